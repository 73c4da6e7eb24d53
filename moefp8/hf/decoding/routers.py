"""Routers of transformers whose softmax, choice and division become one kernel of ours.

T tokens, H hidden, E experts, k choices.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ...routing import softmax_topk
from ...routing.top_k_launch import MAX_EXPERTS

_ROUNDING = 2.0**-7  # scores may be rounded to BF16
_VANISHING = 1e-6  # a score that is as small adds nothing to a BF16 sum of experts
_TRIED_TOKENS = 64


@dataclass(frozen=True)
class Router:
    """A router that gives (logits [T, E], scores [T, k], ids [T, k]), by softmax of its logits."""

    module: nn.Module
    top_k: int
    renormalize: bool
    dtype: torch.dtype

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x: [..., H]."""
        logits = linear(x.reshape(-1, x.shape[-1]), self.module.get_parameter("weight"))
        ids, scores = softmax_topk(logits, self.top_k, self.renormalize)
        return logits, scores.to(self.dtype), ids


@contextmanager
def routers_of(model: nn.Module) -> Iterator[list[Router]]:
    """The routers of a model that can be replaced, filled when a call has been observed."""
    routers: list[Router] = []
    seen: list[tuple[nn.Module, torch.Tensor, Any]] = []

    def note(module: nn.Module, inputs: Any, outputs: Any) -> None:
        seen.append((module, inputs[0], outputs))

    gates = [x for x in model.modules() if hasattr(x, "top_k") and _holds_one_weight(x)]
    hooks = [x.register_forward_hook(note) for x in gates]
    try:
        yield routers
    finally:
        for hook in hooks:
            hook.remove()
    routers += [router for call in seen if (router := _router(*call)) is not None]


def _holds_one_weight(module: nn.Module) -> bool:
    """Whether nothing else, such as a bias in a buffer, may change what it chooses."""
    tensors = *module.named_parameters(), *module.named_buffers()
    return [name for name, _ in tensors] == ["weight"]


def _router(module: nn.Module, x: torch.Tensor, outputs: Any) -> Router | None:
    """The router that computes what `module` gave for these tokens and gives for random ones.

    Small numbers give scores that are nearly equal, large ones scores near 0 and 1.
    """
    generator = torch.Generator(x.device).manual_seed(0)
    shape = _TRIED_TOKENS, x.shape[-1]
    random = torch.randn(shape, dtype=x.dtype, device=x.device, generator=generator)
    try:
        logits, scores, _ = outputs
        if logits.shape[-1] > MAX_EXPERTS:
            return None
        tries = [(x, outputs), *((each, module(each)) for each in (random, random / 64))]
        for renormalize in (True, False):
            router = Router(module, scores.shape[-1], renormalize, scores.dtype)
            clear = [_clear_rows(router, *each) for each in tries]
            if None not in clear and sum(filter(None, clear)) >= _TRIED_TOKENS // 2:
                return router
    except (TypeError, ValueError, AttributeError, RuntimeError):  # a gate of another kind
        pass
    return None


def _clear_rows(router: Router, x: torch.Tensor, outputs: Any) -> int | None:
    """The number of rows in which it gives the same experts; None if any other row differs.

    Rows with ties do not count: equal logits, or scores that vanish, of which a choice by scores
    takes any.
    """
    own = router.forward(x)
    for mine, theirs in zip(own, outputs, strict=True):
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            return None
    (logits, scores, ids), (given_logits, given_scores, given_ids) = own, outputs
    best, given_best = (y.float().sort(-1).values for y in (scores, given_scores))
    are_near = torch.isclose(best, given_best, rtol=_ROUNDING, atol=_VANISHING)
    is_clear = ~_has_tie(logits, router.top_k) & (given_best[:, 0] > _VANISHING)
    is_same = (ids.sort(-1).values == given_ids.sort(-1).values).all(-1)
    if not (torch.equal(logits, given_logits) and are_near.all() and is_same[is_clear].all()):
        return None
    return int(is_clear.sum())


def _has_tie(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """[T], whether the last logit that is chosen has an equal that is not."""
    if top_k == logits.shape[-1]:
        return logits.new_zeros(len(logits), dtype=torch.bool)
    best = logits.sort(-1, descending=True).values
    return best[:, top_k - 1] == best[:, top_k]
