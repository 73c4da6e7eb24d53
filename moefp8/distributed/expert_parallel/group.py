"""The ranks that share the experts of layers, and how tokens travel between them."""

import warnings
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist

from ...kernels.jit import current_driver
from .agreement import Agreement, Call
from .collective import CollectiveExchange
from .peer_memory import PeerMemory, Peers
from .peers import PeerExchange
from .watch import watch

TIMEOUT = timedelta(minutes=5)
Transport = Literal["auto", "peers", "collective"]
TRANSPORTS: tuple[Transport, ...] = ("auto", "peers", "collective")
# Keyed by process group. Values do not hold their keys, so what is destroyed leaves nothing here.
_GROUPS: WeakKeyDictionary[Any, "ExpertGroup"] = WeakKeyDictionary()
# Keyed by GPU and whether it was captured: the stream of the last exchange, and its capture.
_LAST_STREAMS: dict[tuple[torch.device, bool], tuple[torch.cuda.Stream, int | None]] = {}


class ExpertGroup:
    """The ranks of a process group; rank r of P holds [r E // P, (r + 1) E // P) of E experts.

    All layers of a process group share one, with the memory that it owns. Each rank makes the same
    layers in the same order.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        agreement: Agreement,
        peers: Peers,
        *,
        transport: Transport = "auto",
        process_group: Any = None,
    ) -> None:
        self.rank, self.size, self.agreement, self.peers = rank, size, agreement, peers
        self.transport, self._num_layers, self.last_turn = transport, 0, 0
        self._process_group = None if process_group is None else ref(process_group)
        self._memory: PeerMemory | None = None
        self._kept: list[PeerMemory] = []  # that captured graphs may write
        self._has_peers: bool | None = None

    @classmethod
    def of(
        cls, mesh: Any, timeout: timedelta | None = None, transport: Transport | None = None
    ) -> "ExpertGroup":
        """The group of a mesh of one dimension, or of a process group; made at the first call.

        Raises ValueError if it was made with another timeout or transport, or if they are not the
        same on all ranks that make it.
        """
        group = mesh if isinstance(mesh, dist.ProcessGroup) else _group_of(mesh)
        if transport is not None and transport not in TRANSPORTS:
            raise ValueError(
                f"ExpertParallel: transport must be one of {list(TRANSPORTS)}, got {transport!r}"
            )
        existing = _GROUPS.get(group)
        if existing is None:
            agreement = Agreement(group, timeout or TIMEOUT)
            seconds, chosen = agreement.timeout.total_seconds(), transport or "auto"
            agreement.check_alike(
                timeout=(int(seconds * 1000), agreement.timeout),
                transport=(TRANSPORTS.index(chosen), repr(chosen)),
            )
            existing = _GROUPS[group] = cls(
                dist.get_rank(group),
                dist.get_world_size(group),
                agreement,
                Peers(group.group_name, agreement.group),
                transport=chosen,
                process_group=group,
            )
        for name, asked, known in (
            ("timeout", timeout, existing.agreement.timeout),
            ("transport", transport, existing.transport),
        ):
            if asked not in (None, known):
                raise ValueError(
                    f"ExpertParallel: {name} must be one for all layers of a group, got {asked}, "
                    f"and {known} before"
                )
        return existing

    @property
    def process_group(self) -> Any:
        """Raises RuntimeError if it has been destroyed."""
        group = None if self._process_group is None else self._process_group()
        if group is None:
            raise RuntimeError(
                "ExpertParallel: the layer's process group has been destroyed; make a new layer in "
                "a new group"
            )
        return group

    def number_layer(self) -> int:
        self._num_layers += 1
        return self._num_layers - 1

    def number_turn(self) -> int:
        """The number of a turn that begins; `last_turn` is that of the last one."""
        self.last_turn += 1
        return self.last_turn

    def exchange(self, calls: list[Call], ids: torch.Tensor) -> CollectiveExchange | PeerExchange:
        """The exchange of a call that all ranks have agreed on; ids: [T, k] of this rank's."""
        if ids.is_cuda and self._uses_peers(ids.device):
            return PeerExchange(self, calls, ids)
        if calls[0].is_captured:
            raise RuntimeError(
                "ExpertParallel: a CUDA graph needs GPUs that write each other's memory; without, "
                "sizes of what travels are read by the host"
            )
        return CollectiveExchange(self, calls, ids)

    @property
    def may_use(self) -> tuple[bool, bool]:
        """Whether tokens of GPUs may travel by peers, and by collectives; both: it is not known."""
        if self._has_peers is None:
            return self.transport != "collective", self.transport != "peers"
        return self._has_peers, not self._has_peers

    # ---- What the exchange of peers needs ----

    def _uses_peers(self, device: torch.device) -> bool:
        if self._has_peers is None:
            problem: str | None = "transport='collective' was asked for"
            if self.transport != "collective":
                problem = self.peers.why_not(device)
                if problem is not None and self.transport == "peers":
                    raise RuntimeError(
                        "ExpertParallel: transport='peers' needs GPUs of one host that can write "
                        f"each other's memory, but {problem}; take transport='auto'"
                    )
                if problem is not None:
                    warnings.warn(
                        "ExpertParallel: tokens travel by all_to_all_single, which is slower and "
                        f"waits for the GPU in each call, since {problem}",
                        UserWarning,
                        stacklevel=2,
                    )
            self._has_peers = problem is None
        return self._has_peers

    @property
    def memory(self) -> PeerMemory:
        assert self._memory is not None, "it is made by the first dispatch"
        return self._memory

    def memory_for(self, device: torch.device, receiving: int, returning: int) -> PeerMemory:
        """The group's memory, with areas of at least so many bytes.

        All ranks ask for the same, so that they make a new one together where it is too small.
        """
        old = self._memory
        if old is None or old.receiving < receiving or old.returning < returning:
            if current_driver().is_capturing():
                raise RuntimeError(
                    "ExpertParallel: the group's memory cannot grow while a CUDA graph is "
                    "captured; run the layers once before, with as many tokens and a backward if "
                    "the graph has one"
                )
            torch.cuda.synchronize(device)  # what has been pushed is read
            self._memory = None
            sizes = PeerMemory.sizes(receiving, returning, old)
            if old is not None and old.was_captured:
                self._kept.append(old)
            del old
            self._memory = self.peers.make(device, *sizes)
            watch(self._memory, self.agreement)
        memory = self.memory
        if current_driver().is_capturing():
            memory.was_captured = True
        self._follow(device)
        return memory

    def _follow(self, device: torch.device) -> None:
        """Eager exchanges of a GPU run one after the other, whatever their streams and groups, and
        so do those of one captured graph. When a graph is replayed, no host orders anything.

        CTAs that wait would fill the GPUs of two ranks, each for another exchange.
        """
        current, capture = (
            torch.cuda.current_stream(device),
            current_driver().capture_id(device.index),
        )
        which = device, capture is not None
        last, its_capture = _LAST_STREAMS.get(which, (current, capture))
        if last != current and its_capture == capture:
            current.wait_stream(last)
        _LAST_STREAMS[which] = current, capture


def _group_of(mesh: Any) -> Any:
    if getattr(mesh, "ndim", None) != 1:
        raise ValueError(
            "ExpertParallel: mesh must be a DeviceMesh of one dimension or a process group, got "
            f"{mesh!r}; take one dimension of a larger mesh by its name: mesh['experts']"
        )
    return mesh.get_group()
