"""Experts that are stored one by one, copied once into the stack that a module holds.

transformers stacks gate and up each and then concatenates the two: two copies, and for a moment
twice the memory. Here the first step hands its tensors on, and the second puts each in its place.
E experts, I intermediate, H hidden.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

from ..checkpoint.pool import run_all

_NUM_THREADS = 4


def copying_once(conversion: Any) -> Any:
    """The same conversion with these steps, where it merges experts; any other as it is."""
    if not isinstance(conversion, WeightConverter):
        return conversion
    steps: Any = tuple((type(step), getattr(step, "dim", None)) for step in conversion.operations)
    operations = {
        ((MergeModulelist, 0), (Concatenate, 1)): [_HandOn(), _Fuse(dim=1)],
        ((MergeModulelist, 0),): [_Stack()],
    }.get(steps)
    if operations is None:
        return conversion
    sources, targets = conversion._original_source_patterns, conversion._original_target_patterns
    return conversion.copy(sources, targets, operations=operations)


class _HandOn(MergeModulelist):
    """Nothing yet; what undoes it is what undoes a merge."""

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        return dict(input_dict)


class _Stack(MergeModulelist):
    """One list of E tensors [rows, columns] -> [E, rows, columns]."""

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        return {target_patterns[0]: _stacked([input_dict.pop(source_patterns[0])])}


class _Fuse(Concatenate):
    """Lists of E tensors, gate [I, H] and up [I, H] -> [E, 2I, H]."""

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        lists = [input_dict.pop(name) for name in source_patterns if name in input_dict]
        return {target_patterns[0]: _stacked(lists)}


@torch.no_grad()
def _stacked(lists: Sequence[list[torch.Tensor] | torch.Tensor]) -> torch.Tensor:
    """[E, sum of rows, columns]: the e-th tensor of each list, one below the other."""
    shapes = [{tuple(x.shape) for x in tensors} for tensors in lists]
    if any(len(each) != 1 for each in shapes):
        raise ValueError(f"all experts must have weights of one shape, got {shapes}")
    first, num_rows = lists[0][0], sum(tensors[0].shape[0] for tensors in lists)
    result = first.new_empty((len(lists[0]), num_rows, *first.shape[1:]))
    moves = []
    for e, tensors in enumerate(zip(*lists, strict=True)):
        begin = 0
        for x in tensors:
            moves.append((result[e, begin : begin + x.shape[0]], x))
            begin += x.shape[0]
    if result.is_cuda:
        _copy(iter(moves))  # on the stream of the caller
    else:
        run_all(moves, _copy, _NUM_THREADS, "moefp8-merge")
    return result


def _copy(moves: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> None:
    for place, x in moves:
        place.copy_(x)
