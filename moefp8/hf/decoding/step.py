"""One decoding step: a static cache, buffers whose addresses stay, and the graph of both.

B sequences, P tokens of a prompt, V words, L positions of the cache.
"""

from contextlib import nullcontext
from inspect import signature
from typing import Any

import torch
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from .fusion import Fusion

CACHES = "cache", "past_key_values"  # the name in transformers of today, and before 5.24


class Step:
    """One decoding step of B sequences: all that it reads and writes stays where it is."""

    def __init__(self, model: Any, batch: int, length: int, has_padding: bool) -> None:
        self.model, self.addresses = model, addresses_of(model)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.fusion: Fusion | None = None
        self.inputs, self.cache_name = _inputs_of(model), cache_name(model)
        with torch.inference_mode(False):  # calls in either mode write there
            self.cache = StaticCache(config=model.config, max_cache_len=length)
            self.tokens, self.positions = torch.zeros(
                (2, batch, 1), dtype=torch.int64, device=model.device
            )
            self.mask = self.tokens.new_ones((batch, length)) if has_padding else None
        kinds = {type(layer) for layer in self.cache.layers} - {StaticLayer}
        if kinds:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise ValueError(
                f"DecodingGraphs: only full attention is captured, whose steps are all alike, got "
                f"{type(model).__name__} with a cache of {names}; use "
                'model.generate(..., cache_implementation="static")'
            )

    @torch.inference_mode(False)
    @torch.no_grad()
    def capture(self, pool: Any, fuse: bool) -> None:
        """Run the step, so that kernels are loaded and the cache is there, and capture it.

        fuse: whether the captured step is the one that `Fusion` makes of it.
        """
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            if fuse:
                self.fusion = Fusion(self.model, self._run)
            with self.fusion or nullcontext():
                for _ in range(2):
                    self._run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with self.fusion or nullcontext(), torch.cuda.graph(graph, pool=pool):
            self.logits = self._run()
        self.graph = graph

    def begin(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """Fill the cache with prompts [B, P] -> logits of their last tokens [B, V]."""
        self.cache.reset()
        if self.fusion is not None:
            self.fusion.refresh()
        if positions is None:
            counted = torch.ones_like(input_ids) if mask is None else mask
            positions = (counted.cumsum(-1) - 1).clamp(min=0)
        if mask is not None and self.mask is not None:
            self.mask.fill_(1)[:, : mask.shape[1]] = mask
        self.positions.copy_(positions[:, -1:] + 1)
        return self._call(input_ids, mask, positions, is_first_iteration=True)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [B], those after what the cache holds -> logits [B, V] of the next ones."""
        self.tokens.copy_(tokens[:, None])
        if self.graph is None:
            return self._run()
        self.graph.replay()
        return self.logits

    def _run(self) -> torch.Tensor:
        logits = self._call(self.tokens, self.mask, self.positions, next_sequence_length=1)
        self.positions += 1
        return logits

    @torch.inference_mode(False)  # what the cache makes at its first call outlives it
    @torch.no_grad()
    def _call(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor,
        **how: Any,
    ) -> torch.Tensor:
        options = {"position_ids": positions, "logits_to_keep": 1}
        inputs = self.model.prepare_inputs_for_generation(
            ids,
            attention_mask=mask,
            use_cache=True,
            **{name: value for name, value in options.items() if name in self.inputs},
            **{self.cache_name: self.cache},
            **how,
        )
        logits: torch.Tensor = self.model(**inputs, return_dict=True).logits
        return logits[:, -1]


def cache_name(model: Any) -> str:
    """The keyword by which the model takes its cache.

    Of another name transformers knows nothing: it runs with a new cache, and no error.
    """
    return next(name for name in CACHES if name in _inputs_of(model))


def _inputs_of(model: Any) -> set[str]:
    """What the model takes by name."""
    called = model.prepare_inputs_for_generation, model.forward
    return {name for function in called for name in signature(function).parameters}


def addresses_of(model: Any) -> list[int]:
    """Of all weights and buffers: a graph reads them where they were when it was captured."""
    return [x.data_ptr() for group in (model.parameters(), model.buffers()) for x in group]
