"""The modules: right against references, good enough against BF16, and what they refuse."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, ones
from torch.nn import functional as F
from torch.nn.utils import parametrize

from moefp8 import FP8Linear, GroupedExperts, MoE, TopKRouter
from moefp8.layers.moe import SharedExperts
from moefp8.testing import (
    assert_matches_reference,
    reference_model,
    relative_error,
    routings,
    sizes,
    spread,
)
from tests import naive
from tests.layers.cases import E, H, I, K, assert_matches_up_to_codes, hidden, make_moe


def dequantized_experts(experts: GroupedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up [E, 2I, H] and down [E, H, I] in FP64, by the rule for their scale rows."""
    gate_up, down = [], []
    for e in range(experts.num_experts):
        halves = zip(
            experts.gate_up_proj[e].chunk(2),
            experts.gate_up_proj_scale_inv[e].chunk(2),
            strict=True,
        )
        gate_up.append(torch.cat([naive.values(*half, 128) for half in halves]))
        down.append(naive.values(experts.down_proj[e], experts.down_proj_scale_inv[e], 128))
    return torch.stack(gate_up), torch.stack(down)


@given(m=sizes(20), n=sizes(200), k=sizes(300), bias=st.booleans(), data=spread(16))
def test_linear_is_right(m, n, k, bias, data):
    linear = FP8Linear(k, n, bias=bias)
    x = data.tensor(m, k)
    assert_matches_reference(linear(x), reference_model(linear)(x))


@settings(max_examples=20)
@given(
    routing=routings(E, K, max_tokens=12),
    size=st.sampled_from((128, 200, 320)),
    limit=st.sampled_from((None, 0.05)),
    layout=st.sampled_from(("auto", "contiguous", "masked")),
)
def test_experts_are_right(routing, size, limit, layout):
    experts = GroupedExperts(E, 136, size, swiglu_limit=limit, layout=layout)
    x = hidden(routing.top_k_index.shape[0], 136)
    assert_matches_up_to_codes(experts(x, *routing), reference_model(experts)(x, *routing))


def test_every_expert_slot_counts():
    """One token per expert, each against FP64 on that expert's own weights."""
    experts = GroupedExperts(E, H, 320)
    x, index, weights = hidden(E), torch.arange(E)[:, None], torch.ones(E, 1)
    expected = naive.experts(x, index, weights, *dequantized_experts(experts))
    assert_matches_reference(experts(x, index, weights), expected, 0.08)
    for e in range(E):
        others = naive.experts(x, (index + 1) % E, weights, *dequantized_experts(experts))
        assert relative_error(others[e], expected[e]) > 0.5


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_repeated_choices_and_sentinels(layout):
    experts = GroupedExperts(E, H, I, layout=layout)
    x = hidden(3)
    index = torch.tensor([[1, 1, 2], [E, 0, E], [E, E, E]])
    weights = torch.tensor([[0.2, 0.3, 0.5], [9.0, 1.0, torch.nan], [1.0, 1.0, 1.0]])
    y = experts(x, index, weights)
    simple = experts(x[:1], torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.5]]))
    assert_matches_reference(y[:1], simple)
    assert torch.equal(y[1:2], experts(x[1:2], torch.tensor([[0]]), torch.ones(1, 1)))
    assert bool((y[2] == 0).all())


def test_layouts_agree_bit_for_bit():
    experts, x = GroupedExperts(E, H, I), hidden(30)
    router = TopKRouter(H, E, K)
    results = []
    for layout in ("auto", "contiguous", "masked"):
        experts.layout = layout
        results.append(experts(x, *router(x)))
    assert torch.equal(results[0], results[1])
    assert_matches_up_to_codes(results[2], results[1])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_bad_activations_stay_with_their_token(bad, layout):
    experts, x = GroupedExperts(E, H, I, layout=layout), hidden(5)
    routing = torch.tensor([[0, 1]] * 5), torch.full((5, 2), 0.5)
    clean = experts(x, *routing)
    x[3, 17] = bad
    y = experts(x, *routing)
    assert bool(y[3].isnan().all())
    keep = [0, 1, 2, 4]
    assert torch.equal(y[keep], clean[keep])


def test_linear_is_close_to_bf16():
    linear = nn.Linear(1024, 512).bfloat16()
    x = hidden(64, 1024)
    assert_matches_reference(FP8Linear.from_linear(linear)(x), linear(x), 0.06)


def test_experts_are_close_to_bf16():
    gate_up, down = torch.randn(E, 2 * 256, 512) * 0.04, torch.randn(E, 512, 256) * 0.06
    experts = GroupedExperts.from_weights(gate_up.bfloat16(), down.bfloat16())
    x = hidden(32, 512)
    routing = TopKRouter(512, E, K)(x)
    assert_matches_reference(
        experts(x, *routing), naive.experts(x, *routing, gate_up.bfloat16(), down.bfloat16()), 0.1
    )


def test_moe_is_the_sum_of_its_parts():
    moe, x = make_moe(), hidden(10)
    shared = reference_model(moe.shared_experts)(x)
    gate = (x.float() @ moe.shared_expert_gate.weight.float().T).sigmoid()
    expected = reference_model(moe.experts)(x, *moe.gate(x)).float() + gate * shared.float()
    assert_matches_reference(moe(x), expected.detach(), 5e-2)


def test_router_is_fp32():
    router = TopKRouter(H, E, K).bfloat16()
    x = hidden(4)
    logits = x.float() @ router.weight.T
    assert router.weight.dtype == torch.float32
    assert torch.equal(router(x).top_k_weights, router(x.float()).top_k_weights)
    expected = torch.stack([logits[t].softmax(0)[i] for t, i in enumerate(router(x).top_k_index)])
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(router(x).top_k_weights, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(H,), (0, H), (2, 0, H), (2, 3, H)])
def test_linear_takes_any_shape_and_float(dtype, shape):
    y = FP8Linear(H, 40)(torch.randn(shape).to(dtype))
    assert (y.shape, y.dtype) == ((*shape[:-1], 40), dtype)


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_experts_take_no_tokens(layout):
    experts = GroupedExperts(E, H, I, layout=layout)
    y = experts(hidden(0), torch.zeros(0, 2, dtype=torch.int64), torch.ones(0, 2))
    assert (y.shape, y.dtype) == ((0, H), torch.bfloat16)


@pytest.mark.parametrize("shape", [(3, 4, H), (1, 12, H), (2, 2, 3, H), (12, H)])
@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_experts_take_tokens_of_any_shape(shape, layout):
    """DBRX gives a batch of sequences, and choices for each row of it."""
    experts, x = GroupedExperts(E, H, I, layout=layout), hidden(12)
    choices = torch.randint(E, (12, 2)), torch.rand(12, 2)
    expected = experts(x, *choices)
    assert torch.equal(experts(x.view(shape), *choices), expected.view(shape))


X, INDEX, ONES = hidden(4), torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((hidden(4, 200), INDEX, ONES), r"hidden_states must be .* = \[4, 256\], got \[4, 200\]"),
        ((X.new_zeros(1, 5, H), INDEX, ONES), r"index must be \[T, k\] = \[5, 2\], got \[4, 2\]"),
        ((torch.tensor(1.0), INDEX, ONES), r"hidden_states must have 2 dimensions, got shape \[\]"),
        ((X.double(), INDEX, ONES), "hidden_states must be .*, got float64"),
        ((X, INDEX.float(), ONES), "top_k_index must be int32 or int64, got float32"),
        ((X, INDEX, ONES[:, :1]), r"top_k_weights must be .* = \[4, 2\], got \[4, 1\]"),
        ((X, INDEX + E + 1, ONES), r"must be in \[0, E\] for E = 6 .*got ids from 7 to 7"),
        ((X.to("meta"), INDEX, ONES), "hidden_states on meta, top_k_index on cpu"),
    ],
)
def test_experts_name_bad_input(inputs, message):
    with pytest.raises((TypeError, ValueError), match=message):
        GroupedExperts(E, H, I)(*inputs)


def linear_with_1d_weight() -> nn.Linear:
    linear = nn.Linear(8, 8)
    linear.weight = nn.Parameter(torch.ones(8))
    return linear


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FP8Linear(8, 8)(torch.tensor(1.0)), r"in_features = 8, got shape \[\]"),
        (lambda: FP8Linear(8, 8)(torch.ones(2, 9)), r"in_features = 8, got shape \[2, 9\]"),
        (lambda: FP8Linear(8, 8)(torch.ones(2, 8, dtype=torch.int64)), "got int64"),
        (lambda: FP8Linear.from_linear(nn.Identity()), "expected nn.Linear, got"),
        (
            lambda: FP8Linear.from_linear(linear_with_1d_weight()),
            "from_linear: weight must have 2 dimensions",
        ),
        (
            lambda: FP8Linear.from_linear(linear_with_1d_weight(), trainable=True),
            "from_linear: weight must have 2 dimensions",
        ),
        (lambda: GroupedExperts(2, 8, 8, layout="ragged"), "layout must be .*, got 'ragged'"),
        (lambda: GroupedExperts.from_weights(ones(2, 9, 8), ones(2, 8, 4)), r"got \[2, 9, 8\]"),
        (lambda: TopKRouter(8, 4, 5), r"TopKRouter: top_k must be in \[1, E\] = \[1, 4\], got 5"),
        (lambda: TopKRouter(8, 4, 2, scoring="tanh"), "scoring must be .*, got 'tanh'"),
        (lambda: TopKRouter(8, 4, 2, num_groups=2), "are for scoring='sigmoid'"),
        (lambda: TopKRouter(8, 4, 2)(ones(3, 9)), r"hidden_states must be \[T, 8\], got \[3, 9\]"),
        (lambda: MoE(8, 8, 4, 5), "TopKRouter: top_k must be in"),
        (lambda: MoE(8, 8, 4, 2)(ones(3, 9)), r"MoE: .*\[\.\.\., H = 8\], got shape \[3, 9\]"),
        (lambda: MoE(8, 8, 4, 2)(torch.tensor(1.0)), r"got shape \[\]"),
        (lambda: MoE(8, 8, 4, 2, shared_expert_gate=True), "needs shared_intermediate_size"),
    ],
)
def test_modules_name_bad_arguments(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


# Codes are no weights


class AddsInFp32(nn.Module):
    """An adapter's product is added, as PEFT does to a parameter."""

    def forward(self, codes):
        return (codes.float() + 1).to(codes.dtype)


@pytest.mark.parametrize("name", ["weight", "gate_up_proj", "down_proj"])
def test_what_is_added_to_codes_is_refused(name):
    if name == "weight":
        layer, operands = FP8Linear(256, 256), (torch.ones(2, 256),)
    else:
        ids = torch.zeros(2, 1, dtype=torch.int64)
        layer, operands = GroupedExperts(2, 256, 128), (torch.ones(2, 256), ids, torch.ones(2, 1))
    parametrize.register_parametrization(layer, name, AddsInFp32())
    with pytest.raises(ValueError, match=f"{name} is parametrized.*moefp8.dequantize"):
        layer(*operands)
    parametrize.remove_parametrizations(layer, name, leave_parametrized=False)
    assert layer(*operands).isfinite().all()


@pytest.mark.parametrize("multiply", [F.linear, lambda x, weight: x @ weight.T, torch.mul])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_codes_are_not_multiplied_as_weights(multiply, dtype):
    layer = FP8Linear(256, 256, bias=False)
    with pytest.raises(RuntimeError, match=r"dtype|Promotion|not implemented"):
        multiply(torch.ones(256, 256, dtype=dtype), layer.weight)


def test_codes_do_not_load_strictly_into_another_linear():
    with pytest.raises(RuntimeError, match=r"Unexpected key.*weight_scale_inv"):
        nn.Linear(256, 256).load_state_dict(FP8Linear(256, 256).state_dict())


def layers_of_64() -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Of tokens [3, 64], by the name that errors tell."""
    experts = GroupedExperts(2, 64, 40)
    choice = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1)
    return {
        "FP8Linear": FP8Linear(64, 40),
        "SharedExperts": SharedExperts(64, 40),
        "GroupedExperts": lambda x: experts(x, *choice),
    }


@pytest.mark.parametrize("is_outer", [False, True])
def test_tangents_are_not_lost_silently(is_outer):
    x = torch.randn(3, 64)
    for name, layer in layers_of_64().items():
        with pytest.raises(NotImplementedError, match=f"{name}: forward-mode AD"):
            torch.func.jvp(layer, (x,), (x,))
        if is_outer:  # a tangent of something else
            torch.func.jvp(lambda z, f=layer: f(x).sum() + z, (x,), (x,))


def test_gradients_through_vmap_are_not_lost_silently():
    """Within `torch.vmap` no tensor says that it asks for a gradient."""
    x = torch.randn(2, 2, 3, 64)
    for name, layer in layers_of_64().items():
        once, twice = torch.vmap(layer), torch.vmap(torch.vmap(layer))
        error = pytest.raises(NotImplementedError, match=f"{name}: gradients through torch.vmap")
        with error:
            once(x[0].clone().requires_grad_())
        with error:
            twice(x.clone().requires_grad_())
        with error:
            torch.func.grad(lambda x, f=once: f(x).sum())(x[0])
        with error:
            torch.compile(once, backend="eager")(x[0].clone().requires_grad_())
        expected = torch.stack([layer(rows) for rows in x[0]])
        assert torch.equal(once(x[0]), expected)
        with torch.no_grad():
            assert torch.equal(once(x[0].clone().requires_grad_()), expected)
