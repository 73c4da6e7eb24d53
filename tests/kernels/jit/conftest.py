"""A cache of kernels, and what tests of it count."""

from collections.abc import Callable
from pathlib import Path

import pytest

from moefp8.kernels import jit
from moefp8.kernels.jit import cache
from moefp8.kernels.jit.nvrtc import Nvrtc
from tests.kernels.jit.cases import CUBIN, forget


@pytest.fixture
def folder(tmp_path) -> Path:
    """The folder of `own_cache`."""
    return tmp_path / "cache"


@pytest.fixture
def compiles(monkeypatch) -> list[str]:
    """The name of every kernel that is compiled rather than found."""
    names = []
    real = Nvrtc.compile

    def compile_and_tell(self, program, options):
        names.append(program.expression)
        return real(self, program, options)

    monkeypatch.setattr(Nvrtc, "compile", compile_and_tell)
    return names


@pytest.fixture
def builds() -> list[str]:
    """Keys of made-up kernels that were built."""
    return []


@pytest.fixture
def get(builds) -> Callable[..., jit.Cubin]:
    """`get(key)`: a made-up kernel, from disk, else built."""

    def get(key: str = "key") -> jit.Cubin:
        forget()
        return cache.cached(key, lambda: (builds.append(key), CUBIN)[1])

    return get
