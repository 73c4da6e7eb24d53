"""Raw tensors in, raw tensors out: one registered torch op per kernel, with DeepGEMM's names.

No module, no autograd, no policy. Whatever the device, the numerics are those of
`gemm.block_scaled_matmul`.
"""

from ..quant.quantize import per_block_cast_to_fp8, per_token_cast_to_fp8
from .common.blocks import (
    BLOCK,
    E4M3,
    ceil_div,
    empty_tma_aligned,
    num_blocks,
    round_up,
    tma_aligned,
)
from .common.fp8 import e4m3_to_float
from .gemm.dense import (
    fp8_gemm_nt,
    gemm_fp8_fp8_bf16_nt,
    get_col_major_tma_aligned_tensor,
    get_mn_major_tma_aligned_tensor,
    get_tma_aligned_size,
)
from .gemm.grouped import (
    get_mk_alignment_for_contiguous_layout,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)
from .gemm.launch import get_num_sms, set_num_sms

# Their names in DeepGEMM's first release, for `(lhs, rhs, out, m_indices)` and
# `(lhs, rhs, out, masked_m, expected_m)`.
m_grouped_gemm_fp8_fp8_bf16_nt_contiguous = m_grouped_fp8_gemm_nt_contiguous
m_grouped_gemm_fp8_fp8_bf16_nt_masked = m_grouped_fp8_gemm_nt_masked

__all__ = [
    "BLOCK",
    "E4M3",
    "ceil_div",
    "e4m3_to_float",
    "empty_tma_aligned",
    "fp8_gemm_nt",
    "gemm_fp8_fp8_bf16_nt",
    "get_col_major_tma_aligned_tensor",
    "get_mk_alignment_for_contiguous_layout",
    "get_mn_major_tma_aligned_tensor",
    "get_num_sms",
    "get_tma_aligned_size",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "m_grouped_gemm_fp8_fp8_bf16_nt_contiguous",
    "m_grouped_gemm_fp8_fp8_bf16_nt_masked",
    "num_blocks",
    "per_block_cast_to_fp8",
    "per_token_cast_to_fp8",
    "round_up",
    "set_num_sms",
    "tma_aligned",
]
