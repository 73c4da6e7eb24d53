"""Whether SonicMoE's first call ends in time: it compiles its kernels then, maybe for very long.

`python -m benchmarks.training.sonic CASE` makes one step of the layer CASE; a process of its own
can be ended. Its autotuner starts compilers one after the other, and each imports torch for
seconds, while a kernel takes 3: without these, the first call of a layer, with 80 kernels, took 4
minutes of a busy machine.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PATIENCE_S = 400.0
ONE_COMPILER = "QUACK_COMPILE_WORKERS", "1"  # this process itself


_found: list[Exception | None] = []  # of the first layer that was asked for


def check_it_ends(case: str) -> None:
    """Make the first call of a layer in another process, once. Raises what is wrong with it."""
    if not _found:
        _found.append(why_not((sys.executable, "-m", __name__, case), PATIENCE_S))
    if (why := _found[0]) is not None:
        raise type(why)(*why.args)  # one that is raised keeps all that its callers have


def why_not(command: Sequence[str], patience_s: float) -> Exception | None:
    """Run a command. What is wrong with it, if it fails or does not end in time."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        start_new_session=True,  # compilers that it starts end with it
    )
    try:
        _, told = process.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return TimeoutError(f"its first call did not end in {patience_s:g} s")
    if process.returncode:
        last = (told.strip().splitlines() or [f"it ended with {process.returncode}"])[-1]
        return RuntimeError(f"its first call failed: {last}")
    return None


def main() -> None:
    from benchmarks.training.cases import LAYERS, LayerStep
    from benchmarks.training.peers import sonic_step

    (case,) = (x for x in LAYERS if str(x) == sys.argv[1])
    sonic_step(LayerStep.random(case))()


if __name__ == "__main__":
    main()
