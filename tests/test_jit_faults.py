"""The cache of kernels on disks that are full or read-only, damaged, or somebody else's."""

import errno
import os
import resource
import shutil
import stat
import subprocess
import tempfile
import warnings
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jit_cases import GET, files_in, forget, output_of, python_without_torch, write_kernel

from moefp8.kernels import jit
from moefp8.kernels.jit import cache

pytestmark = pytest.mark.usefixtures("fresh_jit")

CUBIN = jit.Cubin(b"image" * 1000, "symbol", "log")
ENTRY = CUBIN.to_bytes("key")
STRANGER = 4711


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def builds() -> list[str]:
    return []


@pytest.fixture
def get(builds):
    """`get(key)`: a made-up kernel, from disk, else built."""

    def get(key: str = "key") -> jit.Cubin:
        forget()
        return cache.cached(key, lambda: (builds.append(key), CUBIN)[1])

    return get


def only_entry(folder: Path) -> Path:
    (path,) = folder.iterdir()
    assert path.suffix == ".cubin"
    return path


# Damage


@given(st.integers(0, 8 * len(ENTRY) - 1))
def test_every_bit_counts(bit):
    data = bytearray(ENTRY)
    data[bit // 8] ^= 1 << (bit % 8)
    assert jit.Cubin.from_bytes("key", bytes(data)) is None


@given(st.integers(0, len(ENTRY) - 1))
def test_every_byte_counts(length):
    assert jit.Cubin.from_bytes("key", ENTRY[:length]) is None


def test_an_entry_under_another_kernel_s_key_is_refused():
    assert jit.Cubin.from_bytes("key", ENTRY) == CUBIN
    assert jit.Cubin.from_bytes("yek", ENTRY) is None


def flip(at: int):
    def flipped(data: bytes) -> bytes:
        data = bytearray(data)
        data[at] ^= 1
        return bytes(data)

    return flipped


DAMAGES = {
    "checksum": flip(0),
    "length of symbol": flip(32),
    "length of log": flip(47),
    "symbol": flip(48),
    "log": flip(48 + len("_ZN1a4fillILi3EEEvPff")),
    "image": flip(-1),
    "all but the end": lambda data: data[:-1],
    "half of the header": lambda data: data[:40],
    "nothing": lambda data: b"",
    "something else": lambda data: b"?",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_entry_is_replaced(tmp_path, folder, compiles, damage):
    kernel = write_kernel(tmp_path)
    cubin = jit.compile_kernel(kernel)
    path = only_entry(folder)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    forget()
    again = jit.compile_kernel(kernel)
    assert (again.image, again.symbol) == (cubin.image, cubin.symbol)
    assert len(compiles) == 2
    forget()
    assert jit.compile_kernel(kernel) == again
    assert len(compiles) == 2
    assert only_entry(folder) == path


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


def open_to_the_group(folder, monkeypatch):
    folder.mkdir()
    folder.chmod(0o770)


def owned_by_another(folder, monkeypatch):
    folder.mkdir()
    if os.geteuid() == 0:
        os.chown(folder, STRANGER, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: STRANGER)


def failing(code: int, when=lambda *_: True):
    def call(real):
        def fail(*arguments, **options):
            if when(*arguments):
                raise OSError(code, os.strerror(code))
            return real(*arguments, **options)

        return fail

    return call


def full_when_flushed(folder, monkeypatch):
    monkeypatch.setattr(os, "fsync", failing(errno.ENOSPC)(os.fsync))


def full_when_renamed(folder, monkeypatch):
    monkeypatch.setattr(os, "replace", failing(errno.EDQUOT)(os.replace))


def full_when_made(folder, monkeypatch):
    monkeypatch.setattr(Path, "mkdir", failing(errno.ENOSPC)(Path.mkdir))


def writes(path, flags=0, *_, **__) -> bool:
    return bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))


def read_only(folder, monkeypatch):
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "open", failing(errno.EROFS, writes)(os.open))
    for name in ("mkdir", "unlink"):
        monkeypatch.setattr(Path, name, failing(errno.EROFS)(getattr(Path, name)))


@pytest.mark.parametrize(
    ("obstacle", "told"),
    [
        (below_a_file, "Not a directory"),
        (without_a_home, "home directory"),
        (home_of_nobody, "home directory"),
        (a_link_to_nowhere, "File exists.*link"),
        (open_to_all, "others may write to .*cache; chmod go-w it"),
        (open_to_the_group, "others may write to .*cache; chmod go-w it"),
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
        cubins = jit.compile_kernels(kernels, num_threads=1)
    assert len(caught) == 1
    assert cubins[0] is cubins[2]
    assert compiles == ["a::fill<1>", "a::fill<2>"]
    assert not folder.exists() or files_in(folder) == []


def test_nothing_is_written_where_nothing_is_missing(folder, builds, get, monkeypatch):
    get()
    tried = []

    def refuse(owner, name, when=lambda *_: True):
        real = getattr(owner, name)

        def call(*arguments, **options):
            if when(*arguments):
                tried.append((name, arguments))
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    refuse(os, "open", writes)
    for name in ("mkdir", "unlink", "replace", "chmod"):
        refuse(os, name)
        refuse(Path, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert get() == CUBIN
    assert (builds, tried) == (["key"], [])
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


TWO_KERNELS = GET + "tell(get('key') + get('other') + get('key'))"


def test_a_full_disk(folder):
    folder.mkdir(mode=0o700)
    within = mounted(f"mount -t tmpfs -o size=4k,mode=700 none {folder}")
    skip_unless_it_runs(within)
    code = f"{TWO_KERNELS}; tell(os.listdir({str(folder)!r}))"
    output = output_of(python_without_torch(code, within))
    assert output.count("built\n") == 2
    assert "symbolsymbolsymbol\n[]\n" in output
    assert output.count("UserWarning: moefp8") == 1
    assert "No space left on device" in output


def test_a_read_only_disk(folder, get):
    folder.mkdir(mode=0o700)
    within = mounted(f"mount --bind {folder} {folder}; mount -o remount,bind,ro {folder}")
    skip_unless_it_runs(within)
    get()
    assert output_of(python_without_torch(f"{GET}tell(get('key'))", within)) == "symbol\n"
    output = output_of(python_without_torch(TWO_KERNELS, within))
    assert output.count("built\n") == output.count("UserWarning: moefp8") == 1
    assert "symbolsymbolsymbol\n" in output
    assert "Read-only file system" in output
    assert files_in(folder) == ["key.cubin"]


def test_a_limit_on_the_size_of_files(folder):
    limit = f"import resource; resource.setrlimit({resource.RLIMIT_FSIZE}, (1000, 1000))\n"
    output = output_of(python_without_torch(limit + TWO_KERNELS))
    assert output.count("built\n") == 2
    assert output.count("UserWarning: moefp8") == 1
    assert "File too large" in output
    assert files_in(folder) == []


# Whose code we run


def a_link(path, monkeypatch):
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def writable_by_the_group(path, monkeypatch):
    path.chmod(0o660)


def writable_by_others(path, monkeypatch):
    path.chmod(0o606)


def given_by_another(path, monkeypatch):
    if os.geteuid() == 0:
        os.chown(path, STRANGER, -1)
        return
    real = os.fstat

    def fstat(descriptor):
        status = real(descriptor)
        ours = path.exists() and os.path.samestat(status, stolen)
        return os.stat_result([*status[:4], STRANGER if ours else status[4], *status[5:]])

    stolen = path.stat()
    monkeypatch.setattr(os, "fstat", fstat)


@pytest.mark.parametrize(
    "change", [a_link, writable_by_the_group, writable_by_others, given_by_another]
)
def test_an_entry_that_others_may_have_written_is_replaced(
    folder, builds, get, monkeypatch, change
):
    get()
    path = only_entry(folder)
    change(path, monkeypatch)
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
        process = python_without_torch(f"{GET}signal.alarm(10); tell(get('key'))")
        assert output_of(process) == "built\nsymbol\n"
    finally:
        if content:
            os.close(pipe)
    assert path.read_bytes() == ENTRY


@pytest.mark.parametrize(
    ("owner", "mode", "told"),
    [
        (1000, 0o100644, None),
        (0, 0o100644, None),
        (0, 0o40755, None),
        (1001, 0o100644, "another user"),
        (0, 0o100664, "others may write"),
        (1000, 0o100646, "others may write"),
    ],
)
def test_root_may_own_what_we_run(monkeypatch, owner, mode, told):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    status = os.stat_result([mode, 1, 1, 1, owner, 1, 1, 0, 0, 0])
    if told:
        with pytest.raises(PermissionError, match=told):
            cache._require_ours(Path("entry"), status)
    else:
        cache._require_ours(Path("entry"), status)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_a_cache_of_root_s_is_read_by_others(get, builds, monkeypatch):
    """As in a container whose image holds a warm cache. pytest's own folders are private."""
    with tempfile.TemporaryDirectory() as place:
        monkeypatch.setenv("MOEFP8_CACHE_DIR", f"{place}/cache")
        get()
        for path in (place, f"{place}/cache"):
            os.chmod(path, 0o755)
        stranger = f"os.setgroups([]); os.setgid({STRANGER}); os.setuid({STRANGER})"
        output = output_of(python_without_torch(f"{GET}{stranger}; tell(get('key'))"))
        assert output == "symbol\n"
        output = output_of(
            python_without_torch(f"{GET}{stranger}; tell(get('key') + get('other'))")
        )
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

    with warnings.catch_warnings():
        warnings.simplefilter("error")
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
