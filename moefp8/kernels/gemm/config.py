"""What varies between the kernels of `gemm.cu`, and what follows from it."""

from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from math import gcd

from ..common.blocks import BLOCK, ceil_div, round_up, round_up_to_tma

MAX_SHARED_BYTES = 227 * 1024  # of one CTA
_SHARED_BYTES_PER_SM = 228 * 1024  # of which each CTA also takes 1 KiB for the system

_TILE_SLOTS = 4  # kTileSlots in tile.cuh


class GroupLayout(str, Enum):
    """What tells which group a token is of: the grouped ones of `GroupLayout` in tile.cuh."""

    OFFSETS = "kOffsets"
    MASKED = "kMasked"
    ROWS = "kRows"


@dataclass(frozen=True)
class GemmConfig:
    """What varies between the kernels of `gemm.cu`; "rows" and "columns" are WGMMA's.

    rows, cols: the tile of one CTA, 64 rows for each math warpgroup but that of a tail.
    stages: how many are in flight.
    parts: WGMMAs beside each other that cover `cols`.
    k_blocks_per_stage: k-blocks of a stage.
    multicast: neighbouring CTAs of a cluster that share one operand.
    multicast_rows: whether that is the row operand.
    split_k: CTAs of a cluster that divide K among them.
    num_product_buffers: sets of accumulators of a warpgroup; with two, it promotes one while the
        tensor cores compute into the other.
    ctas_per_sm: how many must fit on one SM.
    swap_ab: whether the rows are weights (and the columns tokens) or the reverse.
    grouped: whether each group of tokens has weights of its own.
    gate_up: whether half of a tile's weights are gate's and half up's, for the same outputs, and
        SwiGLU and quantization follow. If weights are rows, parts are below each other.
    tail: tokens behind the rows of a tile, which are columns of a math warpgroup of their own.
    """

    wgmma_m: int
    wgmma_n: int
    stages: int
    parts: int = 1
    k_blocks_per_stage: int = 1
    multicast: int = 1
    multicast_rows: bool = False
    split_k: int = 1
    ctas_per_sm: int = 1
    swap_ab: bool = False
    num_product_buffers: int = 1
    grouped: bool = False
    gate_up: bool = False
    tail: int = 0

    @property
    def stacked(self) -> bool:
        """Whether each math warpgroup has rows of gate and rows of up."""
        return self.gate_up and self.swap_ab

    @property
    def outputs(self) -> int:
        """Of a token, that a CTA computes at a time."""
        return self.cta_tile[1] // (2 if self.gate_up else 1)

    @property
    def shares_scale_with_peer(self) -> bool:
        """Whether the CTA beside it has the other half of the outputs that have one scale."""
        return self.gate_up and self.outputs < BLOCK

    @property
    def cluster(self) -> int:
        return max(self.multicast, 2 if self.shares_scale_with_peer else 1) * self.split_k

    @property
    def math_groups(self) -> int:
        return self.row_groups + (self.tail > 0)

    @property
    def row_groups(self) -> int:
        """Math warpgroups that have rows."""
        return self.wgmma_m // 64 // (self.parts if self.stacked else 1)

    @property
    def threads(self) -> int:
        return (self.math_groups + 1) * 128

    @property
    def cta_tile(self) -> tuple[int, int]:
        """(tokens, weights) of the tile of one CTA, without a tail."""
        return (self.wgmma_n, self.wgmma_m) if self.swap_ab else (self.wgmma_m, self.wgmma_n)

    @property
    def most_tokens(self) -> int:
        """Of the tile of one CTA: a tail is behind the last one of a group."""
        return self.cta_tile[0] + self.tail

    @property
    def tile(self) -> tuple[int, int]:
        """(tokens, weights) of the tile of one cluster, without a tail."""
        if self.shares_scale_with_peer:
            return self.cta_tile[0], 2 * self.cta_tile[1]
        rows = self.wgmma_m * (1 if self.multicast_rows else self.multicast)
        cols = self.wgmma_n * (self.multicast if self.multicast_rows else 1)
        return (cols, rows) if self.swap_ab else (rows, cols)

    def token_tiles(self, tokens: int) -> int:
        """Of a group of `tokens` that begins where a tile may: the last one takes the tail too."""
        return ceil_div(max(tokens - self.tail, 1), self.tile[0]) if tokens else 0

    def weight_tiles(self, n: int) -> int:
        """Of clusters, beside each other, for N weights; of gate and up, N of each."""
        return ceil_div(n, self.outputs * self.tile[1] // self.cta_tile[1])

    @property
    def store_n(self) -> int:
        """Columns of one output slice: of a part, or of one of the CTAs that divided K."""
        if self.split_k == 1:
            return self.wgmma_n // (1 if self.stacked else self.parts)
        groups = self.wgmma_n // 8
        owners = max(x for x in range(1, self.split_k + 1) if groups % x == 0)
        return self.wgmma_n // owners

    @property
    def multicasts_tokens(self) -> bool:
        return self.multicast > 1 and self.multicast_rows != self.swap_ab

    @property
    def weight_pieces(self) -> list[int]:
        """Of a tile: whole blocks, then powers of two; see `TileCoord` in tile.cuh."""
        if self.gate_up:
            return [self.outputs] * 2
        rest = self.cta_tile[1] % BLOCK
        pieces = [self.cta_tile[1] - rest, *(1 << i for i in range(6, -1, -1) if rest >> i & 1)]
        return [x for x in pieces if x]

    @property
    def weight_scales(self) -> int:
        """Of a tile in a k-block: no piece but the first has more than one."""
        return sum(ceil_div(x, BLOCK) for x in self.weight_pieces)

    def token_boxes(self, m: int) -> list[int]:
        """Tokens in one TMA load: the tile's, or a slice of those that CTAs share.

        No more than the m that there are: what is out of bounds takes TMA long. The rest of such a
        tile is what shared memory happens to hold; nothing of it is stored. Of a group that ends
        in the tile only as many times 64 are loaded as there are, or all, so there are several.
        """
        tokens = self.most_tokens
        step = tokens if self.swap_ab or not self.grouped else 64
        boxes = [min(box, tokens) for box in range(step, round_up(tokens, step) + 1, step)]
        return [box // self.multicast if self.multicasts_tokens else min(m, box) for box in boxes]

    @property
    def weight_boxes(self) -> list[int]:
        """Weights in each TMA load of a k-block: a piece, or a slice of it if CTAs share them."""
        slices = 1 if self.multicasts_tokens else self.multicast
        return [x // slices for x in self.weight_pieces]

    @property
    def begins_anywhere(self) -> bool:
        """Whether a tile may begin at any token.

        If not, at a multiple of 16 bytes in each row of scales: where its box of them begins
        elsewhere, TMA is an illegal instruction.
        """
        return self.grouped and not self.swap_ab

    @property
    def token_scales(self) -> int:
        """In one row of that box, which begins up to three tokens before the tile."""
        return self.most_tokens + (4 if self.begins_anywhere else 0)

    def last_token(self, m: int) -> int:
        """Where the last tile of tokens begins: early enough to be full, see `token_boxes`."""
        last = max(0, m - self.most_tokens)
        return last if self.begins_anywhere else round_up_to_tma(last, 4)

    def stage_bytes(self, token_box: int) -> int:
        """What TMA writes in one stage: both operands, and the scales of the tokens."""
        _tokens, weights = self.cta_tile
        loaded = token_box * (self.multicast if self.multicasts_tokens else 1)
        return self.k_blocks_per_stage * ((loaded + weights) * BLOCK + self.token_scales * 4)

    @property
    def store_box(self) -> tuple[int, int]:
        """(weights, tokens) of D in one TMA store."""
        if self.gate_up:
            return self.outputs, 64
        if self.swap_ab:
            return 64, self.store_n
        return gcd(self.store_n, 64), 64

    @property
    def accumulators(self) -> int:
        """FP32 registers of a thread that hold sums."""
        if self.stacked:
            return (
                self.wgmma_n
                // 2
                * (self.parts + self.num_product_buffers * self.k_blocks_per_stage)
            )
        return (
            self.wgmma_n // 2
            + self.num_product_buffers * self.k_blocks_per_stage * self.wgmma_n // self.parts // 2
        )

    @property
    def shared_bytes(self) -> int:
        """As `sizeof(Shared<Config>)`, which the kernel asserts."""
        operands = (
            self.stages
            * self.k_blocks_per_stage
            * (self.wgmma_m + self.tail + self.wgmma_n)
            * BLOCK
        )
        output = (self.row_groups * 64 + self.tail) * self.store_n * 2
        magnitudes = 0
        if self.gate_up:
            output = self.most_tokens * self.outputs
            in_turn = 2 if self.shares_scale_with_peer else 1
            if self.stacked:
                magnitudes = in_turn * BLOCK // 16 * self.wgmma_n * 4
            elif self.shares_scale_with_peer:
                magnitudes = in_turn * self.wgmma_m * 4
            magnitudes += in_turn * BLOCK // 16 * self.tail * 4
            if self.shares_scale_with_peer:
                magnitudes += in_turn * self.math_groups * 8
        inbox = self.math_groups * 64 * self.store_n * 4 * (self.split_k - 1)
        scales = self.stages * round_up(self.k_blocks_per_stage * self.token_scales * 4, 128)
        scales += self.stages * round_up(self.k_blocks_per_stage * self.weight_scales * 4, 16)
        tiles = _TILE_SLOTS * (32 + 2 * 8) + 32 if self.grouped else 0
        barriers = (2 * self.stages + 1) * 8
        used = round_up(operands, 1024) + round_up(output + inbox, 128) + scales + tiles
        used = round_up(used + magnitudes, 8) + barriers
        return round_up(used, 1024)

    @property
    def interleaving(self) -> str:
        """Which FFMAs of a promotion yield, see `jit.interleave`; empty: as the compiler says.

        They yield to other math warpgroups of the SM. Of the patterns that
        `benchmarks.interleaving` searches, these are the best for dense GEMMs and for layers.
        """
        if self.math_groups == 1:
            return ""
        return "01111" if self.grouped else "01111111"

    def kernel_name(self, bias: str, group_layout: GroupLayout | None = None) -> str:
        arguments = (
            *(
                self.wgmma_m,
                self.wgmma_n,
                self.parts,
                self.k_blocks_per_stage,
                self.stages,
                self.multicast,
            ),
            *(
                self.multicast_rows,
                self.split_k,
                self.num_product_buffers,
                self.ctas_per_sm,
                self.swap_ab,
            ),
            *(f"Bias::{bias}", f"GroupLayout::{group_layout.value if group_layout else 'kDense'}"),
            *(self.gate_up, self.tail, self.shared_bytes),
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
    """Whether registers and shared memory suffice, and all CTAs that divide K get some of it."""
    registers = {1: 248, 2: 232, 3: 160, 4: 112}.get(config.math_groups, 0)
    if config.ctas_per_sm > 1:
        registers = 65536 // (config.ctas_per_sm * config.threads) // 8 * 8
    token_scales = config.k_blocks_per_stage * config.wgmma_n // 16 if config.swap_ab else 0
    if config.accumulators + token_scales + 32 > registers or config.stages < 2:
        return False
    slices = [config.cta_tile[0]] if config.multicasts_tokens else config.weight_pieces
    if any(
        size % (8 * config.multicast) for size in slices
    ):  # 8 rows are what the swizzle is made of
        return False
    if config.cluster > 8:  # what every GPU of compute capability 9 can run
        return False
    return config.split_k == 1 or config.split_k * config.k_blocks_per_stage <= ceil_div(k, BLOCK)


def usable_ctas(config: GemmConfig, num_sms: int, all_sms: bool) -> int:
    """How many CTAs run at once. A cluster lies within one GPC: larger ones leave SMs idle.

    On a GPU of which other SMs are to stay idle, each CTA may land on an SM of its own.
    """
    if config.cluster > 2:
        num_sms = num_sms * 7 // 8
    ctas_per_sm = config.ctas_per_sm if all_sms else 1
    return num_sms * ctas_per_sm // config.cluster * config.cluster
