"""GEMMs of dX beside those of the forward, transpositions beside copies, and their sizes.

Operands tell what those of `benchmarks.gradient_cases` tell.
"""

from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, NamedTuple

import torch

from benchmarks import grouped_cases, grouped_peers, peers
from benchmarks.gradient_cases import LINEARS, Results, error_of
from benchmarks.grouped_cases import CONTIGUOUS, DEEPSEEK_V3, QWEN3_30B, Setting, spread
from benchmarks.peers import BF16, OURS, Call
from moefp8.kernels import E4M3
from moefp8.quant import BlockScaled, quantize_1x128
from moefp8.quant.transpose import transpose_codes

MIXTRAL = (28672, 4096), (4096, 14336)
SETTINGS = (
    Setting(CONTIGUOUS, "32 x 1024", spread(32, 1024), DEEPSEEK_V3, None),
    Setting(CONTIGUOUS, "128 x 512", spread(128, 512), QWEN3_30B, None),
    Setting(CONTIGUOUS, "8 x 4096", spread(8, 4096), MIXTRAL, None),
)
GEMMS = (*LINEARS, *(grouped_cases.Case(each, n, k) for each in SETTINGS for n, k in each.shapes))
FORWARD = "forward"


GemmCase = peers.Case | grouped_cases.Case


@dataclass(frozen=True)
class GemmPair:
    """Operands of a forward and of its dX: x [M, K] by W [N, K], and dY [M, N] by W^T [K, N]."""

    case: GemmCase
    operands: dict[str, Any]
    family: ModuleType  # it knows how to multiply these

    @classmethod
    def random(cls, case: GemmCase, device: str = "cuda") -> "GemmPair":
        family = peers if isinstance(case, peers.Case) else grouped_peers
        forward = family.Operands.random(case, device)
        codes, scale_inv = forward.b
        grad = torch.randn(len(forward.x), case.n, device=device).bfloat16()
        of_dx = {
            "x": grad,
            "w": forward.w.mT,
            "a": quantize_1x128(grad),
            "b": BlockScaled(transpose_codes(codes), scale_inv.mT),
        }
        if family is grouped_peers:
            of_dx["case"] = case._replace(n=case.k, k=case.n)
        return cls(case, {OURS: replace(forward, **of_dx), FORWARD: forward}, family)

    def call(self, name: str) -> Call:
        operands = self.operands[name]
        job, num_rows = self.family.PEERS[OURS].prepare(operands), len(operands.x)
        return lambda: Results((job()[:num_rows],))

    @property
    def work(self) -> dict[str, float]:
        return {"tflops": self.case.flops / 1e6}

    @property
    def num_bytes(self) -> int:
        return self.case.num_bytes("block_scaled")

    def errors(self, results: dict[str, Results]) -> dict[str, dict[str, float]]:
        """Against BF16."""
        multiply = self.family.PEERS[BF16].prepare
        exact = {name: multiply(self.operands[name])() for name in results}
        return {name: {"error": error_of(d, exact[name])} for name, (d,) in results.items()}


# ---- Transpositions ----


class Weight(NamedTuple):
    """parts: 2 where gate and up lie in one."""

    shape: tuple[int, ...]
    parts: int = 1

    def __str__(self) -> str:
        return " x ".join(map(str, self.shape))


WEIGHTS = (
    Weight((4096, 7168)),
    Weight((32, 4096, 7168), 2),
    Weight((32, 7168, 2048)),
    Weight((128, 1536, 2048), 2),
    Weight((128, 2048, 768)),
    Weight((8, 28672, 4096), 2),
)


@dataclass(frozen=True)
class Codes:
    """Any bytes but NaN, which is not equal to itself."""

    weight: Weight
    codes: torch.Tensor

    @classmethod
    def random(cls, weight: Weight, device: str = "cuda") -> "Codes":
        codes = torch.randint(0, 127, weight.shape, dtype=torch.uint8, device=device)
        return cls(weight, codes.view(E4M3))

    def transpose(self) -> Results:
        return Results((transpose_codes(self.codes, self.weight.parts),))

    def copy(self) -> Results:
        return Results((self.codes.clone(),))

    @property
    def work(self) -> dict[str, float]:
        """Bytes that are read and written."""
        return {"gbps": 2 * self.codes.numel() / 1e3}

    @property
    def num_bytes(self) -> int:
        return 2 * self.codes.numel()

    def errors(self, results: dict[str, Results]) -> dict[str, dict[str, float]]:
        """0 where every code is in its place, else 1."""
        exact = {OURS: self.codes.mT}
        return {
            name: {"error": float(not _same_codes(x, exact.get(name, self.codes)))}
            for name, (x,) in results.items()
        }


def _same_codes(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))
