"""The ranks that share the experts of layers, and the transport that they have chosen."""

import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref
from zlib import crc32

import torch
import torch.distributed as dist

from .agreement import Agreement, Call
from .collective import CollectiveTransport
from .peer_group import PeerGroup
from .peers import PeerTransport
from .transport import Transport

TIMEOUT = timedelta(minutes=5)
TransportName = Literal["auto", "peers", "collective"]
# Tokens take the first that can serve them; where all are for GPUs, those on CPUs are collective.
TRANSPORTS: dict[str, tuple[type[Transport], ...]] = {
    "auto": (PeerTransport, CollectiveTransport),
    "peers": (PeerTransport,),
    "collective": (CollectiveTransport,),
}
# Keyed by process group. Values do not hold their keys, so what is destroyed leaves nothing here.
_GROUPS: WeakKeyDictionary[Any, "ExpertGroup"] = WeakKeyDictionary()


class ExpertGroup:
    """The ranks of a process group; rank r of P holds [r E // P, (r + 1) E // P) of E experts.

    All layers of a process group share one. Each rank makes the same layers in the same order.

    Attributes:
        rank, size: this rank, and P.
        agreement: how the ranks' hosts agree on each call.
        peers: the ranks' GPUs, as `PeerTransport` uses them.
        transport: what was asked for: a name in `TRANSPORTS`, or a class.
        candidates: the transports that tokens on GPUs may take; one, once the first call has tried.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        agreement: Agreement,
        peers: PeerGroup,
        *,
        transport: TransportName | type[Transport] = "auto",
        process_group: Any = None,
    ) -> None:
        self.rank, self.size, self.agreement, self.peers = rank, size, agreement, peers
        self.transport, self._num_layers, self._has_tried_peers = transport, 0, False
        self.candidates = TRANSPORTS[transport] if isinstance(transport, str) else (transport,)
        self._process_group = None if process_group is None else ref(process_group)

    @classmethod
    def of(
        cls,
        mesh: Any,
        timeout: timedelta | None = None,
        transport: TransportName | type[Transport] | None = None,
    ) -> "ExpertGroup":
        """The group of a mesh of one dimension, or of a process group; made at the first call.

        Raises ValueError if it was made with another timeout or transport, or if they are not the
        same on all ranks that make it.
        """
        group = mesh if isinstance(mesh, dist.ProcessGroup) else _group_of(mesh)
        _check_transport(transport)
        existing = _GROUPS.get(group)
        if existing is None:
            agreement = Agreement(group, timeout or TIMEOUT)
            seconds, chosen = agreement.timeout.total_seconds(), transport or "auto"
            name = _name_of(chosen)
            agreement.check_alike(
                timeout=(int(seconds * 1000), agreement.timeout),
                transport=(crc32(name.encode()), name),
            )
            existing = _GROUPS[group] = cls(
                dist.get_rank(group),
                dist.get_world_size(group),
                agreement,
                PeerGroup(group.group_name, agreement),
                transport=chosen,
                process_group=group,
            )
        for name, asked, known in (
            ("timeout", timeout, existing.timeout),
            ("transport", transport, existing.transport),
        ):
            if asked not in (None, known):
                raise ValueError(
                    f"ExpertParallel: {name} must be one for all layers of a group, got {asked}, "
                    f"and {known} before"
                )
        return existing

    @property
    def timeout(self) -> timedelta:
        """How long a rank waits for the others."""
        return self.agreement.timeout

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

    def transport_for(self, calls: Sequence[Call], ids: torch.Tensor) -> Transport:
        """The transport of a call that all ranks have agreed on; ids: [T, k] of this rank."""
        return self._class_for(ids.device)(self, calls, ids)

    def _class_for(self, device: torch.device) -> type[Transport]:
        """The class that the group was given, or the first of those named that can serve it."""
        if isinstance(self.transport, type):
            return self.transport
        if device.type != "cuda":
            others = [x for x in self.candidates if x is not PeerTransport]
            return others[0] if others else CollectiveTransport
        if self.candidates[0] is PeerTransport and not self._has_tried_peers:
            self._try_peers(device)
        return self.candidates[0]

    def _try_peers(self, device: torch.device) -> None:
        """Reduce the candidates to one, the same on all ranks."""
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
        self.candidates, self._has_tried_peers = (self.candidates[problem is not None],), True


def _check_transport(transport: Any) -> None:
    if transport is None or (isinstance(transport, str) and transport in TRANSPORTS):
        return
    if isinstance(transport, type) and issubclass(transport, Transport):
        return
    raise ValueError(
        f"ExpertParallel: transport must be one of {list(TRANSPORTS)}, or a class derived from "
        f"moefp8.distributed.Transport, got {transport!r}"
    )


def _name_of(transport: str | type[Transport]) -> str:
    if isinstance(transport, str):
        return repr(transport)
    return f"{transport.__module__}.{transport.__qualname__}"


def _group_of(mesh: Any) -> Any:
    if getattr(mesh, "ndim", None) != 1:
        raise ValueError(
            "ExpertParallel: mesh must be a DeviceMesh of one dimension or a process group, got "
            f"{mesh!r}; take one dimension of a larger mesh by its name: mesh['experts']"
        )
    return mesh.get_group()
