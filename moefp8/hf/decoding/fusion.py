"""What `compile=True` makes of a decoding step: fewer and larger kernels, of nearly the numbers."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from transformers import Cache

from .attention import grouped_attention
from .layer_cache import with_own_layer
from .merged import Merged, shared_inputs
from .replaced import Forward, replaced_forwards
from .routers import routers_of

_NO_LIMIT = 1 << 16


class Fusion:
    """Within `fused()`, a step of `model` runs fused; the model itself is not changed.

    - Heads of attention that share keys are rows of one product (`attention`).
    - FP8 linears that are called with the same tensor, such as q, k and v, are one (`merged`).
    - A router's softmax, choice and division are one kernel (`routers`).
    - `torch.compile` fuses what is between these, block by block.

    Blocks are what transformers names in `_no_split_modules`. Equal ones share their code, as each
    gets its own layer of the cache instead of the layer's number.

    run: runs one step of `cache`, which is observed. backend: of `torch.compile`; None: nothing is
    compiled.
    """

    def __init__(
        self,
        model: Any,
        cache: Cache,
        run: Callable[[], object],
        backend: Any = "inductor",
    ) -> None:
        self.model = model
        with shared_inputs(model) as groups, routers_of(model) as routers:
            run()
        self.merged = [Merged(linears) for linears in groups]
        # Made once: what has compiled a forward knows it again.
        self.forwards: list[Forward] = [(router.module, router.forward) for router in routers]
        self.forwards += [pair for merged in self.merged for pair in merged.forwards()]
        if backend is not None:
            names = model._no_split_modules or ()
            blocks = [module for module in model.modules() if type(module).__name__ in names]
            options: Any = {"fullgraph": True, "dynamic": False, "backend": backend}
            self.forwards += [
                (block, with_own_layer(block, cache, torch.compile(block.forward, **options)))
                for block in blocks
            ]

    def refresh(self) -> None:
        """Copy weights that are merged again: they may have changed in place."""
        for merged in self.merged:
            merged.refresh()

    @contextmanager
    def fused(self) -> Iterator[None]:
        limits = {"recompile_limit": _NO_LIMIT, "accumulated_recompile_limit": _NO_LIMIT}
        with ExitStack() as stack:
            stack.enter_context(torch._dynamo.config.patch(limits))
            stack.enter_context(grouped_attention(self.model))
            stack.enter_context(replaced_forwards(self.forwards))
            yield
