"""`DecodingGraphs`: transformers' `generate`, each decoding step one CUDA graph.

B sequences, P tokens of a prompt, V words, L positions of a static cache.
"""

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerationMode

from .step import CACHES, Step

_LENGTHS = 128  # L is a multiple of it, so that calls of about as many tokens share a graph
_MODES = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE
_IMPLEMENTATIONS = None, "dynamic", "static"  # of caches: the one that is used is static
# What `generate` hands on that a decoding step does not need or makes itself.
_KNOWN = {*CACHES, "attention_mask", "logits_to_keep", "position_ids", "use_cache"}
_REFUSED = {
    "assistant_model": "use model.generate",
    "custom_generate": "use model.generate",
    "stop_strings": "pass stopping_criteria=StoppingCriteriaList([StopStringCriteria(tokenizer, "
    "stop_strings)])",
    "synced_gpus": "use model.generate",
}


class DecodingGraphs:
    """Generate with a model of transformers; each decoding step is the replay of one CUDA graph.

        graphs = moefp8.hf.DecodingGraphs(model)
        ids = graphs.generate(**inputs, max_new_tokens=100)

    As transformers calls it, the host launches some thousand kernels for each token, and the GPU
    waits for it. A replay launches them all at once. A prompt runs as the model is called, into a
    static cache of L positions (prompt and new tokens, rounded up to 128). The first call with
    another B or L, or the first with padding, captures a graph; later ones replay it. Logits have
    the bits of `model.generate` with a `StaticCache` of the same length.

    Without a GPU the same steps run as they are called, and nothing is compiled.

    Args:
        model: a decoder of transformers on one device, FP8 or not, with full attention in all
            layers, by "sdpa" or "eager". Sliding windows, linear attention, rotary embeddings that
            change with the length, and what else cannot be captured are a ValueError when it
            generates: `model.generate` runs them.
        compile: whether steps are fused: `torch.compile` makes few kernels of norms, rotary
            embedding and sums; heads that share keys are rows of one product; small FP8 linears
            with one input, such as q, k and v, become one (with a copy of their weights), and so
            do softmax, choice and division of a router. The first call of each B and L compiles
            each kind of block once. Logits differ a little from those of `model.generate`, since a
            compiler rounds less often, and equal scores of experts may be chosen otherwise.
        max_graphs: how many graphs, each with its cache, are kept; the one not used for longest
            goes first.

    What Python decides when a graph is captured stays: after adapters are switched, or modules
    or the attention implementation are changed, make new `DecodingGraphs`. Weights may change in
    place; a model that moved is captured again. One call of `generate` runs at a time.
    """

    def __init__(
        self, model: PreTrainedModel, *, compile: bool = False, max_graphs: int = 4
    ) -> None:
        is_decoder = isinstance(model, PreTrainedModel) and not model.config.is_encoder_decoder
        if not (is_decoder and model.can_generate()):
            way = "; pass its get_base_model()" if hasattr(model, "get_base_model") else ""
            raise ValueError(
                "DecodingGraphs: model must be a decoder of transformers, got "
                f"{type(model).__name__}{way}"
            )
        if max_graphs < 1:
            raise ValueError(f"DecodingGraphs: max_graphs must be at least 1, got {max_graphs}")
        self.model: Any = model
        self.compile, self.max_graphs = compile, max_graphs
        self._steps: OrderedDict[tuple[int, int, bool], Step] = OrderedDict()
        self._pool: Any = None  # that of all graphs that are kept

    @property
    def num_graphs(self) -> int:
        """The number of graphs that are kept."""
        return len(self._steps)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`model.generate` with the same arguments and results; B prompts, padded on the left.

        Greedy decoding and sampling, with logits processors, stopping criteria and a streamer; a
        processor may be called once more than there are tokens. `return_dict_in_generate` brings
        `scores` and `logits`, and no cache. ValueError for beam search, an assistant model, a cache
        of the caller's, embeddings or images as inputs, and models that are not captured.
        """
        inputs = signature(self.model.generate).bind(*args, **kwargs).arguments
        inputs |= inputs.get("kwargs", {})
        for name in (*_REFUSED, *CACHES):
            if inputs.get(name) not in (None, False):
                way = _REFUSED.get(name, "use model.generate")
                raise ValueError(f"DecodingGraphs: generate takes no {name}; {way}")
        # transformers gives the prompt to the streamer, and hands it to no decoding but its own.
        decode = partial(self._decode, inputs.get("streamer"))
        return self.model.generate(*args, custom_generate=decode, **kwargs)

    def _decode(
        self,
        streamer: BaseStreamer | None,
        /,
        model: PreTrainedModel,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        """The loop that `generate` calls when all is prepared. input_ids: [B, P]."""
        _check(generation_config, input_ids, model_kwargs)
        device = model.device
        names = "attention_mask", "position_ids"
        mask, positions = (
            None if (x := model_kwargs.get(y)) is None else x.to(device) for y in names
        )
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return self._run(
                _Loop(logits_processor, stopping_criteria, generation_config, streamer),
                input_ids.to(device),
                mask,
                positions,
            )

    def _run(
        self,
        loop: "_Loop",
        input_ids: torch.Tensor,
        mask: torch.Tensor | None,
        positions: torch.Tensor | None,
    ) -> Any:
        step = self._step(len(input_ids), loop.criteria.max_length, mask is not None)
        try:
            return loop.run(step, input_ids, step.begin(input_ids, mask, positions))
        finally:
            step.end()

    def _step(self, batch: int, num_tokens: int, has_padding: bool) -> Step:
        """The step of so many sequences and tokens, captured where there is none yet."""
        length = -(-num_tokens // _LENGTHS) * _LENGTHS
        key = batch, length, has_padding
        step = self._steps.pop(key, None)
        if step is None or not step.is_of(self.model):
            step = None  # its memory goes before the next one's comes
            while len(self._steps) >= self.max_graphs:
                self._steps.popitem(last=False)
            step = Step(self.model, *key)
            if self.model.device.type == "cuda":
                if not self._steps:  # a pool whose last graph is gone is not to be used again
                    self._pool = torch.cuda.graph_pool_handle()
                # As in `generate`, transformers' own experts run steps otherwise than prompts.
                with self.model._optimize_model_for_decode():
                    step.capture(self._pool, fuse=self.compile)
        self._steps[key] = step
        return step


class _Loop:
    """One call of `generate`: tokens are chosen of logits until all sequences have ended."""

    def __init__(
        self, processors: Any, criteria: Any, config: Any, streamer: BaseStreamer | None
    ) -> None:
        self.processors, self.criteria, self.config = processors, criteria, config
        self.streamer = streamer
        has_last_words = any(hasattr(each, "eos_token_id") for each in criteria)
        self.pad_id = config._pad_token_tensor if has_last_words else None

    def run(self, step: Step, input_ids: torch.Tensor, logits: torch.Tensor) -> Any:
        """input_ids: [B, P]; logits: [B, V], those after the prompts."""
        (batch, prompt), device, config = input_ids.shape, input_ids.device, self.config
        end = self.criteria.max_length
        pad_id = None if self.pad_id is None else self.pad_id.to(device)
        # The host reads one step late, so that the GPU never waits for the next replay.
        lag = 1 if device.type == "cuda" and self.streamer is None else 0
        ids = input_ids.new_empty((batch, end))
        ids[:, :prompt] = input_ids
        ended = torch.zeros(batch, dtype=torch.bool, device=device)
        stops, scores_of_steps, logits_of_steps = _Stops(end - prompt, device), [], []
        for length in range(prompt + 1, end + 1):
            logits = logits.to(torch.float32, copy=True)  # the next replay writes there
            scores = self.processors(ids[:, : length - 1], logits)
            if config.do_sample:
                random = _random_state(device)
                tokens = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
            else:
                tokens = scores.argmax(-1)
            if pad_id is not None:
                tokens = torch.where(ended, pad_id, tokens)
            ids[:, length - 1] = tokens
            if config.output_scores:
                scores_of_steps.append(scores)
            if config.output_logits:
                logits_of_steps.append(logits)
            ended = ended | self.criteria(ids[:, :length], tuple(scores_of_steps) or None)
            stops.record(ended.all())
            if self.streamer is not None:
                self.streamer.put(tokens.cpu())
            known = length - prompt - 1 - lag
            if length == end or (known >= 0 and stops.have_ended(known)):
                break
            logits = step(tokens)
        if self.streamer is not None:
            self.streamer.end()
        num_steps = stops.num_steps()
        if config.do_sample and num_steps < length - prompt:
            _set_random_state(device, random)  # the step after the end has drawn for nothing
        sequences = ids[:, : prompt + num_steps].clone()
        if not config.return_dict_in_generate:
            return sequences
        result: dict[str, Any] = {
            "sequences": sequences,
            "scores": tuple(scores_of_steps[:num_steps]) or None,
            "logits": tuple(logits_of_steps[:num_steps]) or None,
        }
        return GenerateDecoderOnlyOutput(**result)


def _random_state(device: torch.device) -> torch.Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def _set_random_state(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


class _Stops:
    """After which steps all sequences had ended, as the host comes to know it."""

    def __init__(self, max_steps: int, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.flags = torch.zeros(max_steps, dtype=torch.bool, pin_memory=self.is_gpu)
        self.events: list[torch.cuda.Event | None] = []

    def record(self, have_ended: torch.Tensor) -> None:
        """have_ended: a bool on the device, whether all have ended after one step more."""
        self.flags[len(self.events)].copy_(have_ended, non_blocking=True)
        event = torch.cuda.Event() if self.is_gpu else None
        if event is not None:
            event.record()
        self.events.append(event)

    def have_ended(self, step: int) -> bool:
        event = self.events[step]
        if event is not None:
            event.synchronize()
        return bool(self.flags[step])

    def num_steps(self) -> int:
        """How many steps count: the first after which all had ended is the last of them."""
        steps = range(len(self.events))
        return next((step + 1 for step in steps if self.have_ended(step)), len(steps))


def _check(
    config: GenerationConfig, input_ids: torch.Tensor, model_kwargs: Mapping[str, Any]
) -> None:
    """Refuse what `generate` may ask for and the loop does not do."""
    mode, implementation = config.get_generation_mode(), config.cache_implementation
    unknown = [name for name, x in model_kwargs.items() if name not in _KNOWN and x is not None]
    positions = model_kwargs.get("position_ids")
    refused = {
        mode.value: mode not in _MODES,
        "output_attentions": config.output_attentions,
        "output_hidden_states": config.output_hidden_states,
        "prefill_chunk_size": config.prefill_chunk_size is not None,
        f"cache_implementation={implementation!r}": implementation not in _IMPLEMENTATIONS,
        "a prompt without tokens": not input_ids.shape[1],
        "positions of several axes": positions is not None and positions.ndim != 2,
        f"inputs {', '.join(unknown)}": bool(unknown),
    }
    if asked_for := [what for what, is_asked in refused.items() if is_asked]:
        raise ValueError(
            "DecodingGraphs: generate takes only tokens, greedily or sampled, got "
            f"{' and '.join(asked_for)}; use model.generate"
        )
