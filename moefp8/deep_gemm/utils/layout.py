"""How scales lie in memory, and to how many rows the groups of a contiguous GEMM are aligned."""

from collections.abc import Sequence

import torch

from ... import kernels
from ...kernels.common.checks import check_shape, check_tensor
from ..settings import integer

__all__ = [
    "get_col_major_tma_aligned_tensor",
    "get_k_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_tensor",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "set_mk_alignment_for_contiguous_layout",
    "transform_sf_into_required_layout",
]

_mk_alignment = kernels.get_mk_alignment_for_contiguous_layout()


def get_tma_aligned_size(x: int, element_size: int) -> int:
    """`x` elements of `element_size` bytes, rounded up to a multiple of TMA's 16 bytes.

    Raises:
        ValueError: `element_size` does not divide 16.
    """
    if element_size < 1 or 16 % element_size:
        raise ValueError(f"get_tma_aligned_size: element_size must divide 16, got {element_size}")
    return kernels.round_up(x, 16 // element_size)


def get_mn_major_tma_aligned_tensor(sf: torch.Tensor) -> torch.Tensor:
    """`sf` in the memory order that the GEMMs load scales of activations in: itself, or a copy.

    M is contiguous and padded to a multiple of 4. `moefp8.quant.quantize_1x128` gives that order;
    the GEMMs copy scales in any other into it at every call.

    Args:
        sf: fp32 [M, K/128] or [G, M, K/128].

    Raises:
        TypeError, ValueError: `sf` has another dtype, or another number of dimensions.
    """
    name = "get_mn_major_tma_aligned_tensor"
    check_tensor(name, "sf", sf, (torch.float32,))
    if sf.ndim not in (2, 3):
        raise ValueError(f"{name}: sf must have 2 or 3 dimensions, got shape {list(sf.shape)}")
    *_, m, k_blocks = sf.shape
    pitch = get_tma_aligned_size(m, sf.element_size())
    strides = (k_blocks * pitch, 1, pitch)[-sf.ndim :]
    return sf if sf.stride() == strides else kernels.tma_aligned(sf)


def get_col_major_tma_aligned_tensor(x: torch.Tensor) -> torch.Tensor:
    """`get_mn_major_tma_aligned_tensor(x)`, under its name in DeepGEMM's first release."""
    return get_mn_major_tma_aligned_tensor(x)


def transform_sf_into_required_layout(
    sf: torch.Tensor,
    mn: int,
    k: int,
    recipe: Sequence[int] | None = None,
    num_groups: int | None = None,
    is_sfa: bool | None = None,
    disable_ue8m0_cast: bool = False,
    psum_layout: torch.Tensor | None = None,
    *,
    recipe_ab: Sequence[int] | None = None,
) -> torch.Tensor:
    """The scales as the GEMMs want them on Hopper: 1x128 aligned for TMA, 128x128 as they are.

    Args:
        sf: fp32 [ceil(mn/rows), ceil(k/128)] for blocks of `rows` x 128 of a matrix [mn, k], or
            [num_groups, ...] of these.
        recipe: (rows, 128), which is (1, 128) or (128, 128); or (1, 128, 128) for both operands,
            of which a has the first if `is_sfa`, and b has the second.
        recipe_ab: two numbers, in place of `recipe`.
        disable_ue8m0_cast, psum_layout: without meaning here.

    Raises:
        TypeError: `sf` is not FP32; packed UE8M0 is for Blackwell.
        ValueError: the shape of `sf` is not that of `mn` and `k`, or blocks are of other sizes.
    """
    op = "transform_sf_into_required_layout"
    check_fp32_scales(op, "sf", sf)
    given = recipe if recipe_ab is None else recipe_ab
    block = () if given is None else tuple(given)
    if len(block) == 3:
        block = (block[0 if is_sfa else 1], block[2])
    if block not in ((1, 128), (128, 128)):
        raise ValueError(
            f"{op}: on Hopper, scales are of 1x128 or 128x128 blocks, got recipe {given} with "
            f"is_sfa {is_sfa}; other blocks are for Blackwell"
        )
    groups = [] if num_groups is None else [num_groups]
    shape = [*groups, *map(kernels.ceil_div, (mn, k), block)]
    check_shape(op, "sf", sf, shape, "[num_groups if given, ceil(mn/rows), ceil(k/128)]")
    return get_mn_major_tma_aligned_tensor(sf) if block[0] == 1 else sf


def check_fp32_scales(op: str, name: str, sf: torch.Tensor) -> None:
    """Raise a TypeError unless `sf` is FP32; for scales of Blackwell, it tells the way out."""
    if sf.dtype in (torch.int32, torch.uint8, torch.float8_e8m0fnu):
        raise TypeError(
            f"{op}: {name} must be float32 on Hopper, got {sf.dtype}; UE8M0 scales, packed four to "
            "an int or not, are for Blackwell: give them in FP32, by "
            "sf.contiguous().view(torch.float8_e8m0fnu).float()"
        )
    check_tensor(op, name, sf, (torch.float32,))


# ---- Alignment of groups ----


def get_mk_alignment_for_contiguous_layout() -> int:
    """The rows to a multiple of which the groups of a contiguous GEMM are aligned, at first 128."""
    return _mk_alignment


def set_mk_alignment_for_contiguous_layout(new_value: int) -> None:
    """Align groups to `new_value` rows. Our kernels take any multiple of 128.

    Raises:
        TypeError, ValueError: it is no int, or no such multiple.
    """
    global _mk_alignment
    op = "set_mk_alignment_for_contiguous_layout"
    value = integer(op, "new_value", new_value)
    unit = kernels.get_mk_alignment_for_contiguous_layout()
    if value < 1 or value % unit:
        raise ValueError(
            f"{op}: new_value must be a multiple of {unit}, to which groups are aligned on Hopper, "
            f"got {value}; groups without alignment are expert_offsets of "
            "moefp8.kernels.m_grouped_fp8_gemm_nt_contiguous"
        )
    _mk_alignment = value


def get_theoretical_mk_alignment_for_contiguous_layout(expected_m: int | None = None) -> int:
    """The least alignment, 128 on Hopper, whatever `expected_m` is."""
    return kernels.get_mk_alignment_for_contiguous_layout()


get_m_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
get_k_alignment_for_contiguous_layout = get_mk_alignment_for_contiguous_layout
