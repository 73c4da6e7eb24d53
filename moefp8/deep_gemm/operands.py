"""What all of DeepGEMM's GEMMs take: pairs of data and scales, c beside d, and recipes."""

from collections.abc import Sequence

import torch

from ..kernels.common.checks import check_no_gradient, check_not_expanded, check_same_device
from .utils.layout import check_fp32_scales

Operand = tuple[torch.Tensor, torch.Tensor]  # (data, scales); a list is taken too
Recipe = Sequence[int] | None

# The block sizes of a's scales, of b's and along K: as recipe, recipe_a and recipe_b.
_OF_WEIGHTS = ((None, None, None), ((1, 128, 128), None, None), (None, (1, 128), (128, 128)))
_OF_GRADIENTS = (((1, 1, 128), None, None), (None, (1, 128), (1, 128)))


def unpack(op: str, name: str, pair: Operand, transposed: bool = False) -> Operand:
    """The pair, transposed if asked for, after checks for what only Blackwell can compute."""
    if not isinstance(pair, (tuple, list)) or len(pair) != 2:
        raise TypeError(f"{op}: {name} must be a pair (data, scales), got {type(pair)}")
    data, scales = pair
    if data.dtype in (torch.int8, torch.uint8, getattr(torch, "float4_e2m1fn_x2", None)):
        raise TypeError(
            f"{op}: {name} must be float8_e4m3fn on Hopper, got {data.dtype}; FP4 is for "
            "Blackwell: per_token_cast_to_fp8 and per_block_cast_to_fp8 give FP8"
        )
    check_fp32_scales(op, f"the scales of {name}", scales)
    if transposed:
        data, scales = (x.mT if x.ndim > 1 else x for x in (data, scales))
    return data, scales


def k_major(op: str, name: str, pair: Operand, transposed: bool = False) -> Operand:
    """The pair as `nt` has it; K must be innermost in memory."""
    data, scales = unpack(op, name, pair, transposed)
    if data.numel() and data.shape[-1] > 1 and data.stride(-1) != 1:
        raise ValueError(
            f"{op}: {name} must be K-major on Hopper, with K = {data.shape[-1]} innermost in "
            f"memory, got strides {list(pair[0].stride())} for shape {list(pair[0].shape)}; copy "
            f"it by {'.mT.contiguous().mT' if transposed else '.contiguous()'}"
        )
    return data, scales


def check_output(op: str, name: str, d: torch.Tensor, c: torch.Tensor | None) -> None:
    """Check that d may be written and c be added to it, before anything is."""
    check_no_gradient(op, [name], [d])
    check_not_expanded(op, name, d)
    if c is not None and (c.shape != d.shape or c.dtype != d.dtype):
        raise ValueError(
            f"{op}: c must have the shape and dtype of d, {list(d.shape)} in {d.dtype}, got "
            f"{list(c.shape)} in {c.dtype}"
        )
    check_same_device(op, **{name: d, "c": c})


def check_recipes(op: str, *recipes: Recipe | str | bool) -> None:
    """Check recipe, recipe_a and recipe_b of a GEMM whose b is weights, in 128x128 blocks."""
    given = _given(recipes)
    if given not in _OF_WEIGHTS:
        raise ValueError(
            f"{op}: recipe must be (1, 128, 128), or recipe_a (1, 128) and recipe_b (128, 128), or "
            "all None, for 1x128 scales of a and 128x128 scales of b; got recipe, recipe_a, "
            f"recipe_b = {given}. (1, 1, 128) is for weight gradients, which fp8_gemm_nt and "
            "k_grouped_fp8_gemm_nt_contiguous compute; other blocks are for Blackwell"
        )


def asks_for_gradients(op: str, *recipes: Recipe | str | bool) -> bool:
    """Whether both operands have 1x128 scales; if b has 128x128 scales, they do not."""
    given = _given(recipes)
    if given not in _OF_WEIGHTS + _OF_GRADIENTS:
        raise ValueError(
            f"{op}: recipe must be None or (1, 128, 128), for 1x128 scales of a and 128x128 scales "
            "of b, or (1, 1, 128), for 1x128 scales of both; or recipe_a (1, 128) and recipe_b "
            f"(128, 128) or (1, 128); got recipe, recipe_a, recipe_b = {given}. Other blocks are "
            "for Blackwell"
        )
    return given in _OF_GRADIENTS


def _given(recipes: Sequence[Recipe | str | bool]) -> tuple[object, ...]:
    """The recipes as tuples.

    By position, calls of 2025 give `compiled_dims` and `disable_ue8m0_cast` for the latter two.
    """
    if isinstance(recipes[1], str):
        recipes = (recipes[0], None, None)
    return tuple(tuple(x) if isinstance(x, Sequence) else x for x in recipes)
