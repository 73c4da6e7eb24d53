"""Caches of values derived from a tensor. An entry lives as long as the tensor's storage."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")
_NAME = "_moefp8_kept"


def attached(tensor: torch.Tensor, kind: Callable[[], T]) -> T:
    """The object of class `kind` attached to a tensor's storage; it is made if there is none.

    FSDP frees gathered weights by resizing their storage, and later writes other weights into it,
    maybe at the same address, without a new version. So a storage with attached objects drops them
    when it is resized. Copies of the tensor and saved files do not have them.
    """
    storage = tensor.untyped_storage()
    own = storage.__dict__
    if _NAME not in own:
        own["resize_"] = partial(_forget_and_resize, weakref.ref(storage))
        own[_NAME] = {}
    by_kind = own[_NAME]
    if kind not in by_kind:
        by_kind[kind] = kind()
    entry: T = by_kind[kind]
    return entry


def attached_or_none(tensor: torch.Tensor, kind: Callable[[], T]) -> T | None:
    """The object of class `kind` attached to a tensor's storage; None if there is none."""
    if not has_memory(tensor):
        return None
    entry: T | None = tensor.untyped_storage().__dict__.get(_NAME, {}).get(kind)
    return entry


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether its own storage holds its values: not so for fake tensors and DTensors."""
    return is_plain(tensor) and not tensor.is_meta


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether no subclass takes over its operations, as fake tensors and DTensors do."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def parameter_id(tensor: torch.Tensor) -> int:
    """The `id` of a parameter; 0 for other tensors, such as views and saved tensors.

    A parameter may take over the memory of another one that has the same version: `.data` puts the
    weights of the next layer into memory that stays.
    """
    return id(tensor) if isinstance(tensor, torch.nn.Parameter) else 0


def may_be_same(one: int, other: int) -> bool:
    """Whether two results of `parameter_id` may be of the same parameter."""
    return one == other or not (one and other)


def _forget_and_resize(watched: "weakref.ref[torch.UntypedStorage]", num_bytes: int) -> Any:
    storage = watched()
    assert storage is not None
    storage.__dict__.pop(_NAME, None)
    storage.__dict__.pop("resize_", None)
    return storage.resize_(num_bytes)


class Completion(NamedTuple):
    """A point on a stream of a GPU after which tensors are complete."""

    stream: int
    event: torch.cuda.Event

    @classmethod
    def now(cls, device: torch.device) -> "Completion":
        """The point after all work that is on the device's current stream."""
        current, event = torch.cuda.current_stream(device), torch.cuda.Event()
        event.record(current)
        return cls(current.cuda_stream, event)

    def wait(self, tensors: Sequence[torch.Tensor], *, is_captured: bool = False) -> None:
        """Let the current stream wait for this point before it uses the tensors, on a GPU.

        is_captured: both are in the same capture of a graph, during which no tensor is freed.
        """
        current = torch.cuda.current_stream(tensors[0].device)
        if current.cuda_stream == self.stream:
            return
        current.wait_event(self.event)
        if not is_captured:
            for x in tensors:
                x.record_stream(current)
