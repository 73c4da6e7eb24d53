"""What is made of a tensor's values and kept: it belongs to its memory, and goes with it."""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

T = TypeVar("T")
_NAME = "_moefp8_kept"


def belonging(tensor: torch.Tensor, kind: Callable[[], T]) -> T:
    """The object of class `kind` that belongs to a tensor's storage, whoever holds the tensor.

    FSDP frees gathered weights by resizing their storage, and writes others into it later, maybe at
    the same address; no version counts that. So a storage to which something belongs watches its
    size. A copy of the tensor, or what is saved of it, has nothing of it.
    """
    storage = tensor.untyped_storage()
    own = storage.__dict__
    if _NAME not in own:
        own["resize_"] = partial(_forget_and_resize, weakref.ref(storage))
        own[_NAME] = {}
    of_kinds = own[_NAME]
    if kind not in of_kinds:
        of_kinds[kind] = kind()
    found: T = of_kinds[kind]
    return found


def belonging_if_any(tensor: torch.Tensor, kind: Callable[[], T]) -> T | None:
    """The same where it was made before, else None."""
    if not has_memory(tensor):
        return None
    found: T | None = tensor.untyped_storage().__dict__.get(_NAME, {}).get(kind)
    return found


def has_memory(tensor: torch.Tensor) -> bool:
    """Whether its values lie in its own storage: not those of fake tensors, or of DTensors."""
    return is_plain(tensor) and not tensor.is_meta


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether no subclass takes over its operations, as fake tensors and DTensors do."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def identity(tensor: torch.Tensor) -> int:
    """Which parameter it is; 0 for other tensors, such as views and what is saved, of any.

    A parameter may get the memory of another one, which counts as many versions (`.data` puts
    weights of the next layer into memory that stays).
    """
    return id(tensor) if isinstance(tensor, torch.nn.Parameter) else 0


def may_be_same(one: int, other: int) -> bool:
    """Whether two of `identity` can be of one parameter."""
    return one == other or not (one and other)


def _forget_and_resize(watched: "weakref.ref[torch.UntypedStorage]", num_bytes: int) -> Any:
    storage = watched()
    assert storage is not None
    storage.__dict__.pop(_NAME, None)
    storage.__dict__.pop("resize_", None)
    return storage.resize_(num_bytes)


class Made(NamedTuple):
    """Behind what something on a GPU was made."""

    stream: int
    event: torch.cuda.Event

    @classmethod
    def now(cls, device: torch.device) -> "Made":
        """Behind all that is on the device's current stream."""
        current, event = torch.cuda.current_stream(device), torch.cuda.Event()
        event.record(current)
        return cls(current.cuda_stream, event)

    def wait(self, tensors: Sequence[torch.Tensor], *, is_captured: bool = False) -> None:
        """Let the current stream wait before it uses the tensors, which are on a GPU.

        is_captured: it is part of the same capture of a graph. Then nobody frees them meanwhile.
        """
        current = torch.cuda.current_stream(tensors[0].device)
        if current.cuda_stream == self.stream:
            return
        current.wait_event(self.event)
        if not is_captured:
            for x in tensors:
                x.record_stream(current)
