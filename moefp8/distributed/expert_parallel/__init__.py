"""Expert parallelism: each rank holds some experts, and tokens travel to them and back."""

from .module import ExpertParallel, expert_parallel

__all__ = ["ExpertParallel", "expert_parallel"]
