"""Print what has gone wrong on a GPU: PyTorch only says that a launch has failed."""

import atexit
import sys
from threading import Event, Thread
from weakref import ref

from .agreement import Agreement
from .peer_memory import PeerMemory

OVERLAPS = (  # an assertion of PyTorch's has room for 254 characters
    "runs two exchanges of a group at once, as when CUDA graphs are replayed on two streams or "
    "beside an eager call; run them on one stream, or let each wait for the other (wait_stream)"
)
_SECONDS_BETWEEN_LOOKS = 0.1
_IS_ELSEWHERE, _OVERLAPS = 2, 3  # `Failure` in ranks.cuh; 1: it did not come


def watch(memory: PeerMemory, agreement: Agreement) -> None:
    """Print what a kernel writes into `memory.error`, once.

    A thread looks, since a process that waits for the GPU runs nothing else of ours. When the
    process ends, it looks once more, and is joined: a thread that runs PyTorch's code while the
    interpreter ends aborts the process.
    """
    error, ranks, seconds = memory.error, agreement.ranks, agreement.timeout.total_seconds()
    is_used, has_said, ends = ref(memory), False, Event()

    def look() -> None:
        nonlocal has_said
        kind, rank = error[:2].tolist()
        if has_said or not kind:
            return
        has_said, what = True, f"did not come within {seconds:g} s (timeout=); it may have ended"
        if kind == _IS_ELSEWHERE:
            what = (
                "is at another layer, or has another number of tokens, as when ranks replay CUDA "
                "graphs that were not captured together, or when one has left a layer by an "
                "exception, or computes less of a checkpoint again"
            )
        elif kind == _OVERLAPS:
            what = OVERLAPS
        print(
            f"ExpertParallel: rank {ranks[rank]} {what}; all work on this GPU has been ended, and "
            "the next call of CUDA raises an error",
            file=sys.stderr,
            flush=True,
        )

    def keep_looking() -> None:
        while not ends.wait(_SECONDS_BETWEEN_LOOKS) and is_used() is not None and not has_said:
            look()

    def end() -> None:
        ends.set()
        thread.join()
        look()

    thread = Thread(target=keep_looking, name="moefp8 ExpertParallel", daemon=True)
    atexit.register(end)
    thread.start()
