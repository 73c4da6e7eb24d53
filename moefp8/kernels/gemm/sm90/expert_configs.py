"""The configs of the two GEMMs of an expert layer.

T tokens, k choices each, E experts, H hidden, I intermediate.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache, partial

from ...common.blocks import BLOCK, ceil_div, round_up
from ...program import Record
from ..interface import GroupsOfTokens
from ..sizes import Sizes, mean_load
from ..sms import Sms
from . import heuristic
from .config import GemmConfig, with_most_stages
from .heuristic import FEW_TOKENS, PEAK_LOAD
from .launch import has_more_tiles_than_clusters
from .tuned import ConfigSource, Experts, Pair

# From _WIDE_PRODUCTS of a layer's gate on, tiles of 256 weights save power, if experts have more
# tokens than a tile. From _TALL_PRODUCTS on, tiles of 192 tokens do, shared by two CTAs, if several
# experts have _SOME_TOKENS; but for down, tiles of 256 weights were faster with K below _TALL_K.
_WIDE_PRODUCTS, _TALL_PRODUCTS, _TALL_K = 2e10, 2e11, 2048
_SOME_TOKENS = 384
_WIDE_TOKENS = 640  # from here on, tiles have 256 weights whatever the number of products
_TAIL = 24
_MOST_WITH_TAIL = 136  # tokens of a group; above, large layers have too many short second tiles


def deciding_numbers(sizes: Sizes) -> Iterator[int]:
    """The numbers of tokens at which `experts_configs`, if nothing is measured, may switch configs.

    No pair of such a layer begins elsewhere. Some numbers may be above `sizes.num_tokens`.
    """
    h, i = sizes.hidden_size, sizes.intermediate_size
    for load in deciding_loads(sizes.num_experts, h, i):  # the first number with that load or more
        yield (load - 1) * sizes.num_to_choose_from // sizes.top_k + 1


def experts_configs(source: ConfigSource, sizes: Sizes) -> Pair:
    """The measured pair of configs if there is one, else a choice by the mean load of an expert."""
    tuned = None if sizes.masked else source.table.look_up(layer_of(sizes), sizes.num_tokens)
    if isinstance(tuned, tuple):
        return tuned
    groups, load = mean_load(sizes)
    h, i, exact = sizes.hidden_size, sizes.intermediate_size, sizes.num_to_choose_from == 1
    return choose_experts_configs(load, groups, h, i, source.num_sms, exact=exact)


def describe_configs(r: Record, source: ConfigSource, sizes: Sizes, *, saves: bool) -> Pair:
    """Choose both configs for a record; saves: gate and up are saved for a backward."""
    choose = saving_configs if saves else experts_configs
    r.hold(sizes.num_tokens, lambda most: _largest(choose, source, sizes, most))
    return choose(source, sizes)


def saving_configs(source: ConfigSource, sizes: Sizes) -> Pair:
    """`experts_configs` for a forward that saves gate and up for a backward."""
    gate_up, down = experts_configs(source, sizes)
    return saving_config(gate_up, sizes, source.num_sms), down


@lru_cache(4096)
def _largest(
    choose: Callable[[ConfigSource, Sizes], Pair], source: ConfigSource, sizes: Sizes, most: int
) -> int:
    """The largest number of tokens, at most `most`, up to which the choice stays the same."""
    if choose is backward_configs:
        numbers: Iterable[int] = _deciding_numbers_backward(sizes, most)
    else:
        measured = source.table.configs.get(layer_of(sizes), ())
        others = {*deciding_numbers(sizes), *measured, *(n + 1 for n in measured)}
        numbers = sorted(n for n in others if sizes.num_tokens < n <= most)
    chosen = choose(source, sizes)
    differ = (n for n in numbers if choose(source, sizes._replace(num_tokens=n)) != chosen)
    return next(differ, most + 1) - 1


def saving_config(config: GemmConfig, sizes: Sizes, num_sms: int) -> GemmConfig:
    """Turn a config of gate and up that saves nothing into one that saves them for a backward.

    Tiles of 256 weights are replaced by tiles of 192 tokens, shared by two CTAs, if several experts
    have `_SOME_TOKENS`: 411 us instead of 457 for 8192 tokens of Qwen3-30B-A3B on an H200, with
    pauses; without rest they are equal. The rest of the config stays.
    """
    _, load = mean_load(sizes)
    is_wide = config.cta_tile == (128, 256)
    if is_wide and load >= _SOME_TOKENS and sizes.num_experts > 1 and num_sms > 1:
        tall = GemmConfig(192, 128, stages=0, grouped=True, gate_up=True, multicast=2)
        config = with_most_stages(tall)
    return replace(config, saves_gate_up=True)


def layer_of(sizes: Sizes) -> Experts:
    """The key of the table of measured configs."""
    h, i = sizes.hidden_size, sizes.intermediate_size
    is_rank = sizes.num_experts < sizes.num_to_choose_from
    num_global_experts = sizes.num_global_experts if is_rank else None
    return Experts(sizes.num_experts, sizes.top_k, h, i, num_global_experts)


def backward_configs(source: ConfigSource, sizes: Sizes) -> Pair:
    """The configs of a backward's GEMMs: with W_down^T, then with W_gate_up^T."""
    load, limit = _backward_load(sizes)
    h, i, groups = sizes.hidden_size, sizes.intermediate_size, sizes.num_experts
    num_sms, all_sms = source.num_sms, source.num_sms == source.all_sms
    shapes = (i, h), (h, 2 * round_up(i, BLOCK))
    first, second = (
        heuristic.choose_grouped_config(load, limit, groups, n, k, num_sms, all_sms)
        for n, k in shapes
    )
    return first, second


def describe_backward_configs(r: Record, source: ConfigSource, sizes: Sizes) -> Pair:
    """Choose both configs of a backward for a record."""
    r.hold(sizes.num_tokens, lambda most: _largest(backward_configs, source, sizes, most))
    return backward_configs(source, sizes)


def _backward_load(sizes: Sizes) -> tuple[int, int]:
    """The mean load, and the most rows of an expert, capped where more make no difference."""
    _, load = mean_load(sizes)
    return load, max(load, min(sizes.num_tokens, 2 * BLOCK))


def _deciding_numbers_backward(sizes: Sizes, most: int) -> Iterator[int]:
    """All numbers of tokens up to `most` where `backward_configs` may change, and some others."""
    number, per_load = sizes.num_tokens, sizes.num_to_choose_from
    while number < most:
        if number >= 2 * BLOCK:
            _, load = mean_load(sizes._replace(num_tokens=number))
            last = heuristic.deciding_load(load) * per_load // sizes.top_k
            number = min(max(number, last), most - 1)
        number += 1
        yield number


def describe_gate_up_config(
    r: Record, num_sms: int, tokens: int, h: int, i: int, *, saves: bool
) -> GemmConfig:
    """Choose the config of gate and up for shared experts, in a record."""

    def choose(load: int) -> GemmConfig:
        return choose_experts_configs(load, 1, h, i, num_sms, exact=True)[0]

    config = choose(tokens)

    def largest(most: int) -> int:
        loads = (n for n in deciding_loads(1, h, i) if tokens < n <= most)
        return next((n for n in loads if choose(n) != config), most + 1) - 1

    r.hold(tokens, largest)
    return replace(config, saves_gate_up=saves)


# ---- Tiles from a counter ----

# Timed at 1 to 32 tokens of whole layers and ranks of five models on an H200: with one token an
# expert, taking tiles of gate and up from a counter paid off at K = 7168, and did not at 4096.
_LONG_K = 7168


def takes_tiles(
    config: GemmConfig, sizes: Sizes, shape: tuple[int, int], groups: GroupsOfTokens, sms: Sms
) -> bool:
    """Whether clusters take tiles from a counter.

    That saves time if there are more tiles than clusters, and tiles are unequal or long.

    shape: [R, N] of the result.
    """
    active, load = mean_load(sizes)
    is_worth_it = load > 1 or (config.gate_up and sizes.hidden_size >= _LONG_K)
    return is_worth_it and has_more_tiles_than_clusters(config, active, load, shape, groups, sms)


# ---- The heuristic ----


def deciding_loads(num_groups: int, h: int, i: int) -> list[int]:
    """The loads, rising, at which `choose_experts_configs` may change its choice."""
    tall = ceil_div(int(_TALL_PRODUCTS), num_groups * h * i)
    return sorted({*range(1, _WIDE_TOKENS + 1), tall})  # _WIDE_PRODUCTS matters only here


@lru_cache(16384)
def choose_experts_configs(
    tokens: int, num_groups: int, h: int, i: int, num_sms: int, *, exact: bool = False
) -> tuple[GemmConfig, GemmConfig]:
    """The configs of gate and up, and of down, for `num_groups` experts of about `tokens` tokens.

    They come from timing up to 20 configs of each for 12 loads of the experts of DeepSeek-V3 and of
    Qwen3-30B-A3B on an H200, alone and one after the other; above 160 tokens, from timing up to 16
    pairs for 13 loads of these and of Mixtral 8x7B on an H100, without rest.

    exact: `tokens` is the number of a single group, not a mean. The tile then gets a tail if the
        tail holds all further tokens.
    """
    gate_up = partial(GemmConfig, stages=0, grouped=True, gate_up=True)
    down = partial(GemmConfig, stages=0, grouped=True)
    wide = down(128, 256, parts=2)
    products = num_groups * tokens * h * i
    many = products >= _TALL_PRODUCTS
    about_128, is_more = 128 < PEAK_LOAD * tokens <= 192, PEAK_LOAD * tokens > 192
    most_with_tail = _MOST_WITH_TAIL if many else 128 + _TAIL
    if tokens <= FEW_TOKENS:  # as in `choose_grouped_config`
        cols = round_up(tokens * 3 // 2 + (8 if tokens > 1 else 5), 8)
        few = partial(down, 128, cols, k_blocks_per_stage=2, ctas_per_sm=2, swap_ab=True)
        configs = few(gate_up=True, parts=2), few()
    elif PEAK_LOAD * tokens <= 64:
        configs = gate_up(64, 128, num_product_buffers=2), down(64, 128, num_product_buffers=2)
    elif about_128 and tokens > most_with_tail and (many or not exact):
        configs = gate_up(192, 128), down(192, 128)
    elif about_128 and (not exact or 128 < tokens <= most_with_tail):
        configs = gate_up(128, 128, tail=_TAIL), down(128, 128, tail=_TAIL)
    elif is_more and many and num_groups > 1 and tokens >= _SOME_TOKENS:
        tall = down(192, 128, multicast=2)
        configs = gate_up(192, 128, multicast=2), tall if i >= _TALL_K else wide
    elif is_more and (products >= _WIDE_PRODUCTS or tokens >= _WIDE_TOKENS):
        configs = gate_up(128, 256, parts=2), wide
    else:
        sharing = 2 if many else 1
        configs = (
            gate_up(128, 128, num_product_buffers=2, multicast=sharing),
            down(128, 128, num_product_buffers=2, multicast=sharing),
        )
    if num_sms == 1:  # one SM cannot hold a cluster of two CTAs
        configs = gate_up(128, 256, parts=2), down(128, 128, num_product_buffers=2)
    return with_most_stages(configs[0]), with_most_stages(configs[1])
