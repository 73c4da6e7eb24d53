"""Measure configs of GEMMs on this GPU: what `python -m moefp8 bench --tune` does.

A measured config replaces the heuristic's only where it was faster twice: when all were
compared, and once more when the two took turns.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from ..functional.expert_parts import (
    Choices,
    Weights,
    fitting_weights,
    split_weights,
    weights_layout,
)
from ..functional.experts_records import INPUTS, describe_experts
from ..kernels.common.blocks import ceil_div
from ..kernels.gemm.interface import GroupLayout
from ..kernels.gemm.operands import Operands, fitting_operands
from ..kernels.gemm.sizes import Sizes, mean_load
from ..kernels.gemm.sm90.config import GemmConfig, is_possible, with_most_stages
from ..kernels.gemm.sm90.expert_configs import experts_configs, layer_of
from ..kernels.gemm.sm90.gemms import Sm90, prepare_dense
from ..kernels.gemm.sm90.heuristic import candidates, deciding_sizes, estimate_us
from ..kernels.gemm.sm90.launch import kernel_of
from ..kernels.gemm.sm90.tuned import (
    Config,
    ConfigSource,
    Dense,
    Experts,
    Layer,
    Pair,
    Table,
)
from ..kernels.jit import Kernel, compile_kernels, current_driver
from ..kernels.program import Record, Target, Tensor, prepare_launches
from ..kernels.targets import target_of
from ..layers import GroupedExperts
from ..quant import quantize_1x128, quantize_128x128
from ..system.progress import Progress
from .clock import us_in_turns

C = TypeVar("C", bound=Hashable)
Call = Callable[[], int]  # returns how often it did what is timed

_AS_LIKELY = 1.3  # times the least estimate: what is above is not measured
_MOST = 12  # configs are measured for a size
_LARGER_THAN_L2, _MOST_WEIGHTS = 128 << 20, 16  # bytes of weights in turn; how many
_REPEATS = 9
_GAIN = 1.015  # a smaller one may be noise


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
        """How many products and sums, in 10**12, the tuned config computes in a second."""
        if isinstance(self.layer, Dense):
            products = self.tokens * self.layer.n * self.layer.k
        else:
            num_experts, top_k, h, i, num_global = self.layer
            products = 3 * self.tokens * top_k * h * i * num_experts // (num_global or num_experts)
        return 2 * products / self.tuned_us / 1e6


def tokens_to_tune(max_tokens: int) -> list[int]:
    """The numbers of tokens: powers of two, and from 64 on also half way between them."""
    powers = [1 << i for i in range(max_tokens.bit_length())]
    between = [n + n // 2 for n in powers if n >= 64]
    return sorted(n for n in powers + between if n <= max_tokens)


def tune_layer(layer: Layer, max_tokens: int, shown: bool | None = None) -> Iterator[Measured]:
    """Tune at every number of tokens where the config may change.

    First it compiles all that it compares. shown: whether a line on stderr tells how far that is;
    None: where it is a terminal.
    """
    base = _heuristic()
    if isinstance(layer, Dense):
        of_sizes = {m: _dense_configs(m, *layer, base) for m in deciding_sizes(max_tokens)}
        _compile((kernel_of(c, None) for some in of_sizes.values() for c in some), shown)
        make = _maker(layer, base)
        for m, some in of_sizes.items():
            call_with = make(m)
            calls = {config: call_with(config) for config in some}
            yield Measured(layer, m, *_faster(calls, base.dense(m, *layer)))
    else:
        all_sizes = (_sizes(layer, tokens) for tokens in tokens_to_tune(max_tokens))
        options = {sizes: _experts_configs(sizes, base) for sizes in all_sizes}
        found = (c for pair in options.values() for some in pair for c in some)
        _compile((kernel_of(c, None, GroupLayout.OFFSETS) for c in found), shown)
        make = _maker(layer, base)
        for sizes, pair in options.items():
            faster = _faster_pair(make(sizes.num_tokens), experts_configs(base, sizes), pair)
            yield Measured(layer, sizes.num_tokens, *faster)


def time_layer(layer: Layer, max_tokens: int) -> Iterator[Measured]:
    """Time the configs that serve now, be they tuned or not."""
    configs, make = Sm90.on(torch.cuda.current_device()).configs, _maker(layer, _heuristic())
    for tokens in tokens_to_tune(max_tokens):
        config: Config
        if isinstance(layer, Dense):
            config = configs.dense(tokens, *layer)
        else:
            config = experts_configs(configs, _sizes(layer, tokens))
        us = us_in_turns({"": make(tokens)(config)}, 2 * _REPEATS)[""]
        yield Measured(layer, tokens, us, us, None)


def _heuristic() -> ConfigSource:
    num_sms = current_driver().num_sms(torch.cuda.current_device())
    return ConfigSource(num_sms, num_sms)


def _here(configs: ConfigSource) -> Target:
    """The current GPU, with these configs."""
    return target_of(torch.cuda.current_device())._replace(gemms=Sm90(configs))


def _maker(layer: Layer, base: ConfigSource) -> Callable[[int], Callable[[Any], Call]]:
    """Number of tokens -> config -> a call on random data."""
    if isinstance(layer, Dense):
        return lambda tokens: partial(_dense_call, _random_operands(tokens, *layer), base)
    weights = _random_weights(layer)
    return lambda tokens: _layer_calls(_sizes(layer, tokens), weights, base)


def _compile(kernels: Iterable[Kernel], shown: bool | None) -> None:
    distinct = list(dict.fromkeys(kernels))
    with Progress("compiling", len(distinct), "kernels", shown=shown) as bar:
        arch = current_driver().arch(torch.cuda.current_device())
        compile_kernels(distinct, arch, done=bar.advance)


def _call_of(
    launch: Callable[[tuple[int, ...]], object], operands: Sequence[Iterable[torch.Tensor]]
) -> Call:
    """Launch with the addresses of each of the operands, which live as long as the call does."""
    addresses = [tuple(x.data_ptr() for x in tensors) for tensors in operands]

    def call(_: object = operands) -> int:
        for each in addresses:
            launch(each)
        return len(addresses)

    return call


def _faster(calls: Mapping[C, Call], chosen: C) -> tuple[float, float, C | None]:
    """Microseconds of the chosen one and of the best; the best, or None if it is the chosen one."""
    us = us_in_turns(calls, _REPEATS)
    best = min(us, key=us.__getitem__)
    if us[chosen] >= _GAIN * us[best]:
        us = us_in_turns({chosen: calls[chosen], best: calls[best]}, 2 * _REPEATS)
        if us[chosen] >= _GAIN * us[best]:
            return us[chosen], us[best], best
    return us[chosen], us[chosen], None


# ---- Linears ----


def _dense_configs(m: int, n: int, k: int, base: ConfigSource) -> list[GemmConfig]:
    """The heuristic's config, and those that may be as good by its estimate."""

    def estimate(config: GemmConfig) -> float:
        return estimate_us(config, m, n, k, base.num_sms)

    possible = [c for c in map(with_most_stages, candidates(m)) if is_possible(c, k)]
    best = sorted(possible, key=estimate)[:_MOST]
    likely = [c for c in best if estimate(c) <= _AS_LIKELY * estimate(best[0])]
    return list(dict.fromkeys((base.dense(m, n, k), *likely)))


def _random_operands(m: int, n: int, k: int) -> list[Operands]:
    """The same tokens with different weights, so many that none is still in the L2 cache."""
    a, a_scales = quantize_1x128(torch.randn(m, k, device="cuda"))
    d = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    count = min(_MOST_WEIGHTS, ceil_div(_LARGER_THAN_L2, n * k))
    weights = (quantize_128x128(torch.randn(n, k, device="cuda")) for _ in range(count))
    return [fitting_operands(Operands(a, a_scales, *b, d), False, keep_d=False) for b in weights]


def _dense_call(operands: list[Operands], base: ConfigSource, config: GemmConfig) -> Call:
    """A GEMM with each of the operands: a single short one would drown in what events cost."""
    launch = prepare_dense(config, operands[0], base)
    return _call_of(partial(launch.on, torch.cuda.current_device()), operands)


# ---- Experts ----


def _sizes(layer: Experts, tokens: int) -> Sizes:
    num_experts, top_k, h, i, num_global = layer
    return Sizes(tokens, top_k, num_experts, h, i, masked=False, num_global_experts=num_global)


def _experts_configs(sizes: Sizes, base: ConfigSource) -> tuple[list[GemmConfig], list[GemmConfig]]:
    """Configs of gate and up, and of down: the heuristic's and those for loads not far from it."""
    _, load = mean_load(sizes)
    grouped = partial(GemmConfig, stages=0, grouped=True)
    few = partial(grouped, 128, k_blocks_per_stage=2, ctas_per_sm=2, swap_ab=True)
    of_few = [few(c) for c in (8, 16, 24, 32, 40, 48) if load <= c <= 4 * load + 16]
    from_load = (
        (9, grouped(64, 128, num_product_buffers=2)),
        (33, grouped(128, 128, num_product_buffers=2)),
        (33, grouped(128, 128, tail=24)),
        (33, grouped(192, 128)),
        (161, grouped(128, 256, parts=2)),
        (193, grouped(128, 128, num_product_buffers=2, multicast=2)),
        (257, grouped(192, 128, multicast=2)),
    )
    rows = [config for least, config in from_load if load >= least]
    gate_up = [replace(x, gate_up=True, parts=2) for x in of_few]
    gate_up += [replace(x, gate_up=True) for x in rows]
    down = [*of_few, *rows, *([grouped(128, 144), grouped(128, 160)] if load >= 193 else [])]
    chosen = experts_configs(base, sizes)
    first, second = (
        list(dict.fromkeys((config, *map(with_most_stages, rest))))
        for config, rest in zip(chosen, (gate_up, down), strict=True)
    )
    return first, second


def _random_weights(layer: Experts) -> Weights:
    sizes = layer.num_experts, layer.hidden_size, layer.intermediate_size
    made = GroupedExperts(*sizes, device="cuda")
    gate_up = made.gate_up_proj, made.gate_up_proj_scale_inv
    return fitting_weights(split_weights((*gate_up, made.down_proj, made.down_proj_scale_inv)))


def _layer_calls(sizes: Sizes, weights: Weights, base: ConfigSource) -> Callable[[Pair], Call]:
    x = torch.randn(sizes.num_tokens, sizes.hidden_size, device="cuda").bfloat16()
    scores = torch.randn(sizes.num_tokens, sizes.num_to_choose_from, device="cuda").softmax(dim=-1)
    top_k_weights, index = scores.topk(sizes.top_k, dim=-1)
    tokens, y = (x, index, top_k_weights), torch.empty_like(x)

    def call_with(configs: Pair) -> Call:
        chosen = replace(base, table=Table({layer_of(sizes): {sizes.num_tokens: configs}}))
        r = Record(_here(chosen), INPUTS)
        describe_experts(
            r,
            sizes,
            Tensor.of(x, "x"),
            Choices(Tensor.of(index, "ids"), Tensor.of(top_k_weights, "scores")),
            weights_layout(weights),
            Tensor.of(y, "y"),
        )
        launches = prepare_launches(r, x.get_device())
        given = *tokens, *weights, y
        absent = [torch.empty(0)] * (len(INPUTS) - len(given))  # the other inputs, at address 0
        return _call_of(partial(launches, x.get_device()), [(*given, *absent)])

    return call_with


def _faster_pair(
    run: Callable[[Pair], Call], chosen: Pair, options: tuple[list[GemmConfig], list[GemmConfig]]
) -> tuple[float, float, Pair | None]:
    """Choose gate and up first, then down: timing all pairs would take long."""
    gate_ups, downs = options
    calls = {(gate_up, chosen[1]): run((gate_up, chosen[1])) for gate_up in gate_ups}
    us = us_in_turns(calls, _REPEATS)
    best, _ = min(us, key=us.__getitem__)
    calls = {chosen: calls[chosen], **{(best, down): run((best, down)) for down in downs}}
    return _faster(calls, chosen)
