"""How a GEMM that sums over tokens is cut into tiles: a pure function of its shape."""

from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import lru_cache

import torch

from ....common.blocks import BLOCK, round_up
from ..config import MAX_SHARED_BYTES, in_cpp


class Output(str, Enum):
    """How a result is stored in d: `Output` of config.cuh."""

    BFLOAT16 = "kBFloat16"
    FLOAT = "kFloat"
    ACCUMULATE = "kAccumulate"

    @classmethod
    def of(cls, dtype: torch.dtype, accumulates: bool) -> "Output":
        """For a d of that dtype, bf16 or fp32."""
        if accumulates:
            return cls.ACCUMULATE
        return cls.BFLOAT16 if dtype == torch.bfloat16 else cls.FLOAT


@dataclass(frozen=True)
class KGroupedConfig:
    """One variant of `k_grouped.cu`; `KGroupedConfig` in config.cuh has the same fields.

    warpgroups: how many multiply.
    parts: WGMMAs of 64 rows that each warpgroup has of a tile, one below the other.
    tile_n: columns of a tile.
    stages: how many the pipeline has.
    multicast: 2: two CTAs of a cluster have the same rows, and load half of them each; else 1.
    blocks_b: b has a scale for each 128 features, not for each feature.
    stages_output: tiles leave through shared memory by TMA, which d must allow; else from
        registers.
    output: how a result is stored in d.
    """

    warpgroups: int
    parts: int
    tile_n: int
    stages: int = 0
    multicast: int = 1
    blocks_b: bool = False
    stages_output: bool = True
    output: Output = Output.BFLOAT16

    @property
    def tile_m(self) -> int:
        return 64 * self.warpgroups * self.parts

    @property
    def threads(self) -> int:
        return (self.warpgroups + 1) * 128

    @property
    def scales_b(self) -> int:
        """Scales of b in one box; TMA moves 16 bytes at least."""
        return 4 if self.blocks_b else self.tile_n

    @property
    def shared_bytes(self) -> int:
        """The size of `Shared<C>` in pipeline.cuh; the kernel asserts that it suffices."""
        operands = self.stages * (self.tile_m + self.tile_n) * BLOCK
        scales = self.stages * 4 * (round_up(self.tile_m, 32) + round_up(self.scales_b, 32))
        output = self.warpgroups * self.output_buffers * 64 * self.tile_n * self.element_bytes
        return round_up(operands + output + scales + 16 * self.stages, 1024)

    @property
    def element_bytes(self) -> int:
        return 2 if self.output == Output.BFLOAT16 else 4

    @property
    def output_buffers(self) -> int:
        """How many parts of a tile a warpgroup may be storing at a time."""
        if not self.stages_output:
            return 0
        return self.parts if self.output == Output.BFLOAT16 else 1

    def kernel_name(self) -> str:
        members = {x.name: getattr(self, x.name) for x in fields(self)}
        members |= {"output": f"Output::{self.output.value}", "shared_bytes": self.shared_bytes}
        initializers = ", ".join(f".{name} = {in_cpp(value)}" for name, value in members.items())
        return f"k_grouped_kernel<KGroupedConfig{{{initializers}}}>"


def with_most_stages(config: KGroupedConfig) -> KGroupedConfig:
    """`config` with as many stages as shared memory holds, 8 at most."""
    fitting = (replace(config, stages=stages) for stages in range(8, 0, -1))
    return next(c for c in fitting if c.shared_bytes <= MAX_SHARED_BYTES)


@lru_cache(4096)
def choose_config(
    m: int, n: int, output: Output, *, blocks_b: bool, d_fits: bool
) -> KGroupedConfig:
    """The config for d [E, M, N].

    blocks_b: whether b has a scale for 128x128 blocks.
    d_fits: whether TMA can address d, so that tiles leave through shared memory.
    """
    are_pairs = blocks_b and n > 128
    config = KGroupedConfig(
        warpgroups=2,
        parts=2,
        tile_n=128,
        multicast=2 if are_pairs else 1,
        blocks_b=blocks_b,
        stages_output=d_fits,
        output=output,
    )
    return with_most_stages(config)
