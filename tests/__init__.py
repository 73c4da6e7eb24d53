"""Tests, a folder for each room of `moefp8`. Helper modules assert too, so pytest rewrites all."""

import pytest

pytest.register_assert_rewrite("tests")
