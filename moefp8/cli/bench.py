"""Time the GEMMs of a model's layers on this GPU; with --tune, keep what beats the default.

What is kept lies beside the compiled kernels and serves every process that starts later; remove the
file to be without it. Times are of random data, with nothing in the L2 cache. With --ranks, layers
of experts are timed that several processes share, on GPUs or, where there are none, on CPUs.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch

from ..kernels.common.blocks import ceil_div
from ..kernels.gemm.sm90.gemms import Sm90
from ..kernels.gemm.sm90.tuned import Config, Dense, Experts, Layer
from ..kernels.jit import current_driver
from ..kernels.targets import GEMMS
from ..layers import FP8Linear, GroupedExperts
from ..tuning.keep import keep
from ..tuning.ranks import RanksTime, check_ranks, time_ranks
from ..tuning.tune import time_layer, tune_layer
from .precompile import add_sizes_to, check_ranks_hold_experts, layers_of, num_ranks_of


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", nargs="?", help="whose layers; a directory or a file")
    several: dict[str, Any] = {"type": int, "action": "append", "default": []}
    parser.add_argument("--linear", nargs=2, metavar=("N", "K"), **several)
    parser.add_argument(
        "--experts",
        nargs=4,
        metavar=("E", "TOP_K", "HIDDEN", "INTERMEDIATE"),
        help="routed experts, instead of a checkpoint or besides it; may be repeated",
        **several,
    )
    parser.add_argument("--tune", action="store_true", help="compare configurations, keep the best")
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="start N processes that share the experts, each with up to --max-tokens of its own",
    )
    add_sizes_to(parser)


def run(arguments: argparse.Namespace) -> int:
    layers = list(dict.fromkeys(_layers(arguments)))
    if not layers:
        raise ValueError("nothing to time: give a CHECKPOINT, --linear N K or --experts E k H I")
    for layer in layers:
        if min(size for size in layer if size is not None) < 1:
            raise ValueError(f"all sizes must be at least 1, got {_title(layer)}")
    if arguments.ranks is not None:
        return _run_ranks(arguments, [x for x in layers if isinstance(x, Experts)])
    has_gpu = torch.cuda.is_available()
    # It measures configs of Hopper's GEMMs.
    if not has_gpu or GEMMS.get(current_driver().arch(torch.cuda.current_device())) is not Sm90:
        found = torch.cuda.get_device_name() if has_gpu else "none"
        raise ValueError(f"needs a Hopper GPU (H100, H200) and a torch built for CUDA, got {found}")
    print(f"{torch.cuda.get_device_name()}, times in microseconds", flush=True)
    for layer in layers:
        print(f"\n{_title(layer)}")
        (_tune if arguments.tune else _time)(layer, arguments.max_tokens)
    return 0


def _run_ranks(arguments: argparse.Namespace, layers: list[Experts]) -> int:
    num_ranks, max_tokens = arguments.ranks, arguments.max_tokens
    if arguments.tune or arguments.expert_parallel_size != 1:
        raise ValueError("--ranks goes with neither --tune nor --expert-parallel-size")
    if not layers or max_tokens < 1:
        raise ValueError("--ranks times experts, of at least 1 token: --experts E k H I")
    check_ranks(layers, num_ranks)
    has_gpu = torch.cuda.is_available()
    where = torch.cuda.get_device_name() if has_gpu else "CPUs that they share"
    print(f"{num_ranks} ranks on {where}, times of host and device", flush=True)
    for found in time_ranks(layers, num_ranks, max_tokens):
        _show_ranks(found)
    return 0


def _show_ranks(found: list[RanksTime]) -> None:
    print(f"\n{_title(found[0].layer)}")
    print(f"{'tokens a rank':>14} {'ms':>10} {'tokens/s':>12} {'one process, ms':>16} {'ratio':>8}")
    for x in found:
        print(
            f"{x.tokens:14d} {x.ms:10.3f} {x.tokens_per_s:12,.0f} {x.alone_ms:16.3f} "
            f"{x.alone_ms / x.ms:8.2f}",
            flush=True,
        )


def _layers(arguments: argparse.Namespace) -> Iterator[Layer]:
    num_ranks = num_ranks_of(arguments)
    if arguments.checkpoint:
        layers = layers_of(arguments.checkpoint, arguments.top_k)
        for module in layers.modules():
            if isinstance(module, FP8Linear):
                yield Dense(module.out_features, module.in_features)
            elif isinstance(module, GroupedExperts) and layers.top_k is not None:  # see layers_of
                h, i = module.hidden_size, module.intermediate_size
                yield from _of_ranks(Experts(module.num_experts, layers.top_k, h, i), num_ranks)
    yield from (Dense(*sizes) for sizes in arguments.linear)
    for sizes in arguments.experts:
        yield from _of_ranks(Experts(*sizes), num_ranks)


def _of_ranks(layer: Experts, num_ranks: int) -> Iterator[Experts]:
    """What the ranks hold that have the fewest experts and the most."""
    num_global = layer.num_experts
    if num_global > 0:  # `run` refuses other sizes
        check_ranks_hold_experts(num_ranks, num_global)
    for num_experts in (num_global // num_ranks, ceil_div(num_global, num_ranks)):
        is_rank = num_experts < num_global
        yield layer._replace(
            num_experts=num_experts, num_global_experts=num_global if is_rank else None
        )


def _time(layer: Layer, max_tokens: int) -> None:
    print(f"{'tokens':>8} {'us':>10} {'TFLOP/s':>10}")
    for x in time_layer(layer, max_tokens):
        print(f"{x.tokens:8d} {x.tuned_us:10.1f} {x.tflops:10.1f}", flush=True)


def _tune(layer: Layer, max_tokens: int) -> None:
    print(f"{'tokens':>8} {'default, us':>12} {'tuned, us':>12} {'times as fast':>14}")
    found: dict[int, Config | None] = {}
    for x in tune_layer(layer, max_tokens):
        found[x.tokens] = x.config
        print(
            f"{x.tokens:8d} {x.heuristic_us:12.1f} {x.tuned_us:12.1f} {x.ratio:14.3f}  "
            f"{_short(x.config)}".rstrip(),
            flush=True,
        )
    path = keep(torch.cuda.current_device(), {layer: found})
    num_faster = sum(config is not None for config in found.values())
    print(f"{num_faster} of {len(found)} sizes are faster than by default; kept in {path}")


def _title(layer: Layer) -> str:
    if isinstance(layer, Dense):
        return f"linear, {layer.n} x {layer.k}"
    e, top_k, h, i, num_global = layer
    told = f"{e}, of which" if num_global is None else f"{e} of {num_global}, of which"
    return f"routed experts: {told} {top_k} a token, hidden size {h}, intermediate size {i}"


def _short(config: Config | None) -> str:
    """Show a config's tiles of tokens x weights."""
    if config is None:
        return ""
    pair = config if isinstance(config, tuple) else (config,)
    return ", ".join("x".join(map(str, x.cta_tile)) for x in pair)
