"""The bound of the cache of kernels: what was used longest ago goes."""

import os
from pathlib import Path

import pytest

from moefp8.cli.main import main
from moefp8.kernels import jit
from moefp8.kernels.jit import cache
from tests.kernels.jit.cases import CUBIN, ENTRY, forget

pytestmark = pytest.mark.usefixtures("fresh_jit")

SIZE = len(ENTRY)


def get(key: str) -> None:
    """As a new process would, one second after the last one."""
    forget()
    for path in cache.cache_folder().glob("*.cubin"):
        os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))
    cache.cached(key, lambda: CUBIN)


def kept(folder: Path) -> set[str]:
    return {path.stem for path in folder.glob("*.cubin")}


def test_kernels_that_were_used_longest_ago_go_and_nothing_else(folder, monkeypatch):
    monkeypatch.setenv("MOEFP8_CACHE_MAX_BYTES", str(3 * SIZE))
    jit.write_beside_kernels("tuned.json", b" " * 10 * SIZE)
    for key in "abcad":
        get(key)
    assert kept(folder) == {"a", "c", "d"}
    assert jit.read_beside_kernels("tuned.json") == b" " * 10 * SIZE


def test_a_kernel_that_is_more_than_the_bound_stays(folder, monkeypatch):
    monkeypatch.setenv("MOEFP8_CACHE_MAX_BYTES", "1")
    get("a")
    get("b")
    assert kept(folder) == {"b"}


@pytest.mark.parametrize("told", [None, "0"])
def test_without_a_low_bound_all_stay(folder, monkeypatch, told):
    if told:
        monkeypatch.setenv("MOEFP8_CACHE_MAX_BYTES", told)
    for key in "abcdefgh":
        get(key)
    assert kept(folder) == set("abcdefgh")


@pytest.mark.parametrize("told", ["-1", "1GB", "", "1.5", "²"])
def test_a_bound_that_is_no_number_is_refused(folder, monkeypatch, capsys, told):
    monkeypatch.setenv("MOEFP8_CACHE_MAX_BYTES", told)
    with pytest.raises(jit.JitError, match="MOEFP8_CACHE_MAX_BYTES must be a number of bytes"):
        get("a")
    assert main(["info"]) == 0
    assert "MOEFP8_CACHE_MAX_BYTES must be" in capsys.readouterr().out
