"""The grouped GEMMs that are timed beside each other: ours, DeepGEMM's, and torch's in BF16.

All multiply the same tokens; their rows lie where each peer wants them. `PADDED` is ours at rows
that are padded for DeepGEMM.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from benchmarks import peers
from benchmarks.grouped_cases import CONTIGUOUS, MASKED, Case
from benchmarks.peers import BF16, DEEP_GEMM, OURS, Peer, exact_values, has
from moefp8 import kernels
from moefp8.kernels import BLOCK, E4M3, num_blocks, round_up, tma_aligned
from moefp8.quant import BlockScaled, quantize_1x128, quantize_128x128

PADDED = "moefp8_padded"
MOST_BF16_BYTES = 8e9  # larger weights are not kept in BF16
GUARD_ROWS = 8  # they are of no group, behind all others


@dataclass(frozen=True)
class Operands:
    """Random normal tokens and weights, in BF16 and quantized.

    x: [T, K], group by group.
    w: [G, N, K], or None where that is too large.
    alignment: it divides the first row of each group, where rows are padded.
    """

    case: Case
    x: torch.Tensor
    w: torch.Tensor | None
    a: BlockScaled
    b: BlockScaled
    alignment: int

    @classmethod
    def random(cls, case: Case, device: str = "cuda") -> "Operands":
        setting, n, k = case
        groups, blocks = len(setting.counts), (num_blocks(n), num_blocks(k))
        x = torch.randn(setting.num_tokens, k, device=device).bfloat16()
        w = x.new_empty(groups, n, k) if 2 * groups * n * k <= MOST_BF16_BYTES else None
        b = BlockScaled(
            x.new_empty(groups, n, k, dtype=E4M3),
            x.new_empty(groups, *blocks, dtype=torch.float32),
        )
        for group in range(groups):  # one by one: all of them in FP32 would fill the GPU
            of_group = torch.randn(n, k, device=device).bfloat16()
            for whole, part in zip(b, quantize_128x128(of_group), strict=True):
                whole[group] = part
            if w is not None:
                w[group] = of_group
        return cls(case, x, w, quantize_1x128(x), b, alignment())

    @property
    def counts(self) -> list[int]:
        return self.case.setting.counts

    @property
    def ends(self) -> list[int]:
        """Where the rows of each group end in x and a."""
        return list(accumulate(self.counts))

    def exact(self, operands: str, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers of one group that a peer multiplies, without rounding: fp64."""
        rows = slice(self.ends[group] - self.counts[group], self.ends[group])
        if operands == "bf16":
            assert self.w is not None
            return self.x[rows].double(), self.w[group].double()
        a = BlockScaled(self.a.data[rows], self.a.scale_inv[rows])
        return exact_values(a), exact_values(BlockScaled(*(part[group] for part in self.b)))

    def int32(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.x.device)


def alignment() -> int:
    """DeepGEMM's alignment, and without it ours, which is the same on Hopper."""
    try:
        import deep_gemm
    except Exception:
        return kernels.get_mk_alignment_for_contiguous_layout()
    return deep_gemm.get_mk_alignment_for_contiguous_layout()


@dataclass(frozen=True)
class Job:
    """A call that gives rows [R, N], and which of them are the tokens, in the order of x."""

    call: Callable[[], torch.Tensor]
    at: torch.Tensor

    def __call__(self) -> torch.Tensor:
        return self.call()

    def tokens(self) -> torch.Tensor:
        return self()[self.at]

    def untouched(self) -> bool:
        """Whether all other rows are NaN, as they were before."""
        rows = self()
        is_token = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        is_token[self.at] = True
        return bool(rows[~is_token].isnan().all())


@dataclass(frozen=True)
class Rows:
    """Tokens among rows of zeros: the first of each group is at `starts`.

    `a` and `d` are [R, K] and [R, N], or [G, max_m, K] and [G, max_m, N]. `memory` is d as rows,
    and more behind it; it holds NaN.
    """

    a: BlockScaled
    d: torch.Tensor
    memory: torch.Tensor
    at: torch.Tensor

    @classmethod
    def spread(cls, operands: Operands, starts: list[int], shape: tuple[int, ...]) -> "Rows":
        (data, scale_inv), n = operands.a, operands.case.n
        num_rows = torch.Size(shape).numel()
        of_groups = zip(starts, operands.counts, strict=True)
        at = torch.cat([torch.arange(start, start + count) for start, count in of_groups])
        at = at.to(data.device)
        padded = torch.zeros(num_rows, data.shape[1], dtype=torch.uint8, device=data.device)
        padded[at] = data.view(torch.uint8)
        scales = scale_inv.new_zeros(num_rows, scale_inv.shape[1])
        scales[at] = scale_inv
        a = BlockScaled(padded.view(E4M3).view(*shape, -1), tma_aligned(scales.view(*shape, -1)))
        memory = operands.x.new_full((num_rows + GUARD_ROWS, n), torch.nan)
        return cls(a, memory[:num_rows].view(*shape, n), memory, at)

    @classmethod
    def dense(cls, operands: Operands) -> "Rows":
        """Rows without padding."""
        return cls.spread(operands, [0, *operands.ends[:-1]], (len(operands.x),))

    @classmethod
    def padded(cls, operands: Operands) -> tuple["Rows", torch.Tensor]:
        """Rows of groups that begin at multiples of the alignment; also `grouped_layout`."""
        ends = accumulate(round_up(count, operands.alignment) for count in operands.counts)
        *starts, num_rows = 0, *ends
        rows = cls.spread(operands, starts, (num_rows,))
        layout = operands.int32([-1] * num_rows)
        groups = torch.arange(len(starts), device=layout.device, dtype=torch.int32)
        layout[rows.at] = groups.repeat_interleave(operands.int32(operands.counts))
        return rows, layout

    @classmethod
    def masked(cls, operands: Operands) -> "Rows":
        groups, max_m = len(operands.counts), operands.case.setting.max_m
        return cls.spread(operands, [max_m * group for group in range(groups)], (groups, max_m))

    def job(self, launch: Callable[[], object]) -> Job:
        """The job of a launch that writes d."""

        def call() -> torch.Tensor:
            launch()
            return self.memory

        return Job(call, self.at)


def _moefp8(operands: Operands) -> Job:
    if operands.case.setting.form == MASKED:
        return _moefp8_masked(operands)
    rows, offsets = Rows.dense(operands), operands.int32([0, *operands.ends])
    multiply = kernels.m_grouped_fp8_gemm_nt_contiguous
    return rows.job(lambda: multiply(rows.a, operands.b, rows.d, expert_offsets=offsets))


def _moefp8_masked(operands: Operands) -> Job:
    rows, masked_m = Rows.masked(operands), operands.int32(operands.counts)
    multiply, expected_m = kernels.m_grouped_fp8_gemm_nt_masked, operands.case.setting.expected_m
    return rows.job(lambda: multiply(rows.a, operands.b, rows.d, masked_m, expected_m))


def _moefp8_padded(operands: Operands) -> Job:
    rows, layout = Rows.padded(operands)
    multiply = kernels.m_grouped_fp8_gemm_nt_contiguous
    return rows.job(lambda: multiply(rows.a, operands.b, rows.d, layout))


def _deep_gemm(operands: Operands) -> Job:
    import deep_gemm

    b, setting = tuple(operands.b), operands.case.setting
    if setting.form == CONTIGUOUS:
        rows, layout = Rows.padded(operands)
        a, multiply = _deep_gemm_operand(rows.a), deep_gemm.m_grouped_fp8_gemm_nt_contiguous
        return rows.job(lambda: multiply(a, b, rows.d, layout))
    rows, masked_m = Rows.masked(operands), operands.int32(setting.counts)
    multiply = getattr(deep_gemm, "m_grouped_fp8_gemm_nt_masked", None)
    multiply = multiply or deep_gemm.fp8_m_grouped_gemm_nt_masked
    a = _deep_gemm_operand(rows.a)
    return rows.job(lambda: multiply(a, b, rows.d, masked_m, setting.expected_m))


def _deep_gemm_operand(a: BlockScaled) -> tuple[torch.Tensor, torch.Tensor]:
    """`a` with scales in the memory order that DeepGEMM wants."""
    import deep_gemm

    (*groups, m, k), layout = a.data.shape, deep_gemm.transform_sf_into_required_layout
    num_groups = groups[0] if groups else None
    scales = a.scale_inv.contiguous()
    return a.data, layout(scales, m, k, (1, BLOCK, BLOCK), num_groups, True)


def _torch_bf16(operands: Operands) -> Job:
    from torch.nn.functional import grouped_mm

    assert operands.w is not None
    x, w, ends = operands.x, operands.w.transpose(-2, -1), operands.int32(operands.ends)
    return Job(lambda: grouped_mm(x, w, offs=ends), torch.arange(len(x), device=x.device))


def _without_large_weights(case: Case) -> str | None:
    num_bytes = 2 * len(case.setting.counts) * case.n * case.k
    if num_bytes <= MOST_BF16_BYTES:
        return None
    return f"its weights would take {num_bytes / 1e9:.1f} GB, more than {MOST_BF16_BYTES / 1e9:g}"


PEERS = {
    OURS: Peer("moefp8", "block_scaled", _moefp8),
    PADDED: Peer("moefp8 (padded rows)", "block_scaled", _moefp8_padded),
    DEEP_GEMM: replace(
        peers.PEERS[DEEP_GEMM],
        prepare=_deep_gemm,
        needs=has("deep_gemm", "m_grouped_fp8_gemm_nt_contiguous"),
    ),
    BF16: Peer(
        "torch BF16",
        "bf16",
        _torch_bf16,
        _without_large_weights,
        needs=has("torch.nn.functional", "grouped_mm"),
        remedy="install torch 2.10 or newer",
    ),
}
FORMS = {CONTIGUOUS: tuple(PEERS), MASKED: (OURS, DEEP_GEMM)}
