"""The transformers plug-in: after `import moefp8.hf`, transformers' functions know moefp8.

`from_pretrained(path, quantization_config=moefp8.hf.FP8Config())` loads block-FP8 checkpoints
into our modules, and quantizes others as they are loaded; `experts_implementation="moefp8"` runs
the experts that transformers keeps itself; `ep_implementation="moefp8"` brings tokens to experts
on several ranks. It needs the extra `hf`.

Reading order: `versions`, `config`, `other_formats`, `quantizer` (what is swapped, and what is
checked before), `placement` (several devices), `merge` (how experts reach their stacks), `experts`,
`expert_parallel`, `decoding` (in CUDA graphs).
"""

from .versions import check as _check
from .versions import has_ep_implementations as _has_ep_implementations

_check()

from . import other_formats as other_formats
from .config import FP8Config, pretrained_config
from .decoding import DecodingGraphs
from .experts import experts_forward, fp8_experts_forward
from .quantizer import FP8Quantizer

if _has_ep_implementations():
    from . import expert_parallel as expert_parallel

__all__ = [
    "DecodingGraphs",
    "FP8Config",
    "FP8Quantizer",
    "experts_forward",
    "fp8_experts_forward",
    "pretrained_config",
]
