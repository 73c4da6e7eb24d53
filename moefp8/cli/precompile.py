"""Compile all kernels that a checkpoint's FP8 layers can need, with no GPU.

The status is 0 only if every kernel is on disk, where processes that start later find it.
"""

import argparse
import copy
import warnings

from torch import nn

from ..checkpoint import fp8_layers
from ..checkpoint.errors import printable
from ..checkpoint.inspect.fp8 import Layers
from ..distributed.shard import Kind, shard
from ..kernels.jit import JitError, cache_state, keep_kernels
from ..layers import FP8Linear, GroupedExperts, unfreeze
from ..precompile import layers as ahead


def add_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a directory, or a .safetensors file")
    add_sizes_to(parser)
    parser.add_argument("--dtype", choices=ahead.DTYPES, default="bfloat16", help="of activations")
    parser.add_argument("--backward", action="store_true", help="also for gradients")
    parser.add_argument(
        "--unfreeze",
        choices=ahead.DTYPES,
        help="for master weights of that dtype, as moefp8.unfreeze(model) makes them",
    )
    parser.add_argument(
        "--updating",
        choices=ahead.DTYPES,
        metavar="DTYPE",
        help="also for new weights of that dtype, as moefp8.updating takes them",
    )
    parser.add_argument(
        "--batch-invariant",
        action="store_true",
        help="for layers of which set_batch_invariant says so",
    )
    parser.add_argument("--num-sms", type=int, help="of the GPU, if it is not this machine's")
    parser.add_argument("--num-threads", type=int, help="that compile (default: all processors)")


def add_sizes_to(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=8192,
        help="of one call: batch times sequence length (default: %(default)s)",
    )
    parser.add_argument("--top-k", type=int, help="experts of a token, if config.json says nothing")
    parser.add_argument(
        "--expert-parallel-size",
        type=int,
        default=1,
        metavar="RANKS",
        help="how many ranks hold the experts (default: %(default)s)",
    )


def num_ranks_of(arguments: argparse.Namespace) -> int:
    num_ranks: int = arguments.expert_parallel_size
    if num_ranks < 1:
        raise ValueError(f"--expert-parallel-size must be at least 1, got {num_ranks}")
    return num_ranks


def check_ranks_hold_experts(num_ranks: int, num_experts: int, where: str = "") -> None:
    if num_ranks > num_experts:
        raise ValueError(
            "--expert-parallel-size must be at most the number of experts, since each rank holds "
            f"one, and there are {num_experts}{where}, got {num_ranks}"
        )


def layers_of(checkpoint: str, top_k: int | None) -> Layers:
    """Return `fp8_layers`. Raises ValueError if there are experts and no top_k is known."""
    layers = fp8_layers(checkpoint, top_k)
    for name, module in zip(layers.names, layers, strict=True):
        if isinstance(module, GroupedExperts) and layers.top_k is None:
            raise ValueError(
                f"{name}: config.json does not say how many experts a token goes to: --top-k"
            )
    return layers


def parts_of_ranks(layers: Layers, num_ranks: int) -> nn.ModuleList:
    """What the ranks hold that have the fewest experts and the most: the first and the last."""
    for name, module in zip(layers.names, layers, strict=True):
        if isinstance(module, GroupedExperts):
            check_ranks_hold_experts(num_ranks, module.num_experts, f" of {name}")
    experts = (i for i, module in enumerate(layers) if isinstance(module, GroupedExperts))
    plan: dict[str, Kind] = {str(i): "experts" for i in experts}
    ranks = (0, num_ranks - 1)
    return nn.ModuleList(shard(copy.deepcopy(layers), plan, rank, num_ranks) for rank in ranks)


def run(arguments: argparse.Namespace) -> int:
    layers = layers_of(arguments.checkpoint, arguments.top_k)
    if arguments.unfreeze:
        unfreeze(layers, ahead.DTYPES[arguments.unfreeze])
    for layer in layers:
        if isinstance(layer, FP8Linear):
            layer.batch_invariant = arguments.batch_invariant
    parts = parts_of_ranks(layers, num_ranks_of(arguments))
    keep_kernels({})  # a folder that cannot be used is an error before minutes of compiling
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "moefp8: compiled kernels cannot|precompile: this proc")
        done = ahead.precompile(
            parts,
            arguments.max_tokens,
            dtype=ahead.DTYPES[arguments.dtype],
            backward=arguments.backward,
            updating=ahead.DTYPES.get(arguments.updating),
            num_sms=arguments.num_sms,
            num_threads=arguments.num_threads,
        )
    if done.problem:
        raise JitError(done.problem)
    print(
        printable(f"{done.num_kernels} kernels in {done.seconds:.1f} s, in {cache_state().folder}")
    )
    return 0
