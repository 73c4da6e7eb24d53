"""FP8 codes of master weights, W and W^T: quantized once after each change of a weight, and kept.

A trained module's parameter is the master weight, in BF16, FP16 or FP32. Its codes are cached as
long as the parameter's storage lives. They are reused unless something says that the weight has
changed; then they are made again in the same memory, which CUDA graphs may read.
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
from ..kept import Completion, attached, attached_or_none, has_memory, may_be_same, parameter_id
from .gathered import GatheredCodes, GatheredWeight

__all__ = ["WeightCodes", "codes_of", "codes_stay", "requantize"]


class _Layout(NamedTuple):
    """Identifies the view of a storage that codes belong to."""

    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    parts: int

    @classmethod
    def of(cls, weight: torch.Tensor, parts: int) -> "_Layout":
        return cls(weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, parts)

    def begins_in(self, weight: torch.Tensor) -> bool:
        """Whether the view begins within `weight`, which has the same storage."""
        last = sum((n - 1) * pitch for n, pitch in zip(weight.shape, weight.stride(), strict=True))
        begin = weight.data_ptr()
        return begin <= self.address <= begin + last * weight.element_size()

    def view_of(self, weight: torch.Tensor) -> torch.Tensor:
        """This view of the storage of `weight`."""
        storage = weight.untyped_storage()
        offset = (self.address - storage.data_ptr()) // self.dtype.itemsize
        empty = torch.empty(0, dtype=self.dtype, device=weight.device)
        return empty.set_(storage, offset, self.shape, self.strides)


@dataclass
class _Entry:
    """Codes of a weight, and the state in which they were made.

    version, parameter: of the weight. was_frozen: whether the weight needed no gradient.
    num_steps: `_known.num_steps` at that time. capture: of a graph; None: made outside of captures.
    completion: the point after which they are complete; None on a CPU.
    is_old: whether the weight may have changed since, or the codes are not made yet.
    is_in_graph: whether a graph's replay, which counts no version, may write them or the weight.
    """

    codes: WeightCodes
    version: int = -1
    parameter: int = 0
    was_frozen: bool = False
    num_steps: int = 0
    capture: int | None = None
    completion: Completion | None = None
    is_old: bool = True
    is_in_graph: bool = False

    def is_current(self, weight: torch.Tensor) -> bool:
        """Whether the weight has not changed since, as far as is known."""
        if self.is_old or self.version != weight._version:
            return False
        if not may_be_same(self.parameter, parameter_id(weight)):
            return False
        return (self.was_frozen and _is_frozen(weight)) or self.num_steps == _known.num_steps

    def is_readable_in(self, capture: int | None) -> bool:
        """Whether work in this capture may read them; None: work outside of captures."""
        return self.capture == capture and not (capture is None and self.is_in_graph)

    def wait(self, capture: int | None) -> None:
        """Let the current stream wait for them; a wait cannot cross the border of a capture."""
        if self.completion is not None and self.capture == capture:
            self.completion.wait(self.codes, is_captured=capture is not None)

    def make(self, weight: torch.Tensor, parts: int, capture: int | None) -> None:
        """Make them again in their memory, on the current stream."""
        version, num_steps = weight._version, _known.num_steps
        self.wait(capture)  # another stream may still write older codes
        self.is_old = True  # in case the launch fails
        data, scale_inv, _ = self.codes
        quantize_128x128_both_into(weight, parts, data, scale_inv, whole_rows(self.codes, parts))
        self.completion = Completion.now(weight.device) if weight.is_cuda else None
        self.version, self.num_steps, self.capture = version, num_steps, capture
        self.parameter, self.was_frozen = parameter_id(weight), _is_frozen(weight)
        self.is_in_graph |= capture is not None
        self.is_old = False


def _is_frozen(weight: torch.Tensor) -> bool:
    return isinstance(weight, nn.Parameter) and not weight.requires_grad


class _StorageCodes(dict[_Layout, _Entry]):
    """The codes of all views of a storage."""


@dataclass
class _Known:
    """State of all weights."""

    num_steps: int = 0  # of optimizers, with weights that have no codes
    num_staying: int = 0  # how many `codes_stay` are active


_known = _Known()
_entering = threading.Lock()


def codes_of(
    weight: torch.Tensor, parts: int = 1, *, reuse_codes: bool = True, is_backward: bool = False
) -> WeightCodes | GatheredCodes:
    """The codes of a master weight and of its transpose, as `quantize_128x128_both` makes them.

    They are kept. One kernel makes them again, in the same memory, when

    - the weight's version changed: each write in place, other than through `.data`, counts it up;
    - another parameter has the memory now;
    - the weight has another address or layout (then in other memory), or its storage was resized,
      as FSDP does to free gathered weights;
    - an optimizer of torch made a step with the weight; or with weights that have no codes, which
      may be copies to be written back: then all codes are made again but those of parameters that
      were frozen before and still are;
    - a graph is captured: see below;
    - `requantize` asks for it.

    Codes of an inference tensor, which has no version, are not kept. A `GatheredWeight` has codes.

    While a stream is captured into a CUDA graph, codes are made inside the capture, once for each
    version: so a graph of a whole step quantizes in each replay. A replay changes weights, but not
    versions. So these codes are reused in their own capture only, and calls outside of captures
    make them each time. With `codes_stay`, graphs do not quantize.

    Later calls may overwrite the memory. So a backward saves the weight, not codes, and asks again.

    Args:
        weight: [N, K] or [E, N, K] bf16, fp16 or fp32; columns contiguous.
        parts: 2 for stacked gate and up, each with its own blocks; N is a multiple of it.
        reuse_codes: False makes codes in any case, as the forward of a module in eval mode does:
            a moving average may be written through `.data`, which no version counts, and the
            trained weights written back later. So the next call makes codes, too.
        is_backward: whether the call is for a gradient. If it has to make codes, the next call
            makes them, too: a backward does not end the rule of `reuse_codes=False`.

    Raises:
        TypeError, ValueError: naming the argument, the rule and the value.
        RuntimeError: within `codes_stay`, if codes would have to be made inside a capture.
    """
    if isinstance(weight, GatheredWeight):
        return GatheredCodes(weight, parts)
    if weight.is_inference() or not has_memory(weight):
        return quantize_128x128_both(weight, parts)
    entries, layout = attached(weight, _StorageCodes), _Layout.of(weight, parts)
    entry, capture = entries.get(layout), _capture_of(weight)
    is_current = entry is not None and entry.is_current(weight)
    if capture is not None and _known.num_staying:
        return _codes_for_graph(weight, entry if is_current else None)
    if entry is None:
        with torch.inference_mode(False):  # it outlives the mode in which it is made
            entry = _Entry(empty_both(weight, parts))
    elif is_current and reuse_codes and entry.is_readable_in(capture):
        entry.wait(capture)
        return entry.codes
    stays_old = not reuse_codes or (is_backward and entry.is_old and layout in entries)
    entry.make(weight, parts, capture)
    entry.is_old = stays_old  # a write that no version counts may restore the weight
    _watch_optimizers()
    entries[layout] = entry
    return entry.codes


def _capture_of(weight: torch.Tensor) -> int | None:
    """The capture of a graph that the current stream is part of, if any."""
    driver, device_index = current_driver(), weight.get_device()
    if weight.is_cuda or driver.arch(device_index):
        return driver.capture_id(device_index)
    return None


def _codes_for_graph(weight: torch.Tensor, entry: _Entry | None) -> WeightCodes:
    if entry is None or entry.capture is not None:
        raise RuntimeError(
            f"codes_stay: a weight of shape {list(weight.shape)} has no codes that a graph could "
            "read as they are; outside of a graph, run the module once, or call requantize after "
            "the weights changed, then capture"
        )
    return entry.codes


@contextmanager
def codes_stay() -> Iterator[None]:
    """Within it, captured graphs read existing codes, and make none.

    For a graph of one micro-batch of several: its replays then quantize no weights. In return, call
    `requantize` after every change of the weights, outside of this graph and before its next
    replay. Codes have to exist and be current when the graph is captured.

    It applies to all threads, since a backward runs in another one, and to captures only.
    """
    with _entering:
        _known.num_staying += 1
    try:
        yield
    finally:
        with _entering:
            _known.num_staying -= 1


def requantize(weights: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> None:
    """Make all kept codes of weights again, now, in the same memory.

    For graphs that were captured within `codes_stay`, and after writes through `.data`, which no
    version counts, while a module trains. Weights without codes get none.

    Args:
        weights: a tensor, several, or a module, for all of its parameters.

    Raises:
        TypeError: for anything else.
    """
    for weight in _weights_of(weights):
        capture = _capture_of(weight)
        for layout, entry in list((attached_or_none(weight, _StorageCodes) or {}).items()):
            if layout == _Layout.of(weight, layout.parts):
                entry.make(weight, layout.parts, capture)
            elif layout.begins_in(weight):  # a view of it, whose own version is unknown
                entry.make(layout.view_of(weight), layout.parts, capture)
                entry.is_old = True


def _weights_of(weights: Any) -> list[torch.Tensor]:
    if isinstance(weights, nn.Module):
        return list(weights.parameters())
    if isinstance(weights, torch.Tensor):
        return [weights]
    tensors = list(weights) if isinstance(weights, Iterable) else [weights]
    for x in tensors:
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"requantize: weights must be a module, a tensor or several, got {type(x).__name__}"
            )
    return tensors


@cache
def _watch_optimizers() -> None:
    """Registers the hook once, at the first master weight."""
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Mark all codes of an optimizer's weights as old.

    An optimizer may write through `.data`, which no version counts. If a CUDA graph captures the
    step, each replay changes the weights, so their codes are marked as written in a graph, too.
    """
    weights = [x for group in optimizer.param_groups for x in group["params"]]
    has_weights_without_codes = False
    seen = set()  # storages: the weights of a flat buffer share one
    for weight in weights:
        codes_of_storage = attached_or_none(weight, _StorageCodes)
        if not codes_of_storage:
            has_weights_without_codes = True
        elif id(codes_of_storage) not in seen:
            seen.add(id(codes_of_storage))
            is_captured = _capture_of(weight) is not None
            for entry in list(codes_of_storage.values()):
                entry.is_old = True
                entry.is_in_graph |= is_captured
    if (
        has_weights_without_codes
    ):  # codes may be of other memory with the same values, as FSDP gathers it
        _known.num_steps += 1
