"""Describe `logits.cu`: the router's logits on a Hopper GPU, as sums that `top_k.cuh` adds up.

T tokens, E experts, H hidden size.
"""

from pathlib import Path
from typing import NamedTuple

import torch

from ..kernels.common.blocks import ceil_div
from ..kernels.jit import Kernel
from ..kernels.program import Place, Record, Tensor, TensorMap

_SOURCE = Path(__file__).with_name("logits.cu")
_WARPGROUP, _WARP = 128, 32
_CHUNK, _DEPTH, _STAGES, _IN_BOX = 256, 64, 4, 32  # as in logits.cu
_CHUNKS_OF_GROUP = 4  # see logits.cu; results depend on it, and on the chunk
_SWIZZLE_BYTES = 128
MAX_SUMS_BYTES = 1 << 30


class Tile(NamedTuple):
    """The sums that a CTA computes at a time: tokens x experts x chunks of H."""

    tokens: int
    experts: int
    chunks: int

    @property
    def parts_of_group(self) -> int:
        return _CHUNKS_OF_GROUP // self.chunks

    @property
    def ctas_per_sm(self) -> int:
        return 2 if self.experts == 64 else 1

    @property
    def threads(self) -> int:
        return 2 * self.experts + (_WARP if self.experts == 64 else _WARPGROUP)

    @property
    def shared_bytes(self) -> int:
        return _STAGES * (_DEPTH * (4 * self.experts + 2 * self.tokens) + 2 * 8)

    def num_parts(self, hidden_size: int) -> int:
        return ceil_div(ceil_div(hidden_size, _CHUNK), self.chunks)

    def num_items(self, num_tokens: int, num_experts: int, hidden_size: int) -> int:
        tiles = ceil_div(num_tokens, self.tokens) * ceil_div(num_experts, self.experts)
        return tiles * self.num_parts(hidden_size)


TILES = (
    *(Tile(n, 64, 1) for n in (8, 16, 32, 64)),
    *(Tile(n, 128, _CHUNKS_OF_GROUP) for n in (64, 80, 96, 112)),
)


def choose_tile(num_tokens: int, num_experts: int, hidden_size: int, num_sms: int) -> Tile:
    """The tile that is estimated to take the least time.

    The constants come from timing all tiles for 1 to 16384 tokens of four routers on an H100.
    """

    def microseconds(tile: Tile) -> float:
        items_of_sm = ceil_div(tile.num_items(num_tokens, num_experts, hidden_size), num_sms)
        sums = 4 * tile.num_parts(hidden_size) * num_tokens * num_experts / 3e6
        if tile.experts == 64:
            return sums + items_of_sm * (1.15 + 0.0175 * tile.tokens)
        return sums + items_of_sm * (7.9 + 0.088 * tile.tokens) + 3.5

    return min(TILES, key=microseconds)


def takes(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel can multiply them, or copies of them that TMA can address."""
    return (
        x.dtype == torch.bfloat16
        and weight.dtype == torch.float32
        and x.ndim == weight.ndim == 2
        and x.shape[1] == weight.shape[1] > 0
    )


def most_tokens(num_experts: int, hidden_size: int) -> int:
    """The most tokens whose sums take up to `MAX_SUMS_BYTES` with any tile; at least 1."""
    return MAX_SUMS_BYTES // (4 * num_experts * ceil_div(hidden_size, _CHUNK)) or 1


ARCHITECTURES = ("sm_90a",)  # it multiplies by WGMMA


def kernel_of(tile: Tile) -> Kernel:
    return Kernel(_SOURCE, f"logits_kernel<{tile.tokens}, {tile.experts}, {tile.chunks}>")


class Sums(NamedTuple):
    """Logits [T, E] as partial sums, fp32 [parts, T, E]; the parts of a group are added up first.

    shape: (T, E).
    """

    place: Place
    shape: tuple[int, int]
    num_parts: int
    parts_of_group: int


def describe_logits(r: Record, x: Tensor, weight: Tensor) -> Sums:
    """One step that writes sums into a buffer. It reads the weight early.

    x: [T, H] and weight [E, H] that the kernel takes and TMA can address; T, H, E at least 1.
    """
    (num_tokens, hidden_size), num_experts = x.shape, weight.shape[0]
    num_sms = r.target.num_sms
    tile = choose_tile(num_tokens, num_experts, hidden_size, num_sms)

    def largest(most: int) -> int:
        others = range(num_tokens + 1, most + 1)
        sizes = (num_experts, hidden_size, num_sms)
        return next((m for m in others if choose_tile(m, *sizes) != tile), most + 1) - 1

    r.hold(num_tokens, largest)
    num_parts = tile.num_parts(hidden_size)
    num_items = tile.num_items(num_tokens, num_experts, hidden_size)
    sums = r.buffer("sums", 4 * num_parts * num_tokens * num_experts)
    r.step(
        kernel_of(tile),
        min(num_items, num_sms * tile.ctas_per_sm),
        tile.threads,
        {
            "sums": sums,
            "num_tokens": num_tokens,
            "num_experts": num_experts,
            "num_chunks": ceil_div(hidden_size, _CHUNK),
            "num_parts": num_parts,
            "expert_tiles": ceil_div(num_experts, tile.experts),
            "num_items": num_items,
        },
        maps=(
            (TensorMap(x, (_DEPTH, tile.tokens), _SWIZZLE_BYTES),),
            (TensorMap(weight, (_IN_BOX, tile.experts), _SWIZZLE_BYTES),),
        ),
        early=(weight.place,),
        programmatic=False,
        shared_bytes=tile.shared_bytes,
    )
    return Sums(sums, (num_tokens, num_experts), num_parts, tile.parts_of_group)
