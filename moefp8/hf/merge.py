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

SCALE = "_scale_inv"  # of a weight's name and its scales'
_NUM_THREADS = 4


def copying_once(conversion: Any) -> Any:
    """The same conversion with these steps, where it merges experts; any other as it is."""
    if not isinstance(conversion, WeightConverter):
        return conversion
    steps: Any = tuple((type(step), getattr(step, "dim", None)) for step in conversion.operations)
    copying: dict[Any, list[Any]] = {
        ((MergeModulelist, 0), (Concatenate, 1)): [_HandOn(), _Fuse(dim=1)],
        ((MergeModulelist, 0),): [_Stack()],
    }
    operations = copying.get(steps)
    if operations is None:
        return conversion
    return _copy_of(conversion, "", operations)


def with_scales(conversion: Any, scales: Sequence[str]) -> list[Any]:
    """A conversion of weights, and the same of their scales if the model has such.

    scales: names of the model's parameters that end with SCALE.
    """
    if not isinstance(conversion, WeightConverter):
        return [conversion]
    sources, target = conversion._original_source_patterns, conversion._original_target_patterns[0]
    is_of_weights = all(source.endswith(".weight") for source in sources)
    if is_of_weights and any(is_target(f"{target}{SCALE}", name) for name in scales):
        return [conversion, _copy_of(conversion, SCALE, list(conversion.operations))]
    return [conversion]


def is_target(pattern: str, name: str) -> bool:
    """Whether a conversion's target pattern ends name."""
    return re.search(_any_groups(pattern) + "$", name) is not None


def is_in(pattern: str, name: str) -> bool:
    """Whether it is one of name, or of a module above: some say `q_proj` of all that is in it."""
    return re.search(_any_groups(pattern) + r"(?:\.|$)", name) is not None


def _any_groups(pattern: str) -> str:
    """Groups stand for anything."""
    return re.sub(r"\\\d", ".*", pattern)


def _copy_of(conversion: Any, suffix: str, operations: list[Any]) -> WeightConverter:
    """suffix: of the keys and names that it converts."""
    sources = [source + suffix for source in conversion._original_source_patterns]
    targets = [target + suffix for target in conversion._original_target_patterns]
    if hasattr(conversion, "copy"):
        return conversion.copy(sources, targets, operations=operations)
    made: Any = WeightConverter(sources, targets, operations=operations)  # older transformers
    for name in ("scope_prefix", "base_model_prefix"):
        setattr(made, name, getattr(conversion, name, None))
    return made


class _Unstack(SplitModulelist):
    """[E, rows, columns] -> E tensors [rows, columns], though a side is 1.

    In 5.10 to 5.17 transformers' own drops that side, and scales lose their rows.
    """

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for source, held in input_dict.items():
            stack = held[0] if isinstance(held, list) else held
            names = self.get_target_patterns(input_dict, source, target_patterns, len(stack))
            found.update(zip(names, stack.unbind(0), strict=True))
        return found


class _Merge(MergeModulelist):
    """A merge that `_Unstack` undoes."""

    @property
    def reverse_op(self) -> _Unstack:
        return _Unstack(self.dim)


class _HandOn(_Merge):
    """Nothing yet: the next step has more to do with these tensors."""

    def convert(  # type: ignore[override]
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        **kwargs: Any,
    ) -> dict[str, Any]:
        return dict(input_dict)


class _Stack(_Merge):
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
