"""`DecodingGraphs`: transformers' `generate`, each decoding step one CUDA graph.

B sequences, P tokens of a prompt, V words, L positions of a static cache.
"""

from collections import OrderedDict
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerationMode

from .step import CACHES, Step, addresses_of

_LENGTHS = 128  # L is a multiple of it, so that calls of about as many tokens share a graph
_MODES = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE
# What `generate` hands on that a decoding step does not need or makes itself.
_KNOWN = {
    *CACHES,
    "attention_mask",
    "logits_to_keep",
    "position_ids",
    "streamer",
    "synced_gpus",
    "use_cache",
}


class DecodingGraphs:
    """Generate with a model of transformers; each decoding step is the replay of one CUDA graph.

        graphs = moefp8.hf.DecodingGraphs(model)
        ids = graphs.generate(**inputs, max_new_tokens=100)

    As transformers calls it, the host launches some thousand kernels for each token, and the GPU
    waits for it. A replay launches them all at once. A prompt runs as the model is called, into a
    static cache of L positions (prompt and new tokens, rounded up to 128). The first call with
    another B or L captures a graph; later ones replay it. Logits have the bits of
    `model.generate` with a `StaticCache` of the same length.

    Without a GPU the same steps run as they are called, and nothing is compiled.

    Args:
        model: any decoder of transformers on one device, FP8 or not, whose cache has layers of
            full attention only. Others are a ValueError: `model.generate` runs them.
        compile: whether steps are fused: `torch.compile` makes few kernels of norms, rotary
            embedding and sums; heads that share keys are rows of one product; small FP8 linears
            with one input, such as q, k and v, become one (with a copy of their weights), and so
            do softmax, choice and division of a router. The first call of each B and L takes some
            2 s for each block of the model. Logits differ a little from those of `model.generate`,
            since a compiler rounds less often, and equal scores of experts may be chosen otherwise.
        max_graphs: how many graphs, each with its cache, are kept; the one not used for longest
            goes first.

    What Python decides when a graph is captured stays: after adapters are switched, or modules
    or the attention implementation are changed, make new `DecodingGraphs`. Weights may change in
    place; a model that moved is captured again. One call of `generate` runs at a time.
    """

    def __init__(
        self, model: PreTrainedModel, *, compile: bool = False, max_graphs: int = 4
    ) -> None:
        if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
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
        self._pool: Any = None

    @property
    def num_graphs(self) -> int:
        """How many graphs are kept."""
        return len(self._steps)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`model.generate` with the same arguments and results; B prompts, padded on the left.

        Greedy decoding and sampling, with any logits processors, stopping criteria and streamer;
        `return_dict_in_generate` brings `scores` and `logits`, and no cache. ValueError for beam
        search, an assistant model, a cache that is not empty, embeddings or images as inputs.
        """
        for name in ("custom_generate", "assistant_model", "synced_gpus"):
            if kwargs.get(name):
                raise ValueError(f"DecodingGraphs: generate takes no {name}; use model.generate")
        # transformers gives the prompt to the streamer, and hands it to no decoding but its own.
        decode = partial(self._decode, kwargs.get("streamer"))
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
        _check(model, generation_config, input_ids, model_kwargs)
        (batch, prompt), end = input_ids.shape, stopping_criteria.max_length
        mask, positions = model_kwargs.get("attention_mask"), model_kwargs.get("position_ids")
        step = self._step(batch, end, has_padding=mask is not None)
        ids = input_ids.new_empty((batch, end))
        ids[:, :prompt] = input_ids
        ended = torch.zeros(batch, dtype=torch.bool, device=ids.device)
        stops = _Stops(end - prompt, ids.device)
        has_last_words = any(hasattr(each, "eos_token_id") for each in stopping_criteria)
        pad_id = generation_config._pad_token_tensor if has_last_words else None
        scores_of_steps, logits_of_steps = [], []
        logits = step.begin(input_ids, mask, positions)
        for length in range(prompt + 1, end + 1):
            logits = logits.to(torch.float32, copy=True)  # the next replay writes there
            scores = logits_processor(ids[:, : length - 1], logits)
            if generation_config.do_sample:
                tokens = torch.multinomial(scores.softmax(-1), 1).squeeze(1)
            else:
                tokens = scores.argmax(-1)
            if pad_id is not None:
                tokens = torch.where(ended, pad_id, tokens)
            ids[:, length - 1] = tokens
            if generation_config.output_scores:
                scores_of_steps.append(scores)
            if generation_config.output_logits:
                logits_of_steps.append(logits)
            ended = ended | stopping_criteria(ids[:, :length], tuple(scores_of_steps) or None)
            stops.record(ended.all())
            # The host reads one step late, so that the GPU never waits for the next replay.
            known = stops.num_recorded - 1
            if streamer is None:
                known -= 1
            else:
                streamer.put(tokens.cpu())
            if length == end or (known >= 0 and stops.have_ended(known)):
                break
            logits = step(tokens)
        if streamer is not None:
            streamer.end()
        num_steps = stops.num_steps()
        sequences = ids[:, : prompt + num_steps].clone()
        if not generation_config.return_dict_in_generate:
            return sequences
        result: dict[str, Any] = {
            "sequences": sequences,
            "scores": tuple(scores_of_steps[:num_steps]) or None,
            "logits": tuple(logits_of_steps[:num_steps]) or None,
        }
        return GenerateDecoderOnlyOutput(**result)

    def _step(self, batch: int, num_tokens: int, has_padding: bool) -> Step:
        """The step of so many sequences and tokens, captured where there is none yet."""
        length = -(-num_tokens // _LENGTHS) * _LENGTHS
        key = batch, length, has_padding
        step = self._steps.pop(key, None)
        if step is None or step.addresses != addresses_of(self.model):
            step = None  # its memory goes before the next one's comes
            while len(self._steps) >= self.max_graphs:
                self._steps.popitem(last=False)
            step = Step(self.model, *key)
            device = self.model.device
            if device.type == "cuda":
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                # As in `generate`, transformers' own experts run steps otherwise than prompts.
                with torch.cuda.device(device), self.model._optimize_model_for_decode():
                    step.capture(self._pool, fuse=self.compile)
        self._steps[key] = step
        return step


class _Stops:
    """After which steps all sequences had ended, as the host comes to know it."""

    def __init__(self, max_steps: int, device: torch.device) -> None:
        self.is_gpu = device.type == "cuda"
        self.flags = torch.zeros(max_steps, dtype=torch.bool, pin_memory=self.is_gpu)
        self.events: list[torch.cuda.Event | None] = []

    @property
    def num_recorded(self) -> int:
        return len(self.events)

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
    model: PreTrainedModel,
    config: GenerationConfig,
    input_ids: torch.Tensor,
    model_kwargs: Mapping[str, Any],
) -> None:
    """Refuse what `generate` may ask for and the loop does not do."""
    devices = {str(x.device) for x in model.parameters()}
    if len(devices) > 1:
        raise ValueError(
            f"DecodingGraphs: the model must be on one device, got {', '.join(sorted(devices))}; "
            "use model.generate"
        )
    cache = next((model_kwargs[name] for name in CACHES if model_kwargs.get(name)), None)
    unknown = [name for name, x in model_kwargs.items() if name not in _KNOWN and x is not None]
    refused = {
        config.get_generation_mode().value: config.get_generation_mode() not in _MODES,
        "output_attentions": config.output_attentions,
        "output_hidden_states": config.output_hidden_states,
        "prefill_chunk_size": config.prefill_chunk_size is not None,
        "a cache that is not empty": cache is not None and bool(cache.get_seq_length()),
        "a prompt without tokens": not input_ids.shape[1],
        f"use of {', '.join(unknown)}": bool(unknown),
    }
    if asked_for := [what for what, is_asked in refused.items() if is_asked]:
        raise ValueError(
            f"DecodingGraphs: generate takes only tokens, greedily or sampled, got "
            f"{' and '.join(asked_for)}; use model.generate"
        )
