"""What is timed of a loaded model: the prefill of a prompt, and decoding for several batches."""

import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from transformers import StaticCache

from benchmarks.model import PREFILL, decode_name
from benchmarks.model.timeline import (
    Call,
    Parts,
    moe_blocks,
    moe_us,
    parts_of_call,
    us_without_rest,
)
from benchmarks.peers import first_line
from benchmarks.timing import FLUSH_BYTES, captured

Figures = dict[str, Any]

_NUM_LOGITS = 16  # of the prompt's last tokens: the head takes as long as for one


class Phase(NamedTuple):
    """num_tokens: of one call. begin: makes room for `room` calls in a row."""

    name: str
    num_tokens: int
    call: Call
    begin: Call
    room: int


def phases(model: Any, prompt: int, batches: Iterable[int], context: int) -> Iterator[Phase]:
    """The phases of one model; what each needs is made when its turn comes.

    A prompt has `prompt` tokens. A cache for decoding has room for `context` tokens of each
    sequence, and begins half full of random numbers. Tokens are random, and the same in each step:
    what a random model says would soon be one token in all sequences, and so would the experts be.
    """
    yield _prefill(model, prompt)
    for batch in batches:
        yield _decode(model, batch, context)


def _prefill(model: Any, prompt: int) -> Phase:
    ids = _random_ids(model, 1, prompt)
    cache = StaticCache(config=model.config, max_cache_len=prompt)

    def call() -> torch.Tensor:
        _set_length(cache, 0)
        logits: torch.Tensor = model(ids, cache=cache, logits_to_keep=_NUM_LOGITS).logits
        return logits

    return Phase(PREFILL, prompt, call, _nothing, 9)


def _decode(model: Any, batch: int, context: int) -> Phase:
    ids = _random_ids(model, batch, 1)
    cache, begin = StaticCache(config=model.config, max_cache_len=context), context // 2

    def call() -> torch.Tensor:
        logits: torch.Tensor = model(ids, cache=cache).logits
        return logits

    call()
    fill_at_random(cache)
    room = min(context - begin, 60)
    return Phase(decode_name(batch), batch, call, lambda: _set_length(cache, begin), room)


def fill_at_random(cache: Any) -> None:
    """Normal numbers into all that a cache holds. Some layers hold no values of their own: latent
    attention makes them of the keys."""
    for layer in cache.layers:
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
    """The figures of one phase; what a provider refuses is told in "graph_refused".

    eager_ms, graph_ms: one call as it is called, and one replay of its CUDA graph; medians of many
    in a row. parts: microseconds of each part and layer, in the graph if there is one. moe_alone:
    those of the MoE blocks alone, on the same inputs, each behind a flush of L2.
    """
    device = model.device
    found: Figures = {"tokens": phase.num_tokens}
    is_gpu = device.type == "cuda"
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    _warm_up(phase)
    repeats = max(2, min(phase.room - 2, 20))
    found["eager_ms"] = _ms(phase, phase.call, repeats, device)
    if is_gpu:
        found["peak_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        try:
            phase.begin()
            replay = captured(phase.call)
            found["graph_ms"] = _ms(phase, replay, max(2, min(phase.room, 50)), device)
            del replay
        except Exception as error:
            found["graph_refused"] = first_line(error)
    if "graph_ms" in found:
        try:
            found |= _parts(model, phase, in_graph=True)
        except Exception as error:
            found["parts_refused"] = first_line(error)
    if "parts" not in found:
        found |= _parts(model, phase, in_graph=False)
    gc.collect()
    if is_gpu:
        torch.cuda.empty_cache()
    return found


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
