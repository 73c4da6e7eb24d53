"""FP8 codes of master weights, W and W^T: made once for each value that a weight has, and kept.

A trained module's parameter is the master weight, in BF16, FP16 or FP32. Its codes are a cache that
belongs to the parameter's storage and goes with it. They are trusted as long as nothing tells that
the weight has changed, and made anew in the same memory, which CUDA graphs may know.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ...kernels.jit import current_driver
from ...quant.both import (
    WeightCodes,
    empty_both,
    quantize_128x128_both,
    quantize_128x128_both_into,
    whole_rows,
)
from ..kept import Made, belonging, belonging_if_any, has_memory, identity, may_be_same
from .gathered import GatheredCodes, GatheredWeight

__all__ = ["WeightCodes", "codes_of", "codes_stay", "requantize"]


class _Layout(NamedTuple):
    """Where codes are of: other views of a storage have their own."""

    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    parts: int

    @classmethod
    def of(cls, weight: torch.Tensor, parts: int) -> "_Layout":
        return cls(weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, parts)

    def begins_in(self, weight: torch.Tensor) -> bool:
        """Whether codes are of a part of `weight`, which lies in the same storage."""
        last = sum((n - 1) * pitch for n, pitch in zip(weight.shape, weight.stride(), strict=True))
        begin = weight.data_ptr()
        return begin <= self.address <= begin + last * weight.element_size()

    def view_of(self, weight: torch.Tensor) -> torch.Tensor:
        """The values that lie there, in the storage of `weight`."""
        storage = weight.untyped_storage()
        offset = (self.address - storage.data_ptr()) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=weight.device)
        return empty.set_(storage, offset, self.shape, self.strides)


@dataclass
class _Kept:
    """Codes as they were made.

    version: of the weight. of: which parameter that was. was_frozen: whether it asked for no
        gradient. num_steps: how many steps optimizers had made of weights unknown to us.
    capture: the capture of a graph in which they were made; None: they are made already.
    made: behind what they are made; None on a CPU.
    is_old: whether something told that the weight has changed since, or nothing is made yet.
    is_in_graph: whether a graph's replay, which counts no version, may write them or the weight.
    """

    codes: WeightCodes
    version: int = -1
    of: int = 0
    was_frozen: bool = False
    num_steps: int = 0
    capture: int | None = None
    made: Made | None = None
    is_old: bool = True
    is_in_graph: bool = False

    def is_of(self, weight: torch.Tensor) -> bool:
        """Whether nothing told that the weight has changed since."""
        if self.is_old or self.version != weight._version:
            return False
        if not may_be_same(self.of, identity(weight)):
            return False
        return (self.was_frozen and _is_frozen(weight)) or self.num_steps == _known.num_steps

    def is_made_in(self, capture: int | None) -> bool:
        """Whether what is made in this capture, or outside of all, may read them as they are."""
        return self.capture == capture and not (capture is None and self.is_in_graph)

    def wait(self, capture: int | None) -> None:
        """Let the current stream wait until they are made; across a capture, nothing can wait."""
        if self.made is not None and self.capture == capture:
            self.made.wait(self.codes, is_captured=capture is not None)

    def make(self, weight: torch.Tensor, parts: int, capture: int | None) -> None:
        """Make them anew in their memory, on the current stream."""
        version, num_steps = weight._version, _known.num_steps
        self.wait(capture)  # another stream may be about to write what the weight was before
        self.is_old = True  # if the launch fails
        data, scale_inv, _ = self.codes
        quantize_128x128_both_into(weight, parts, data, scale_inv, whole_rows(self.codes, parts))
        self.made = Made.now(weight.device) if weight.is_cuda else None
        self.version, self.num_steps, self.capture = version, num_steps, capture
        self.of, self.was_frozen = identity(weight), _is_frozen(weight)
        self.is_in_graph |= capture is not None
        self.is_old = False


def _is_frozen(weight: torch.Tensor) -> bool:
    return isinstance(weight, nn.Parameter) and not weight.requires_grad


class _OfStorage(dict[_Layout, _Kept]):
    """All codes that belong to a storage."""


@dataclass
class _Known:
    """What holds for all weights: steps of unknown ones, and how many `codes_stay` are entered."""

    num_steps: int = 0
    num_staying: int = 0


_known = _Known()
_entering = threading.Lock()


def codes_of(
    weight: torch.Tensor, parts: int = 1, *, trusts: bool = True, is_backward: bool = False
) -> WeightCodes | GatheredCodes:
    """The codes of a master weight and of its transpose, as `quantize_128x128_both` makes them.

    They are kept, and made anew by one kernel in the same memory when

    - the weight's version changed: a write in place counts one up, unless it is through `.data`;
    - another parameter lies there now;
    - the weight lies elsewhere or otherwise than before (then in other memory), or its storage was
      resized, as FSDP does when it frees what it gathered;
    - an optimizer of torch made a step with the weight, however it wrote it; or with others that
      have no codes, which may be copies that somebody writes back: then all are made anew but those
      of parameters that were frozen before and still are;
    - a graph is captured: see below;
    - `requantize` asks for it.

    Of an inference tensor, which counts no versions, nothing is kept. A `GatheredWeight` has codes.

    While a stream is captured into a CUDA graph, codes are made inside the capture, once for each
    version: a graph of a whole step quantizes once each step, whatever its replay finds. A replay
    changes weights unseen, so these codes are trusted in their own capture only, and calls outside
    of captures then make them anew each time. `codes_stay` leaves the kernel outside instead.

    The memory may be written again by each later call. A backward therefore saves the weight rather
    than its codes, and asks again.

    Args:
        weight: [N, K] or [E, N, K] bf16, fp16 or fp32; columns contiguous.
        parts: 2 for stacked gate and up, whose blocks begin anew with up; N is a multiple of it.
        trusts: False makes them anew in any case, as a module in eval mode does in its forward:
            nothing counts writes through `.data`, by which a moving average may be put in, and the
            trained weights back later. So the next call makes them anew, too.
        is_backward: whether it is called for a gradient. If codes have to be made anew then, that
            holds for the next forward as well: between the two, eval mode's rule is not ended.

    Raises:
        TypeError, ValueError: naming the argument, the rule and what came.
        RuntimeError: within `codes_stay`, if codes had to be made inside a capture.
    """
    if isinstance(weight, GatheredWeight):
        return GatheredCodes(weight, parts)
    if weight.is_inference() or not has_memory(weight):
        return quantize_128x128_both(weight, parts)
    of_storage, layout = belonging(weight, _OfStorage), _Layout.of(weight, parts)
    found, capture = of_storage.get(layout), _capture_of(weight)
    is_trusted = found is not None and found.is_of(weight)
    if capture is not None and _known.num_staying:
        return _staying(weight, found if is_trusted else None)
    if found is None:
        with torch.inference_mode(False):  # it outlives the mode in which it is made
            found = _Kept(empty_both(weight, parts))
    elif is_trusted and trusts and found.is_made_in(capture):
        found.wait(capture)
        return found.codes
    stays_old = not trusts or (is_backward and found.is_old and layout in of_storage)
    found.make(weight, parts, capture)
    found.is_old = stays_old  # what nothing counts may put the weight back, too
    _watch_optimizers()
    of_storage[layout] = found
    return found.codes


def _capture_of(weight: torch.Tensor) -> int | None:
    """Which capture of a graph the stream is part of, if any."""
    driver, device_index = current_driver(), weight.get_device()
    if weight.is_cuda or driver.runs_our_kernels(device_index):
        return driver.capture_id(device_index)
    return None


def _staying(weight: torch.Tensor, found: _Kept | None) -> WeightCodes:
    if found is None or found.capture is not None:
        raise RuntimeError(
            f"codes_stay: a weight of shape {list(weight.shape)} has no codes that a graph could "
            "read as they are; outside of a graph, run the module once, or call requantize after "
            "the weights changed, then capture"
        )
    return found.codes


@contextmanager
def codes_stay() -> Iterator[None]:
    """Within it, graphs that are captured read codes as they lie in memory, and make none.

    For a graph of one micro-batch of several: its replays then quantize no weights. In return,
    `requantize` has to be called after every change of the weights, outside of this graph, and
    before its next replay. Codes have to be there, and right, when the graph is captured.

    It holds for all threads, since a backward runs in another one. Outside of captures it changes
    nothing.
    """
    with _entering:
        _known.num_staying += 1
    try:
        yield
    finally:
        with _entering:
            _known.num_staying -= 1


def requantize(weights: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Make all codes that are kept of weights anew, now, in the same memory.

    For graphs that were captured within `codes_stay`, and after writes through `.data` while
    a module trains: nothing else tells of these. Weights without codes get none.

    Args:
        weights: those of a module are all of its parameters.

    Raises:
        TypeError: for anything else.
    """
    for weight in _weights_of(weights):
        capture = _capture_of(weight)
        for layout, kept in list((belonging_if_any(weight, _OfStorage) or {}).items()):
            if layout == _Layout.of(weight, layout.parts):
                kept.make(weight, layout.parts, capture)
            elif layout.begins_in(weight):  # a view of it: which version is its own, is not known
                kept.make(layout.view_of(weight), layout.parts, capture)
                kept.is_old = True


def _weights_of(weights: Any) -> list[torch.Tensor]:
    if isinstance(weights, nn.Module):
        return list(weights.parameters())
    if isinstance(weights, torch.Tensor):
        return [weights]
    found = list(weights) if isinstance(weights, Iterable) else [weights]
    for x in found:
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"requantize: weights must be a module, a tensor or several, got {type(x).__name__}"
            )
    return found


@cache
def _watch_optimizers() -> None:
    """From the first master weight on; once."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """An optimizer may write through `.data`, and its step may be part of a graph."""
    weights = [x for group in optimizer.param_groups for x in group["params"]]
    found = [(belonging_if_any(x, _OfStorage), x) for x in weights]
    of_storages = {id(of_storage): (of_storage, x) for of_storage, x in found if of_storage}
    for of_storage, weight in of_storages.values():  # of one flat buffer, all have the same
        is_in_graph = _capture_of(weight) is not None
        for kept in list(of_storage.values()):
            kept.is_old = True
            kept.is_in_graph |= is_in_graph
    if not all(of_storage for of_storage, _ in found):
        _known.num_steps += 1
