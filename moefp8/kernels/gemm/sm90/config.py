"""The config of a kernel of `gemm.cu`, and the sizes that follow from it."""

from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from math import gcd
from typing import Any

from ...common.activation import SWIGLU
from ...common.blocks import BLOCK, ceil_div, round_up, round_up_to_tma
from ..interface import GroupLayout

MAX_SHARED_BYTES = 227 * 1024  # the most that a CTA can have
_SHARED_BYTES_PER_SM = 228 * 1024  # the system takes 1 KiB of them for each CTA

_TILE_SLOTS = 4  # kTileSlots in schedule.cuh
_MOST_WAVES = 20  # of tiles; with fewer, the last wave is halved


class kernel_field(cached_property[Any]):
    """A property that is also a field of the kernel's config, under the same name."""


@dataclass(frozen=True)
class GemmConfig:
    """One variant of `gemm.cu`. M, N, "rows" and "columns" are WGMMA's, as config.cuh says.

    The kernel's template argument, `GemmConfig` in config.cuh, has the same fields and says what
    each means; each `kernel_field` follows them, in the same order. What both sides derive from the
    fields is derived here alone.
    """

    wgmma_m: int
    wgmma_n: int
    stages: int
    parts: int = 1
    k_blocks_per_stage: int = 1
    multicast: int = 1
    split_k: int = 1
    ctas_per_sm: int = 1
    swap_ab: bool = False
    num_product_buffers: int = 1
    grouped: bool = False
    gate_up: bool = False
    tail: int = 0
    halves_tiles: bool = False
    saves_gate_up: bool = False

    # ---- Warpgroups and clusters ----

    @kernel_field
    def stacked(self) -> bool:
        """Whether a math warpgroup has 64 rows of gate and 64 rows of up."""
        return self.gate_up and self.swap_ab

    @kernel_field
    def row_warpgroups(self) -> int:
        """Math warpgroups without the tail's."""
        return self.wgmma_m // 64 // (self.parts if self.stacked else 1)

    @kernel_field
    def math_warpgroups(self) -> int:
        return self.row_warpgroups + (self.tail > 0)

    @kernel_field
    def threads(self) -> int:
        return (self.math_warpgroups + 1) * 128

    @kernel_field
    def shares_scale_with_peer(self) -> bool:
        """Whether the other CTA of the cluster has the other 64 of 128 outputs with one scale."""
        return self.gate_up and self.outputs < BLOCK

    @kernel_field
    def tiles_per_cluster(self) -> int:
        """Tiles of the same tokens that the CTAs of a cluster compute side by side."""
        return 2 if self.shares_scale_with_peer else self.multicast

    @cached_property
    def cluster(self) -> int:
        """How many CTAs a cluster has."""
        return self.tiles_per_cluster * self.split_k

    # ---- Tiles ----

    @kernel_field
    def tile_tokens(self) -> int:
        """Tokens of a CTA's tile without a tail: the distance between tiles of a group."""
        return self.wgmma_n if self.swap_ab else self.wgmma_m

    @kernel_field
    def most_tokens(self) -> int:
        """Tokens of a CTA's tile: the last one of a group has the tail, too."""
        return self.tile_tokens + self.tail

    @kernel_field
    def tile_weights(self) -> int:
        return self.wgmma_m if self.swap_ab else self.wgmma_n

    @kernel_field
    def outputs(self) -> int:
        """Values that a CTA's tile computes for each token."""
        return self.tile_weights // (2 if self.gate_up else 1)

    @cached_property
    def cta_tile(self) -> tuple[int, int]:
        """(tokens, weights) of the tile of one CTA, without a tail."""
        return self.tile_tokens, self.tile_weights

    @cached_property
    def tile(self) -> tuple[int, int]:
        """(tokens, weights) of the tile of one cluster, without a tail."""
        return self.tile_tokens, self.tile_weights * self.tiles_per_cluster

    def token_tiles(self, tokens: int) -> int:
        """Tiles of a group of `tokens` that begins where a tile may; the last has the tail, too."""
        return ceil_div(max(tokens - self.tail, 1), self.tile_tokens) if tokens else 0

    def weight_tiles(self, n: int) -> int:
        """How many tiles of clusters cover N weights, or if `gate_up` N of gate and N of up."""
        return ceil_div(n, self.outputs * self.tiles_per_cluster)

    # ---- Loads ----

    @cached_property
    def weight_pieces(self) -> list[int]:
        """The weights of a tile: whole blocks, then powers of two; see `TileCoord`."""
        if self.gate_up:
            return [self.outputs] * 2
        rest = self.tile_weights % BLOCK
        pieces = [self.tile_weights - rest, *(1 << i for i in range(6, -1, -1) if rest >> i & 1)]
        return [x for x in pieces if x]

    @kernel_field
    def num_weight_pieces(self) -> int:
        """How many pieces there are; each is one TMA load of a k-block."""
        return len(self.weight_pieces)

    @kernel_field
    def weight_scales(self) -> int:
        """Scales of a tile's weights in a k-block: no piece but the first has more than one."""
        return sum(ceil_div(x, BLOCK) for x in self.weight_pieces)

    @kernel_field
    def begins_anywhere(self) -> bool:
        """Whether a tile may begin at any token.

        If not, it begins at a multiple of 16 bytes in each row of scales, because TMA loads of
        boxes of scales that begin elsewhere are illegal instructions.
        """
        return self.grouped and not self.swap_ab

    @kernel_field
    def num_token_boxes(self) -> int:
        """How many boxes a tile chooses from: 64 tokens, 128, ..., the last with the tail."""
        return self.math_warpgroups if self.begins_anywhere or self.halves_tiles else 1

    def token_boxes(self, m: int) -> list[int]:
        """Tokens in one TMA load, for each box that the kernel may choose where a group ends.

        A box has at most m tokens, since TMA takes long for what is out of bounds. The rest of such
        a tile is what shared memory happens to hold; nothing of it is stored.
        """
        tokens, boxes = self.most_tokens, self.num_token_boxes
        sizes = [min(64 * i, tokens) for i in range(1, boxes + 1)] if boxes > 1 else [tokens]
        return [x // 2 if self.multicast > 1 else min(m, x) for x in sizes]

    @kernel_field
    def token_scales(self) -> int:
        """Scales in one row of their box, which may begin up to three tokens before the tile."""
        return self.most_tokens + (4 if self.begins_anywhere else 0)

    def last_token(self, m: int) -> int:
        """Where the last tile of tokens begins: early enough to be full, see `token_boxes`."""
        last = max(0, m - self.most_tokens)
        return last if self.begins_anywhere else round_up_to_tma(last, 4)

    def stage_bytes(self, token_box: int) -> int:
        """The bytes that TMA writes in one stage: both operands, and the scales of the tokens."""
        operands = (token_box * self.multicast + self.tile_weights) * BLOCK
        return self.k_blocks_per_stage * (operands + self.token_scales * 4)

    # ---- Stores ----

    @kernel_field
    def slice_owners(self) -> int:
        """CTAs that add up a slice each, if CTAs divide K: as many as can have equal slices."""
        groups = self.wgmma_n // 8
        return max(x for x in range(1, self.split_k + 1) if groups % x == 0)

    @kernel_field
    def store_n(self) -> int:
        """Columns that are stored at once: those of a part, or of the slice of an owner."""
        return self.wgmma_n // (1 if self.stacked else self.parts * self.slice_owners)

    @kernel_field
    def store_box_weights(self) -> int:
        """Weights in one TMA store of d."""
        if self.gate_up:
            return self.outputs
        return 64 if self.swap_ab else gcd(self.store_n, 64)

    @kernel_field
    def store_box_tokens(self) -> int:
        return self.store_n if self.swap_ab else 64

    @cached_property
    def store_box(self) -> tuple[int, int]:
        """(weights, tokens)"""
        return self.store_box_weights, self.store_box_tokens

    # ---- Resources ----

    @cached_property
    def accumulators(self) -> int:
        """FP32 registers of a thread that hold sums or products."""
        products = self.num_product_buffers * self.k_blocks_per_stage * self.wgmma_n
        if self.stacked:
            return (self.wgmma_n * self.parts + products) // 2
        return self.wgmma_n // 2 + products // self.parts // 2

    @kernel_field
    def shared_bytes(self) -> int:
        """The size of `Shared<C>` in pipeline.cuh; the kernel asserts that they agree."""
        stage = self.stages * self.k_blocks_per_stage
        operands = stage * (self.wgmma_m + self.tail + self.wgmma_n) * BLOCK
        output = (self.row_warpgroups * 64 + self.tail) * self.store_n * 2
        magnitudes = 0
        if self.gate_up:
            output = self.most_tokens * self.outputs
        if self.shares_scale_with_peer:
            columns = self.wgmma_n if self.stacked else self.tail
            rows = 0 if self.stacked else self.wgmma_m
            magnitudes = 2 * (4 * (rows + BLOCK // 16 * columns) + 8 * self.math_warpgroups)
        inbox = self.math_warpgroups * 64 * self.store_n * 4 * (self.split_k - 1)
        scales = self.stages * round_up(self.k_blocks_per_stage * self.token_scales * 4, 128)
        scales += self.stages * round_up(self.k_blocks_per_stage * self.weight_scales * 4, 16)
        tiles = _TILE_SLOTS * (32 + 2 * 8) + 32 if self.grouped else 0
        barriers = (2 * self.stages + 1) * 8
        used = round_up(operands, 1024) + round_up(output + inbox, 128) + scales + tiles
        used = round_up(used + magnitudes, 8) + barriers
        return round_up(used, 1024)

    # ---- The kernel ----

    @cached_property
    def interleaving(self) -> str:
        """Which FFMAs of a promotion yield, see `jit.interleave`; empty: as the compiler says.

        They yield to other math warpgroups of the SM. Of the patterns that
        `benchmarks.interleaving` searches, these are the best for dense GEMMs and for layers.
        """
        if self.math_warpgroups == 1:
            return ""
        return "01111" if self.grouped else "01111111"

    def kernel_name(
        self,
        bias: str,
        group_layout: GroupLayout | None = None,
        activation: str = SWIGLU.enumerator,
    ) -> str:
        """bias: the name of a value of `Bias` in config.cuh. activation: an enumerator."""
        layout = group_layout.value if group_layout else "kDense"
        members = {x.name: getattr(self, x.name) for x in fields(self)}
        members |= {"bias": f"Bias::{bias}", "group_layout": f"GroupLayout::{layout}"}
        if self.gate_up:
            members["activation"] = activation
        derived = [name for name, x in vars(GemmConfig).items() if type(x) is kernel_field]
        members |= {name: getattr(self, name) for name in derived}
        initializers = (f".{name} = {in_cpp(value)}" for name, value in members.items())
        return f"gemm_kernel<GemmConfig{{{', '.join(initializers)}}}>"


def in_cpp(value: bool | int | str) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@lru_cache(4096)
def with_most_stages(config: GemmConfig) -> GemmConfig:
    """`config` with as many stages as shared memory holds, 16 at most; 0 if it holds none."""
    budget = min(MAX_SHARED_BYTES, _SHARED_BYTES_PER_SM // config.ctas_per_sm - 1024)
    fitting = (replace(config, stages=stages) for stages in range(16, 0, -1))
    return next((c for c in fitting if c.shared_bytes <= budget), replace(config, stages=0))


def is_possible(config: GemmConfig, k: int) -> bool:
    """Whether a dense GEMM may have this config.

    It may if there are kernels for such a combination of fields, registers and shared memory
    suffice, and all CTAs that divide K get some of it.
    """
    if config.multicast > 1 or (config.split_k > 1 and config.parts > 1):
        return False
    if config.num_product_buffers > 1 and config.swap_ab:
        return False
    if config.halves_tiles and (
        config.parts != 2
        or config.row_warpgroups != 2
        or config.k_blocks_per_stage > 1
        or config.ctas_per_sm > 1
        or config.swap_ab
    ):
        return False
    registers = {1: 248, 2: 232, 3: 160}.get(config.math_warpgroups, 0)
    if config.ctas_per_sm > 1:
        registers = 65536 // (config.ctas_per_sm * config.threads) // 8 * 8
    token_scales = config.k_blocks_per_stage * config.wgmma_n // 16 if config.swap_ab else 0
    if config.accumulators + token_scales + 32 > registers or config.stages < 2:
        return False
    if config.cluster > 8:  # what every GPU of compute capability 9 can run
        return False
    return config.split_k == 1 or config.split_k * config.k_blocks_per_stage <= ceil_div(k, BLOCK)


def usable_ctas(config: GemmConfig, num_sms: int, all_sms: bool) -> int:
    """How many CTAs run at once. A cluster stays within one GPC: larger ones leave SMs idle.

    Where some SMs of the GPU have to stay idle, each CTA may get an SM of its own.
    """
    if config.cluster > 2:
        num_sms = num_sms * 7 // 8
    ctas_per_sm = config.ctas_per_sm if all_sms else 1
    return num_sms * ctas_per_sm // config.cluster * config.cluster


def num_whole_tiles(config: GemmConfig, num_tiles: int, clusters: int) -> int:
    """How many of a dense GEMM's tiles are not halved, if `clusters` walk over them.

    Tiles of the last wave are halved if the wave has room for all halves. It takes less time then,
    which counts for little after many waves.
    """
    waves, rest = divmod(num_tiles, clusters)
    is_halved = config.halves_tiles and 0 < waves < _MOST_WAVES and 2 * rest <= clusters
    return num_tiles - rest if is_halved else num_tiles
