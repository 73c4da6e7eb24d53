"""Expert parallelism: each rank holds some experts, and tokens travel to them and back."""

from .module import ExpertParallel, expert_parallel
from .transport import Transport

__all__ = ["ExpertParallel", "Transport", "expert_parallel"]
