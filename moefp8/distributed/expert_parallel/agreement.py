"""The ranks of a group tell each other their calls before each exchange, and compare them.

T tokens of a rank, H hidden, k choices, E experts of the whole model. The hosts exchange the
calls, without waiting for a GPU. If a rank has ended, does not come within the timeout, or makes
another call, all others raise an error.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from ...kernels.common.checks import FLOATS
from .host_words import HostWords

PHASES = "forward", "backward", "gradients of tokens"
_TENSORS = "hidden_states", "top_k_index", "top_k_weights"
_DEVICES = "cpu", "cuda", "meta", "another device"
T = TypeVar("T")


class Call(NamedTuple):
    """What a rank is about to do.

    phase: an index into `PHASES`. layer: which layer of the group, by the order they were made in.
    num_experts: E. dtype, devices: as `dtype_and_devices` gives them. is_fp8: whether tokens travel
    as FP8 codes. is_captured: whether a CUDA graph is being captured. asks: 1 if hidden states or
    scores ask for a gradient, plus 2 if weights do, plus 4 under torch.no_grad(). num_tokens: T.
    has_failed: whether this rank's arguments are wrong, and then only phase and layer mean
    something.

    Ranks may differ in the last three, and in no other.
    """

    phase: int
    layer: int
    num_experts: int = 0
    hidden_size: int = 0
    top_k: int = 0
    dtype: int = 0
    devices: int = 0
    is_fp8: int = 0
    is_captured: int = 0
    asks: int = 0
    num_tokens: int = 0
    has_failed: int = 0

    @property
    def name(self) -> str:
        return f"{PHASES[self.phase]} of layer {self.layer}"


_ALIKE = Call._fields[:-3]


def dtype_and_devices(x: torch.Tensor, ids: torch.Tensor, scores: torch.Tensor) -> tuple[int, int]:
    """`Call.dtype`, which is that of x, and `Call.devices`: two bits for the kind of each."""
    devices = 0
    for tensor in (x, ids, scores):
        kinds = tensor.is_cpu, tensor.is_cuda, tensor.is_meta, True
        devices = devices * 4 + kinds.index(True)
    return FLOATS.index(x.dtype), devices


def are_of_one_kind(devices: int) -> bool:
    """Whether all tensors are on devices of one kind."""
    return devices % 0b010101 == 0


class Agreement:
    """The agreement of a group's hosts: through shared memory on one host, else through gloo.

    group: the ranks over gloo, also for other messages between hosts.
    """

    def __init__(self, group: Any, timeout: timedelta) -> None:
        self.ranks, self.timeout = dist.get_process_group_ranks(group), timeout
        self._process = os.getpid()
        with self.explaining("the first layer of a group"):
            self.group: Any = dist.new_group(
                self.ranks, timeout, backend="gloo", use_local_synchronization=True
            )
            place = dist.get_rank(group), len(self.ranks), len(Call._fields)
            words = HostWords.of(self._gather_by_gloo, *place, timeout)
        self._gather = words.gather if words else self._gather_by_gloo

    def checked(self, failed: Call, check: Callable[[], T]) -> T:
        """The result of `check`. If it raises, the other ranks hear of it first and do not wait."""
        try:
            return check()
        except Exception:
            with suppress(RuntimeError):  # this rank raises the error of `check`
                self.agree(failed._replace(has_failed=1))
            raise

    def agree(self, call: Call) -> list[Call]:
        """The calls of all ranks, by rank.

        Raises:
            RuntimeError: a rank has ended, does not come in time, or had wrong arguments; or this
                process is a child that a rank has forked.
            ValueError: ranks are at different calls. All ranks raise it.
        """
        if os.getpid() != self._process:  # others would take its words for its parent's
            raise RuntimeError(
                f"ExpertParallel: {call.name} was called in a process that a rank has forked, and "
                "which is no rank of the group; call the layer in the rank's own process, or start "
                'processes with the method "spawn" and make a group of them'
            )
        with self.explaining(call.name):
            calls = [Call._make(x) for x in self._gather(call)]
        failed = [rank for rank, x in enumerate(calls) if x.has_failed]
        if failed and not call.has_failed:
            raise RuntimeError(
                f"ExpertParallel: {call.name} cannot go on, since rank {failed[0]} of the group "
                "was given something wrong; that rank's error tells what"
            )
        if not failed and len({x[: len(_ALIKE)] for x in calls}) > 1:
            each = zip(_ALIKE, zip(*calls, strict=True), strict=False)
            name, came = next((name, came) for name, came in each if len(set(came)) > 1)
            raise ValueError(
                "ExpertParallel: all ranks must make the same calls in the same order, but "
                f"{_describe(name, came)}; call the layers in one order on all ranks, with tokens "
                "of one width and dtype, on one kind of device, and as many choices"
            )
        return calls

    def check_alike(self, **values: tuple[int, object]) -> None:
        """Raise ValueError on all ranks if numbers differ; values: (number, text for errors)."""
        with self.explaining("the first layer of a group"):
            everyone = self._gather_by_gloo([number for number, _ in values.values()])
        for (name, (_, own)), came in zip(values.items(), zip(*everyone, strict=True), strict=True):
            if len(set(came)) > 1:
                others = [rank for rank, x in enumerate(came) if x != came[0]]
                raise ValueError(
                    f"ExpertParallel: all ranks must make their layers with one {name}, but rank "
                    f"{others[0]} has another than rank 0, and this rank has {own}"
                )

    def _gather_by_gloo(self, values: Sequence[int]) -> list[list[int]]:
        own = torch.tensor(values, dtype=torch.int64, device="cpu")
        everyone = [torch.empty_like(own) for _ in self.ranks]
        dist.all_gather(everyone, own, self.group)
        return [x.tolist() for x in everyone]

    def explaining(self, what: str) -> "_Explaining":
        """A context that rewrites the errors of hosts that wait for others."""
        return _Explaining(self, what)


class _Explaining:
    def __init__(self, agreement: Agreement, what: str) -> None:
        self.agreement, self.what = agreement, what

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            seconds = self.agreement.timeout.total_seconds()
            raise RuntimeError(
                f"ExpertParallel: in {self.what}, a rank of the group {self.agreement.ranks} has "
                f"ended or did not come within {seconds:g} s (timeout=); see what that rank says, "
                f"and whether all ranks run the same layers ({error})"
            ) from error


def _describe(name: str, came: Sequence[int]) -> str:
    values: list[object] = list(came)
    if name == "phase":
        values = [PHASES[x] for x in came]
    elif name == "dtype":
        values = [str(FLOATS[x]).removeprefix("torch.") for x in came]
    elif name == "devices":
        kinds = [[x >> shift & 3 for x in came] for shift in (4, 2, 0)]
        which = next(i for i, by_rank in enumerate(kinds) if len(set(by_rank)) > 1)
        name, values = f"the device of {_TENSORS[which]}", [_DEVICES[x] for x in kinds[which]]
    each = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
    return f"{name} is {each}"
