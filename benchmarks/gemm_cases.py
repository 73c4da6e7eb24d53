"""What the dense GEMM is timed at: shapes of DeepSeek-V3, and linears of many public models.

A shape is N x K. The models are two sets: a heuristic may be fitted to `FITTED`, and `HELD_OUT`
says how it does at shapes that it has not seen; no shape is in both.
"""

import random
from collections.abc import Collection, Iterable, Iterator

from benchmarks.peers import Case

Shape = tuple[int, int]

MS = 1, 16, 64, 128, 512, 777, 4096, 8192, 16384
SHAPES = (2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)
LARGE_MS = 4096, 8192, 16384
MORE_SHAPES = (10240, 8192), (18432, 7168)  # for large M only
MOST_M, NUM_RANDOM = 16384, 200


def cases_of(ms: Iterable[int], shapes: Iterable[Shape] | None = None) -> list[Case]:
    """All of `ms` at all of `shapes`, or without these at the ones above."""
    usual = {m: SHAPES + (MORE_SHAPES if m in LARGE_MS else ()) for m in ms}
    given = None if shapes is None else tuple(shapes)
    return [Case(m, n, k) for m, those in usual.items() for n, k in given or those]


def _attention(hidden: int, heads: int, kv_heads: int, head_dim: int) -> Iterator[Shape]:
    """Q, K or V by itself, the three as one, and the output."""
    q, kv = heads * head_dim, kv_heads * head_dim
    yield from ((q, hidden), (kv, hidden), (q + 2 * kv, hidden), (hidden, q))


def _latent_attention(hidden: int, heads: int, q_rank: int, kv_rank: int = 512) -> Iterator[Shape]:
    """DeepSeek's: a head of Q and K has 128 + 64, one of V 128; K and V come from `kv_rank`."""
    q, kv = 192 * heads, kv_rank + 64
    yield from ((kv, hidden), (256 * heads, kv_rank), (hidden, 128 * heads))
    if q_rank:
        yield from ((q_rank, hidden), (q_rank + kv, hidden), (q, q_rank))
    else:
        yield q, hidden


def _feed_forward(hidden: int, *intermediate: int) -> Iterator[Shape]:
    """Gate and up as one, and down, of each kind: dense, or an expert."""
    for i in intermediate:
        yield from ((2 * i, hidden), (hidden, i))


def _multi_query(hidden: int, heads: int, head_dim: int) -> Iterator[Shape]:
    """Falcon's: Q with one K and one V, the output, and a feed-forward without a gate."""
    yield from (((heads + 2) * head_dim, hidden), (hidden, heads * head_dim))
    yield from ((4 * hidden, hidden), (hidden, 4 * hidden))


Models = dict[str, tuple[Shape, ...]]  # the shapes of each, by its name

FITTED: Models = {
    "DeepSeek-V3": (*_latent_attention(7168, 128, 1536), *_feed_forward(7168, 18432, 2048)),
    "DeepSeek-V2-Lite": (*_latent_attention(2048, 16, 0), *_feed_forward(2048, 10944, 1408)),
    "Qwen3-30B-A3B": (*_attention(2048, 32, 4, 128), *_feed_forward(2048, 768)),
    "Qwen3-8B": (*_attention(4096, 32, 8, 128), *_feed_forward(4096, 12288)),
    "Qwen2.5-7B": (*_attention(3584, 28, 4, 128), *_feed_forward(3584, 18944)),
    "Llama-3.1-70B": (*_attention(8192, 64, 8, 128), *_feed_forward(8192, 28672)),
    "Mixtral 8x7B": (*_attention(4096, 32, 8, 128), *_feed_forward(4096, 14336)),
    "GLM-4.5": (*_attention(5120, 96, 8, 128), *_feed_forward(5120, 12288, 1536)),
    "MiniMax-M2": (*_attention(3072, 48, 8, 128), *_feed_forward(3072, 1536)),
    "gpt-oss-120b": (*_attention(2880, 64, 8, 64), *_feed_forward(2880, 2880)),
    "Gemma-3-27B": (*_attention(5376, 32, 16, 128), *_feed_forward(5376, 21504)),
    "Phi-4": (*_attention(5120, 40, 10, 128), *_feed_forward(5120, 17920)),
}
_OTHERS: Models = {
    "DeepSeek-V2": (*_latent_attention(5120, 128, 1536), *_feed_forward(5120, 12288, 1536)),
    "Kimi-K2": (*_latent_attention(7168, 64, 1536), *_feed_forward(7168, 18432, 2048)),
    "Qwen3-235B-A22B": (*_attention(4096, 64, 4, 128), *_feed_forward(4096, 1536)),
    "Qwen3-32B": (*_attention(5120, 64, 8, 128), *_feed_forward(5120, 25600)),
    "Qwen3-4B": (*_attention(2560, 32, 8, 128), *_feed_forward(2560, 9728)),
    "Qwen3-Next-80B-A3B": (
        (12288, 2048),  # Q, K, V and gate of its linear attention
        *_attention(2048, 16, 2, 256),
        *_feed_forward(2048, 512),
    ),
    "Llama-3.2-3B": (*_attention(3072, 24, 8, 128), *_feed_forward(3072, 8192)),
    "Llama-4-Scout": (*_attention(5120, 40, 8, 128), *_feed_forward(5120, 16384, 8192)),
    "Mixtral 8x22B": (*_attention(6144, 48, 8, 128), *_feed_forward(6144, 16384)),
    "Mistral-Small-3.1": (*_attention(5120, 32, 8, 128), *_feed_forward(5120, 32768)),
    "GLM-4.5-Air": (*_attention(4096, 96, 8, 128), *_feed_forward(4096, 10944, 1408)),
    "Gemma-3-12B": (*_attention(3840, 16, 8, 256), *_feed_forward(3840, 15360)),
    "Yi-34B": (*_attention(7168, 56, 8, 128), *_feed_forward(7168, 20480)),
    "Falcon-7B": tuple(_multi_query(4544, 71, 64)),
}


def shapes_of(models: Models) -> list[Shape]:
    """Every shape once."""
    return list(dict.fromkeys(shape for shapes in models.values() for shape in shapes))


def _without(seen: Collection[Shape], models: Models) -> Models:
    return {name: tuple(s for s in shapes if s not in seen) for name, shapes in models.items()}


HELD_OUT: Models = _without({*shapes_of(FITTED), *SHAPES, *MORE_SHAPES}, _OTHERS)


def random_cases(models: Models, count: int = NUM_RANDOM, seed: int = 0) -> list[Case]:
    """Different cases: a shape of a model, each as likely as another, and M of any magnitude."""
    order, shapes = random.Random(seed), shapes_of(models)
    found: dict[Case, None] = {}
    while len(found) < count:
        n, k = order.choice(shapes)
        found[Case(round(MOST_M ** order.random()), n, k)] = None
    return list(found)
