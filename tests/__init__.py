"""Tests, a folder for each room of `moefp8`. What helper modules assert, pytest explains too."""

import pkgutil

import pytest

pytest.register_assert_rewrite(*(f"tests.{x.name}" for x in pkgutil.iter_modules(__path__)))
