"""What the tests of the GEMMs share as fixtures."""

from collections.abc import Iterator

import pytest

from moefp8.kernels import jit


@pytest.fixture
def new_driver() -> Iterator[jit.Driver]:
    """With nothing loaded, nothing prepared, and all SMs of the GPU."""
    with jit.using(jit.Driver()) as driver:
        yield driver
