"""The GEMMs that are timed beside each other: ours, and what else a user could call.

Each multiplies x [M, K] by w [N, K] transposed and gives bf16 [M, N]. They differ in what they
take, which `Peer.operands` says:

`block_scaled`: E4M3 with 1x128 and 128x128 scales, made once by `moefp8.quant` for all of them.
`codes`: the same E4M3 data without scales. It is no substitute for the former, but a ceiling.
`bf16`: what was quantized.
"""

import argparse
import importlib
import importlib.metadata
import os
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from moefp8.kernels import BLOCK, fp8_gemm_nt, num_blocks, round_up
from moefp8.quant import BlockScaled, quantize_1x128, quantize_128x128

Call = Callable[[], torch.Tensor]

OURS, DEEP_GEMM, BLOCK_SCALED, PER_TENSOR, BF16 = (
    "moefp8",
    "deep_gemm",
    "cublaslt_block_scaled",
    "cublaslt_per_tensor",
    "torch_bf16",
)


class Case(NamedTuple):
    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}"

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    def num_bytes(self, operands: str) -> int:
        """Each operand and its scales read once, and the result written once."""
        m, n, k = self
        size = 2 if operands == "bf16" else 1
        scales = (m + num_blocks(n)) * num_blocks(k) if operands == "block_scaled" else 0
        return size * (m * k + n * k) + 4 * scales + 2 * m * n


@dataclass(frozen=True)
class Operands:
    """x [M, K] and w [N, K], in BF16 and quantized."""

    x: torch.Tensor
    w: torch.Tensor
    a: BlockScaled
    b: BlockScaled

    @classmethod
    def random(cls, case: Case, device: str = "cuda") -> "Operands":
        """Normal numbers."""
        x = torch.randn(case.m, case.k, device=device).bfloat16()
        return cls.of(x, torch.randn(case.n, case.k, device=device).bfloat16())

    @classmethod
    def of(cls, x: torch.Tensor, w: torch.Tensor) -> "Operands":
        return cls(x, w, quantize_1x128(x), quantize_128x128(w))

    def exact(self, operands: str) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers that a peer multiplies, without rounding: fp64 [M, K] and [N, K]."""
        if operands == "bf16":
            return self.x.double(), self.w.double()
        if operands == "codes":
            return self.a.data.float().double(), self.b.data.float().double()
        return exact_values(self.a), exact_values(self.b)


def exact_values(q: BlockScaled) -> torch.Tensor:
    """`data * scale_inv` without rounding, for blocks of either kind: fp64 [rows, K]."""
    values, scales = q.data.float().double(), q.scale_inv.double()
    rows, k = values.shape
    if len(scales) < rows:
        scales = scales.repeat_interleave(BLOCK, dim=0)[:rows]
    return values.mul_(scales.repeat_interleave(BLOCK, dim=1)[:, :k])


def _moefp8(operands: Operands) -> Call:
    a, b = operands.a, operands.b
    d = operands.x.new_full((a.data.shape[0], b.data.shape[0]), torch.nan)  # unwritten stays NaN

    def call() -> torch.Tensor:
        fp8_gemm_nt(a, b, d)
        return d

    return call


def _deep_gemm(operands: Operands) -> Call:
    import deep_gemm

    (m, k), n = operands.a.data.shape, operands.b.data.shape[0]
    layout = deep_gemm.transform_sf_into_required_layout
    scales = layout(operands.a.scale_inv.contiguous(), m, k, (1, BLOCK, BLOCK), None, True)
    a, b, d = (operands.a.data, scales), tuple(operands.b), operands.x.new_full((m, n), torch.nan)

    def call() -> torch.Tensor:
        deep_gemm.fp8_gemm_nt(a, b, d)
        return d

    return call


def _cublaslt_block_scaled(operands: Operands) -> Call:
    from torch.nn.functional import ScalingType, scaled_mm

    (a, a_scales), (b, b_scales) = operands.a, operands.b
    # It wants scales [M, K/128] with M contiguous and unpadded, and [K/128 up to a multiple of 4,
    # N/128] with K contiguous.
    a_scales = a_scales.T.contiguous().T
    missing = round_up(b_scales.shape[1], 4) - b_scales.shape[1]
    b_scales = F.pad(b_scales, (0, missing), value=1.0).T
    rows, blocks = ScalingType.BlockWise1x128, ScalingType.BlockWise128x128
    return lambda: scaled_mm(a, b.T, a_scales, rows, b_scales, blocks, output_dtype=torch.bfloat16)


def _cublaslt_per_tensor(operands: Operands) -> Call:
    a, b, one = operands.a.data, operands.b.data, torch.ones((), device=operands.x.device)
    return lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def _torch_bf16(operands: Operands) -> Call:
    x, w = operands.x, operands.w
    return lambda: x @ w.T


def has(module: str, attribute: str) -> Callable[[], object]:
    """Finds an attribute of a module, or raises."""
    return lambda: getattr(importlib.import_module(module), attribute)


_torch_has_fp8 = has("torch", "_scaled_mm")


def _never(case: object) -> str | None:
    return None


def _without_small_or_uneven(case: Case) -> str | None:
    if case.m == 1:
        return "it refuses M = 1"
    return "it refuses N that is no multiple of 128" if case.n % BLOCK else None


@dataclass(frozen=True)
class Peer:
    """How to call a GEMM, and when one cannot. `Operands` and `Case` are above, or grouped ones.

    Attributes:
        operands: what it multiplies, see above.
        prepare: makes a call of it; layouts and allocations that a user does once are done here.
        refuses: why it cannot take a case, or None.
        needs: raises where there is no such peer.
        remedy: how to get that.
    """

    title: str
    operands: str
    prepare: Callable[[Any], Call]
    refuses: Callable[[Any], str | None] = _never
    needs: Callable[[], object] = _torch_has_fp8
    remedy: str = ""

    def why_missing(self) -> str | None:
        try:
            self.needs()
        except Exception as error:  # an extension that does not fit this torch raises anything
            return f"{self.title} is left out ({first_line(error)}); to have it, {self.remedy}"
        return None


PEERS = {
    OURS: Peer("moefp8", "block_scaled", _moefp8),
    DEEP_GEMM: Peer(
        "DeepGEMM",
        "block_scaled",
        _deep_gemm,
        needs=has("deep_gemm", "fp8_gemm_nt"),
        remedy="pip install --no-deps sgl-deep-gemm apache-tvm-ffi, in versions built for this "
        "torch (0.1.5 and 0.1.11 for 2.11), and set CUDA_HOME to a CUDA toolkit",
    ),
    BLOCK_SCALED: Peer(
        "cuBLASLt block-scaled",
        "block_scaled",
        _cublaslt_block_scaled,
        _without_small_or_uneven,
        needs=has("torch.nn.functional", "scaled_mm"),
        remedy="install torch 2.10 or newer, built for CUDA 12.9 or newer",
    ),
    PER_TENSOR: Peer("cuBLASLt per-tensor", "codes", _cublaslt_per_tensor),
    BF16: Peer("torch BF16", "bf16", _torch_bf16),
}


def available(peers: Mapping[str, Peer]) -> list[str]:
    """The names of those that are here; of the others it prints why not."""
    missing = {name: why for name, peer in peers.items() if (why := peer.why_missing())}
    for why in missing.values():
        print(why)
    return [name for name in peers if name not in missing]


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


def deep_gemm_version() -> str:
    """The version of whichever distribution the module comes from."""
    for name in importlib.metadata.packages_distributions().get("deep_gemm", []):
        return f"{name} {importlib.metadata.version(name)}"
    return str(getattr(importlib.import_module("deep_gemm"), "__version__", "unknown"))


def add_compile_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--compile-with",
        type=int,
        metavar="N",
        default=min(6, (os.cpu_count() or 1) // 2),
        help="processes that compile kernels before any is timed (default %(default)s; 0: none)",
    )


def compile_ahead(cases: Iterable[Case], num_processes: int) -> None:
    """Fill the disk caches of moefp8 and DeepGEMM, which compile kernels at the first call.

    One process takes all cases of an N and K: both are part of DeepGEMM's kernels, so no two
    processes compile the same one. What fails here is reported when it is timed.
    """
    if num_processes < 2:
        return
    started = time.perf_counter()
    by_weight: dict[tuple[int, int], list[Case]] = defaultdict(list)
    for case in cases:
        by_weight[case.n, case.k].append(case)
    with ProcessPoolExecutor(num_processes, mp_context=get_context("spawn")) as pool:
        try:
            list(pool.map(compile_kernels, by_weight.values()))
        except Exception as error:
            print(f"compiling ahead was cut short: {first_line(error)}")
    print(f"compiled ahead in {time.perf_counter() - started:.0f} s")


def compile_kernels(cases: Iterable[Case]) -> None:
    """Launch moefp8's and DeepGEMM's kernels of these cases once; what fails is left out."""
    warnings.simplefilter("ignore")  # the process that times repeats them
    for case in cases:
        operands = Operands.random(case)
        for peer in (PEERS[OURS], PEERS[DEEP_GEMM]):
            try:
                peer.prepare(operands)()
                torch.cuda.synchronize()
            except Exception:
                continue
