"""`DecodingGraphs`: transformers' `generate`, each decoding step one CUDA graph.

B sequences, P tokens of a prompt, V words, L positions of a static cache.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, GenerationMode

_LENGTHS = 128  # L is a multiple of it, so that calls of about as many tokens share a graph
_MODES = GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE
_CACHES = "cache", "past_key_values"  # the name in transformers of today, and before 5.24
# What `generate` hands on that a decoding step does not need or makes itself.
_KNOWN = {
    *_CACHES,
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
        compile: whether `torch.compile` first fuses what stands between the kernels of each
            block (norms, rotary embedding, sums): steps take about half as long, and the first
            call of each B and L takes some 2 s for each block of the model. Logits then differ
            from those of `model.generate`, since the compiler rounds less often.
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
        self._steps: OrderedDict[tuple[int, int, bool], _Step] = OrderedDict()
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

    def _step(self, batch: int, num_tokens: int, has_padding: bool) -> "_Step":
        """The step of so many sequences and tokens, captured where there is none yet."""
        length = -(-num_tokens // _LENGTHS) * _LENGTHS
        key = batch, length, has_padding
        step = self._steps.pop(key, None)
        if step is None or step.addresses != _addresses_of(self.model):
            step = None  # its memory goes before the next one's comes
            while len(self._steps) >= self.max_graphs:
                self._steps.popitem(last=False)
            step = _Step(self.model, *key)
            device = self.model.device
            if device.type == "cuda":
                self._pool = self._pool or torch.cuda.graph_pool_handle()
                compiled = _compiled_blocks(self.model) if self.compile else nullcontext()
                # As in `generate`, transformers' own experts run steps otherwise than prompts.
                decoding = self.model._optimize_model_for_decode()
                with torch.cuda.device(device), decoding, compiled:
                    step.capture(self._pool)
        self._steps[key] = step
        return step


class _Step:
    """One decoding step of B sequences: all that it reads and writes stays where it is."""

    def __init__(self, model: Any, batch: int, length: int, has_padding: bool) -> None:
        self.model, self.addresses = model, _addresses_of(model)
        self.graph: torch.cuda.CUDAGraph | None = None
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

    def capture(self, pool: Any) -> None:
        """Run the step twice, so that kernels are loaded and the cache is there, and capture it."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            self.logits = self._run()
        self.graph = graph

    def begin(
        self, input_ids: torch.Tensor, mask: torch.Tensor | None, positions: torch.Tensor | None
    ) -> torch.Tensor:
        """Fill the cache with prompts [B, P] -> logits of their last tokens [B, V]."""
        self.cache.reset()
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


def cache_name(model: Any) -> str:
    """The keyword by which the model takes its cache.

    Of another name transformers knows nothing: it runs with a new cache, and no error.
    """
    return next(name for name in _CACHES if name in _inputs_of(model))


def _inputs_of(model: Any) -> set[str]:
    """What the model takes by name."""
    called = model.prepare_inputs_for_generation, model.forward
    return {name for function in called for name in signature(function).parameters}


def _addresses_of(model: PreTrainedModel) -> list[int]:
    """Of all weights and buffers: a graph reads them where they were when it was captured."""
    return [x.data_ptr() for group in (model.parameters(), model.buffers()) for x in group]


@contextmanager
def _compiled_blocks(model: PreTrainedModel) -> Iterator[None]:
    """Each block of the model runs through `torch.compile`.

    Blocks are what transformers names in `_no_split_modules`. One by one they take less time than
    the whole model, since equal ones share their code; Dynamo counts each as a recompilation.
    """
    names = model._no_split_modules or ()
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    limits = {"recompile_limit": 1 << 16, "accumulated_recompile_limit": 1 << 16}
    with ExitStack() as stack:
        stack.enter_context(torch._dynamo.config.patch(limits))
        for block in blocks:
            forward = torch.compile(block.forward, fullgraph=True, dynamic=False)
            stack.enter_context(_replaced_forward(block, forward))
        yield


@contextmanager
def _replaced_forward(block: nn.Module, forward: Any) -> Iterator[None]:
    own = vars(block).get("forward")  # hooks of accelerate stand there
    block.forward = forward
    try:
        yield
    finally:
        if own is None:
            del block.forward
        else:
            block.forward = own


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
    cache = next((model_kwargs[name] for name in _CACHES if model_kwargs.get(name)), None)
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
