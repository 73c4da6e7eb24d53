"""How each level is compiled and launched. M rows of a, N rows of b, K columns of both."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from moefp8.kernels import BLOCK, ceil_div, num_blocks
from moefp8.kernels.jit import Kernel, Launch, current_driver
from moefp8.kernels.program import Codes, Record, Tensor, TensorMap, prepare_launch
from moefp8.kernels.targets import ANY_TARGET
from moefp8.quant import BlockScaled

FOLDER = Path(__file__).parent
SHARED_BYTES = 227 * 1024  # kMaxSharedBytes in parts.cuh
BAND_ROWS = 2048  # of d, whose tiles are walked together: a of these rows stays in the L2 cache
INPUTS = "a", "a_scales", "b", "b_scales", "d"


@dataclass(frozen=True)
class Level:
    """A kernel of this folder.

    kernel_name: its name in C++. tile: rows and columns of d that a CTA computes at a time.
    threads: of a CTA. uses_tma: whether it takes tensor maps of a and b, and of the scales of a and
        of d, too, if `stores_by_tma`. cluster: CTAs that share rows of a, by multicast.
    is_persistent: whether a CTA computes several tiles.
    band_rows: of d, that persistent CTAs walk together. interleaving: as in `jit.Kernel`.
    """

    title: str
    source: str
    kernel_name: str
    tile: tuple[int, int] = (128, 128)
    threads: int = 256
    uses_tma: bool = True
    stores_by_tma: bool = False
    cluster: int = 1
    is_persistent: bool = False
    band_rows: int = BAND_ROWS
    interleaving: str = ""

    @property
    def kernel(self) -> Kernel:
        return Kernel(FOLDER / self.source, self.kernel_name, self.interleaving)

    def maps(self, a: Codes, b: Codes, d: Tensor) -> tuple[tuple[TensorMap, ...], ...]:
        """The tensor maps, in the kernel's order: which box of a tensor TMA moves at once.

        A box of a or b has 128 bytes of each row, which TMA swizzles so that a WGMMA finds them in
        different banks. With a cluster, a CTA loads its share of the rows of a.
        """
        rows, columns = self.tile
        multicast = a.data.batched() if self.is_persistent and not self.stores_by_tma else a.data
        a_map = TensorMap(multicast, (BLOCK, rows // self.cluster), 128)
        b_map = TensorMap(b.data, (BLOCK, columns), 128)
        if not self.uses_tma:
            return ()
        if not self.stores_by_tma:
            return (a_map,), (b_map,)
        scale_map = TensorMap(a.scale_inv.mT, (rows, 1))
        d_map = TensorMap(d, (64, 64), 128, is_written=True)
        return (a_map,), (scale_map,), (b_map,), (d_map,)

    def describe(self, a: Codes, b: Codes, d: Tensor, num_sms: int) -> Record:
        """The launch, without addresses."""
        (m, k), n = a.data.shape, b.data.shape[0]
        rows, columns = ceil_div(m, self.tile[0]), ceil_div(n, self.tile[1] * self.cluster)
        clusters = rows * columns
        if self.is_persistent:
            clusters = min(clusters, num_sms // self.cluster)
        arguments: dict[str, Any] = {
            "a_scales": a.scale_inv.place,
            "b_scales": b.scale_inv.place,
            "d": d.place,
            "a_scale_pitch": a.scale_inv.strides[1],
            "m": m,
            "n": n,
            "num_k_blocks": num_blocks(k),
            "col_tiles": columns,
        }
        if self.uses_tma:
            arguments |= {"row_tiles": rows, "band": max(1, self.band_rows // self.tile[0])}
        else:
            arguments |= {"a": a.data.place, "b": b.data.place}
        record = Record(ANY_TARGET, INPUTS)
        record.step(
            self.kernel,
            clusters * self.cluster,
            self.threads,
            arguments,
            maps=self.maps(a, b, d),
            programmatic=False,
            shared_bytes=SHARED_BYTES if self.uses_tma else 0,
            cluster=self.cluster,
        )
        return record

    def prepare(self, a: BlockScaled, b: BlockScaled, d: torch.Tensor) -> Callable[[], None]:
        """A call that writes d = dequantize(a) @ dequantize(b).T, on the current stream.

        a: e4m3 [M, K], fp32 scales [M, K/128] with M innermost, as `quantize_1x128` gives them.
        b: e4m3 [N, K], fp32 scales [N/128, K/128], contiguous, as `quantize_128x128` gives them.
        d: bf16 [M, N], contiguous.
        Raises ValueError for other operands.
        """
        check(a, b, d)
        device_index = d.get_device()
        codes = Codes.of(*a, "a"), Codes.of(*b, "b")
        num_sms = current_driver().num_sms(device_index)
        record = self.describe(*codes, Tensor.of(d, "d"), num_sms)
        launch: Launch = prepare_launch(record, device_index)
        addresses = tuple(x.data_ptr() for x in (*a, *b, d))
        return lambda: launch.on(device_index, addresses)


def check_shape(m: int, n: int, k: int) -> None:
    """What keeps the levels short: `fp8_gemm_nt` takes any shape."""
    if min(m, n, k) < 1 or n % 8 or k % BLOCK:
        raise ValueError(
            "hopper_gemm: M must be at least 1, N a multiple of 8 and K a multiple of 128, got "
            f"{m} x {n} x {k}; moefp8.kernels.fp8_gemm_nt takes other shapes"
        )


def check(a: BlockScaled, b: BlockScaled, d: torch.Tensor) -> None:
    (m, k), n = a.data.shape, b.data.shape[0]
    check_shape(m, n, k)
    if b.data.shape[1] != k or d.shape != (m, n):
        shapes = [list(x.shape) for x in (a.data, b.data, d)]
        raise ValueError(f"hopper_gemm: a [M, K], b [N, K] and d [M, N] must agree, got {shapes}")
    are_contiguous = all(x.is_contiguous() for x in (a.data, *b, d))
    if not are_contiguous or a.scale_inv.stride() != (1, ceil_div(m, 4) * 4):
        raise ValueError(
            "hopper_gemm: a, b, its scales and d must be contiguous, and the scales of a have the "
            f"strides (1, M rounded up to 4), got {a.scale_inv.stride()}; quantize_1x128 gives them"
        )


_ROLES = Level("", "", "", threads=384)  # a producer warpgroup and two that multiply
LEVELS = (
    Level("1 plain FMAs", "level1_plain.cu", "plain", uses_tma=False),
    Level("2 TMA, WGMMA", "level2_tma_wgmma.cu", "tma_wgmma"),
    replace(_ROLES, title="3 warp roles", source="level3_warp_roles.cu", kernel_name="warp_roles"),
    replace(
        _ROLES,
        title="4 clusters, persistent",
        source="level4_cluster.cu",
        kernel_name="cluster<2>",
        cluster=2,
        is_persistent=True,
    ),
    replace(
        _ROLES,
        title="5 overlap",
        source="level5_overlap.cu",
        kernel_name="overlap<2, 2, 4>",
        tile=(128, 256),
        stores_by_tma=True,
        is_persistent=True,
    ),
)
