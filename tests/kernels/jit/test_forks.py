"""The cache of kernels among threads and forks."""

import multiprocessing
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest

from moefp8.kernels import jit
from moefp8.kernels.jit import cache
from tests.gpu import ARCH
from tests.kernels.jit.cases import (
    CUBIN,
    PATIENCE_S,
    files_in,
    run_python,
    symbol_of,
    symbols_of,
    write_kernel,
)

pytestmark = pytest.mark.usefixtures("fresh_jit")

# Threads


def test_threads_compile_each_kernel_once(tmp_path, compiles):
    kernels = [write_kernel(tmp_path, f"a::fill<{i}>") for i in range(3)]
    barrier = threading.Barrier(12)

    def ask(i):
        barrier.wait(PATIENCE_S)
        return jit.compile_kernel(kernels[i % 3], ARCH)

    with ThreadPoolExecutor(12) as pool:
        cubins = list(pool.map(ask, range(12)))
    assert len(set(map(id, cubins))) == 3
    assert sorted(compiles) == [kernel.name for kernel in kernels]
    assert [x.symbol for x in cubins[:3]] == [symbol_of(i) for i in range(3)]


def test_different_keys_build_at_the_same_time():
    both = threading.Barrier(2)
    build = lambda: (both.wait(PATIENCE_S), CUBIN)[1]  # noqa: E731
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda key: cache.cached(key, build), ["one", "other"]))


# Forks


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_compiles_too(tmp_path, folder, method):
    old, new = (write_kernel(tmp_path, f"a::fill<{i}>") for i in (1, 2))
    jit.compile_kernel(old, ARCH)
    before = {path: path.stat().st_ino for path in folder.iterdir()}
    with warnings.catch_warnings():
        # Python dislikes forks of processes with threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        with multiprocessing.get_context(method).Pool(1) as pool:
            found = pool.apply_async(symbols_of, [[old, new]]).get(PATIENCE_S)
    assert found == [symbol_of(1), symbol_of(2)]
    assert len(files_in(folder)) == 2
    assert {path: path.stat().st_ino for path in before} == before


def test_a_forked_child_has_its_parent_s_kernels_in_memory():
    code = """
get("key")
os.environ["MOEFP8_CACHE_DIR"] = "/nowhere"
tell(exit_code_of_child(lambda: get("key") != "symbol"))
"""
    assert run_python(code) == "built\n0\n"


def test_forks_while_a_thread_compiles(tmp_path):
    """Without `ForksWait`, every other child hangs in a lock of NVRTC's."""
    code = """
import itertools
kernel._compiler()
kernel.Nvrtc.compile = quietly
end = threading.Event()
def fill_on():
    for i in itertools.takewhile(lambda _: not end.is_set(), itertools.count()):
        fill(i)
thread = threading.Thread(target=fill_on)
thread.start()
codes = []
for i in range(10**6, 10**6 + 12):
    time.sleep(0.01)
    codes.append(exit_code_of_child(lambda: f"Li{i}E" not in fill(0, i)[1]))
    if codes[-1]:
        break
end.set()
thread.join()
tell(codes)
"""
    assert run_python(code, write_kernel(tmp_path).source) == f"{[0] * 12}\n"


def test_a_fork_while_a_thread_builds():
    code = """
values, building, end = Once(), threading.Event(), threading.Event()
build = lambda: (building.set(), end.wait(), "parent")[-1]
thread = threading.Thread(target=lambda: values.get("key", build))
thread.start()
building.wait()
tell(exit_code_of_child(lambda: values.get("key", lambda: 7)))
end.set()
thread.join()
tell(values.get("key", None))
"""
    assert run_python(code) == "7\nparent\n"


def test_a_fork_waits_until_the_compiler_is_found():
    """Finding it imports, opens NVRTC and compiles a file: amid that, every third child hung."""
    code = """
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
tell(exit_code_of_child(lambda: not found))
"""
    assert run_python(code) == "0\n"
