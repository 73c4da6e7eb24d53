"""How a dense GEMM is cut into tiles: a pure function of its shape and the number of SMs.

`choose_config` estimates the time of each configuration of a short list and takes the best. The
list and the constants of the estimate come from timing many more configurations on an H200, for 14
shapes of weights and M = 1 to 4096; `python -m benchmarks.gemm_configs` repeats that, and says how
far the choice is from the best of all.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import gcd

from .blocks import BLOCK, ceil_div, round_up

MAX_SHARED_BYTES = 227 * 1024  # of one CTA
_SHARED_BYTES_PER_SM = 228 * 1024  # of which each CTA also takes 1 KiB for the system


@dataclass(frozen=True)
class GemmConfig:
    """What varies between the kernels of `gemm.cu`; "rows" and "columns" are WGMMA's.

    rows, cols: the tile of one CTA, 64 rows for each math warpgroup.
    stages: how many are in flight.
    parts: WGMMAs beside each other that cover `cols`.
    depth: k-blocks of a stage.
    share: neighbouring CTAs of a cluster that share one operand.
    share_rows: whether that is the row operand.
    split: CTAs of a cluster that divide K among them.
    ctas_per_sm: how many must fit on one SM.
    weights_are_rows: whether the rows are weights (and the columns tokens) or the reverse.
    """

    rows: int
    cols: int
    stages: int
    parts: int = 1
    depth: int = 1
    share: int = 1
    share_rows: bool = False
    split: int = 1
    ctas_per_sm: int = 1
    weights_are_rows: bool = False

    @property
    def cluster(self) -> int:
        return self.share * self.split

    @property
    def math_groups(self) -> int:
        return self.rows // 64

    @property
    def threads(self) -> int:
        return (self.math_groups + 1) * 128

    @property
    def tile(self) -> tuple[int, int]:
        """(tokens, weights) of the tile of one cluster."""
        rows = self.rows * (1 if self.share_rows else self.share)
        cols = self.cols * (self.share if self.share_rows else 1)
        return (cols, rows) if self.weights_are_rows else (rows, cols)

    @property
    def store_cols(self) -> int:
        """Columns of one output slice: of a part, or of one of the CTAs that divided K."""
        if self.split == 1:
            return self.cols // self.parts
        groups = self.cols // 8
        owners = max(x for x in range(1, self.split + 1) if groups % x == 0)
        return self.cols // owners

    @property
    def row_box(self) -> int:
        return self.rows // (self.share if self.share_rows else 1)

    @property
    def col_box(self) -> int:
        return self.cols // (1 if self.share_rows else self.share)

    @property
    def store_box(self) -> tuple[int, int]:
        """(weights, tokens) of D in one TMA store."""
        if self.weights_are_rows:
            return 64, self.store_cols
        return gcd(self.store_cols, 64), 64

    @property
    def accumulators(self) -> int:
        """FP32 registers of a thread that hold sums."""
        return self.cols // 2 + self.depth * self.cols // self.parts // 2

    @property
    def shared_bytes(self) -> int:
        """As `sizeof(Shared<Config>)`, which the kernel asserts."""
        weights, tokens = (
            (self.rows, self.cols) if self.weights_are_rows else (self.cols, self.rows)
        )
        weight_blocks = ceil_div(BLOCK - gcd(weights, BLOCK) + weights, BLOCK)
        operands = self.stages * self.depth * (self.rows + self.cols) * BLOCK
        output = self.math_groups * 64 * self.store_cols * 2
        scales = self.stages * round_up(self.depth * tokens * 4, 128)
        scales += self.stages * round_up(self.depth * weight_blocks * 4, 16)
        barriers = (2 * self.stages + 1) * 8
        return round_up(round_up(operands, 1024) + round_up(output, 128) + scales + barriers, 1024)

    def kernel_name(self, bias: str) -> str:
        numbers = (self.rows, self.cols, self.parts, self.depth, self.stages, self.share)
        arguments = (
            *(*numbers, self.share_rows, self.split, self.ctas_per_sm, self.weights_are_rows),
            *(f"Bias::{bias}", self.shared_bytes),
        )
        template = ", ".join(str(x).lower() if isinstance(x, bool) else str(x) for x in arguments)
        return f"gemm_kernel<Config<{template}>>"


@lru_cache(4096)
def with_most_stages(config: GemmConfig) -> GemmConfig:
    """`config` with as many stages as shared memory holds, 16 at most; 0 if it holds none."""
    budget = min(MAX_SHARED_BYTES, _SHARED_BYTES_PER_SM // config.ctas_per_sm - 1024)
    fitting = (replace(config, stages=stages) for stages in range(16, 0, -1))
    return next((c for c in fitting if c.shared_bytes <= budget), replace(config, stages=0))


def is_possible(config: GemmConfig, k: int) -> bool:
    """Whether registers and shared memory suffice, and every CTA that divides K gets some of it."""
    registers = {1: 248, 2: 232, 3: 160}[config.math_groups]
    if config.ctas_per_sm > 1:
        registers = 65536 // (config.ctas_per_sm * config.threads) // 8 * 8
    token_scales = config.depth * config.cols // 16 if config.weights_are_rows else 0
    if config.accumulators + token_scales + 32 > registers or config.stages < 2:
        return False
    if config.cluster > 8:  # what every GPU of compute capability 9 can run
        return False
    # Partial sums meet in the shared memory of the stages; see `reduce` in gemm.cu.
    inbox = config.split * config.math_groups * 64 * config.store_cols * 4
    stages = config.stages * config.depth * (config.rows + config.cols) * BLOCK
    return config.split == 1 or (
        inbox <= stages and config.split * config.depth <= ceil_div(k, BLOCK)
    )


def _candidates(m: int, n: int, k: int) -> Iterator[GemmConfig]:
    """What has been the best for some shape, or near it. `stages` is left open."""
    splits = (1, 2, 3, 4)
    if m <= 32:  # tokens are few: they are the columns, which come in eights
        cols = round_up(m, 8)
        for split in splits:
            yield GemmConfig(
                64, cols, 0, depth=2, split=split, ctas_per_sm=2, weights_are_rows=True
            )
        for ctas in (4, 3) if k <= 512 else (3,):  # of equal estimates the first wins
            yield GemmConfig(128, cols, 0, ctas_per_sm=ctas, weights_are_rows=True)
    elif m <= 64:
        for cols, ctas in ((32, 2), (64, 2), (64, 1), (96, 1)):
            for split in splits:
                yield GemmConfig(64, cols, 0, depth=2, split=split, ctas_per_sm=ctas)
    if m <= 64:
        if n >= 12288:
            yield GemmConfig(64, 96, 0, share=4, share_rows=True, ctas_per_sm=2)
        return
    if m <= 96:
        for split in (1, 2):
            yield GemmConfig(64, round_up(m, 8), 0, depth=2, split=split, weights_are_rows=True)
    for cols in (32, 64) if m > 96 else (32,):
        for split in splits:
            yield GemmConfig(128, cols, 0, depth=2, split=split)
    for cols in (96, 128, 160, 192, 256) if m > 128 else (96, 128, 160, 192):
        parts = 2 if cols > 192 else 1
        for split in (1, 2) if m <= 512 else (1,):
            yield GemmConfig(128, cols, 0, parts=parts, split=split)
        if cols >= 192 and m >= 1024:
            yield GemmConfig(128, cols, 0, parts=parts, share=2)
    if m > 256:
        yield GemmConfig(192, 128, 0)
        yield GemmConfig(192, 128, 0, share=2)


def _usable_ctas(config: GemmConfig, num_sms: int, all_sms: bool) -> int:
    """How many CTAs run at once. A cluster lies within one GPC: larger ones leave SMs idle.

    On a GPU of which other SMs are to stay idle, each CTA may land on an SM of its own.
    """
    if config.cluster > 2:
        num_sms = num_sms * 7 // 8
    ctas_per_sm = config.ctas_per_sm if all_sms else 1
    return num_sms * ctas_per_sm // config.cluster * config.cluster


def estimate_us(
    config: GemmConfig, m: int, n: int, k: int, num_sms: int, all_sms: bool = True
) -> float:
    """An estimate of the kernel's time on an H200; infinite if too few CTAs can run at once."""
    tokens, weights = config.tile
    num_tiles = ceil_div(m, tokens) * ceil_div(n, weights)
    num_ctas = num_tiles * config.cluster
    at_once = _usable_ctas(config, num_sms, all_sms)
    if at_once < (num_ctas if config.split > 1 else config.cluster):
        return float("inf")
    waves = ceil_div(num_ctas, at_once)
    num_stages = ceil_div(ceil_div(ceil_div(k, BLOCK), config.depth), config.split)
    # Cycles of a stage: its products on the tensor cores of the SM, which all CTAs there share, or
    # one warpgroup's products and what it does between them.
    area, on_sm = config.rows * config.cols, min(config.ctas_per_sm, ceil_div(num_ctas, num_sms))
    products = on_sm * area * config.depth / 32 * 1.09
    latency = 2 * config.cols * config.depth + 125 + 163 * config.parts
    tile_cycles = num_stages * max(products, latency) + 313 + 2.8 * config.cols
    tile_cycles += 124 * config.math_groups
    compute = waves * tile_cycles / 1600
    from_l2 = num_ctas * num_stages * config.depth * BLOCK * (config.row_box + config.col_box)
    memory = max((n * k + m * k + 2 * m * n) / 3.95e6, from_l2 / 16.6e6)
    result = 2.7 + max(compute, memory) + 0.17 * min(compute, memory)
    if config.split > 1:
        result += 0.07 + 0.11 * config.split + 2.15e-4 * area * (1 - 1 / config.split)
    return result + (0.5 if config.share > 1 else 0.0)


@lru_cache(16384)
def choose_config(m: int, n: int, k: int, num_sms: int, all_sms: bool = True) -> GemmConfig:
    """The configuration for d [M, N] with `num_sms` SMs; m, n, k and num_sms are at least 1.

    all_sms: whether the GPU has no more of them.
    """
    possible = [c for c in map(with_most_stages, _candidates(m, n, k)) if is_possible(c, k)]
    return min(possible, key=lambda config: estimate_us(config, m, n, k, num_sms, all_sms))
