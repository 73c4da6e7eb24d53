"""Which token goes where: top-k choices, the routing plan, dispatch and combine."""

from .combine import combine
from .dispatch import dispatch
from .plan import Layout, RoutingPlan, build_plan
from .top_k import TopK, sigmoid_group_topk, softmax_topk

__all__ = [
    "Layout",
    "RoutingPlan",
    "TopK",
    "build_plan",
    "combine",
    "dispatch",
    "sigmoid_group_topk",
    "softmax_topk",
]
