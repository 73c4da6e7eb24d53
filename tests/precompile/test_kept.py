"""`precompile` where kernels cannot be kept on disk: a container's build must not go on."""

import errno
import os
from pathlib import Path

import pytest

import moefp8
from moefp8 import FP8Linear
from moefp8.cli.main import main
from tests.checkpoint.inspect.cases import LINEAR, headers_only
from tests.kernels.jit.cases import fail, forget

pytestmark = pytest.mark.usefixtures("fresh_jit")


def a_file(folder: Path, monkeypatch) -> str:
    folder.write_text("")
    return f"{folder} is no directory; set MOEFP8_CACHE_DIR to a folder of your own"


def full(folder: Path, monkeypatch) -> str:
    fail(monkeypatch, os, "fsync", errno.ENOSPC)
    return "No space left on device; set MOEFP8_CACHE_DIR to a folder of your own"


def too_small(folder: Path, monkeypatch) -> str:
    monkeypatch.setenv("MOEFP8_CACHE_MAX_BYTES", "100")
    return "bytes, more than MOEFP8_CACHE_MAX_BYTES = 100 keeps on disk; raise it"


CACHES_OF_NO_USE = pytest.mark.parametrize("spoil", [a_file, full, too_small])


@CACHES_OF_NO_USE
def test_the_command_fails_and_says_why(tmp_path, monkeypatch, capsys, recwarn, spoil):
    checkpoint = headers_only(tmp_path / "x.safetensors", LINEAR)
    why = spoil(tmp_path / "cache", monkeypatch)
    assert main(["precompile", str(checkpoint), "--max-tokens", "1"]) == 1
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("moefp8 precompile: ")
    assert why in err
    assert not recwarn  # which would say the same


@CACHES_OF_NO_USE
def test_python_is_told_each_time(tmp_path, monkeypatch, spoil):
    """The call succeeds: a server that it warms up has the kernels in memory."""
    why = spoil(tmp_path / "cache", monkeypatch)
    for _ in range(2):
        with pytest.warns(UserWarning, match="precompile: this process alone has its") as told:
            done = moefp8.precompile(FP8Linear(128, 128, bias=False), 1)
        assert why in str(told[-1].message)
        assert why in done.problem
        assert done.num_kernels > 0


def test_kernels_in_memory_are_written_where_they_are_missing(tmp_path, monkeypatch):
    linear = FP8Linear(128, 128, bias=False)
    assert moefp8.precompile(linear, 1).problem is None
    monkeypatch.setenv("MOEFP8_CACHE_DIR", str(tmp_path / "elsewhere"))
    done = moefp8.precompile(linear, 1)
    assert done.problem is None
    assert len([*(tmp_path / "elsewhere").glob("*.cubin")]) == done.num_kernels > 0


def test_a_full_disk_that_holds_all_kernels_is_fine(monkeypatch):
    linear = FP8Linear(128, 128, bias=False)
    moefp8.precompile(linear, 1)
    forget()
    full(Path(), monkeypatch)
    assert moefp8.precompile(linear, 1).problem is None
