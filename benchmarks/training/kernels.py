"""The kernels of a training step that a forward does not have, alone.

The GEMM that sums over tokens, beside DeepGEMM's; quantizations along tokens, both ways at once and
of weights, beside copies of as many bytes. Operands tell what those of `benchmarks.gradient_cases`
tell. R rows, E experts, B blocks of column codes.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from benchmarks import peers
from benchmarks.gradient_cases import Results, error_of
from benchmarks.gradient_swiglu import SWIGLU_CASES, differs, values_of_columns
from benchmarks.peers import DEEP_GEMM, OURS, Peer
from benchmarks.training.cases import GROUPED, GroupedCase, normal, sample
from moefp8.kernels import BLOCK, E4M3
from moefp8.kernels.common.blocks import MIN_AMAX, MIN_GRADIENT_AMAX
from moefp8.kernels.gemm.k_grouped import k_grouped_gemm
from moefp8.quant import BlockScaled, dequantize
from moefp8.quant.both import quantize_128x128_both
from moefp8.quant.columns import first_block, quantize_1x128_and_128x1, quantize_128x1

# ---- The GEMM of gradients in weights ----


class WgradCase(NamedTuple):
    """dW [N, K], or [E, N, K], of `counts`, the tokens of each expert."""

    counts: tuple[int, ...]
    n: int
    k: int

    def __str__(self) -> str:
        if len(self.counts) == 1:
            return f"{self.n}x{self.k}x{self.counts[0]}"
        return f"{len(self.counts)} experts of {self.n}x{self.k}, {sum(self.counts)} tokens"

    @property
    def flops(self) -> int:
        return 2 * sum(self.counts) * self.n * self.k


DENSE_WGRAD = WgradCase((8192,), 4096, 7168)
GROUPED_WGRAD = WgradCase(tuple(GROUPED[0].counts), 4096, 7168)
WGRADS = DENSE_WGRAD, GROUPED_WGRAD
Codes = tuple[torch.Tensor, torch.Tensor]  # data, scale_inv


@dataclass(frozen=True)
class Wgrad:
    """dY bf16 [R, N] and X bf16 [R, K], and column codes of them; of X also in 128x128 blocks."""

    case: WgradCase
    dy: torch.Tensor
    x: torch.Tensor
    of_dy: Codes
    of_x: dict[bool, Codes]  # by whether they are in blocks

    @classmethod
    def random(cls, case: WgradCase, device: str = "cuda") -> "Wgrad":
        rows = sum(case.counts)
        dy, x = (normal(rows, size, device=device) for size in (case.n, case.k))
        offsets = _offsets(case.counts, device)

        def columns(x: torch.Tensor, min_amax: float, blocks: bool = False) -> Codes:
            data, scale_inv = quantize_128x1(x, offsets, None, False, min_amax, blocks)
            return data, scale_inv

        of_x = {blocks: columns(x, MIN_AMAX, blocks) for blocks in (False, True)}
        return cls(case, dy, x, columns(dy, MIN_GRADIENT_AMAX), of_x)

    @cached_property
    def _is_dense(self) -> bool:
        return len(self.case.counts) == 1

    def empty(self, dtype: torch.dtype) -> torch.Tensor:
        """dW, in zeros, which a sum begins from."""
        shape = (len(self.case.counts),) * (not self._is_dense) + (self.case.n, self.case.k)
        return self.dy.new_zeros(shape, dtype=dtype)

    def multiply(self, blocks: bool, dtype: torch.dtype, accumulates: bool) -> peers.Call:
        """By ours."""
        d, rows = self.empty(dtype), len(self.x)
        offsets = None if self._is_dense else _offsets(self.case.counts, self.x.device)
        of_dy, of_x = self.of_dy, self.of_x[blocks]
        if self._is_dense:  # one expert, whose blocks are all that there are
            count = rows // BLOCK
            of_dy, of_x = ((data[:count], scales[:count]) for data, scales in (of_dy, of_x))

        def call() -> Any:
            k_grouped_gemm(*of_dy, *of_x, d, offsets, rows, accumulates)
            return Results((d,))

        return call

    def multiply_by_deep_gemm(self) -> peers.Call:
        """It adds to FP32; scales are for 128 tokens of each feature."""
        import deep_gemm

        d, recipe, counts = self.empty(torch.float32), (1, 1, BLOCK), [*self.case.counts]
        if self._is_dense:
            a, b = (self._k_major(*codes, 0) for codes in (self.of_dy, self.of_x[False]))

            def dense() -> Any:
                deep_gemm.fp8_gemm_nt(a, b, d, c=d, recipe=recipe)
                return Results((d,))

            return dense
        flat_a, flat_b = (self._flat(*codes) for codes in (self.of_dy, self.of_x[False]))
        on_device = torch.tensor(counts, dtype=torch.int32, device=self.x.device)
        multiply = deep_gemm.k_grouped_fp8_gemm_nt_contiguous

        def grouped() -> Any:
            multiply(flat_a, flat_b, d, counts, on_device, d, recipe)
            return Results((d,))

        return grouped

    def _k_major(self, data: torch.Tensor, scale_inv: torch.Tensor, expert: int) -> Codes:
        """Codes of one expert [features, tokens] and scales [features, tokens / 128]."""
        blocks = self._blocks_of(expert)
        codes = data[blocks].view(torch.uint8).transpose(0, 1).flatten(1)
        return codes.contiguous().view(E4M3), scale_inv[blocks].T

    def _flat(self, data: torch.Tensor, scale_inv: torch.Tensor) -> Codes:
        """Those of all experts one after the other, and scales [features, tokens / 128]."""
        both = [self._k_major(data, scale_inv, e) for e in range(len(self.case.counts))]
        codes = torch.cat([codes.view(torch.uint8).flatten() for codes, _ in both])
        return codes.view(E4M3), torch.cat([scales.T for _, scales in both]).T

    def _blocks_of(self, expert: int) -> slice:
        begin = first_block(sum(self.case.counts[:expert]), expert)
        return slice(begin, begin + self.case.counts[expert] // BLOCK)

    @property
    def work(self) -> dict[str, float]:
        return {"tflops": self.case.flops / 1e6}

    @property
    def num_bytes(self) -> int:
        size = self.case.n * self.case.k * len(self.case.counts)
        return len(self.x) * (self.case.n + self.case.k) + 2 * size

    def errors(self, results: dict[str, Results]) -> dict[str, dict[str, float]]:
        """Against BF16, of the first and the last expert."""
        first, last = self.case.counts[0], self.case.counts[-1]
        exact = self.dy[:first].T @ self.x[:first], self.dy[-last:].T @ self.x[-last:]
        found = {}
        for name, (d,) in results.items():
            ends = (d, d) if self._is_dense else (d[0], d[-1])
            pairs = zip(ends, exact, strict=True)
            errors = [error_of(sample(x), sample(y)) for x, y in pairs]
            found[name] = {"error": max(errors)}
        return found


def _offsets(counts: tuple[int, ...], device: torch.device | str) -> torch.Tensor:
    offsets = [*accumulate(counts, initial=0)]
    return torch.tensor(offsets, dtype=torch.int32, device=device)


def _ours(blocks: bool, dtype: torch.dtype, accumulates: bool) -> Callable[[Wgrad], peers.Call]:
    return lambda operands: operands.multiply(blocks, dtype, accumulates)


BLOCKS, FP32, FP32_BLOCKS = "moefp8_128x128", "moefp8_fp32", "moefp8_fp32_128x128"
ADDS, ADDS_BLOCKS = "moefp8_adds", "moefp8_adds_128x128"
OF_OURS = OURS, BLOCKS, FP32, FP32_BLOCKS, ADDS, ADDS_BLOCKS
_BF16, _FP32 = torch.bfloat16, torch.float32
WGRAD_PEERS = {
    OURS: Peer("128x1, BF16", "block_scaled", _ours(False, _BF16, False)),
    BLOCKS: Peer("128x128, BF16", "block_scaled", _ours(True, _BF16, False)),
    FP32: Peer("128x1, FP32", "block_scaled", _ours(False, _FP32, False)),
    FP32_BLOCKS: Peer("128x128, FP32", "block_scaled", _ours(True, _FP32, False)),
    ADDS: Peer("128x1, FP32 +=", "block_scaled", _ours(False, _FP32, True)),
    ADDS_BLOCKS: Peer("128x128, FP32 +=", "block_scaled", _ours(True, _FP32, True)),
    DEEP_GEMM: Peer(
        "DeepGEMM, 128x1, FP32 +=",
        "block_scaled",
        lambda operands: operands.multiply_by_deep_gemm(),
        needs=peers.has("deep_gemm", "k_grouped_fp8_gemm_nt_contiguous"),
        remedy=peers.PEERS[DEEP_GEMM].remedy,
    ),
}


# ---- Quantizations ----

BOTH, COLUMNS, GATHERED, WEIGHTS = "1x128 and 128x1", "128x1", "128x1, gathered", "128x128, both"


class QuantizeCase(NamedTuple):
    """kind: of the four above. experts: they tell how many rows each has, and shapes of weights.

    features: of a row. blocks: column codes have a scale for 128x128.
    """

    kind: str
    experts: GroupedCase
    features: int
    blocks: bool = False

    def __str__(self) -> str:
        e, _, n, k = self.experts
        if self.kind == WEIGHTS:
            return f"{self.kind}: {e} x {n} x {k}"
        blocks = ", in blocks" if self.blocks else ""
        rows = f"{sum(self.experts.counts)} rows of {self.features}"
        return f"{self.kind}{blocks}: {rows}, {e} experts"


TOP_K = 8  # choices of a token whose rows are gathered
_DEEPSEEK, _, _QWEN = GROUPED
QUANTIZE_CASES = (
    QuantizeCase(BOTH, _DEEPSEEK, 7168),
    QuantizeCase(BOTH, _DEEPSEEK, 7168, True),
    QuantizeCase(BOTH, _QWEN, 2048),
    QuantizeCase(COLUMNS, _DEEPSEEK, 7168),
    QuantizeCase(GATHERED, _DEEPSEEK, 7168),
    QuantizeCase(GATHERED, _DEEPSEEK, 7168, True),
    QuantizeCase(GATHERED, _QWEN, 2048),
    QuantizeCase(WEIGHTS, _DEEPSEEK, 7168),
    QuantizeCase(WEIGHTS, _QWEN, 2048),
)
# DeepSeek-V3's and Qwen3-30B-A3B's, saved in BF16 with columns in 128x1, and in E4M3 in blocks.
SWIGLUS = tuple(
    case
    for case in SWIGLU_CASES
    if case.num_experts > 8 and case.blocks == (case.saved_dtype == E4M3)
)


@dataclass(frozen=True)
class Quantize:
    """x: bf16 [T, features] or weights. rows: int32 [R], which token each is of, or None."""

    case: QuantizeCase
    x: torch.Tensor
    rows: torch.Tensor | None
    bytes: torch.Tensor  # half as many as are moved

    @classmethod
    def random(cls, case: QuantizeCase, device: str = "cuda") -> "Quantize":
        rows, num_rows = None, sum(case.experts.counts)
        if case.kind == WEIGHTS:
            x = normal(*case.experts.shape, device=device)
        else:
            x = normal(num_rows, case.features, device=device)
        if case.kind == GATHERED:
            x = x[: num_rows // TOP_K].clone()
            rows = (torch.randperm(num_rows, device=device) % len(x)).int()
        moved = x.numel() * 2 + _bytes_written(case)
        return cls(case, x, rows, torch.ones(moved // 2, dtype=torch.uint8, device=device))

    def quantize(self) -> peers.Call:
        case, x = self.case, self.x
        if case.kind == WEIGHTS:
            return lambda: Results(quantize_128x128_both(x, 2))
        offsets = _offsets(tuple(case.experts.counts), x.device)
        if case.kind == BOTH:
            return lambda: Results(
                quantize_1x128_and_128x1(x, offsets, False, MIN_AMAX, case.blocks)
            )
        return lambda: Results(quantize_128x1(x, offsets, self.rows, False, MIN_AMAX, case.blocks))

    def copy(self) -> peers.Call:
        return lambda: Results((self.bytes.clone(),))

    @property
    def work(self) -> dict[str, float]:
        """Bytes that are read and written; a token whose row is gathered counts once."""
        return {"gbps": 2 * self.bytes.numel() / 1e3}

    @property
    def num_bytes(self) -> int:
        return 2 * self.bytes.numel()

    def errors(self, results: dict[str, Results]) -> dict[str, dict[str, float]]:
        """Of the first expert; a copy has 0 if it is one."""
        return {
            name: self._errors(found) if name == OURS else {"error": differs(found[0], self.bytes)}
            for name, found in results.items()
        }

    def _errors(self, found: Results) -> dict[str, float]:
        end = self.case.experts.counts[0]
        if self.case.kind == WEIGHTS:
            data, scale_inv, transposed = (x[0] for x in found)
            n = data.shape[0]
            values = torch.cat(
                [
                    dequantize(BlockScaled(codes, scales))
                    for codes, scales in zip(data.chunk(2), scale_inv.chunk(2), strict=True)
                ]
            )
            codes, back = (x.contiguous().view(torch.uint8) for x in (data, transposed.mT[:n]))
            same = {} if n % (2 * BLOCK) else {"error_of_transposed": differs(codes, back)}
            return {"error": error_of(values, self.x[0])} | same
        x = self.x[:end] if self.rows is None else self.x[self.rows[:end].long()]
        data, scale_inv = found[-2:]
        of_first = slice(0, end // BLOCK)
        columns = values_of_columns(data[of_first], scale_inv[of_first], end)
        errors = {"error": error_of(columns, x)}
        if self.case.kind == BOTH:
            rows = BlockScaled(found[0][:end], found[1][:end])
            errors["error_of_rows"] = error_of(dequantize(rows), x)
        return errors


def _bytes_written(case: QuantizeCase) -> int:
    """Codes and scales, of loads that are multiples of 128."""
    if case.kind == WEIGHTS:
        e, n, k = case.experts.shape
        return 2 * e * n * k + 4 * e * (n // BLOCK) * (k // BLOCK)
    num_rows, features = sum(case.experts.counts), case.features
    scales = num_rows // BLOCK * (features // BLOCK if case.blocks else features)
    written = num_rows * features + 4 * scales
    if case.kind == BOTH:
        written += num_rows * features + 4 * num_rows * (features // BLOCK)
    return written
