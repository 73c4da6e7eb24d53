"""What users need to property-test a model of their own: measures, references, strategies."""

from .compare import compare_models
from .errors import assert_matches_reference, relative_error, row_errors
from .gradients import gradients
from .reference import (
    ReferenceExperts,
    ReferenceLinear,
    module_errors,
    reference_model,
    teacher_forced,
)
from .strategies import Spread, gemm_shapes, routings, sizes, spread

__all__ = [
    "ReferenceExperts",
    "ReferenceLinear",
    "Spread",
    "assert_matches_reference",
    "compare_models",
    "gemm_shapes",
    "gradients",
    "module_errors",
    "reference_model",
    "relative_error",
    "routings",
    "row_errors",
    "sizes",
    "spread",
    "teacher_forced",
]
