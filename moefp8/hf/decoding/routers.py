"""Routers of transformers whose softmax, choice and division become one kernel of ours.

T tokens, H hidden, E experts, k choices.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear

from ...routing import softmax_topk
from ...routing.top_k_launch import MAX_EXPERTS
from .blocks import replaced_forward

_ROUNDING = 2.0**-7  # scores may be rounded to BF16


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

    gates = [x for x in model.modules() if [*dict(x.named_parameters())] == ["weight"]]
    gates = [x for x in gates if hasattr(x, "top_k") and not list(x.children())]
    hooks = [x.register_forward_hook(note) for x in gates]
    try:
        yield routers
    finally:
        for hook in hooks:
            hook.remove()
    routers += [router for call in seen if (router := _router(*call)) is not None]


def _router(module: nn.Module, x: torch.Tensor, outputs: Any) -> Router | None:
    """The router that computes what `module` gave for these tokens and gives for random ones."""
    try:
        logits, scores, ids = outputs
        random = torch.randn(64, x.shape[-1], dtype=x.dtype, device=x.device)
        tries = [(x, (logits, scores, ids)), (random, module(random))]
        found = [
            router
            for renormalize in (True, False)
            if (router := Router(module, scores.shape[-1], renormalize, scores.dtype))
            and logits.shape[-1] <= MAX_EXPERTS
            and all(_agrees(router, tokens, given) for tokens, given in tries)
        ]
    except (TypeError, ValueError, AttributeError, RuntimeError):  # a gate of another kind
        return None
    return found[0] if found else None


def _agrees(router: Router, x: torch.Tensor, outputs: Any) -> bool:
    """Whether it gives these outputs, but for the order of equal scores, and rounding."""
    own = router.forward(x)
    for mine, given in zip(own, outputs, strict=True):
        if mine.shape != given.shape or mine.dtype != given.dtype:
            return False
    (logits, scores, ids), (given_logits, given_scores, given_ids) = own, outputs
    if not torch.equal(logits, given_logits):
        return False
    places, given_places = ids.argsort(-1), given_ids.argsort(-1)
    near = torch.isclose(
        scores.gather(-1, places).float(),
        given_scores.gather(-1, given_places).float(),
        rtol=_ROUNDING,
        atol=0,
    )
    same = ids.gather(-1, places) == given_ids.gather(-1, given_places)
    has_tie = _has_tie(logits, router.top_k)
    return bool((same & near).all(-1).logical_or(has_tie).all())


def _has_tie(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """[T], whether the last logit that is chosen has an equal that is not."""
    if top_k == logits.shape[-1]:
        return logits.new_zeros(len(logits), dtype=torch.bool)
    best = logits.sort(-1, descending=True).values
    return best[:, top_k - 1] == best[:, top_k]


@contextmanager
def chosen_by_one_kernel(routers: Sequence[Router]) -> Iterator[None]:
    """Within it, each router's softmax, choice and division are one kernel."""
    with ExitStack() as stack:
        for router in routers:
            stack.enter_context(replaced_forward(router.module, router.forward))
        yield
