"""The GPUs of a group that write each other's memory, and the memory that its layers share.

It uses `torch.distributed._symmetric_memory` (its CUDA backend: peers' memory as plain addresses),
which is private to PyTorch; only this file imports it.
"""

import os
from typing import Any

import torch
import torch.distributed as dist

from ...kernels.jit import current_driver
from .agreement import Agreement
from .peer_memory import GRANULE, MAX_RANKS, PeerMemory
from .watch import watch

_MAY_SHARE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # PyTorch's own, for tests
# Keyed by GPU and whether it was captured: the stream of the last exchange, and its capture.
_LAST_STREAMS: dict[tuple[torch.device, bool], tuple[torch.cuda.Stream, int | None]] = {}


class PeerGroup:
    """The GPUs of a process group, one for each rank, and the memory that all its layers share.

    All ranks call `make`, `why_not` and `memory_for` together.

    name: the process group's, by which PyTorch finds it. agreement: of the same ranks.
    """

    def __init__(self, name: Any, agreement: Agreement) -> None:
        self.name, self.agreement, self.last_turn = name, agreement, 0
        self._memory: PeerMemory | None = None
        self._kept: list[PeerMemory] = []  # memory that captured graphs may write

    def number_turn(self) -> int:
        """The number of a turn that begins; `last_turn` is the last turn's."""
        self.last_turn += 1
        return self.last_turn

    @property
    def memory(self) -> PeerMemory:
        assert self._memory is not None, "it is made by the first dispatch"
        return self._memory

    def memory_for(self, device: torch.device, receiving: int, returning: int) -> PeerMemory:
        """The group's memory, with areas of at least so many bytes.

        All ranks ask for the same sizes, so they make a new memory together if it is too small.
        """
        old = self._memory
        if old is None or old.receiving < receiving or old.returning < returning:
            if current_driver().is_capturing():
                raise RuntimeError(
                    "ExpertParallel: the group's memory cannot grow while a CUDA graph is "
                    "captured; run the layers once before, with as many tokens and a backward if "
                    "the graph has one"
                )
            torch.cuda.synchronize(device)  # all that was pushed has been read
            self._memory = None
            sizes = PeerMemory.sizes(receiving, returning, old)
            if old is not None and old.was_captured:
                self._kept.append(old)
            del old
            self._memory = self.make(device, *sizes)
            watch(self._memory, self.agreement)
        memory = self.memory
        if current_driver().is_capturing():
            memory.was_captured = True
        _follow_the_last_exchange(device)
        return memory

    def make(self, device: torch.device, receiving: int, returning: int) -> PeerMemory:
        """Allocate memory with areas of so many bytes on each rank."""
        import torch.distributed._symmetric_memory as symmetric

        num_bytes = PeerMemory.num_bytes(receiving, returning)
        tensor = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
        handle: Any = symmetric.rendezvous(tensor, self.name)
        tensor.zero_()
        memory = PeerMemory(tensor, handle.buffer_ptrs, receiving, returning)
        memory.handle = handle  # it owns the mapping
        torch.cuda.synchronize(device)
        dist.barrier(self.agreement.group)  # no rank signals before all have zeros
        return memory

    def why_not(self, device: torch.device) -> str | None:
        """Why the GPUs cannot write each other's memory, the same on all ranks; None: they can.

        It allocates some memory to see.
        """
        answers: list[Any] = [None] * dist.get_world_size(self.agreement.group)
        dist.all_gather_object(answers, _identity_of(device), group=self.agreement.group)
        hosts, gpus, kinds, may_share = ({x[i] for x in answers} for i in range(4))
        if len(answers) > MAX_RANKS:
            return f"there are {len(answers)} ranks, and at most {MAX_RANKS} can"
        if len(hosts) > 1:
            return "they are GPUs of several hosts"
        if len(gpus) < len(answers) and may_share != {"1"}:
            return f"several ranks have one GPU (for tests, {_MAY_SHARE}=1 on all lets them)"
        if kinds != {(9, 0)}:
            return f"kernels of ours need Hopper GPUs, and their compute capabilities are {kinds}"
        problem = None
        try:
            self.make(device, GRANULE, GRANULE)
        except Exception as error:  # of the driver, of rights, of what PyTorch was built with
            problem = f"{type(error).__name__}: {error}"
        dist.all_gather_object(answers, problem, group=self.agreement.group)
        return next((x for x in answers if x is not None), None)


def _identity_of(device: torch.device) -> tuple[str, str, tuple[int, int], str | None]:
    """(host, GPU, compute capability, whether it may have several ranks)"""
    host = "one"
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            host = file.read().strip()
    except OSError:
        pass
    properties = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", device.index))
    return host, uuid, torch.cuda.get_device_capability(device), os.environ.get(_MAY_SHARE)


def _follow_the_last_exchange(device: torch.device) -> None:
    """Let the current stream wait for the GPU's last exchange, whatever its stream and group.

    So eager exchanges run one after the other, and so do those of one captured graph. CTAs that
    wait would fill the GPUs of two ranks, each for another exchange. When a graph is replayed, no
    host orders anything.
    """
    current, capture = (
        torch.cuda.current_stream(device),
        current_driver().capture_id(device.index),
    )
    key = device, capture is not None
    last, last_capture = _LAST_STREAMS.get(key, (current, capture))
    if last != current and last_capture == capture:
        current.wait_stream(last)
    _LAST_STREAMS[key] = current, capture
