"""How a GEMM is cut into tiles: a pure function of its shape and the number of SMs.

`choose_config` estimates the time of each of the `candidates` and takes the best. The list and the
constants of the estimate come from timings on an H200: of up to 97 configurations for each of 227
shapes and, for more than 64 tokens, of all that may be the best for each of 272 cases of public
models. `python -m benchmarks.gemm_configs` says how far the choice is from the best of still more,
and `python -m benchmarks.gemm_sweep` how it does at other models' shapes. `choose_grouped_config`
is for groups of tokens.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from math import ceil
from typing import NamedTuple

from ...common.blocks import BLOCK, ceil_div, round_up
from .config import GemmConfig, is_possible, num_whole_tiles, usable_ctas, with_most_stages


def candidates(m: int) -> Iterator[GemmConfig]:
    """The configs that were the best for some shape, or near it. `stages` is left open."""
    config = partial(GemmConfig, stages=0)
    deep, buffered = partial(config, k_blocks_per_stage=2), partial(config, num_product_buffers=2)
    splits = (1, 2) if m <= 512 else (1,)
    if m <= 32:  # tokens are few: they are the columns, which come in eights
        few = partial(config, wgmma_n=round_up(m, 8), swap_ab=True)
        for split in (1, 2, 3, 4):
            yield few(64, k_blocks_per_stage=2, split_k=split, ctas_per_sm=2)
            yield few(128, k_blocks_per_stage=2, split_k=split)
        for depth, ctas in ((2, 3), (2, 4), (1, 4)):  # the first of equal estimates wins
            yield few(64, k_blocks_per_stage=depth, ctas_per_sm=ctas)
        yield few(128, ctas_per_sm=3)
    elif m <= 64:
        for split in splits:
            yield from (deep(64, n, split_k=split, ctas_per_sm=2) for n in (32, 48, 64, 96))
            yield deep(64, 96, split_k=split)
            for n in (32, 48, 64, 80):
                yield deep(64, n, split_k=split, num_product_buffers=2)
        yield from (config(64, n, ctas_per_sm=2) for n in (48, 64, 96))
        yield buffered(64, 96)
    elif m <= 128:
        yield buffered(64, 64, ctas_per_sm=2)
        yield from (deep(64, n, num_product_buffers=2) for n in (64, 80))
        yield buffered(64, 128)
        for split in splits:
            yield deep(64, round_up(m, 8), split_k=split, swap_ab=True)
            yield deep(64, 32, split_k=split, num_product_buffers=2)
            for n in (32, 48):
                for buffers in (1, 2):
                    yield deep(128, n, split_k=split, num_product_buffers=buffers)
            yield deep(128, 64, split_k=split)
            yield config(128, 96, split_k=split)
        yield from (buffered(128, n) for n in (80, 96, 112, 128))
        yield from (config(128, n) for n in (144, 160, 176, 192))
        for halves in (False, True):
            yield from (config(128, n, parts=2, halves_tiles=halves) for n in (224, 256))
    else:
        for split in splits:
            yield deep(64, 32, split_k=split, num_product_buffers=2)
            yield from (deep(128, n, split_k=split) for n in (64, 96))
        yield from (deep(64, n, num_product_buffers=2) for n in (48, 64, 80))
        yield deep(128, 48, num_product_buffers=2)
        yield from (buffered(64, n) for n in (96, 128))
        yield from (buffered(128, n) for n in (96, 128))
        yield buffered(64, 192, parts=2)
        yield from (buffered(128, 192, parts=2, halves_tiles=halves) for halves in (False, True))
        yield from (config(128, n) for n in (144, 160, 176, 192))
        for halves in (False, True):
            yield from (config(128, n, parts=2, halves_tiles=halves) for n in (224, 256))
        yield from (config(192, n) for n in (96, 112, 128))


class Rates(NamedTuple):
    """Constants of the estimate, fitted to timings. Cycles, unless they say otherwise.

    Attributes:
        products, shared_memory: factors of the time that the tensor cores and shared memory need
            for a k-block.
        more_pieces: for each piece of a tile's weights but the first, in a k-block.
        two_buffers: factor of a stage where two product buffers overlap promotion with products.
        least: the least time of a warpgroup with one product buffer for a stage, for each column
            of a k-block, each k-block and each part; least_of_two: with two buffers, for each
            k-block and the stage.
        start: of a tile. store: for each column of the last tile.
        clock: in MHz; long: factor of a time above 300 us, with one product buffer.
        memory, l2: bytes in a microsecond. unaligned: factor of bytes from the L2 cache where 128
            does not divide K, since a row of a box is then in two of its lines.
        ramp: microseconds. overlap: factor of the shorter of products and memory.
        split_k: microseconds for more than one CTA, for each further one, and for each number of a
            tile that goes to another CTA.
    """

    products: float
    shared_memory: float
    more_pieces: float
    two_buffers: float
    least: tuple[float, float, float]
    least_of_two: tuple[float, float]
    start: float
    store: float
    clock: float
    long: float
    memory: float
    l2: float
    unaligned: float
    ramp: float
    overlap: float
    split_k: tuple[float, float, float]


# Few tokens, whose weights come from memory, and groups of tokens.
_FEW = Rates(
    products=0.658,
    shared_memory=0.276,
    more_pieces=0,
    two_buffers=0.921,
    least=(1.043, 0, 327),
    least_of_two=(0, 0),
    start=1960,
    store=22,
    clock=1600,
    long=1.14,
    memory=3.62e6,
    l2=13.6e6,
    unaligned=1,
    ramp=1.45,
    overlap=0.087,
    split_k=(0.077, 0.055, 2.58e-4),
)
_MANY = Rates(
    products=0.548,
    shared_memory=0.317,
    more_pieces=24,
    two_buffers=0.896,
    least=(1.41, 83, 191),
    least_of_two=(28, 135),
    start=361,
    store=8.1,
    clock=1830,
    long=1,
    memory=8.37e6,
    l2=20.9e6,
    unaligned=1.4,
    ramp=2.64,
    overlap=0.832,
    split_k=(0.021, 0, 3.46e-4),
)


# The time along K of half a tile, as a share of a whole one's, and more for each piece of weights.
_HALF = 0.657, 0.06


def estimate_us(
    config: GemmConfig, m: int, n: int, k: int, num_sms: int, all_sms: bool = True
) -> float:
    """An estimate of the kernel's time; infinite if too few CTAs can run at once."""
    tokens, weights = config.tile
    num_tiles = ceil_div(m, tokens) * ceil_div(n, weights)
    num_bytes = n * k + m * k + 2 * m * n
    rates = _FEW if m <= 64 else _MANY
    return _estimate_us(rates, config, num_tiles, num_bytes, k, num_sms, all_sms)


def _estimate_us(
    rates: Rates,
    config: GemmConfig,
    num_tiles: int,
    num_bytes: int,
    k: int,
    num_sms: int,
    all_sms: bool,
) -> float:
    num_ctas = num_tiles * config.cluster
    at_once = usable_ctas(config, num_sms, all_sms)
    if at_once < (num_ctas if config.split_k > 1 else config.cluster):
        return float("inf")
    num_stages = ceil_div(ceil_div(ceil_div(k, BLOCK), config.k_blocks_per_stage), config.split_k)
    ctas_per_sm = config.ctas_per_sm if all_sms else 1
    on_sm = min(ctas_per_sm, ceil_div(num_ctas, num_sms))
    # All CTAs of an SM share its tensor cores and its shared memory, which takes and gives 128
    # bytes a cycle: what TMA writes, and for each WGMMA of 32 along K both operands.
    area, loaded = config.wgmma_m * config.wgmma_n, config.wgmma_m + config.wgmma_n
    reads = config.math_warpgroups * BLOCK // 32 * (2048 * config.parts + 32 * config.wgmma_n)
    k_block = rates.products * area / 32 + rates.shared_memory * (reads + BLOCK * loaded) / 128
    k_block += rates.more_pieces * (config.num_weight_pieces - 1)
    depth = config.k_blocks_per_stage
    stage = on_sm * depth * k_block
    if config.num_product_buffers == 2:
        per_k_block, fixed = rates.least_of_two
        stage = max(rates.two_buffers * stage, per_k_block * depth + fixed)
    else:  # a warpgroup's products and what it does before its next ones may take longer
        per_column, per_k_block, per_part = rates.least
        least = (per_column * config.wgmma_n + per_k_block) * depth + per_part * config.parts
        stage = max(stage, least)
    waves, halves = ceil_div(num_ctas, at_once), 0
    if (whole := num_whole_tiles(config, num_tiles, at_once // config.cluster)) < num_tiles:
        waves, halves = whole // at_once, 1
    half_tile = _HALF[0] + _HALF[1] * config.num_weight_pieces
    compute = (waves + halves) * rates.start + (waves + halves * half_tile) * num_stages * stage
    compute += rates.store * config.wgmma_n
    compute /= rates.clock
    if compute > 300 and config.num_product_buffers == 1:
        compute *= rates.long
    # Bytes from memory to the GPU, and from the L2 cache to all SMs.
    byte_factor = rates.unaligned if k % BLOCK else 1.0
    into_sms = num_ctas * num_stages * depth * BLOCK * loaded * byte_factor
    memory = max(num_bytes / rates.memory, into_sms / rates.l2)
    result = rates.ramp + max(compute, memory) + rates.overlap * min(compute, memory)
    if config.split_k > 1:
        once, per_cta, per_number = rates.split_k
        sent = area * (1 - 1 / config.split_k)
        result += once + per_cta * (config.split_k - 1) + per_number * sent
    return result


def deciding_size(m: int) -> int:
    """The M whose config m gets, as do all M above the previous deciding size.

    Deciding sizes are few, so that all kernels that a weight may need can be listed, and compiled
    ahead. Up to 8192, such an M takes no more tiles of 64, 128 or 192 tokens than m does, and up to
    16384 no more tiles of 128: one more could be the only one of its wave.
    """
    return round_up(m, 8) if m <= 128 else round_up(m, max(64, 1 << (m.bit_length() - 7)))


def deciding_sizes(max_m: int) -> Iterator[int]:
    """All deciding sizes up to that of `max_m`."""
    m = 1
    while m <= max_m:
        yield (last := deciding_size(m))
        m = last + 1


def choose_config(
    m: int, n: int, k: int, num_sms: int, all_sms: bool = True, batch_invariant: bool = False
) -> GemmConfig:
    """The configuration for d [M, N] with `num_sms` SMs; m, n, k and num_sms are at least 1.

    all_sms: whether the GPU has no more SMs than these.
    batch_invariant: no CTAs divide K, so that a row's sums have one order whatever M is.
    """
    return _choose_config(deciding_size(m), n, k, num_sms, all_sms, batch_invariant)


@lru_cache(16384)
def _choose_config(
    m: int, n: int, k: int, num_sms: int, all_sms: bool, batch_invariant: bool
) -> GemmConfig:
    allowed = (c for c in candidates(m) if c.split_k == 1 or not batch_invariant)
    possible = [c for c in map(with_most_stages, allowed) if is_possible(c, k)]
    return min(possible, key=lambda config: estimate_us(config, m, n, k, num_sms, all_sms))


# Up to this many tokens in a group, on average, tokens are WGMMA's columns.
FEW_TOKENS = 16
# Tiles hold this many times the average: the tokens left over cost less than taller tiles would.
PEAK_LOAD = 1.2
# From this many products of one group, or of several groups, the power limit counts. Tiles of 192,
# whose tokens two CTAs share, then save power, because they ask less of the L2 cache; with fewer
# tokens, too much of their last tiles is empty, and a single group has no tile counter.
_MANY_PRODUCTS, _MANY_TOKENS = 4e11, 1280
_MANY_OF_ALL, _MANY_TOKENS_OF_EACH = 1e11, 384
# With more tokens in a group, tiles have 128: loads are seldom even, and in tiles of 64 a group of
# many reads its weights twice as often. They cost even loads 1 %, and gain uneven ones up to 12 %.
_FLAT_TOKENS = 30
# This many waves of tiles of 256 weights leave few SMs idle at the end.
_WIDE_WAVES = 5
_LOADS = 0.7, 0.85, 1.0, 1.15, 1.3  # loads of groups whose average is 1


def deciding_load(tokens: int) -> int:
    """The mean load whose config groups of `tokens` get: at most a sixteenth, or 63, more.

    Up to 256, where tiles are chosen to hold groups whole, each load decides for itself. Beyond,
    such a load takes no more tiles of 64, 128 or 192 tokens from 1024 on.
    """
    return tokens if tokens <= 256 else round_up(tokens, min(64, 1 << (tokens.bit_length() - 5)))


def choose_grouped_config(
    tokens: int, limit: int, num_groups: int, n: int, k: int, num_sms: int, all_sms: bool = True
) -> GemmConfig:
    """The config for groups of about `tokens` tokens, each with weights [N, K].

    It comes from timing up to 58 configurations for each of 80 loads and shapes on an H200, and
    for many groups and many tokens from timings on an H100 and an H200 without rest.

    tokens: from 1 to `limit`, which is the most that a group can have.
    """
    load = deciding_load(tokens)
    return _choose_grouped_config(load, max(load, limit), num_groups, n, k, num_sms, all_sms)


@lru_cache(16384)
def _choose_grouped_config(
    tokens: int, limit: int, num_groups: int, n: int, k: int, num_sms: int, all_sms: bool
) -> GemmConfig:
    grouped = partial(GemmConfig, stages=0, grouped=True)
    if tokens <= FEW_TOKENS:  # a tile should hold most groups whole, because it reads their weights
        cols = round_up(tokens * 3 // 2 + 8, 8)
        return with_most_stages(grouped(128, cols, k_blocks_per_stage=2, swap_ab=True))
    flat, square = grouped(64, 128, num_product_buffers=2), grouped(128, 128, num_product_buffers=2)
    tall, wide = grouped(192, 128), grouped(128, 256, parts=2)
    rows, weight_tiles = num_groups * tokens, ceil_div(n, 128)
    are_pairs = weight_tiles % 2 < 0.02 * weight_tiles  # else half of some pairs would be idle
    many, products = _MANY_TOKENS, _MANY_PRODUCTS
    if num_groups > 1:
        many, products = _MANY_TOKENS_OF_EACH, _MANY_OF_ALL
    if num_sms > 1 and are_pairs and tokens >= many and rows * n * k >= products:
        return with_most_stages(replace(tall, multicast=2))

    num_bytes = num_groups * n * k + rows * k + 2 * rows * n

    def estimate(config: GemmConfig) -> float:
        """The mean over two numbers of tiles: those expected, and half way to the least."""
        height, width = config.tile[0], ceil_div(n, config.tile[1])
        least = ceil_div(rows, height)
        loads = _LOADS if num_groups > 1 else (1.0,)
        each = sum(ceil_div(int(load * tokens), height) for load in loads) / len(loads)
        expected = max(least, ceil(num_groups * each))
        counts = (least + expected) // 2, expected
        return sum(
            _estimate_us(_FEW, config, count * width, num_bytes, k, num_sms, all_sms)
            for count in counts
        )

    candidates = [square, grouped(128, 144), grouped(128, 160)]
    num_tiles = num_groups * ceil_div(tokens, 128) * weight_tiles
    if num_groups == 1 or num_tiles <= num_sms:
        narrow = (
            grouped(128, 96, num_product_buffers=2),
            grouped(64, 64, k_blocks_per_stage=2, num_product_buffers=2),
        )
        candidates += [flat, tall, *narrow]
    # The estimate leaves out that in later waves each tile reads its weights again.
    elif limit <= 64 or tokens <= _FLAT_TOKENS:
        candidates = [flat]
    elif min(PEAK_LOAD * tokens, limit) <= 128:
        candidates = [square]
    elif tokens <= 192:
        candidates = [tall]
    elif are_pairs and num_tiles >= 2 * _WIDE_WAVES * num_sms:
        candidates = [wide]
    if len(candidates) == 1:
        return with_most_stages(candidates[0])
    return min(map(with_most_stages, candidates), key=estimate)
