"""What `compile=True` makes of a decoding step: fewer and larger kernels, of nearly the numbers."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from .attention import grouped_attention
from .blocks import CompiledBlocks
from .merged import Merged, merged_linears, shared_inputs
from .routers import chosen_by_one_kernel, routers_of


class Fusion:
    """Within it, a step of `model` runs fused. It may be entered again.

    - Heads of attention that share keys are rows of one product (`attention`).
    - FP8 linears that are called with the same tensor, such as q, k and v, are one (`merged`).
    - A router's softmax, choice and division are one kernel (`routers`).
    - `torch.compile` fuses what is between these (`blocks`).

    run: runs one step, which is observed. The model itself is not changed.
    backend: of `torch.compile`.
    """

    def __init__(self, model: Any, run: Callable[[], object], backend: Any = "inductor") -> None:
        self.model = model
        with shared_inputs(model) as groups, routers_of(model) as self.routers:
            run()
        self.merged = [Merged(linears) for linears in groups]
        self.blocks = CompiledBlocks(model, backend)
        self._entered = ExitStack()

    def refresh(self) -> None:
        """Copy weights that are merged again: they may have changed in place."""
        for merged in self.merged:
            merged.refresh()

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(grouped_attention(self.model))
            stack.enter_context(merged_linears(self.merged))
            stack.enter_context(chosen_by_one_kernel(self.routers))
            stack.enter_context(self.blocks)
            self._entered = stack.pop_all()

    def __exit__(self, *error: Any) -> None:
        self._entered.close()
