"""One decoding step: a static cache, buffers whose addresses stay, and the graph of both.

B sequences, P tokens of a prompt, V words, L positions of the cache.
"""

from contextlib import AbstractContextManager, nullcontext
from inspect import signature
from typing import Any, NoReturn

import torch
from transformers import StaticCache
from transformers.cache_utils import StaticLayer

from ..experts import weights_kept_beside
from .fusion import Fusion

CACHES = "cache", "past_key_values"  # the name in transformers of today, and before 5.24
_ATTENTION = "sdpa", "eager"  # others take the mask of `generate` for something else
_CHANGING_ROPE = {"dynamic", "longrope"}


class Step:
    """One decoding step of B sequences: all that it reads and writes stays where it is."""

    def __init__(self, model: Any, batch: int, length: int, has_padding: bool) -> None:
        check_model(model)
        self.model, self.inputs, self.cache_name = model, _inputs_of(model), cache_name(model)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.fusion: Fusion | None = None
        self.last_use: torch.cuda.Event | None = None
        with torch.inference_mode(False):  # calls in either mode write there
            self.cache = StaticCache(config=model.config, max_cache_len=length)
            self.tokens, self.positions = torch.zeros(
                (2, batch, 1), dtype=torch.int64, device=model.device
            )
            self.mask = self.tokens.new_ones((batch, length)) if has_padding else None
        kinds = {type(layer) for layer in self.cache.layers} - {StaticLayer}
        if kinds:
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            _refuse(model, f"only full attention is captured, but its cache has {names}")
        self.addresses = addresses_of(model)

    def is_of(self, model: Any) -> bool:
        """Whether weights and buffers are where the graph reads them."""
        return self.addresses == addresses_of(model)

    @torch.inference_mode(False)
    @torch.no_grad()
    def capture(self, pool: Any, fuse: bool) -> None:
        """Run the step, so that kernels are loaded and the cache is there, and capture it.

        fuse: whether the captured step is the one that `Fusion` makes of it.
        """
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                self._run()
                if fuse:
                    self.fusion = Fusion(self.model, self.cache, self._run)
                with self._fused():
                    self._run()
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # A capture that fails leaves its own stream current: the outer one ends that.
            with torch.cuda.stream(current), self._fused(), torch.cuda.graph(graph, pool=pool):
                self.logits = self._run()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            reason = str(error).strip().splitlines()[0][:200]
            _refuse(self.model, f"a step could not be captured ({reason})", error)
        self.graph = graph
        self.addresses = addresses_of(self.model)  # what the first call made is there now

    def _fused(self) -> AbstractContextManager[None]:
        return nullcontext() if self.fusion is None else self.fusion.fused()

    def begin(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """Fill the cache with prompts [B, P] -> logits of their last tokens [B, V]."""
        if self.last_use is not None:  # perhaps on another stream
            torch.cuda.current_stream().wait_event(self.last_use)
        self.cache.reset()
        if self.fusion is not None:
            self.fusion.refresh()
        if mask is not None and self.mask is not None:
            self.mask.fill_(1)[:, : mask.shape[1]] = mask
        if positions is not None:
            self.positions.copy_(positions[:, -1:] + 1)
        return self._call(input_ids, mask, positions, is_first_iteration=True)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """tokens: [B], those after what the cache holds -> logits [B, V] of the next ones."""
        self.tokens.copy_(tokens[:, None])
        if self.graph is None:
            return self._run()
        self.graph.replay()
        return self.logits

    def end(self) -> None:
        """Let the next call wait for this one, on whichever stream it is."""
        if self.graph is not None:
            self.last_use = torch.cuda.Event()
            self.last_use.record()

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
        positions: torch.Tensor | None,
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
        layers: Any = self.cache.layers
        if not all(layer.is_initialized for layer in layers):
            _refuse(self.model, "it does not write into a static cache")
        return logits[:, -1]


def check_model(model: Any) -> None:
    """Refuse models of which a step is not like the next, or differs from that of `generate`."""
    devices = sorted({str(x.device) for x in model.parameters()})
    if len(devices) > 1:
        _refuse(model, f"it must be on one device, but is on {', '.join(devices)}")
    attention = model.config._attn_implementation
    if attention not in _ATTENTION:
        _refuse(
            model, f'its attention must be one of {", ".join(_ATTENTION)}, but is "{attention}"'
        )
    if changing := _rope_types(model.config) & _CHANGING_ROPE:
        _refuse(model, f"its rotary embedding changes with the length ({', '.join(changing)})")


def _rope_types(config: Any) -> set[str]:
    """Of all kinds of layers."""
    parameters = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = [x for x in parameters.values() if isinstance(x, dict)]
    return {str(x.get("rope_type")) for x in (parameters, *nested)}


def _refuse(model: Any, reason: str, cause: Exception | None = None) -> NoReturn:
    raise ValueError(
        f"DecodingGraphs: {type(model).__name__}: {reason}; use "
        'model.generate(..., cache_implementation="static")'
    ) from cause


def cache_name(model: Any) -> str:
    """The keyword by which the model takes its cache.

    Of another name transformers knows nothing: it runs with a new cache, and no error.
    """
    name = next((name for name in CACHES if name in _inputs_of(model)), None)
    return name or _refuse(model, f"its forward must take {' or '.join(CACHES)}")


def _inputs_of(model: Any) -> set[str]:
    """What the model takes by name."""
    called = model.prepare_inputs_for_generation, model.forward
    return {name for function in called for name in signature(function).parameters}


def addresses_of(model: Any) -> list[int]:
    """Of all weights and buffers: a graph reads them where they were when it was captured."""
    tensors = *model.parameters(), *model.buffers(), *weights_kept_beside(model)
    return [x.data_ptr() for x in tensors]
