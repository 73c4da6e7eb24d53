"""Experts that are stored one by one, copied once into the stack that a module holds.

transformers stacks gate and up each and then concatenates the two: two copies, and for a moment
twice the memory. Here the first step hands its tensors on, and the second puts each in its place.
E experts, I intermediate, H hidden.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    SplitModulelist,
    WeightConverter,
)

from ..checkpoint.files.thread_pool import run_all

SCALE = "_scale_inv"  # a weight's name and this suffix name its scales
_NUM_THREADS = 4


def copying_once(conversion: Any) -> Any:
    """`conversion`, with the steps of this file if it merges experts."""
    if not isinstance(conversion, WeightConverter):
        return conversion
    steps = [(type(step), getattr(step, "dim", None)) for step in conversion.operations]
    if steps == [(MergeModulelist, 0), (Concatenate, 1)]:
        return _copy_of(conversion, "", [_HandOn(), _Fuse(dim=1)])
    return _copy_of(conversion, "", [_Stack()]) if steps == [(MergeModulelist, 0)] else conversion


def with_scales(conversion: Any, scales: Sequence[str]) -> list[Any]:
    """A conversion of weights, and a copy of it for their scales if the model has scales.

    scales: names of the model's parameters that end with SCALE.
    """
    if not isinstance(conversion, WeightConverter):
        return [conversion]
    sources, target = conversion._original_source_patterns, conversion._original_target_patterns[0]
    is_of_weights = all(source.endswith(".weight") for source in sources)
    if is_of_weights and any(is_target(f"{target}{SCALE}", name) for name in scales):
        return [conversion, _copy_of(conversion, SCALE, list(conversion.operations))]
    return [conversion]


def is_target(pattern: str, name: str, or_above: bool = False) -> bool:
    """Whether a conversion's target pattern, whose groups match anything, ends `name`.

    or_above: whether it may end a name above `name`: some say `q_proj` for all that is below it.
    """
    end = r"(?:\.|$)" if or_above else "$"
    return re.search(re.sub(r"\\\d", ".*", pattern) + end, name) is not None


def _copy_of(conversion: Any, suffix: str, operations: list[Any]) -> WeightConverter:
    """A copy with other operations, and with `suffix` after the keys and names it converts."""
    sources = [source + suffix for source in conversion._original_source_patterns]
    targets = [target + suffix for target in conversion._original_target_patterns]
    if hasattr(conversion, "copy"):
        return conversion.copy(sources, targets, operations=operations)
    made: Any = WeightConverter(sources, targets, operations=operations)  # older transformers
    for name in ("scope_prefix", "base_model_prefix"):
        setattr(made, name, getattr(conversion, name, None))
    return made


class _Unstack(SplitModulelist):
    """[E, rows, columns] -> E tensors [rows, columns], even where rows or columns are 1.

    In 5.10 to 5.17 transformers' own drops that side, and scales lose their rows.
    """

    def convert(self, input_dict: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        tensors: dict[str, Any] = {}
        for source, held in input_dict.items():
            stack = held[0] if isinstance(held, list) else held
            names = self.get_target_patterns(
                input_dict, source, kwargs["target_patterns"], len(stack)
            )
            tensors.update(zip(names, stack.unbind(0), strict=True))
        return tensors


class _Merge(MergeModulelist):
    """A merge that `_Unstack` undoes."""

    @property
    def reverse_op(self) -> _Unstack:
        return _Unstack(self.dim)


class _HandOn(_Merge):
    """This step does nothing: the next one copies."""

    def convert(self, input_dict: Any, **_: Any) -> Any:  # type: ignore[override]
        return dict(input_dict)


def _stack(step: Any, input_dict: Any, **kwargs: Any) -> Any:
    lists = [input_dict.pop(name) for name in kwargs["source_patterns"] if name in input_dict]
    return {kwargs["target_patterns"][0]: _stacked(lists)}


class _Stack(_Merge):
    """A list of E tensors [rows, columns] -> [E, rows, columns]."""

    convert: Any = _stack


class _Fuse(Concatenate):
    """Lists of E tensors, gate [I, H] and up [I, H] -> [E, 2I, H]."""

    convert: Any = _stack


@torch.no_grad()
def _stacked(lists: Sequence[list[torch.Tensor] | torch.Tensor]) -> torch.Tensor:
    """[E, sum of rows, columns]: the e-th tensor of each list, one below the other."""
    shapes = [{tuple(x.shape) for x in tensors} for tensors in lists]
    if any(len(each) != 1 for each in shapes):
        raise ValueError(f"all experts must have weights of one shape, got {shapes}")
    first, num_rows = lists[0][0], sum(tensors[0].shape[0] for tensors in lists)
    result = first.new_empty((len(lists[0]), num_rows, *first.shape[1:]))
    moves: list[tuple[torch.Tensor, torch.Tensor]] = []
    for e, tensors in enumerate(zip(*lists, strict=True)):
        moves += zip(result[e].split([len(x) for x in tensors]), tensors, strict=True)
    if result.is_cuda:
        _copy(iter(moves))  # on the stream of the caller
    else:
        run_all(moves, _copy, _NUM_THREADS, "moefp8-merge")
    return result


def _copy(moves: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for place, x in moves:
        place.copy_(x)
