"""DeepGEMM's FP8 GEMMs for Hopper, over ours: `import moefp8.deep_gemm as deep_gemm`.

Call sites of DeepGEMM's releases of 2025 and 2026 run on every device that moefp8 runs on, by
position and by keyword. The numerics are those of `moefp8.kernels`, whose functions these call.
Names are where DeepGEMM has them: here, in `utils`, `utils.layout`, `utils.math` and `testing`; the
`__all__` of each file lists them. Operands are pairs (e4m3 data, fp32 scales): 1x128 scales for a,
128x128 scales for b; in weight gradients 1x128 scales along K for both.

These are accepted and change nothing, since our kernels are chosen otherwise or run on Hopper only:
`compiled_dims`, `disable_ue8m0_cast`, `expected_m_for_psum_layout`, `psum_layout` of
`transform_sf_into_required_layout`, `set_tc_util`, `set_pdl`, `set_ignore_compile_dims`,
`set_block_size_multiple_of` and `set_compile_mode`. `expected_m` is a hint.

What only Blackwell can compute (FP4 data, packed UE8M0 scales) is refused by an error that names
the way out, and a name of DeepGEMM that is not offered raises an AttributeError that says why.
"""

from . import gemm, k_grouped, settings, testing, utils, weight_gradients
from .gemm import *
from .k_grouped import *
from .settings import *
from .testing import *
from .utils.layout import *
from .utils.math import *
from .weight_gradients import *

__all__ = [
    *gemm.__all__,
    *k_grouped.__all__,
    *settings.__all__,
    *testing.__all__,
    *utils.layout.__all__,
    *utils.math.__all__,
    *weight_gradients.__all__,
    "testing",
    "utils",
]

# Pieces of DeepGEMM's names that are not offered, and the reason.
_NOT_OFFERED = {
    "mega_moe": "the routed experts as a whole are moefp8.GroupedExperts",
    "ue8m0": "packed UE8M0 scales are for Blackwell; Hopper takes FP32 scales",
    "mqa_logits": "scores of attention are not part of moefp8",
    "skip_head_mid": "projections of attention that leave gaps are not part of moefp8",
    "hc_prenorm": "hyper-connections are not part of moefp8",
    "einsum": "einsums are not part of moefp8; torch.einsum has them in BF16",
    "cublaslt": "wrappers of cuBLASLt are not part of moefp8; torch.matmul calls it",
    "fp4": "FP4 is for Blackwell; per_token_cast_to_fp8 and per_block_cast_to_fp8 give FP8",
    "bf16": "BF16 GEMMs are not part of moefp8; torch.matmul and grouped_mm have them",
    "bench": "timing is not part of moefp8.deep_gemm; torch.utils.benchmark has it",
}


def __getattr__(name: str) -> object:
    reasons = [reason for piece, reason in _NOT_OFFERED.items() if piece in name]
    why = f": {reasons[0]}" if reasons else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{why}", name=name)
