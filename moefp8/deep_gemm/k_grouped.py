"""DeepGEMM's GEMMs of weight gradients of experts, whose groups divide K.

M, N, K are GEMM axes, G is groups (experts); S are the blocks of 128 along the K of all groups, F
the features of an operand, M or N.
"""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from ..kernels import BLOCK, E4M3, ceil_div
from ..kernels.common.checks import check_rows_contiguous, check_shape, check_tensor
from ..kernels.gemm.k_grouped import k_grouped_gemm
from ..quant.transpose import transpose_codes
from .operands import Operand, Recipe, unpack
from .settings import integer
from .weight_gradients import (
    by_blocks,
    check_devices,
    check_gradient,
    in_blocks,
    multiply,
    start_from_c,
)

__all__ = [
    "k_grouped_fp8_gemm_nt_contiguous",
    "k_grouped_fp8_gemm_tn_contiguous",
    "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt",
]

# Groups are multiplied one by one where they are few, or where the tensor cores take longer than
# the host. These are estimates, not measured: to launch a group takes the host some 20 us, in which
# an H200 does 2e10 operations.
_FEW_GROUPS = 8
_OPERATIONS_OF_A_LAUNCH = 2e10


class _KGrouped(NamedTuple):
    """An operand of a GEMM whose groups divide K.

    codes: e4m3 [F * sum(ks)], the groups' [F, k] one after the other; or [F, sum(ks)], K-major.
    scales: fp32 [S, F].
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def group(self, k: int, first: int, first_block: int) -> Operand:
        """Views of a group's codes [F, k] and scales; `first` tokens are of groups before it."""
        features = self.scales.shape[1]
        if self.codes.ndim == 2:
            codes = self.codes[:, first : first + k]
        else:
            codes = self.codes[first * features : (first + k) * features].view(features, k)
        return codes, self.scales[first_block : first_block + ceil_div(k, BLOCK)]

    def apart(self, layout: "_Apart") -> Operand:
        """Copies of codes [S + G, F, 128] and scales [S + G, F], with a gap behind each group."""
        (num_blocks, features), positions = self.scales.shape, len(layout.source)
        if self.codes.ndim == 2:
            codes = _wide(in_blocks(self.codes)).index_select(0, layout.source)
        else:
            # Of a group's matrix, the blocks of one feature lie one after the other.
            feature = torch.arange(features, dtype=torch.int32, device=self.codes.device)
            first = layout.source + layout.begin * (features - 1)  # of feature 0
            index = first[:, None] + layout.blocks[:, None] * feature
            index = index.clamp_(0, num_blocks * features - 1).flatten()
            codes = _wide(self.codes.view(-1, BLOCK)).index_select(0, index)
            codes = codes.view(positions, features, -1)
        scales = self.scales.index_select(0, layout.source)
        return codes.view(E4M3), by_blocks(scales.T)


class _Apart(NamedTuple):
    """Blocks as `k_grouped_gemm` wants them: those of group g lie g places later than here.

    expert_offsets is int32 [G + 1], all else int32 [S + G], of each place; what is told of a gap is
    within bounds.
    """

    expert_offsets: torch.Tensor
    source: torch.Tensor  # the block that comes to this place
    begin: torch.Tensor  # the first block of its group
    blocks: torch.Tensor  # how many blocks its group has

    @classmethod
    def of(cls, ks_tensor: torch.Tensor, num_blocks: int) -> "_Apart":
        """From int32 ks [G], without a wait for the device."""
        expert_offsets = pad(ks_tensor.cumsum(0, dtype=torch.int32), (1, 0))
        begins = expert_offsets[:-1] // BLOCK
        numbers = torch.arange(
            num_blocks + len(ks_tensor), dtype=torch.int32, device=ks_tensor.device
        )
        places = begins + numbers[: len(begins)]
        group = torch.searchsorted(places, numbers, right=True, out_int32=True) - 1
        source = (numbers - group).clamp_(0, num_blocks - 1)
        group = group.clamp_(min=0)
        return cls(expert_offsets, source, begins[group], (ks_tensor // BLOCK)[group])


def _wide(codes: torch.Tensor) -> torch.Tensor:
    """Codes for a copy: eight as one int64 where they lie so, else bytes. FP8 has few ops."""
    *pitches, _ = codes.stride()
    fits = all(x % 8 == 0 for x in (codes.storage_offset(), *pitches))
    return codes.view(torch.int64 if fits else torch.uint8)


def _multiply_groups(
    a: _KGrouped,
    b: _KGrouped,
    d: torch.Tensor,
    c: torch.Tensor | None,
    ks: Sequence[int],
    ks_tensor: torch.Tensor | None,
) -> None:
    """Write c plus the product of each group to d; without ks_tensor, one group at a time."""
    accumulates = start_from_c(d, c)
    _, m, n = d.shape
    num_launches = sum(k > 0 for k in ks)
    is_short = 2.0 * m * n * sum(ks) < _OPERATIONS_OF_A_LAUNCH * num_launches
    if d.numel() and num_launches > _FEW_GROUPS and is_short and ks_tensor is not None:
        layout = _Apart.of(ks_tensor, len(a.scales))
        operands = *a.apart(layout), *b.apart(layout)
        k_grouped_gemm(*operands, d, layout.expert_offsets, sum(ks), accumulates)
        return
    firsts = accumulate(ks, initial=0)
    first_blocks = accumulate((ceil_div(k, BLOCK) for k in ks), initial=0)
    for of_group, k, *first in zip(d, ks, firsts, first_blocks, strict=False):
        multiply(a.group(k, *first), b.group(k, *first), of_group, accumulates)


def _k_grouped(form: str) -> Callable[..., None]:
    name, is_flat = f"k_grouped_fp8_gemm_{form}_contiguous", form == "nt"

    def gemm(
        a: Operand,
        b: Operand,
        d: torch.Tensor,
        ks: Sequence[int] | None = None,
        ks_tensor: torch.Tensor | None = None,
        c: torch.Tensor | None = None,
        recipe: Recipe = (1, 1, BLOCK),
        compiled_dims: str = "mn",
        use_psum_layout: bool = False,
        *,
        ks_cpu: Sequence[int] | None = None,
        grouped_layout: torch.Tensor | None = None,
    ) -> None:
        if recipe is None or tuple(recipe) != (1, 1, BLOCK):
            raise ValueError(
                f"{name}: recipe must be (1, 1, 128), 1x128 scales of both operands, got {recipe}; "
                "other blocks are for Blackwell"
            )
        if use_psum_layout:
            raise ValueError(
                f"{name}: use_psum_layout must be False, got True: groups that end anywhere are "
                "for Blackwell; give ks, multiples of 128"
            )
        sizes = _sizes(name, "ks", _either(name, "ks", ks, "ks_cpu", ks_cpu), BLOCK)
        on_device = _either(name, "ks_tensor", ks_tensor, "grouped_layout", grouped_layout)
        _check_groups(name, "d", d, c, "ks", sizes)
        x, w = unpack(name, "a", a), unpack(name, "b", b)
        check_devices(name, x, w, d, c, ks_tensor=on_device)
        check_tensor(name, "ks_tensor", on_device, (torch.int32,), 1)
        check_shape(name, "ks_tensor", on_device, [len(sizes)], "[G] for the G of ks")
        if on_device.device.type == "cpu" and on_device.tolist() != sizes:
            raise ValueError(
                f"{name}: ks_tensor must have the values of ks = {sizes}, got {on_device.tolist()}"
            )
        operand = _flat if is_flat else _tall
        x, w = operand(name, "a", x, d.shape[1], sizes), operand(name, "b", w, d.shape[2], sizes)
        _multiply_groups(x, w, d, c, sizes, on_device)

    gemm.__name__ = gemm.__qualname__ = name
    of_flat = """[M * sum(ks)], the groups' [M, k] one after the other; fp32 scales
            [M, sum(ks)/128], in any memory order)."""
    of_tall = """[sum(ks), M]; fp32 scales [sum(ks)/128, M], as `per_channel_cast_to_fp8` gives
            them). Where K is not innermost in memory, a kernel transposes the codes first."""
    gemm.__doc__ = f"""Write `d[g] = c[g] + dequantize(a) @ dequantize(b).T`, over K of group g.

    Args:
        a: (e4m3 {of_flat if is_flat else of_tall}
        b: the same with N instead of M.
        d: fp32 [G, M, N], or bf16 if c is None; rows contiguous. A group without K is c, or zeros.
        ks: the K of each group, a list on the host; multiples of 128, or 0.
        ks_tensor: int32 [G], the same on the device; there, nobody compares them.
        c: fp32 [G, M, N], or d itself. Unlike in DeepGEMM, None lets d be overwritten.
        ks_cpu, grouped_layout: ks and ks_tensor, under their names of June 2026.
        compiled_dims: without meaning here.

    Many small groups are copied to where one launch takes them all; others take a launch each.

    Raises:
        TypeError, ValueError: naming the argument, the rule, what came and the way out; also for
            a recipe but (1, 1, 128), and use_psum_layout, which is for Blackwell.
    """
    return gemm


k_grouped_fp8_gemm_nt_contiguous = _k_grouped("nt")
k_grouped_fp8_gemm_tn_contiguous = _k_grouped("tn")


def k_grouped_wgrad_gemm_fp8_fp8_fp32_nt(
    lhs: Operand, rhs: Operand, out: torch.Tensor, batch_sizes: Sequence[int]
) -> None:
    """Add a product for each group to `out`, one launch after the other, as in May 2025.

    Args:
        lhs: (e4m3 [M * sum(batch_sizes)], the groups' [M, k] one after the other; fp32 scales
            [S, M] of S = sum(ceil(k/128)) blocks).
        rhs: the same with N instead of M.
        out: fp32 [G, M, N].
        batch_sizes: the K of each group, a list of any numbers on the host.

    Raises:
        TypeError, ValueError: naming the argument, the rule and what came.
    """
    op = "k_grouped_wgrad_gemm_fp8_fp8_fp32_nt"
    sizes = _sizes(op, "batch_sizes", batch_sizes, 1)
    _check_groups(op, "out", out, out, "batch_sizes", sizes)
    pairs = unpack(op, "lhs", lhs), unpack(op, "rhs", rhs)
    check_devices(op, *pairs, out, None, ("lhs", "rhs", "out"))
    a, b = (
        _flat(op, name, pair, features, sizes, lie_by_blocks=True)
        for name, pair, features in zip(("lhs", "rhs"), pairs, out.shape[1:], strict=True)
    )
    _multiply_groups(a, b, out, out, sizes, None)


# ---- Checks of groups ----


def _either(op: str, name: str, value: Any, name_2026: str, value_2026: Any) -> Any:
    if (value is None) == (value_2026 is None):
        raise TypeError(f"{op}: give either {name} or, its name of June 2026, {name_2026}")
    return value_2026 if value is None else value


def _sizes(op: str, name: str, ks: Sequence[int], multiple: int) -> list[int]:
    if not isinstance(ks, (list, tuple)):
        raise TypeError(f"{op}: {name} must be a list of ints on the host, got {type(ks)}")
    sizes = [integer(op, f"{name}[{group}]", k) for group, k in enumerate(ks)]
    for group, k in enumerate(sizes):
        if k < 0 or k % multiple:
            raise ValueError(
                f"{op}: {name}[{group}] must be 0 or a positive multiple of {multiple}, got {k}; "
                "fill groups up with zeros"
            )
    return sizes


def _check_groups(
    op: str, name: str, d: torch.Tensor, c: torch.Tensor | None, of: str, ks: Sequence[int]
) -> None:
    features = [*d.shape[1:], 0, 0][:2]
    check_gradient(op, name, d, c, [len(ks), *features], f"[G, M, N] for the G of {of}")


def _flat(
    op: str,
    name: str,
    pair: Operand,
    features: int,
    ks: Sequence[int],
    lie_by_blocks: bool = False,
) -> _KGrouped:
    """Codes that hold a matrix for each group; scales [F, S], or [S, F] if they lie by blocks."""
    codes, scales = pair
    check_tensor(op, name, codes, (E4M3,))
    if not codes.is_contiguous() or codes.numel() != features * sum(ks):
        raise ValueError(
            f"{op}: {name} must hold a contiguous [{features}, k] of each group one after the "
            f"other, {features} x {sum(ks)} codes in all, got shape {list(codes.shape)} with "
            f"strides {list(codes.stride())}"
        )
    scales = _scales(op, name, scales, features, ks, lie_by_blocks)
    return _KGrouped(codes.view(-1), scales)


def _tall(op: str, name: str, pair: Operand, features: int, ks: Sequence[int]) -> _KGrouped:
    """Codes [sum(ks), F]; scales [S, F]."""
    codes, scales = pair
    check_tensor(op, name, codes, (E4M3,), 2)
    check_shape(op, name, codes, [sum(ks), features], "[sum(ks), features], as d has them,")
    scales = _scales(op, name, scales, features, ks, True)
    if codes.numel() == 0 or codes.stride(0) == 1:
        return _KGrouped(codes.T, scales)
    check_rows_contiguous(op, name, codes)
    return _KGrouped(transpose_codes(codes), scales)


def _scales(
    op: str, name: str, scales: torch.Tensor, features: int, ks: Sequence[int], lie_by_blocks: bool
) -> torch.Tensor:
    """The scales as [S, F]."""
    shape = [sum(ceil_div(k, BLOCK) for k in ks), features]
    rule = "[blocks of all groups, features]"
    if not lie_by_blocks:
        shape, rule = shape[::-1], "[features, blocks of all groups]"
    check_shape(op, f"the scales of {name}", scales, shape, rule)
    return by_blocks(scales.T if lie_by_blocks else scales)
