"""The cache of kernels among threads, forks and processes, some of which are killed."""

import errno
import multiprocessing
import os
import signal
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from jit_cases import (
    GET,
    files_in,
    forget,
    output_of,
    python_without_torch,
    symbols_of,
    write_kernel,
)

from moefp8.kernels import jit
from moefp8.kernels.jit import cache
from moefp8.kernels.jit.once import ForksWait, Once

pytestmark = pytest.mark.usefixtures("fresh_jit")

CUBIN = jit.Cubin(b"image" * 1000, "symbol", "log")


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def builds() -> list[str]:
    return []


@pytest.fixture
def get(builds):
    """The made-up kernel of `GET`, from disk, else built; no warning."""

    def get() -> jit.Cubin:
        forget()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return cache.cached("key", lambda: (builds.append("key"), CUBIN)[1])

    return get


# Many processes

COMPILE = """
import pathlib, time
from room.kernel import Kernel, _compiler, compile_kernels
from room.nvrtc import Nvrtc
quietly = Nvrtc.compile
def compile_and_tell(self, program, options):
    tell(f"compiled {program.expression}")
    return quietly(self, program, options)
Nvrtc.compile = compile_and_tell
def kernels(*numbers):
    return [Kernel(pathlib.Path(SOURCE), f"a::fill<{i}>") for i in numbers]
"""


def test_16_processes_compile_each_kernel_once(tmp_path, folder):
    source = write_kernel(tmp_path).source
    code = f"""
SOURCE = {str(source)!r}
{COMPILE}
_compiler()
tell("ready")
sys.stdin.read()
for cubin in compile_kernels(kernels(1, 2, 3, 4), num_threads=2):
    tell(cubin.symbol)
"""
    gate, go = os.pipe()
    processes = [python_without_torch(code, stdin=gate) for _ in range(16)]
    os.close(gate)
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    os.close(go)
    outputs = [output_of(process).splitlines() for process in processes]
    for lines in outputs:
        assert lines[-4:] == [f"_ZN1a4fillILi{i}EEEvPff" for i in (1, 2, 3, 4)]
    compiled = sorted(line for lines in outputs for line in lines[:-4])
    assert compiled == [f"compiled a::fill<{i}>" for i in (1, 2, 3, 4)]
    assert [Path(name).suffix for name in files_in(folder)] == [".cubin"] * 4


# Killed processes

STUCK = """
import time
def stop(*_):
    tell("stuck")
    time.sleep(100)
"""
WHEN_STUCK = {
    "in the build": "build = stop",
    "half of it written": "os.fsync = lambda file: (os.ftruncate(file, 999), stop())",
    "all of it written": "os.replace = stop",
    "published": "import pathlib; pathlib.Path.unlink = stop",
}


@contextmanager
def stuck(where: str):
    """A process that stops there with the lock of `key`; killed in the end at the latest."""
    process = python_without_torch(f"{GET}{STUCK}{WHEN_STUCK[where]}\nget('key')")
    try:
        for line in process.stdout:
            if line == "stuck\n":
                break
            assert line == "built\n"
        yield process
    finally:
        kill(process)


def kill(process) -> None:
    process.kill()
    process.wait(timeout=10)
    process.stdout.close()


@pytest.mark.parametrize("where", WHEN_STUCK)
def test_a_killed_process_leaves_nothing_behind(folder, builds, get, where):
    with stuck(where):
        pass
    left = files_in(folder)
    assert ".key.lock" in left
    assert sum(name.endswith(".tmp") for name in left) == where.endswith("written")
    published = where == "published"
    assert ("key.cubin" in left) == published
    begin = time.monotonic()
    assert get() == CUBIN
    assert time.monotonic() - begin < cache._PATIENCE_S / 2
    assert builds == ([] if published else ["key"])
    # With the entry there, nobody asks for the lock any more.
    assert files_in(folder) == ([".key.lock"] if published else []) + ["key.cubin"]
    assert get() == CUBIN
    assert len(builds) <= 1


def test_who_waits_for_a_killed_process_takes_over(folder, builds, get):
    with stuck("in the build") as process, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(get)
        time.sleep(4 * cache._POLL_S)
        assert builds == []
        kill(process)
        assert waiting.result(timeout=10) == CUBIN
    assert builds == ["key"]
    assert files_in(folder) == ["key.cubin"]


def test_who_waits_finds_what_the_other_published(builds, get):
    code = f"""
{GET}
build_at_once = build
def build():
    cubin = build_at_once()
    sys.stdin.read()
    return cubin
get("key")
"""
    gate, go = os.pipe()
    process = python_without_torch(code, stdin=gate)
    os.close(gate)
    assert process.stdout.readline() == "built\n"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(get)
        time.sleep(2 * cache._POLL_S)
        os.close(go)
        assert waiting.result(timeout=10) == CUBIN
    assert builds == []
    assert output_of(process) == ""


def test_a_stopped_process_is_waited_for_but_not_for_ever(folder, builds, get, monkeypatch):
    monkeypatch.setattr(cache, "_PATIENCE_S", 0.3)
    with ThreadPoolExecutor(1) as pool, stuck("in the build"):
        begin = time.monotonic()
        assert pool.submit(get).result(timeout=10) == CUBIN
        assert time.monotonic() - begin >= 0.3
        assert files_in(folder) == [".key.lock", "key.cubin"]  # the lock is not ours
    assert builds == ["key"]


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_parent(builds, get, monkeypatch):
    monkeypatch.setattr(cache, "_PATIENCE_S", 10)
    code = f"""
{GET}{STUCK}
import threading
writing = threading.Event()
os.fsync = lambda file: (writing.set(), time.sleep(100))
threading.Thread(target=get, args=["key"]).start()
writing.wait()
child = os.fork()
if child == 0:
    stop()
tell(child)
time.sleep(100)
"""
    process = python_without_torch(code)
    lines = [process.stdout.readline() for _ in range(3)]
    (child,) = (int(line) for line in lines if line.strip().isdigit())
    try:
        process.kill()
        process.wait(timeout=10)
        os.kill(child, 0)  # it lives
        begin = time.monotonic()
        assert get() == CUBIN
        assert time.monotonic() - begin < cache._PATIENCE_S / 2
        assert builds == ["key"]
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


# Where locks are of no use


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks(folder, builds, get, monkeypatch, code):
    def lockf(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(cache.fcntl, "lockf", lockf)
    assert get() == get() == CUBIN
    assert builds == ["key"]
    assert files_in(folder) == ["key.cubin"]


def test_a_system_without_locks(folder, builds, get, monkeypatch):
    monkeypatch.setattr(cache, "fcntl", None)
    assert get() == get() == CUBIN
    assert builds == ["key"]
    assert files_in(folder) == ["key.cubin"]


def test_a_lock_file_that_was_removed_is_no_lock(folder, get, monkeypatch):
    """Its holder was done after we had opened it."""
    real, calls = cache.fcntl.lockf, []

    def lockf(descriptor, how):
        calls.append(how)
        if len(calls) == 1:
            (folder / ".key.lock").unlink()
        real(descriptor, how)

    monkeypatch.setattr(cache.fcntl, "lockf", lockf)
    get()
    assert len(calls) == 2


def test_nobody_waits_for_what_cannot_be_published(folder, builds, get, monkeypatch):
    monkeypatch.setattr(cache, "_PATIENCE_S", 10)
    real = os.fsync

    def fsync(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.warns(UserWarning, match="No space left"):
        cache.cached("other", lambda: CUBIN)
    with stuck("in the build"):
        begin = time.monotonic()
        get()
        assert time.monotonic() - begin < cache._PATIENCE_S / 2
        monkeypatch.setattr(os, "fsync", real)
        get()
        assert builds == ["key", "key"]
        assert "key.cubin" in files_in(folder)
    assert not cache._disk_fails


# Threads


def test_threads_compile_each_kernel_once(tmp_path, compiles):
    kernels = [write_kernel(tmp_path, f"a::fill<{i}>") for i in range(3)]
    barrier = threading.Barrier(12)

    def ask(i):
        barrier.wait(timeout=10)
        return jit.compile_kernel(kernels[i % 3])

    with ThreadPoolExecutor(12) as pool:
        cubins = list(pool.map(ask, range(12)))
    assert len(set(map(id, cubins))) == 3
    assert sorted(compiles) == [kernel.name for kernel in kernels]
    assert [x.symbol for x in cubins[:3]] == [f"_ZN1a4fillILi{i}EEEvPff" for i in range(3)]


def test_different_keys_build_at_the_same_time():
    both = threading.Barrier(2)
    build = lambda: (both.wait(timeout=10), CUBIN)[1]  # noqa: E731
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda key: cache.cached(key, build), ["one", "other"]))


def test_a_failed_build_is_tried_again():
    once: Once[str, int] = Once()
    with pytest.raises(ZeroDivisionError):
        once.get("key", lambda: 1 // 0)
    assert once.get("key", lambda: 1) == 1


# Forks


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_compiles_too(tmp_path, folder, method):
    old, new = (write_kernel(tmp_path, f"a::fill<{i}>") for i in (1, 2))
    jit.compile_kernel(old)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    with warnings.catch_warnings():
        # Python dislikes forks of processes with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        with multiprocessing.get_context(method).Pool(1) as pool:
            found = pool.apply_async(symbols_of, [[old, new]]).get(timeout=60)
    assert found == [f"_ZN1a4fillILi{i}EEEvPff" for i in (1, 2)]
    assert len(files_in(folder)) == 2
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_a_forked_child_has_its_parent_s_kernels_in_memory():
    code = f"""
{GET}
get("key")
os.environ["MOEFP8_CACHE_DIR"] = "/nowhere"
child = os.fork()
if child == 0:
    os._exit(0 if get("key") == "symbol" else 1)
tell(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert output_of(python_without_torch(code)) == "built\n0\n"


def test_forks_while_a_thread_compiles(tmp_path):
    """Without `ForksWait`, every other child hangs in a lock of NVRTC's."""
    source = write_kernel(tmp_path).source
    code = f"""
SOURCE = {str(source)!r}
{COMPILE}
Nvrtc.compile = quietly
import itertools, threading
_compiler()
end = threading.Event()
def compile_on():
    for i in itertools.count():
        if end.is_set():
            break
        compile_kernels(kernels(i), num_threads=1)
thread = threading.Thread(target=compile_on)
thread.start()
codes = []
for i in range(12):
    time.sleep(0.01)
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        _, cubin = compile_kernels(kernels(0, 10**6 + i), num_threads=1)
        os._exit(f"Li{{10**6 + i}}E" not in cubin.symbol)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    if codes[-1]:
        break
end.set()
thread.join()
tell(codes)
"""
    process = python_without_torch(code, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert output_of(process) == f"{[0] * 12}\n"


def test_a_fork_while_a_thread_builds():
    code = """
import threading
from room.once import Once
once, building, end = Once(), threading.Event(), threading.Event()
build = lambda: (building.set(), end.wait(20), "parent")[-1]
thread = threading.Thread(target=lambda: once.get("key", build))
thread.start()
building.wait()
child = os.fork()
if child == 0:
    signal.alarm(5)  # rather than hang
    os._exit(once.get("key", lambda: 7))
status = os.waitpid(child, 0)[1]
end.set()
thread.join()
tell(os.waitstatus_to_exitcode(status))
tell(once.get("key", None))
"""
    process = python_without_torch(code, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert output_of(process) == "7\nparent\n"


def test_forks_wait_for_those_within_and_nobody_enters_meanwhile():
    order = []
    forks_wait = ForksWait()
    within, end, late_has_begun = threading.Event(), threading.Event(), threading.Event()

    def first():
        with forks_wait:
            within.set()
            end.wait(10)
            order.append("first")

    def fork():
        forks_wait._empty()
        order.append("fork")
        late_has_begun.wait(10)
        time.sleep(0.05)
        forks_wait._door.release()

    def late():
        late_has_begun.set()
        with forks_wait:
            order.append("late")

    threads = [threading.Thread(target=target) for target in (first, fork, late)]
    threads[0].start()
    within.wait(10)
    threads[1].start()
    while not forks_wait._door.locked():
        time.sleep(0.001)
    threads[2].start()
    end.set()
    for thread in threads:
        thread.join(timeout=10)
    assert order == ["first", "fork", "late"]


def test_a_fork_waits_until_the_compiler_is_found():
    """It imports, opens NVRTC and compiles an empty file: amid that, every third child hung."""
    code = """
import threading, time
from room import kernel
class Slow(kernel.Nvrtc):
    def __init__(self):
        finding.set()
        time.sleep(0.2)
        found.append(self)
finding, found = threading.Event(), []
kernel._COMPILERS["nvrtc"] = Slow
thread = threading.Thread(target=kernel._compiler)
thread.start()
finding.wait()
child = os.fork()
if child == 0:
    os._exit(not found)
tell(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    process = python_without_torch(code, env={**os.environ, "PYTHONWARNINGS": "ignore"})
    assert output_of(process) == "0\n"
