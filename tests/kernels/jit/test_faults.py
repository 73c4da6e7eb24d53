"""The cache of kernels on disks that are full or read-only, and entries that are damaged."""

import errno
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from moefp8.kernels import jit
from tests.gpu import ARCH
from tests.kernels.jit.cases import (
    CUBIN,
    ENTRY,
    STRANGER,
    fail,
    files_in,
    run_python,
    write_kernel,
)

pytestmark = pytest.mark.usefixtures("fresh_jit")


def test_every_byte_of_an_entry_counts():
    assert jit.Cubin.from_bytes("key", ENTRY) == CUBIN
    assert jit.Cubin.from_bytes("yek", ENTRY) is None
    for at in range(len(ENTRY)):
        changed = bytearray(ENTRY)
        changed[at] ^= 1 << at % 8
        assert jit.Cubin.from_bytes("key", bytes(changed)) is None
        assert jit.Cubin.from_bytes("key", ENTRY[:at]) is None


# Folders that are of no use


def below_a_file(folder, monkeypatch):
    folder.parent.joinpath("file").touch()
    monkeypatch.setenv("MOEFP8_CACHE_DIR", str(folder.parent / "file" / "cache"))


def without_a_home(folder, monkeypatch):
    def home():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("MOEFP8_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/paths/are/ignored")
    monkeypatch.setattr(Path, "home", home)


def home_of_nobody(folder, monkeypatch):
    monkeypatch.setenv("MOEFP8_CACHE_DIR", "~no-such-user/cache")


def a_link_to_nowhere(folder, monkeypatch):
    link = folder.with_name("link")
    link.symlink_to("nowhere")
    monkeypatch.setenv("MOEFP8_CACHE_DIR", str(link))


def open_to_all(folder, monkeypatch):
    folder.mkdir()
    folder.chmod(0o707)


def owned_by_another(folder, monkeypatch):
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


def full_when_flushed(folder, monkeypatch):
    fail(monkeypatch, os, "fsync", errno.ENOSPC)


def full_when_renamed(folder, monkeypatch):
    fail(monkeypatch, os, "replace", errno.EDQUOT)


def full_when_made(folder, monkeypatch):
    fail(monkeypatch, Path, "mkdir", errno.ENOSPC)


def refuse_to_write(monkeypatch) -> list[tuple]:
    """Refuse as a read-only disk does; return what was tried."""

    def writes(path, flags=0, *_) -> bool:
        return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))

    tried = [fail(monkeypatch, os, "open", errno.EROFS, writes)]
    for name in ("mkdir", "unlink", "replace", "chmod"):
        tried += [fail(monkeypatch, owner, name, errno.EROFS) for owner in (os, Path)]
    return tried


def read_only(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    refuse_to_write(monkeypatch)


@pytest.mark.parametrize(
    ("obstacle", "told"),
    [
        (below_a_file, "Not a directory"),
        (without_a_home, "home directory"),
        (home_of_nobody, "home directory"),
        (a_link_to_nowhere, "File exists.*link"),
        (open_to_all, "others may write to .*cache; chmod go-w it"),
        (owned_by_another, "cache belongs to another user .uid "),
        (full_when_flushed, "cache: .*No space left"),
        (full_when_renamed, "cache: .*quota"),
        (full_when_made, "No space left"),
        (read_only, "Read-only"),
    ],
)
def test_without_a_folder_it_works_from_memory_and_says_so_once(
    tmp_path, folder, compiles, monkeypatch, obstacle, told
):
    obstacle(folder, monkeypatch)
    kernels = [write_kernel(tmp_path, f"a::fill<{i}>") for i in (1, 2, 1)]
    message = f"^moefp8: .*{told}.*; set MOEFP8_CACHE_DIR to a folder of your own"
    with pytest.warns(UserWarning, match=message) as caught:
        cubins = jit.compile_kernels(kernels, ARCH, num_threads=1)
    assert len(caught) == 1
    assert cubins[0] is cubins[2]
    assert compiles == ["a::fill<1>", "a::fill<2>"]
    assert not folder.exists() or files_in(folder) == []


def test_nothing_is_written_where_nothing_is_missing(builds, get, monkeypatch):
    get()
    tried = refuse_to_write(monkeypatch)
    assert get() == CUBIN
    assert (builds, [*filter(None, tried)]) == (["key"], [])
    with pytest.warns(UserWarning, match="Read-only"):
        get("missing")
    assert (get("missing"), builds) == (CUBIN, ["key", "missing", "missing"])


# Real disks


def mounted(script: str) -> list[str]:
    """The beginning of a command that runs another where it has mounted disks of its own."""
    return ["unshare", "-rm", "sh", "-ec", f'{script}\nexec "$@"', "sh"]


def skip_unless_it_runs(command: list[str]) -> None:
    if not shutil.which("unshare") or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("no right to mount")


TWO_KERNELS = "tell(get('key') + get('other') + get('key'))"


def test_a_full_disk(folder):
    folder.mkdir(mode=0o700)
    within = mounted(f"mount -t tmpfs -o size=4k,mode=700 none {folder}")
    skip_unless_it_runs(within)
    output = run_python(f"{TWO_KERNELS}; tell(os.listdir({str(folder)!r}))", within=within)
    assert output.count("built\n") == 2
    assert "symbolsymbolsymbol\n[]\n" in output
    assert output.count("UserWarning: moefp8") == 1
    assert "No space left on device" in output


def test_a_read_only_disk(folder, get):
    folder.mkdir(mode=0o700)
    within = mounted(f"mount --bind {folder} {folder}; mount -o remount,bind,ro {folder}")
    skip_unless_it_runs(within)
    get()
    assert run_python("tell(get('key'))", within=within) == "symbol\n"
    output = run_python(TWO_KERNELS, within=within)
    assert output.count("built\n") == output.count("UserWarning: moefp8") == 1
    assert "symbolsymbolsymbol\n" in output
    assert "Read-only file system" in output
    assert files_in(folder) == ["key.cubin"]
