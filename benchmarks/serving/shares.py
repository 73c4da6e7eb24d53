"""Where a step of an engine spends its time, read from the names and the order of its kernels."""

import re
from typing import Any

import torch

_CHOICE = re.compile(r"topkGating|grouped_topk|topk_softmax|topk_sigmoid")
_NORM = re.compile(r"rms_norm|_norm_|layernorm", re.IGNORECASE)


def experts_share(profile: Any) -> float | None:
    """Which part of the GPU's busy time experts take: from a router's choice to the next norm.

    A kernel counts from the end of the one before it to its own end, so that kernels that overlap
    are not counted twice. None: no router's choice was seen.
    """
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, of_experts, end_before, is_in_experts, has_choice = 0.0, 0.0, 0.0, False, False
    for start, end, name in events:
        time_us = max(0.0, end - max(start, end_before))
        end_before = max(end_before, end)
        busy += time_us
        if _CHOICE.search(name):
            is_in_experts = has_choice = True
            continue
        if _NORM.search(name):
            is_in_experts = False
        if is_in_experts:
            of_experts += time_us
    return of_experts / busy if has_choice and busy else None
