"""DeepGEMM's helpers: how scales lie in memory, and how tensors become FP8."""

from . import layout, math
from .layout import (
    get_col_major_tma_aligned_tensor,
    get_k_alignment_for_contiguous_layout,
    get_m_alignment_for_contiguous_layout,
    get_mk_alignment_for_contiguous_layout,
    get_mn_major_tma_aligned_tensor,
    get_theoretical_mk_alignment_for_contiguous_layout,
    get_tma_aligned_size,
    set_mk_alignment_for_contiguous_layout,
    transform_sf_into_required_layout,
)
from .math import (
    align,
    ceil_div,
    ceil_to_ue8m0,
    per_block_cast_to_fp8,
    per_channel_cast_to_fp8,
    per_custom_dims_cast_to_fp8,
    per_token_cast_to_fp8,
)

__all__ = [
    "align",
    "ceil_div",
    "ceil_to_ue8m0",
    "get_col_major_tma_aligned_tensor",
    "get_k_alignment_for_contiguous_layout",
    "get_m_alignment_for_contiguous_layout",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_tensor",
    "get_theoretical_mk_alignment_for_contiguous_layout",
    "get_tma_aligned_size",
    "layout",
    "math",
    "per_block_cast_to_fp8",
    "per_channel_cast_to_fp8",
    "per_custom_dims_cast_to_fp8",
    "per_token_cast_to_fp8",
    "set_mk_alignment_for_contiguous_layout",
    "transform_sf_into_required_layout",
]
