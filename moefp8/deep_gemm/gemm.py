"""DeepGEMM's FP8 GEMMs, in the forms of its calls. M, N, K are GEMM axes, G is groups (experts).

A form is named by how a and b are given: `n` and `t` of `nt` are a [M, K] and b [N, K]; `tn` has a
[K, M] and b [K, N], with transposed scales. As in DeepGEMM, Hopper takes K-major data only: in
memory, K must be the innermost axis, whatever the form.
"""

from collections.abc import Callable
from itertools import pairwise

import torch
from torch.nn.functional import pad

from .. import kernels
from ..kernels.common.checks import check_shape, check_tensor
from .operands import Operand, Recipe, asks_for_gradients, check_output, check_recipes, k_major
from .utils.layout import get_mk_alignment_for_contiguous_layout
from .weight_gradients import dense_gradient

__all__ = [
    "fp8_fp4_gemm_nn",
    "fp8_fp4_gemm_nt",
    "fp8_fp4_gemm_tn",
    "fp8_fp4_gemm_tt",
    "fp8_gemm_nn",
    "fp8_gemm_nt",
    "fp8_gemm_tn",
    "fp8_gemm_tt",
    "fp8_m_grouped_gemm_nt_masked",
    "gemm_fp8_fp8_bf16_nt",
    "m_grouped_fp8_fp4_gemm_nn_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_contiguous",
    "m_grouped_fp8_fp4_gemm_nt_masked",
    "m_grouped_fp8_gemm_nn_contiguous",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
]

Gemm = Callable[..., None]


# ---- Dense ----


def _dense(form: str) -> Gemm:
    name, transposed_a, transposed_b = f"fp8_gemm_{form}", form[0] == "t", form[1] == "n"

    def gemm(
        a: Operand,
        b: Operand,
        d: torch.Tensor,
        c: torch.Tensor | None = None,
        recipe: Recipe = None,
        recipe_a: Recipe | str = None,
        recipe_b: Recipe | bool = None,
        compiled_dims: str = "nk",
        disable_ue8m0_cast: bool = False,
    ) -> None:
        of_gradients = asks_for_gradients(name, recipe, recipe_a, recipe_b)
        operands = k_major(name, "a", a, transposed_a), k_major(name, "b", b, transposed_b)
        check_output(name, "d", d, c)
        if of_gradients:
            dense_gradient(name, *operands, d, c)
            return
        product = d if c is None else torch.empty_like(d)
        kernels.fp8_gemm_nt(*operands, product)
        if c is not None:
            torch.add(c.detach(), product, out=d)

    a, b = "[K, M]" if transposed_a else "[M, K]", "[K, N]" if transposed_b else "[N, K]"
    gemm.__name__ = gemm.__qualname__ = name
    gemm.__doc__ = f"""Write the product of dequantized a and b, plus c, to d.

    Args:
        a: (e4m3 {a}, fp32 scales of 1x128 blocks along K).
        b: (e4m3 {b}, fp32 scales of 128x128 blocks, or as a with recipe (1, 1, 128)).
        d: bf16 [M, N], rows contiguous; overwritten. With recipe (1, 1, 128) fp32, or bf16 if c is
            None.
        c: as d, or d itself. Where d is bf16, the product is rounded to BF16 before c is added.
        recipe: None or (1, 128, 128), the blocks of both scales; or recipe_a (1, 128) and recipe_b
            (128, 128) instead. (1, 1, 128), or recipe_a and recipe_b (1, 128), is for weight
            gradients: K are tokens, and both operands have scales for 128 of them.
        compiled_dims, disable_ue8m0_cast: without meaning here.

    Raises:
        TypeError, ValueError: naming the argument, the rule, what came and the way out.
    """
    return gemm


fp8_gemm_nt = fp8_fp4_gemm_nt = _dense("nt")
fp8_gemm_nn = fp8_fp4_gemm_nn = _dense("nn")
fp8_gemm_tn = fp8_fp4_gemm_tn = _dense("tn")
fp8_gemm_tt = fp8_fp4_gemm_tt = _dense("tt")


def gemm_fp8_fp8_bf16_nt(lhs: Operand, rhs: Operand, out: torch.Tensor) -> None:
    """`fp8_gemm_nt(lhs, rhs, out)`, under its name in DeepGEMM's first release."""
    fp8_gemm_nt(lhs, rhs, out)


# ---- Grouped, contiguous ----


def _contiguous(form: str) -> Gemm:
    name, transposed_b = f"m_grouped_fp8_gemm_{form}_contiguous", form == "nn"

    def gemm(
        a: Operand,
        b: Operand,
        d: torch.Tensor,
        grouped_layout: torch.Tensor | None = None,
        recipe: Recipe = None,
        recipe_a: Recipe | str = None,
        recipe_b: Recipe | bool = None,
        compiled_dims: str = "nk",
        disable_ue8m0_cast: bool = False,
        use_psum_layout: bool = False,
        ensure_zero_padding: bool | int | None = True,
        expected_m_for_psum_layout: int | None = None,
        *,
        m_indices: torch.Tensor | None = None,
    ) -> None:
        check_recipes(name, recipe, recipe_a, recipe_b)
        x, w = k_major(name, "a", a), k_major(name, "b", b, transposed_b)
        layout = m_indices if grouped_layout is None else grouped_layout
        if layout is None or (grouped_layout is not None and m_indices is not None):
            raise TypeError(f"{name}: give either grouped_layout or, its name of 2025, m_indices")
        if use_psum_layout:
            layout = _groups_of_rows(name, layout, x[0], w[0])
        # By position, releases before June 2026 have expected_m_for_psum_layout in its place.
        zero_padding = ensure_zero_padding is not False
        kernels.m_grouped_fp8_gemm_nt_contiguous(x, w, d, layout, zero_padding=zero_padding)

    gemm.__name__ = gemm.__qualname__ = name
    gemm.__doc__ = f"""Write `d[r] = dequantize(a)[r] @ dequantize(b)[group of r]` of every row.

    Args:
        a: (e4m3 [M, K], fp32 scales [M, ceil(K/128)]). Rows of padding may hold anything.
        b: (e4m3 {"[G, K, N]" if transposed_b else "[G, N, K]"}, fp32 scales of 128x128 blocks).
        d: bf16 [M, N].
        grouped_layout: int32 [M], the group of each row, -1 for padding; groups start at multiples
            of `get_mk_alignment_for_contiguous_layout()`. With `use_psum_layout` int32 [G], the
            row that each group ends before; it starts at the first such multiple behind the group
            before it. Values are checked on the CPU only.
        m_indices: the same, under its name of 2025.
        ensure_zero_padding: all rows of padding become zeros, those after the last group too. A
            GPU zeroes all of d first, which writes 2 M N bytes. If False, none of them is written.
        expected_m_for_psum_layout: without meaning here.

    All else is as in `fp8_gemm_nt`.
    """
    return gemm


def _groups_of_rows(op: str, ends: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The group of each row or -1, int32 [M]; ends, int32 [G]: the row each group ends before."""
    check_tensor(op, "grouped_layout", ends, (torch.int32,), 1)
    check_shape(op, "grouped_layout", ends, [len(b)], "[G] with use_psum_layout")
    alignment = get_mk_alignment_for_contiguous_layout()
    if ends.device.type == "cpu" and not torch.compiler.is_compiling():
        for group, (before, end) in enumerate(pairwise([0, *ends.tolist()])):
            start = kernels.round_up(before, alignment)
            if not (end == before or start <= end) or end > len(a):
                raise ValueError(
                    f"{op}: with use_psum_layout, each group in grouped_layout must end where the "
                    f"group before it does, or at or after the next multiple of {alignment}, in "
                    f"M = {len(a)} rows, got {end} for group {group} after {before}"
                )
    next_starts = (ends + (alignment - 1)) // alignment * alignment
    rows = torch.arange(len(a), dtype=torch.int32, device=ends.device)
    groups = torch.searchsorted(next_starts, rows, right=True, out_int32=True)
    return torch.where(rows < pad(ends, (0, 1))[groups], groups, -1)  # after all groups is none


m_grouped_fp8_gemm_nt_contiguous = m_grouped_fp8_fp4_gemm_nt_contiguous = _contiguous("nt")
m_grouped_fp8_gemm_nn_contiguous = m_grouped_fp8_fp4_gemm_nn_contiguous = _contiguous("nn")


def m_grouped_gemm_fp8_fp8_bf16_nt_contiguous(
    lhs: Operand, rhs: Operand, out: torch.Tensor, m_indices: torch.Tensor
) -> None:
    """`m_grouped_fp8_gemm_nt_contiguous`, under its name in DeepGEMM's first release."""
    m_grouped_fp8_gemm_nt_contiguous(lhs, rhs, out, m_indices)


# ---- Grouped, masked ----


def m_grouped_fp8_gemm_nt_masked(
    a: Operand,
    b: Operand,
    d: torch.Tensor,
    masked_m: torch.Tensor,
    expected_m: int,
    recipe: Recipe = None,
    recipe_a: Recipe | str = None,
    recipe_b: Recipe | bool = None,
    compiled_dims: str = "nk",
    disable_ue8m0_cast: bool = False,
) -> None:
    """Write `d[g, :masked_m[g]] = dequantize(a)[g] @ dequantize(b)[g].T`, and no other row.

    The first five arguments are those of `moefp8.kernels.m_grouped_fp8_gemm_nt_masked`; all else is
    as in `fp8_gemm_nt`.
    """
    op = "m_grouped_fp8_gemm_nt_masked"
    check_recipes(op, recipe, recipe_a, recipe_b)
    operands = k_major(op, "a", a), k_major(op, "b", b)
    kernels.m_grouped_fp8_gemm_nt_masked(*operands, d, masked_m, expected_m)


m_grouped_fp8_fp4_gemm_nt_masked = fp8_m_grouped_gemm_nt_masked = m_grouped_fp8_gemm_nt_masked


def m_grouped_gemm_fp8_fp8_bf16_nt_masked(
    lhs: Operand, rhs: Operand, out: torch.Tensor, masked_m: torch.Tensor, expected_m: int
) -> None:
    """`m_grouped_fp8_gemm_nt_masked`, under its name in DeepGEMM's first release."""
    m_grouped_fp8_gemm_nt_masked(lhs, rhs, out, masked_m, expected_m)
