"""Configurations of every family of GEMMs, and shapes and tokens that reach all of their code.

The module imports no more than `tests.kernels.sanitizer` may need.
"""

from functools import partial

from moefp8.kernels.gemm.sm90.config import GemmConfig
from tests.kernels.gemm.cases import filled

FAMILIES = {
    "tokens are rows": filled(128, 128),
    "three math groups": filled(192, 112),
    "uneven columns": filled(128, 176),
    "two parts": filled(128, 256, parts=2),
    "two parts, halves": filled(128, 256, parts=2, halves_tiles=True),
    "two parts, three pieces, halves": filled(128, 224, parts=2, halves_tiles=True),
    "split": filled(128, 192, split_k=3),
    "two CTAs on an SM": filled(64, 64, ctas_per_sm=2),
    "one math group, deep": filled(64, 24, k_blocks_per_stage=2),
    "one math group, deep and split": filled(64, 32, k_blocks_per_stage=4, split_k=2),
    "two buffers": filled(128, 128, num_product_buffers=2),
    "two buffers, parts of a stage": filled(128, 192, parts=2, num_product_buffers=2),
    "two buffers, parts of a stage, halves": filled(
        128, 192, parts=2, num_product_buffers=2, halves_tiles=True
    ),
    "two buffers, deep": filled(64, 48, k_blocks_per_stage=2, num_product_buffers=2),
    "two buffers, split": filled(128, 64, split_k=2, num_product_buffers=2),
    "two buffers, narrow": filled(128, 32, k_blocks_per_stage=2, num_product_buffers=2),
    "two buffers, two stages": GemmConfig(64, 64, 2, ctas_per_sm=2, num_product_buffers=2),
    "four pieces": filled(128, 120),
    "three pieces, two buffers": filled(128, 112, num_product_buffers=2),
    "weights are rows": filled(64, 8, ctas_per_sm=2, swap_ab=True),
    "weights are rows, split": filled(64, 16, split_k=4, ctas_per_sm=2, swap_ab=True),
    "weights are rows, two math groups": filled(128, 64, split_k=2, swap_ab=True),
    "weights are rows, two pieces": filled(192, 24, swap_ab=True),
    "weights are rows, deep": filled(
        64, 16, k_blocks_per_stage=4, split_k=4, ctas_per_sm=2, swap_ab=True
    ),
}
_grouped = partial(filled, grouped=True)
GROUPED_FAMILIES = {
    "two buffers": _grouped(128, 128, num_product_buffers=2),
    "three math groups": _grouped(192, 112),
    "two parts": _grouped(128, 256, parts=2),
    "two CTAs on an SM": _grouped(64, 64, ctas_per_sm=2),
    "two buffers, parts of a stage": _grouped(128, 192, parts=2, num_product_buffers=2),
    "multicast": _grouped(128, 128, multicast=2),
    "two buffers, multicast": _grouped(128, 128, multicast=2, num_product_buffers=2),
    "three math groups, multicast": _grouped(192, 128, multicast=2),
    "weights are rows": _grouped(64, 8, swap_ab=True),
    "weights are rows, two math groups": _grouped(128, 64, swap_ab=True),
    "weights are rows, deep": _grouped(64, 16, k_blocks_per_stage=2, swap_ab=True),
    "weights are rows, two pieces": _grouped(192, 24, swap_ab=True),
}
# The tokens of each group, of few groups and of more than a warp has lanes.
COUNTS = (0, 77, 1, 0, 130, 5), (*[0] * 33, 9, 0, 260, 1)


def shapes_of(config: GemmConfig) -> list[tuple[int, int, int]]:
    """(M, N, K) that this configuration may be chosen for, odd in every way.

    In the first a pipeline is not even full; in the second each of its stages is filled again.
    """
    k = 128 * max(3, config.split_k * config.k_blocks_per_stage) + 40
    rounds = 128 * config.k_blocks_per_stage * config.split_k * (config.stages + 2) + 40
    return [(77, 200, k), (130, 331, rounds)]
