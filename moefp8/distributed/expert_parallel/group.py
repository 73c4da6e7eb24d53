"""The ranks that share the experts of layers, and how tokens travel between them."""

from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from .agreement import Agreement, Call
from .collective import CollectiveExchange

TIMEOUT = timedelta(minutes=5)
_GROUPS: WeakKeyDictionary[Any, "ExpertGroup"] = WeakKeyDictionary()  # keyed by process group


class ExpertGroup:
    """The ranks of a process group; rank r of P holds [r E // P, (r + 1) E // P) of E experts.

    All layers of a process group share one, with all that it owns. Each rank makes the same layers
    in the same order.
    """

    def __init__(self, group: Any, timeout: timedelta) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self.agreement, self._num_layers = Agreement(group, timeout), 0

    @classmethod
    def of(cls, mesh: Any, timeout: timedelta | None = None) -> "ExpertGroup":
        """The one of a mesh of one dimension, or of a process group, made at the first call.

        Raises ValueError if it was made with another timeout, or this rank is not in the mesh.
        """
        group = mesh if isinstance(mesh, dist.ProcessGroup) else _group_of(mesh)
        found = _GROUPS.get(group)
        if found is None:
            found = _GROUPS[group] = cls(group, timeout or TIMEOUT)
        if timeout not in (None, found.agreement.timeout):
            raise ValueError(
                f"ExpertParallel: timeout must be one for all layers of a group, got {timeout}, "
                f"and {found.agreement.timeout} before"
            )
        return found

    def number_layer(self) -> int:
        self._num_layers += 1
        return self._num_layers - 1

    def exchange(self, calls: list[Call], ids: torch.Tensor) -> CollectiveExchange:
        """The exchange of a call that all ranks have agreed on; ids: [T, k] of this rank's."""
        return CollectiveExchange(self, calls, ids)


def _group_of(mesh: Any) -> Any:
    if getattr(mesh, "ndim", None) != 1:
        raise ValueError(
            "ExpertParallel: mesh must be a DeviceMesh of one dimension or a process group, got "
            f"{mesh!r}; take one dimension of a larger mesh by its name: mesh['experts']"
        )
    return mesh.get_group()
