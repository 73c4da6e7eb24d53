"""FP8 linears that are called with the same tensor, such as q, k and v, as one of all their rows.

The tensor is then quantized once, and one product has more tiles for the GPU. M rows, K in, N out.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise

import torch
from torch import nn

from ...kernels.common.blocks import BLOCK
from ...layers import FP8Linear
from ...layers.module import is_wrapped
from .replaced import Forward

_TENSORS = "weight", "weight_scale_inv", "bias"
# An H200 reads as much in 12 us, at 4.3 TB/s. Larger linears gain less by a kernel less, and their
# copies take memory: q, k and v of Qwen3-30B-A3B have 10 MiB, gate and up of a dense 8B have 112.
_MAX_BYTES = 48 << 20


@contextmanager
def shared_inputs(model: nn.Module) -> Iterator[list[list[FP8Linear]]]:
    """The groups of linears that can be merged, filled when a call of the model has been observed.

    They are children of one module, called once each, with one tensor that does not change.
    """
    groups: list[list[FP8Linear]] = []
    calls: dict[tuple[str, int, int], list[FP8Linear]] = {}
    inputs: list[torch.Tensor] = []  # so that none has the address of an earlier one

    def note(name: str) -> Callable[..., None]:
        def before(linear: FP8Linear, args: tuple[torch.Tensor, ...]) -> None:
            if len(args) == 1 and not args[0].is_inference():
                inputs.append(args[0])
                key = name.rpartition(".")[0], id(args[0]), args[0]._version
                calls.setdefault(key, []).append(linear)

        return before

    linears = [(name, x) for name, x in model.named_modules() if type(x) is FP8Linear]
    hooks = [x.register_forward_pre_hook(note(name)) for name, x in linears if _can_merge(x)]
    try:
        yield groups
    finally:
        for hook in hooks:
            hook.remove()
    num_calls = Counter(id(linear) for group in calls.values() for linear in group)
    for group in calls.values():
        if _fit(once := [linear for linear in group if num_calls[id(linear)] == 1]):
            groups.append(once)


def _can_merge(linear: FP8Linear) -> bool:
    is_whole = not (linear.rows_before or linear.columns_before)
    return not linear.trainable and is_whole and not is_wrapped(linear)


def _fit(linears: Sequence[FP8Linear]) -> bool:
    """Whether they are several, small and alike; blocks of 128 rows end where each does."""
    kinds = {(x.batch_invariant, None if x.bias is None else x.bias.dtype) for x in linears}
    ends_fit = all(x.out_features % BLOCK == 0 for x in linears[:-1])
    is_small = sum(x.weight.numel() for x in linears) <= _MAX_BYTES
    return len(linears) > 1 and is_small and len(kinds) == 1 and ends_fit


class Merged:
    """One linear with copies of the rows of others, which take their parts of its output."""

    def __init__(self, linears: Sequence[FP8Linear]) -> None:
        self.linears = linears
        first, sizes = linears[0], [x.out_features for x in linears]
        self.ends = [0, *accumulate(sizes)]
        has_bias, device = first.bias is not None, first.weight.device
        dtype = torch.bfloat16 if first.bias is None else first.bias.dtype
        whole = FP8Linear(first.in_features, self.ends[-1], has_bias, "meta", dtype)
        whole.batch_invariant = first.batch_invariant
        self.whole = whole.to_empty(device=device).eval()
        self.x: torch.Tensor | None = None
        self.y: torch.Tensor | None = None
        self.refresh()

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy all rows."""
        for name in _TENSORS:
            whole = getattr(self.whole, name)
            if whole is not None:
                parts = [getattr(x, name) for x in self.linears]
                starts = [0, *accumulate(len(x) for x in parts)]
                for part, (start, end) in zip(parts, pairwise(starts), strict=True):
                    whole[start:end].copy_(part)

    def forwards(self) -> list[Forward]:
        """Each linear with the forward that takes its part."""
        return [(linear, self._forward_of(i)) for i, linear in enumerate(self.linears)]

    def _forward_of(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """The first one computes all, the last one forgets it."""
        start, end = self.ends[index : index + 2]

        def forward(x: torch.Tensor) -> torch.Tensor:
            if index == 0:
                self.x, self.y = x, self.whole(x)
            if self.x is not x or self.y is None:
                raise RuntimeError(
                    "DecodingGraphs: linears that were called with one tensor in the first step "
                    "are called otherwise in the next; use compile=False"
                )
            part = self.y[..., start:end]
            if index == len(self.linears) - 1:
                self.x = self.y = None
            return part

        return forward
