"""`moefp8.testing`: measures, references, gradients and what strategies draw."""

import copy
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from torch import nn

import moefp8
from moefp8.testing import (
    ReferenceExperts,
    ReferenceLinear,
    Spread,
    assert_matches_reference,
    gemm_shapes,
    gradients,
    reference_model,
    relative_error,
    routings,
    row_errors,
    sizes,
    spread,
    teacher_forced,
)

from . import BF16, attempt, case, choices, randn


@case
def measures(device: str) -> Any:
    expected = randn(6, 40, device=device, dtype=torch.float32)
    actual = expected + 0.01 * randn(6, 40, device=device, dtype=torch.float32)
    lost = actual.clone()
    lost[2], lost[4, 1] = 0, float("nan")
    return [
        row_errors(actual=actual, expected=expected),
        row_errors(lost, expected),
        relative_error(actual=actual, expected=expected),
        relative_error(lost, expected),
        assert_matches_reference(actual=actual, expected=expected, max_relative_error=0.1),
        attempt(lambda: assert_matches_reference(actual, expected)),
        attempt(lambda: assert_matches_reference(lost, expected, 0.1)),
        attempt(lambda: row_errors(actual, expected[:3])),
    ]


@case
def references(device: str) -> Any:
    linear = moefp8.FP8Linear(136, 72, device=device)
    experts = moefp8.GroupedExperts(4, 136, 72, device=device)
    x = randn(9, 136, device=device)
    ids, scores = choices(9, 2, 4, device)
    outcomes = []
    for quantize in (True, False):
        by_hand = ReferenceExperts(experts=experts, quantize_activations=quantize)
        outcomes += [
            ReferenceLinear(linear=linear, quantize_activations=quantize)(x=x),
            by_hand(hidden_states=x, top_k_index=ids, top_k_weights=scores),
            reference_model(model=experts, quantize_activations=quantize)(x, ids, scores),
        ]
    return outcomes, reference_model(nn.Sequential(linear))


@case
def whole_models(device: str) -> Any:
    layers = (nn.Sequential(nn.Linear(136, 136), nn.SiLU()) for _ in range(3))
    model = moefp8.convert(nn.Sequential(*layers).to(device, BF16))
    x = randn(9, 136, device=device)
    return teacher_forced(model, x), teacher_forced(model=model, input=x)


@case
def errors_by_name(device: str) -> Any:
    model = nn.Sequential(*(moefp8.FP8Linear(136, 136, device=device) for _ in range(2)))
    return moefp8.testing.module_errors(model=model, input=randn(9, 136, device=device))


@case
def comparisons(device: str) -> Any:
    model = nn.Sequential(
        nn.Embedding(40, 136), *(nn.Linear(136, 136) for _ in range(2)), nn.Linear(136, 40)
    ).to(device, BF16)
    converted = moefp8.convert(copy.deepcopy(model))
    ids = torch.arange(12, device=device).view(2, 6)
    masked = moefp8.testing.compare_models(
        a=model,
        b=converted,
        ids=ids,
        labels=ids.masked_fill(ids % 3 > 0, -100),
        layers="",
        logits=lambda y: y * 2,
    )
    causal = moefp8.testing.compare_models(model, converted, ids, layers="")
    return masked.to_dict(), causal.to_dict(), causal.costliest.name


@case
def addends_and_uneven_weights(device: str) -> Any:
    experts = moefp8.GroupedExperts(4, 136, 72, device=device)
    by_hand, tokens = (
        ReferenceExperts(experts, quantize_activations=True),
        (randn(9, 136, device=device), *choices(9, 2, 4, device)),
    )
    uneven = Spread(seed=1, octaves=4, zero_fraction=0.3)
    return [
        by_hand(*tokens, addend=randn(9, 136, device=device)),
        uneven.weight(3, 200, 300, dtype=torch.float32),
        uneven.weight(200, 300),
    ]


@case
def gradients_by_name(device: str) -> Any:
    moe = moefp8.MoE(136, 72, 4, 2, device=device)
    moe.without_use = nn.Parameter(torch.ones(3, device=device))
    x = randn(9, 136, device=device)
    other = gradients(model=moe, hidden_states=x, loss=lambda y: y.float().square().sum(), seed=3)
    return gradients(moe, x), other, gradients(reference_model(moe), x)


def _drawn(strategy: Any) -> list[Any]:
    drawn: list[Any] = []

    @settings(
        max_examples=12,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[*HealthCheck],
    )
    @given(value=strategy)
    def draw(value: Any) -> None:
        drawn.append(value)

    draw()
    return drawn


@case
def strategies(device: str) -> Any:
    data = _drawn(spread(max_octaves=8))
    return [
        _drawn(sizes(max_size=300, min_size=2)),
        _drawn(gemm_shapes(max_m=70, max_n=300, max_k=400)),
        _drawn(routings(num_experts=8, top_k=2, max_tokens=20, sentinels=False)),
        _drawn(routings(4, 1)),
        data,
        [x.tensor(5, 300, dtype=torch.float32) for x in data],
        Spread(seed=1, octaves=4, zero_fraction=0.3).tensor(3, 200),
    ]
