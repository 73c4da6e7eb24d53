"""The cache of kernels among processes, some of which are killed."""

import errno
import fcntl
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from moefp8.kernels.jit import cache
from moefp8.system import files
from tests.kernels.jit.cases import (
    CUBIN,
    PATIENCE_S,
    fail,
    files_in,
    output_of,
    start_python,
    symbol_of,
    write_kernel,
)

pytestmark = pytest.mark.usefixtures("fresh_jit")


# Many processes


def test_16_processes_compile_each_kernel_once(tmp_path, folder):
    source = write_kernel(tmp_path).source
    code = """
kernel._compiler()
tell("ready")
sys.stdin.read()
for symbol in fill(1, 2, 3, 4):
    tell(symbol)
"""
    gate, go = os.pipe()
    processes = [start_python(code, source, stdin=gate) for _ in range(16)]
    os.close(gate)
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    os.close(go)
    outputs = [output_of(process).splitlines() for process in processes]
    for lines in outputs:
        assert lines[-4:] == [symbol_of(i) for i in (1, 2, 3, 4)]
    compiled = sorted(line for lines in outputs for line in lines[:-4])
    assert compiled == [f"compiled a::fill<{i}>" for i in (1, 2, 3, 4)]
    assert [Path(name).suffix for name in files_in(folder)] == [".cubin"] * 4


# Killed processes

STUCK = """
def stop(*_):
    tell("stuck")
    time.sleep(100)
"""
WHEN_STUCK = {
    "in the build": "build = stop",
    "half of it written": "os.fsync = lambda file: (os.ftruncate(file, 999), stop())",
    "all of it written": "os.replace = stop",
    "published": "pathlib.Path.unlink = stop",
}


@contextmanager
def stuck(where: str):
    """A process that stops there with the lock of `key`, and is killed in the end at the latest."""
    process = start_python(f"{STUCK}{WHEN_STUCK[where]}\nget('key')")
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
    process.wait(PATIENCE_S)
    process.stdout.close()


@contextmanager
def without_waiting():
    """What is done within waits for no other process's lock, which it would do by sleeping."""

    def sleep(_: float) -> None:
        raise AssertionError("it waits for another process's lock")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", sleep)
        yield


@pytest.mark.parametrize("where", WHEN_STUCK)
def test_a_killed_process_leaves_nothing_behind(folder, builds, get, where):
    with stuck(where):
        pass
    left = files_in(folder)
    assert ".key.lock" in left
    assert sum(name.endswith(".tmp") for name in left) == where.endswith("written")
    published = where == "published"
    assert ("key.cubin" in left) == published
    with without_waiting():
        assert get() == CUBIN
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
        assert waiting.result(PATIENCE_S) == CUBIN
    assert builds == ["key"]
    assert files_in(folder) == ["key.cubin"]


def test_who_waits_finds_what_the_other_published(builds, get):
    code = """
build_at_once = build
def build():
    cubin = build_at_once()
    sys.stdin.read()
    return cubin
get("key")
"""
    gate, go = os.pipe()
    process = start_python(code, stdin=gate)
    os.close(gate)
    assert process.stdout.readline() == "built\n"
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(get)
        time.sleep(2 * cache._POLL_S)
        os.close(go)
        assert waiting.result(PATIENCE_S) == CUBIN
    assert builds == []
    assert output_of(process) == ""


def test_a_stopped_process_is_waited_for_but_not_for_ever(folder, builds, get, monkeypatch):
    monkeypatch.setattr(cache, "_PATIENCE_S", 0.3)
    with ThreadPoolExecutor(1) as pool, stuck("in the build"):
        begin = time.monotonic()
        assert pool.submit(get).result(PATIENCE_S) == CUBIN
        assert time.monotonic() - begin >= 0.3
        assert files_in(folder) == [".key.lock", "key.cubin"]  # the lock is not ours
    assert builds == ["key"]


def test_a_forked_child_does_not_keep_the_lock_of_a_killed_parent(builds, get):
    code = f"""
{STUCK}
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
    process = start_python(code)
    lines = [process.stdout.readline() for _ in range(3)]
    (child,) = (int(line) for line in lines if line.strip().isdigit())
    try:
        process.kill()
        process.wait(PATIENCE_S)
        os.kill(child, 0)  # it lives
        with without_waiting():
            assert get() == CUBIN
        assert builds == ["key"]
    finally:
        os.kill(child, signal.SIGKILL)
        process.stdout.close()


# Where locks are of no use


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, None])
def test_a_file_system_or_a_whole_system_without_locks(folder, builds, get, monkeypatch, code):
    if code:
        fail(monkeypatch, fcntl, "lockf", code)
    else:
        monkeypatch.setattr(files, "fcntl", None)
    assert get() == get() == CUBIN
    assert builds == ["key"]
    assert files_in(folder) == ["key.cubin"]


def test_a_lock_file_that_was_removed_is_no_lock(folder, get, monkeypatch):
    """The lock's holder was done after we had opened the file."""
    real, calls = fcntl.lockf, []

    def lockf(descriptor, how):
        calls.append(how)
        if len(calls) == 1:
            (folder / ".key.lock").unlink()
        real(descriptor, how)

    monkeypatch.setattr(fcntl, "lockf", lockf)
    get()
    assert len(calls) == 2


def test_nobody_waits_for_what_cannot_be_published(folder, builds, get, monkeypatch):
    fails = [True]
    fail(monkeypatch, os, "fsync", errno.ENOSPC, lambda _: fails[0])
    with pytest.warns(UserWarning, match="No space left"):
        get("other")
    with stuck("in the build"):
        with without_waiting():
            get()
        fails[0] = False
        get()
        assert builds == ["other", "key", "key"]
        assert "key.cubin" in files_in(folder)
    assert not cache._disk_fails
