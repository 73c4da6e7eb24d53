"""Raw tensors in, raw tensors out: one registered torch op per kernel, with DeepGEMM's names.

There is no module, autograd or policy here; DeepGEMM's other names are in `moefp8.deep_gemm`. On
every device the numerics are those of `gemm.dense.block_scaled_matmul`.
"""

from .common.blocks import (
    BLOCK,
    E4M3,
    ceil_div,
    e4m3_to_float,
    empty_tma_aligned,
    num_blocks,
    round_up,
    tma_aligned,
)
from .gemm.dense import fp8_gemm_nt
from .gemm.grouped import (
    get_mk_alignment_for_contiguous_layout,
    m_grouped_fp8_gemm_nt_contiguous,
    m_grouped_fp8_gemm_nt_masked,
)
from .gemm.sms import get_num_sms, set_num_sms

__all__ = [
    "BLOCK",
    "E4M3",
    "ceil_div",
    "e4m3_to_float",
    "empty_tma_aligned",
    "fp8_gemm_nt",
    "get_mk_alignment_for_contiguous_layout",
    "get_num_sms",
    "m_grouped_fp8_gemm_nt_contiguous",
    "m_grouped_fp8_gemm_nt_masked",
    "num_blocks",
    "round_up",
    "set_num_sms",
    "tma_aligned",
]
