"""The folder of the cache of kernels: whose code we run, where it lies, and how much of it."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

import pytest

from moefp8.cli.main import main
from moefp8.kernels import jit
from moefp8.kernels.jit import cache
from tests.kernels.jit.cases import CUBIN, ENTRY, STRANGER, files_in, only_entry, run_python

pytestmark = pytest.mark.usefixtures("fresh_jit")


# Whose code we run


CHANGES = {
    "cut off": lambda path: path.write_bytes(ENTRY[:-1]),
    "something else": lambda path: path.write_bytes(b"?"),
    "a link": lambda path: path.symlink_to(path.rename(path.parent.parent / "elsewhere")),
    "writable by others": lambda path: path.chmod(0o606),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_entry_that_is_not_as_we_wrote_it_is_replaced(folder, builds, get, change):
    get()
    path = only_entry(folder)
    CHANGES[change](path)
    assert get() == CUBIN
    assert builds == ["key", "key"]
    assert only_entry(folder).read_bytes() == ENTRY
    assert stat.S_ISREG(path.lstat().st_mode)
    assert path.stat().st_uid == os.geteuid()
    get()
    assert builds == ["key", "key"]


@pytest.mark.parametrize("content", [b"", ENTRY], ids=["empty", "full"])
def test_a_pipe_is_no_entry(folder, get, content):
    get()
    path = only_entry(folder)
    path.unlink()
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR)
    try:
        os.write(pipe, content)
        if not content:  # nor is there a writer
            os.close(pipe)
        assert run_python("tell(get('key'))") == "built\nsymbol\n"
    finally:
        if content:
            os.close(pipe)
    assert path.read_bytes() == ENTRY


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_cache_of_root_s_is_read_by_others(get, builds, monkeypatch):
    """A container's image may hold a warm cache, for instance. pytest's folders are private."""
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setenv("MOEFP8_CACHE_DIR", f"{place}/cache")
        get()
        for path in (place, f"{place}/cache"):
            os.chmod(path, 0o755)
        stranger = f"os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})"
        assert run_python(f"{stranger}; tell(get('key'))") == "symbol\n"
        output = run_python(f"{stranger}; tell(get('key') + get('other'))")
        assert output.count("built\n") == output.count("UserWarning: moefp8") == 1
        assert "symbolsymbol\n" in output
        assert "Permission denied" in output
        assert files_in(Path(place, "cache")) == ["key.cubin"]


@pytest.mark.parametrize(("umask", "mode"), [(0o000, 0o644), (0o002, 0o644), (0o077, 0o600)])
def test_no_umask_makes_entries_writable_by_others(folder, builds, get, umask, mode):
    before = os.umask(umask)
    try:
        get()
    finally:
        os.umask(before)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert only_entry(folder).stat().st_mode & 0o777 == mode
    get()
    assert builds == ["key"]


def test_a_folder_that_is_there_keeps_its_mode(folder, builds, get):
    folder.mkdir()
    folder.chmod(0o755)
    get()
    get()
    assert folder.stat().st_mode & 0o777 == 0o755
    assert builds == ["key"]


# Where it is


def test_a_relative_folder_stays_where_it_was(tmp_path, monkeypatch):
    monkeypatch.setenv("MOEFP8_CACHE_DIR", "kept/here")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    cache.cached("key", lambda: (os.chdir("elsewhere"), CUBIN)[1])
    assert files_in(tmp_path / "kept" / "here") == ["key.cubin"]
    assert files_in(tmp_path / "elsewhere") == []


def test_a_tilde_is_the_home(tmp_path, get, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("MOEFP8_CACHE_DIR", "~/kept")
    get()
    assert files_in(tmp_path / "kept") == ["key.cubin"]


def test_a_link_to_the_folder_is_followed(tmp_path, builds, get, monkeypatch):
    (tmp_path / "large").mkdir(mode=0o700)
    (tmp_path / "cache").symlink_to("large")
    get()
    get()
    assert (files_in(tmp_path / "large"), builds) == (["key.cubin"], ["key"])


def test_a_folder_that_is_removed_comes_back(folder, builds):
    def build(key):
        builds.append(key)
        if key == "during":
            shutil.rmtree(folder)
        return CUBIN

    cache.cached("before", lambda: build("before"))
    shutil.rmtree(folder)
    for key in ("before", "during"):
        cache.cached(key, lambda key=key: build(key))
    assert files_in(folder) == ["during.cubin"]
    shutil.rmtree(folder)
    cache.cached("after", lambda: build("after"))
    assert builds == ["before", "during", "after"]
    assert files_in(folder) == ["after.cubin"]
    assert folder.stat().st_mode & 0o777 == 0o700


# How much


@pytest.mark.parametrize(
    ("max_bytes", "expected"), [(3 * len(ENTRY), "acd"), (1, "d"), (0, "abcd"), (None, "abcd")]
)
def test_kernels_that_were_used_longest_ago_go_and_nothing_else(
    folder, get, monkeypatch, max_bytes, expected
):
    """Above the bound as well as below it, the newest one stays."""
    if max_bytes is not None:
        monkeypatch.setenv("MOEFP8_CACHE_MAX_BYTES", str(max_bytes))
    jit.write_beside_kernels("tuned.json", b" " * 10 * len(ENTRY))
    for key in "abcad":
        for path in folder.glob("*.cubin"):  # the last key was asked for a second ago
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))
        get(key)
    assert {path.stem for path in folder.glob("*.cubin")} == set(expected)
    assert jit.read_beside_kernels("tuned.json") == b" " * 10 * len(ENTRY)


@pytest.mark.parametrize("told", ["-1", "1GB", "", "1.5", "²"])
def test_a_bound_that_is_no_number_is_refused(get, monkeypatch, capsys, told):
    monkeypatch.setenv("MOEFP8_CACHE_MAX_BYTES", told)
    with pytest.raises(jit.JitError, match="MOEFP8_CACHE_MAX_BYTES must be a number of bytes"):
        get("a")
    assert main(["info"]) == 0
    assert "MOEFP8_CACHE_MAX_BYTES must be" in capsys.readouterr().out
