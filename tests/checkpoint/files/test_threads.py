"""Threads of loads and of quantize: what they set is their own, and forked children have theirs."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors.torch import save_file

from moefp8.checkpoint import quantize_checkpoint
from tests.checkpoint.quantize.cases import bf16, write_source


def run_script(script: str, *arguments) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", script, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


FORKS = """
import os, sys, torch
from moefp8.checkpoint import load_checkpoint

model = torch.nn.Linear(2048, 512, dtype=torch.bfloat16)  # of another dtype than what is stored
torch.set_num_threads(2)
torch.zeros(1 << 20).add_(1)  # in parallel, so that there are threads that a fork loses
told, tell = os.pipe()
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if not child:
        try:
            load_checkpoint(model, sys.argv[1])
        except BaseException as error:
            os.write(tell, f"{error}\\n".encode())
        os._exit(0)
    os.waitpid(child, 0)
os.close(tell)
print(os.read(told, 1 << 16).decode())
"""


def test_a_forked_child_loads(tmp_path):
    """After set_num_threads in its parent, torch makes a pool of threads anew in each child.

    Where four threads at once were the first to ask for it, a third of the children found none.
    """
    source = torch.nn.Linear(2048, 512)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    done = run_script(FORKS, tmp_path / "model.safetensors", "60")
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stdout[:500] + done.stderr


FORKS_AMID_SAVES = """
import os, signal, sys, threading, time, torch
from pathlib import Path
from moefp8.checkpoint import save_checkpoint
from moefp8.checkpoint.files import workplace

real, entered = workplace.try_lock, threading.Event()

def slow(lock):
    entered.set()
    time.sleep(0.5)
    return real(lock)

workplace.try_lock = slow
model, folder = torch.nn.Linear(4, 4), Path(sys.argv[1])
thread = threading.Thread(target=save_checkpoint, args=(model, folder / "parent"))
thread.start()
entered.wait()
child = os.fork()
if not child:
    signal.alarm(300)  # which ends one that hangs
    save_checkpoint(model, folder / "child")
    os._exit(0)
thread.join()
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_that_is_forked_amid_a_save_saves(tmp_path):
    done = run_script(FORKS_AMID_SAVES, tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["child", "parent"]


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("three_threads")
def test_quantize_in_two_threads_leaves_the_number_of_threads(tmp_path):
    tensors = {f"model.layers.{n}.q_proj.weight": bf16(256, 256) for n in range(8)}
    source = write_source(tmp_path / "s", tensors)

    def run(name: str) -> int:
        for turn in range(8):
            quantize_checkpoint(source, tmp_path / f"{name}{turn}", max_shard_bytes=100_000)
        return torch.get_num_threads()

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, "ab")) == [3, 3]
    with ThreadPoolExecutor(1) as pool:  # a thread that has not asked yet, as torch's own have not
        assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == 3
