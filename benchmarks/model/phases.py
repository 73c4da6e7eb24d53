"""What is timed of a loaded model: the prefill of a prompt, and decoding for several batches."""

import gc
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from transformers import LogitsProcessor, LogitsProcessorList, StaticCache

from benchmarks.model import PREFILL, decode_name
from benchmarks.model.timeline import (
    Call,
    Parts,
    moe_blocks,
    moe_us,
    parts_of_call,
    synchronize,
    us_without_rest,
)
from benchmarks.peers import first_line
from benchmarks.timing import FLUSH_BYTES, captured
from moefp8 import GroupedExperts
from moefp8.hf import DecodingGraphs
from moefp8.hf.decoding.step import cache_name

Figures = dict[str, Any]

_NUM_LOGITS = 16  # of the prompt's last tokens: the head takes as long as for one
BATCHED, GROUPED = "batched_mm", "grouped_mm"  # ways in which transformers runs its experts
_MOST_BATCHED = 16  # sequences: it copies the weights of each choice, 10 GB a layer for 128
_MANY, _MANY_AS_CALLED = 40, 12  # new tokens of the longer of two calls


class Phase(NamedTuple):
    """num_tokens: of one call. begin: makes room for `room` calls in a row.

    prompts: of decoding, ids [batch, half a cache], after which tokens are generated.
    """

    name: str
    num_tokens: int
    call: Call
    begin: Call
    room: int
    prompts: torch.Tensor | None = None


def phases(model: Any, prompt: int, batches: Iterable[int], context: int) -> Iterator[Phase]:
    """The phases of one model; what each needs is made when its turn comes.

    A prompt has `prompt` tokens. A cache for decoding has room for `context` tokens of each
    sequence, and begins half full. Tokens are random: what a random model says would soon be one
    token in all sequences, and so would the experts be.
    """
    yield _prefill(model, prompt)
    for batch in batches:
        yield _decode(model, batch, context)


def _prefill(model: Any, prompt: int) -> Phase:
    ids = _random_ids(model, 1, prompt)
    cache = StaticCache(config=model.config, max_cache_len=prompt)
    options = {cache_name(model): cache, "logits_to_keep": _NUM_LOGITS}

    def call() -> torch.Tensor:
        _set_length(cache, 0)
        logits: torch.Tensor = model(ids, **options).logits
        return logits

    return Phase(PREFILL, prompt, call, _nothing, 9)


def _decode(model: Any, batch: int, context: int) -> Phase:
    ids, begin = _random_ids(model, batch, 1), context // 2
    cache = StaticCache(config=model.config, max_cache_len=context)
    options = {cache_name(model): cache}

    def call() -> torch.Tensor:
        logits: torch.Tensor = model(ids, **options).logits
        return logits

    call()
    fill_at_random(cache)
    room = min(context - begin, 60)
    prompts = _random_ids(model, batch, begin)
    name = decode_name(batch)
    return Phase(name, batch, call, lambda: _set_length(cache, begin), room, prompts)


def fill_at_random(cache: Any) -> None:
    """Normal numbers into all that a cache holds. Some layers hold no values of their own: latent
    attention makes them of the keys. RuntimeError if the model has not taken the cache."""
    for layer in cache.layers:
        if layer.keys is None:
            raise RuntimeError("the model has not written into the cache that it was given")
        for held in (layer.keys, layer.values):
            if held is not None:
                held.normal_()


def _random_ids(model: Any, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch)
    ids = torch.randint(model.config.vocab_size, (batch, length), generator=generator)
    return ids.to(model.device)


def _set_length(cache: StaticCache, length: int) -> None:
    for layer in cache.layers:
        layer.cumulative_length.fill_(length)


def measure(model: Any, phase: Phase) -> Figures:
    """The figures of one phase; what a provider refuses is told in "graph_refused", and what it
    has no memory for as it is called in "eager_refused".

    eager_ms, graph_ms: as it is called, and in CUDA graphs. Of a prefill these are a call and a
    replay, medians of many in a row; of decoding, a token of `generate` and of `DecodingGraphs`.
    parts: microseconds of each part and layer, in the graph if there is one. moe_alone: those of
    the MoE blocks alone, on the same inputs, each after a flush of L2.
    """
    device = model.device
    figures: Figures = {"tokens": phase.num_tokens}
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    _warm_up(phase)
    if phase.prompts is None:
        repeats = max(2, min(phase.room - 2, 20))
        figures["eager_ms"] = _ms(phase, phase.call, repeats, device)
    else:
        try:
            figures["eager_ms"] = _ms_a_token(model.generate, phase.prompts, _MANY_AS_CALLED)
        except torch.OutOfMemoryError as error:
            figures["eager_refused"] = first_line(error)
    if is_gpu:
        figures["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        try:
            figures |= _in_graphs(model, phase)
        except Exception as error:
            figures["graph_refused"] = first_line(error)
    if "graph_ms" in figures:
        try:
            figures |= _parts(model, phase, in_graph=True)
        except Exception as error:
            figures["parts_refused"] = first_line(error)
    if "parts" not in figures:
        figures |= _parts(model, phase, in_graph=False)
    _free()
    return figures


def compile_steps(model: Any, prompts: torch.Tensor) -> tuple[DecodingGraphs, Figures]:
    """Graphs of compiled steps. compile_s: what the first call took; compiled_refused: why not."""
    graphs, started = DecodingGraphs(model, compile=True), time.perf_counter()
    try:
        _generate(graphs.generate, prompts, _few_and_many(prompts, _MANY)[1])
        synchronize(model.device)
    except Exception as error:
        return graphs, {"compiled_refused": first_line(error)}
    return graphs, {"compile_s": round(time.perf_counter() - started, 1)}


def measure_compiled(graphs: DecodingGraphs, prompts: torch.Tensor) -> Figures:
    """compiled_ms: a token of steps that were compiled before."""
    return {"compiled_ms": _ms_a_token(graphs.generate, prompts, _MANY)}


def _in_graphs(model: Any, phase: Phase) -> Figures:
    """graph_ms; experts: how transformers' own experts decode, of two ways the faster one."""
    if phase.prompts is None:
        phase.begin()
        replay = captured(phase.call)
        return {"graph_ms": _ms(phase, replay, max(2, min(phase.room, 50)), model.device)}
    if any(isinstance(module, GroupedExperts) for module in model.modules()):
        return {"graph_ms": _ms_in_graphs(model, phase.prompts)}
    with decoding_by(model, GROUPED):
        ways = {GROUPED: _ms_in_graphs(model, phase.prompts)}
    if phase.num_tokens <= _MOST_BATCHED:
        with decoding_by(model, BATCHED), suppress(torch.OutOfMemoryError):
            ways[BATCHED] = _ms_in_graphs(model, phase.prompts)
    way = min(ways, key=lambda way: ways[way])
    return {"graph_ms": ways[way], "experts": way}


def _ms_in_graphs(model: Any, prompts: torch.Tensor) -> float:
    try:
        return _ms_a_token(DecodingGraphs(model).generate, prompts, _MANY)
    finally:
        _free()


@contextmanager
def decoding_by(model: Any, way: str | None) -> Iterator[None]:
    """transformers' own experts decode by "batched_mm", its way unasked, or as prompts run."""
    if way == GROUPED:
        model._optimize_model_for_decode = nullcontext
    try:
        yield
    finally:
        vars(model).pop("_optimize_model_for_decode", None)


class _AtRandom(LogitsProcessor):
    """Any word may be next."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.rand_like(scores)


def _generate(generate: Callable[..., Any], prompts: torch.Tensor, num_new: int) -> None:
    generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        logits_processor=LogitsProcessorList([_AtRandom()]),
        max_new_tokens=num_new,
        eos_token_id=None,
        pad_token_id=0,
        do_sample=False,
    )


def _few_and_many(prompts: torch.Tensor, many: int) -> tuple[int, int]:
    """Numbers of new tokens, for which a cache has room that the prompts fill by half."""
    many = min(many, prompts.shape[1])
    return many // 4, many


def _ms_a_token(generate: Callable[..., Any], prompts: torch.Tensor, many: int) -> float:
    """What each new token adds to a call: the median of three differences."""
    few, many = _few_and_many(prompts, many)

    def seconds(num_new: int) -> float:
        synchronize(prompts.device)
        started = time.perf_counter()
        _generate(generate, prompts, num_new)
        synchronize(prompts.device)
        return time.perf_counter() - started

    seconds(many)
    taken = [(seconds(many) - seconds(few)) / (many - few) for _ in range(3)]
    return round(statistics.median(taken) * 1e3, 4)


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _warm_up(phase: Phase) -> None:
    phase.begin()
    for _ in range(2):
        phase.call()


def _ms(phase: Phase, call: Call, repeats: int, device: torch.device) -> float:
    phase.begin()
    gc.collect()
    gc.disable()
    try:
        return round(us_without_rest(call, repeats, device) / 1e3, 4)
    finally:
        gc.enable()


def _parts(model: Any, phase: Phase, *, in_graph: bool) -> Figures:
    """The parts of a call, and the sums of its MoE blocks, there and alone."""
    repeats = max(1, min(phase.room // 3, 10))

    def parts_of(call: Call) -> Parts:
        phase.begin()
        return parts_of_call(model, call, model.device, repeats, in_graph=in_graph)

    parts, alone = parts_of(phase.call), parts_of(_moe_alone(model, phase))
    return {
        "parts_of": "graph" if in_graph else "eager",
        "parts": {part: [round(x, 2) for x in us] for part, us in parts.items()},
        "moe_ms": round(moe_us(parts) / 1e3, 4),
        "moe_alone_ms": round(moe_us(alone) / 1e3, 4),
    }


def _moe_alone(model: Any, phase: Phase) -> Callable[[], None]:
    """A call of all MoE blocks, one after the other, on what they get in a call of the model."""
    inputs: dict[int, torch.Tensor] = {}
    blocks = moe_blocks(model)

    def keep(layer: int) -> Callable[..., None]:
        return lambda block, args: inputs.update({layer: args[0].clone()})

    hooks = [block.register_forward_pre_hook(keep(i)) for i, block in blocks.items()]
    phase.begin()
    phase.call()
    for hook in hooks:
        hook.remove()
    flush: Call = _nothing
    if model.device.type != "cpu":
        flush = torch.ones(FLUSH_BYTES // 8, dtype=torch.int64, device=model.device).prod

    def call() -> None:
        for layer, block in blocks.items():
            flush()
            block(inputs[layer])

    return call


def _nothing() -> None:
    pass
