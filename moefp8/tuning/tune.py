"""Measure configurations of GEMMs on this GPU: what `python -m moefp8 bench --tune` does.

A measured choice replaces the heuristic's only where it was faster twice: when all were compared,
and once more when the two took turns.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from ..functional.experts_launch import prepare_experts
from ..functional.workspace import Weights, fitting_weights, split_weights
from ..kernels.common.blocks import ceil_div
from ..kernels.gemm.config import GemmConfig, GroupLayout, is_possible, with_most_stages
from ..kernels.gemm.experts_sizes import Sizes, mean_load
from ..kernels.gemm.heuristic import candidates, deciding_sizes, estimate_us
from ..kernels.gemm.launch import GemmSources, kernel_of, prepare_gemm
from ..kernels.gemm.operands import Operands, fitting_operands
from ..kernels.gemm.tuned import Config, ConfigSource, Dense, Experts, Layer, Pair, config_source_of
from ..kernels.jit import Kernel, Source, compile_kernels, current_driver, launch_all
from ..layers import GroupedExperts
from ..progress import Progress
from ..quant import quantize_1x128, quantize_128x128
from .clock import us_in_turns

C = TypeVar("C", bound=Hashable)
Call = Callable[[], int]  # how many it made

_AS_LIKELY = 1.3  # of the least estimate: what is measured
_MOST = 12
_LARGER_THAN_L2, _MOST_WEIGHTS = 128 << 20, 16
_REPEATS = 9
_GAIN = 1.015  # less may be noise


@dataclass(frozen=True)
class Measured:
    """Microseconds of one call; tuned_us is heuristic_us where nothing is faster."""

    layer: Layer
    tokens: int
    heuristic_us: float
    tuned_us: float
    config: Config | None

    @property
    def ratio(self) -> float:
        return self.heuristic_us / self.tuned_us

    @property
    def tflops(self) -> float:
        """Products and sums a second, in 10**12, of what is tuned."""
        if isinstance(self.layer, Dense):
            products = self.tokens * self.layer.n * self.layer.k
        else:
            _, top_k, h, i = self.layer
            products = 3 * self.tokens * top_k * h * i
        return 2 * products / self.tuned_us / 1e6


def tokens_to_tune(max_tokens: int) -> list[int]:
    """Of expert layers: powers of two, from 64 on also half way between them."""
    found, n = [], 1
    while n <= max_tokens:
        found += [n] if n < 64 else [n, n + n // 2]
        n *= 2
    return [n for n in found if n <= max_tokens]


def tune_layer(layer: Layer, max_tokens: int, shown: bool | None = None) -> Iterator[Measured]:
    """At every number of tokens where the choice may change. Compiles what it compares first.

    shown: whether a line on stderr tells how far that is; None: where it is a terminal.
    """
    base = _heuristic()
    if isinstance(layer, Dense):
        yield from _tune_linear(layer, max_tokens, base, shown)
    else:
        yield from _tune_experts(layer, max_tokens, base, shown)


def time_layer(layer: Layer, max_tokens: int) -> Iterator[Measured]:
    """What serves now, be it tuned or not."""
    configs, make = config_source_of(torch.cuda.current_device()), _maker(layer, _heuristic())
    for tokens in tokens_to_tune(max_tokens):
        config: Any
        if isinstance(layer, Dense):
            config = configs.dense(tokens, *layer)
        else:
            config = configs.experts(_sizes(layer, tokens))
        us = us_in_turns({"": make(tokens)(config)}, 2 * _REPEATS)[""]
        yield Measured(layer, tokens, us, us, None)


def _heuristic() -> ConfigSource:
    num_sms = current_driver().num_sms(torch.cuda.current_device())
    return ConfigSource(num_sms, num_sms)


def _maker(layer: Layer, base: ConfigSource) -> Callable[[int], Callable[[Any], Call]]:
    """Number of tokens -> configuration -> a call on random data."""
    if isinstance(layer, Dense):
        return lambda tokens: partial(_dense_call, _random_operands(tokens, *layer), base)
    weights = _random_weights(layer)
    return lambda tokens: _layer_calls(_sizes(layer, tokens), weights, base)


def _compile(kernels: Iterable[Kernel], shown: bool | None) -> None:
    distinct = list(dict.fromkeys(kernels))
    with Progress("compiling", len(distinct), "kernels", shown=shown) as bar:
        compile_kernels(distinct, done=bar.advance)


def _faster(calls: Mapping[C, Call], chosen: C) -> tuple[float, float, C | None]:
    """Microseconds of the chosen one and of the best, which is None if that is no other."""
    us = us_in_turns(calls, _REPEATS)
    best = min(us, key=us.__getitem__)
    if us[chosen] >= _GAIN * us[best]:
        us = us_in_turns({chosen: calls[chosen], best: calls[best]}, 2 * _REPEATS)
        if us[chosen] >= _GAIN * us[best]:
            return us[chosen], us[best], best
    return us[chosen], us[chosen], None


# ---- Linears ----


def _tune_linear(
    layer: Dense, max_tokens: int, base: ConfigSource, shown: bool | None
) -> Iterator[Measured]:
    configs = {m: _dense_configs(m, *layer, base) for m in deciding_sizes(max_tokens)}
    _compile((kernel_of(c, None) for some in configs.values() for c in some), shown)
    make = _maker(layer, base)
    for m, some in configs.items():
        call_with = make(m)
        calls = {config: call_with(config) for config in some}
        yield Measured(layer, m, *_faster(calls, base.dense(m, *layer)))


def _dense_configs(m: int, n: int, k: int, base: ConfigSource) -> list[GemmConfig]:
    """The heuristic's, and those that may be as good by its estimate."""

    def estimate(config: GemmConfig) -> float:
        return estimate_us(config, m, n, k, base.num_sms)

    possible = [c for c in map(with_most_stages, candidates(m)) if is_possible(c, k)]
    best = sorted(possible, key=estimate)[:_MOST]
    likely = [c for c in best if estimate(c) <= _AS_LIKELY * estimate(best[0])]
    return list(dict.fromkeys((base.dense(m, n, k), *likely)))


def _random_operands(m: int, n: int, k: int) -> list[Operands]:
    """With weights that differ: multiplied one after the other, they find none in the L2 cache."""
    a, a_scales = quantize_1x128(torch.randn(m, k, device="cuda"))
    d, found = torch.empty(m, n, dtype=torch.bfloat16, device="cuda"), []
    for _ in range(min(_MOST_WEIGHTS, ceil_div(_LARGER_THAN_L2, n * k))):
        b, b_scales = quantize_128x128(torch.randn(n, k, device="cuda"))
        operands = Operands(a, a_scales, b, b_scales, d)
        found.append(fitting_operands(operands, False, keep_d=False))
    return found


def _dense_call(operands: list[Operands], base: ConfigSource, config: GemmConfig) -> Call:
    """Several, since a single short one would drown in what events cost."""
    m, device_index = operands[0].a.shape[0], torch.cuda.current_device()
    sources = GemmSources(*map(Source, range(5)))
    launch = prepare_gemm(config, operands[0], sources, base.sms, m, programmatic=False)
    addresses = [tuple(x.data_ptr() for x in each) for each in operands]

    def run(_: object = operands) -> int:  # which live as long as it does
        for each in addresses:
            launch_all((launch,), device_index, each)
        return len(addresses)

    return run


# ---- Experts ----


def _tune_experts(
    layer: Experts, max_tokens: int, base: ConfigSource, shown: bool | None
) -> Iterator[Measured]:
    of_tokens = {n: _sizes(layer, n) for n in tokens_to_tune(max_tokens)}
    options = {n: _experts_configs(sizes, base) for n, sizes in of_tokens.items()}
    found = (x for pair in options.values() for some in pair for x in some)
    _compile((kernel_of(c, None, GroupLayout.OFFSETS) for c in found), shown)
    make = _maker(layer, base)
    for n, sizes in of_tokens.items():
        yield Measured(layer, n, *_faster_pair(make(n), base.experts(sizes), options[n]))


def _sizes(layer: Experts, tokens: int) -> Sizes:
    num_experts, top_k, h, i = layer
    return Sizes(tokens, top_k, num_experts, h, i, masked=False)


def _experts_configs(sizes: Sizes, base: ConfigSource) -> tuple[list[GemmConfig], list[GemmConfig]]:
    """Of gate and up, and of down: the heuristic's and those that suit loads not far from it."""
    _, load = mean_load(sizes)
    few = partial(
        GemmConfig, stages=0, k_blocks_per_stage=2, ctas_per_sm=2, grouped=True, swap_ab=True
    )
    grouped = partial(GemmConfig, stages=0, grouped=True)
    columns = [c for c in (8, 16, 24, 32, 40, 48) if load <= c <= 4 * load + 16]
    rows: list[GemmConfig] = []
    if load > 8:
        rows.append(grouped(64, 128, num_product_buffers=2))
    if load > 32:
        rows += [
            grouped(128, 128, num_product_buffers=2),
            grouped(128, 128, tail=24),
            grouped(192, 128),
        ]
    if load > 192:
        rows += [
            grouped(128, 128, num_product_buffers=2, multicast=2),
            grouped(128, 256, parts=2),
        ]
    of_few = [few(wgmma_m=128, wgmma_n=c) for c in columns]
    gate_up = [replace(x, gate_up=True, parts=2) for x in of_few]
    gate_up += [replace(x, gate_up=True) for x in rows]
    down = [*of_few, *rows, *([grouped(128, 144), grouped(128, 160)] if load > 192 else [])]
    chosen = base.experts(sizes)
    first, second = (
        list(dict.fromkeys((config, *map(with_most_stages, rest))))
        for config, rest in zip(chosen, (gate_up, down), strict=True)
    )
    return first, second


def _random_weights(layer: Experts) -> Weights:
    num_experts, _, h, i = layer
    made = GroupedExperts(num_experts, h, i, device="cuda")
    gate_up = made.gate_up_proj, made.gate_up_proj_scale_inv
    return fitting_weights(split_weights((*gate_up, made.down_proj, made.down_proj_scale_inv)))


def _layer_calls(sizes: Sizes, weights: Weights, base: ConfigSource) -> Callable[[Pair], Call]:
    x = torch.randn(sizes.num_tokens, sizes.hidden_size, device="cuda").bfloat16()
    scores = torch.randn(sizes.num_tokens, sizes.num_experts, device="cuda").softmax(dim=-1)
    top_k_weights, index = scores.topk(sizes.top_k, dim=-1)
    tokens, y, device_index = (x, index, top_k_weights), torch.empty_like(x), x.get_device()

    def call_with(configs: Pair) -> Call:
        launches = prepare_experts(sizes, tokens, weights, math.inf, configs, base.sms)
        tensors = (*tokens, *weights, y)
        addresses = tuple(z.data_ptr() for z in tensors)

        def run(_: object = tensors) -> int:  # which live as long as it does
            launches(device_index, addresses)
            return 1

        return run

    return call_with


def _faster_pair(
    run: Callable[[Pair], Call], chosen: Pair, options: tuple[list[GemmConfig], list[GemmConfig]]
) -> tuple[float, float, Pair | None]:
    """Gate and up first, then down: each of all with each other would take long."""
    gate_ups, downs = options
    calls = {(gate_up, chosen[1]): run((gate_up, chosen[1])) for gate_up in gate_ups}
    us = us_in_turns(calls, _REPEATS)
    best, _ = min(us, key=us.__getitem__)
    calls = {chosen: calls[chosen], **{(best, down): run((best, down)) for down in downs}}
    return _faster(calls, chosen)
