"""The modules: right against references, good enough against BF16, and hard to break."""

import copy
import pickle

import naive
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from moefp8 import FP8Linear, GroupedExperts, MoE, TopKRouter
from moefp8.quant import BlockScaled, dequantize
from moefp8.testing import (
    assert_matches_reference,
    reference_model,
    relative_error,
    routings,
    row_errors,
    sizes,
    spread,
)

FP8 = torch.float8_e4m3fn
E, H, I, K = 6, 256, 200, 2


def make_moe() -> MoE:
    torch.manual_seed(0)
    return MoE(
        H,
        I,
        E,
        K,
        shared_intermediate_size=130,
        shared_expert_gate=True,
        scoring="sigmoid",
        num_groups=3,
        topk_groups=2,
        correction_bias=True,
    )


def hidden(num_tokens: int = 9, size: int = H) -> torch.Tensor:
    return torch.randn(num_tokens, size, dtype=torch.bfloat16)


def dequantized_experts(experts: GroupedExperts) -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up [E, 2I, H] and down [E, H, I] in FP64, by the rule for their scale rows."""
    gate_up, down = [], []
    half, blocks = experts.intermediate_size, experts.gate_up_proj_scale_inv.shape[1] // 2
    for e in range(experts.num_experts):
        for rows, scales in (
            (slice(0, half), slice(0, blocks)),
            (slice(half, None), slice(blocks, None)),
        ):
            operand = experts.gate_up_proj[e, rows], experts.gate_up_proj_scale_inv[e, scales]
            gate_up.append(naive.values(*operand, 128))
        down.append(naive.values(experts.down_proj[e], experts.down_proj_scale_inv[e], 128))
    return torch.cat(gate_up).view(experts.num_experts, 2 * half, -1), torch.stack(down)


def assert_matches_up_to_codes(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Between the GEMMs one activation in 10**5 may round to the neighbouring E4M3 code."""
    assert_matches_reference(actual, expected, 5e-2)
    errors = row_errors(actual, expected)
    assert int((errors > 6e-3).sum()) <= 1 + 0.05 * errors.numel()


# --- right ---


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
    assert_matches_reference(results[2], results[1])


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


# --- good enough ---


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
    assert_matches_reference(moe(x), expected.detach(), 1.2e-2)
    assert torch.equal(moe(x.view(2, 5, H)), moe(x).view(2, 5, H))


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


# --- hard to break ---

FIXED = {
    "experts.gate_up_proj": FP8,
    "experts.down_proj": FP8,
    "experts.gate_up_proj_scale_inv": torch.float32,
    "experts.down_proj_scale_inv": torch.float32,
    "shared_experts.up_proj.weight": FP8,
    "shared_experts.up_proj.weight_scale_inv": torch.float32,
    "gate.weight": torch.float32,
    "gate.e_score_correction_bias": torch.float32,
}


def same_bytes(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8))
        for k in a
    )


@pytest.mark.parametrize(
    "cast",
    [
        lambda m: m.half(),
        lambda m: m.bfloat16(),
        lambda m: m.double().float(),
        lambda m: m.to(torch.float16),
        lambda m: m.to("cpu", torch.bfloat16),
    ],
)
def test_casts_leave_fp8_scales_and_router_alone(cast):
    moe = make_moe()
    moe.gate.e_score_correction_bias.copy_(torch.randn(E))
    before = {name: moe.state_dict()[name].clone() for name in FIXED}
    cast(moe)
    after = {name: moe.state_dict()[name] for name in FIXED}
    assert {name: x.dtype for name, x in after.items()} == FIXED
    assert same_bytes(before, after)


def test_casts_reach_the_bias():
    linear = FP8Linear(8, 8)
    assert linear.bias.dtype == torch.bfloat16
    assert linear.half().bias.dtype == torch.float16
    assert linear(torch.ones(1, 8, dtype=torch.float16)).dtype == torch.float16


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
    ids=["deepcopy", "pickle"],
)
def test_copies_are_equal_and_independent(duplicate):
    moe, x = make_moe(), hidden()
    twin = duplicate(moe)
    assert same_bytes(moe.state_dict(), twin.state_dict())
    assert torch.equal(moe(x), twin(x))
    twin.experts.down_proj.view(torch.uint8).zero_()
    assert not torch.equal(moe(x), twin(x))
    assert not any(p.requires_grad for p in twin.experts.parameters())


def test_torch_save_and_load(tmp_path):
    moe, x = make_moe(), hidden()
    torch.save(moe, tmp_path / "moe.pt")
    assert torch.equal(torch.load(tmp_path / "moe.pt", weights_only=False)(x), moe(x))


@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_round_trip(tmp_path, assign):
    moe, x = make_moe(), hidden()
    torch.save(moe.state_dict(), tmp_path / "moe.pt")
    state = torch.load(tmp_path / "moe.pt")
    with torch.device("meta" if assign else "cpu"):
        twin = make_moe()
    twin.load_state_dict(state, assign=assign)
    assert torch.equal(twin(x), moe(x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_of_a_state_dict_are_upcast(assign, dtype):
    linear = FP8Linear(300, 200)
    state = linear.state_dict()
    scales = torch.exp2(torch.randint(-9, 9, (2, 3)).float())
    linear.load_state_dict({**state, "weight_scale_inv": scales.to(dtype)}, assign=assign)
    assert linear.weight_scale_inv.dtype == torch.float32
    assert torch.equal(linear.weight_scale_inv, scales)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_of_bf16_weights_is_refused(assign):
    linear = FP8Linear(16, 16)
    before = {name: x.clone() for name, x in linear.state_dict().items()}
    state = {**linear.state_dict(), "weight": torch.randn(16, 16).bfloat16()}
    with pytest.raises(RuntimeError, match=r"weight must be float8_e4m3fn, got torch\.bfloat16"):
        linear.load_state_dict(state, assign=assign)
    assert same_bytes(before, linear.state_dict())


def test_meta_modules_become_real():
    with torch.device("meta"):
        moe = make_moe()
    assert all(x.is_meta for x in moe.state_dict().values())
    assert moe(torch.empty(3, H, device="meta", dtype=torch.bfloat16)).shape == (3, H)
    moe.to_empty(device="cpu")
    assert {name: moe.state_dict()[name].dtype for name in FIXED} == FIXED


@pytest.mark.parametrize("layout", ["contiguous", "masked"])
def test_compiles_whole_for_any_number_of_tokens(layout):
    torch._dynamo.reset()
    moe = make_moe()
    moe.experts.layout = layout
    compiled = torch.compile(moe, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for num_tokens in (7, 12, 3):
            x = hidden(num_tokens)
            assert_matches_reference(compiled(x), moe(x), 2e-2)


def test_compiled_linear_is_bit_equal():
    torch._dynamo.reset()
    linear, x = FP8Linear(300, 200), hidden(5, 300)
    assert torch.equal(torch.compile(linear, fullgraph=True)(x), linear(x))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["FP8Linear", "GroupedExperts"])
def test_a_gradient_is_an_error_that_says_so(name, compiled):
    torch._dynamo.reset()
    x = hidden().requires_grad_()
    if name == "FP8Linear":
        module, arguments = FP8Linear(H, 40), (x,)
    else:
        module = GroupedExperts(E, H, I)
        arguments = (x, torch.zeros(9, 1, dtype=torch.int64), torch.ones(9, 1))
    if compiled:
        module = torch.compile(module, fullgraph=True)
    y = module(*arguments)
    with pytest.raises(NotImplementedError, match=f"{name}: training is not supported yet"):
        y.float().sum().backward()
    with torch.no_grad():
        assert not module(*arguments).requires_grad


def test_a_gradient_of_the_weights_of_the_choice_is_an_error_too():
    weights = torch.ones(9, 1, requires_grad=True)
    y = GroupedExperts(E, H, I)(hidden(), torch.zeros(9, 1, dtype=torch.int64), weights)
    with pytest.raises(NotImplementedError, match="GroupedExperts: training"):
        y.float().sum().backward()


def test_inference_mode():
    with torch.inference_mode():
        moe, x = make_moe(), hidden()
        y = moe(x)
    assert torch.equal(make_moe()(hidden() * 0 + x.clone()), y.clone())


def test_a_fresh_linear_is_a_random_linear():
    torch.manual_seed(1)
    ours = FP8Linear(300, 200)
    weight = dequantize(BlockScaled(ours.weight, ours.weight_scale_inv))
    assert 0.9 < weight.std() / (300**-0.5 / 3**0.5) < 1.1


ONES = torch.ones(4, 2)
INDEX = torch.zeros(4, 2, dtype=torch.int64)
BAD_EXPERTS = {
    "width": (
        (hidden(4, 200), INDEX, ONES),
        r"hidden_states must be \[T, H\] = \[4, 256\], got \[4, 200\]",
    ),
    "rank": (
        (hidden(4)[None], INDEX, ONES),
        r"hidden_states must have 2 dimensions, got shape \[1, 4, 256\]",
    ),
    "dtype": ((hidden(4).double(), INDEX, ONES), "hidden_states must be .*, got float64"),
    "index dtype": (
        (hidden(4), INDEX.float(), ONES),
        "top_k_index must be int32 or int64, got float32",
    ),
    "index tokens": (
        (hidden(5), INDEX, ONES),
        r"top_k_index must be \[T, k\] = \[5, 2\], got \[4, 2\]",
    ),
    "weights": (
        (hidden(4), INDEX, ONES[:, :1]),
        r"top_k_weights must be .* = \[4, 2\], got \[4, 1\]",
    ),
    "ids": (
        (hidden(4), INDEX + E + 1, ONES),
        r"top_k_index must be in \[0, E\] for E = 6 .*got ids from 7 to 7",
    ),
    "device": ((hidden(4).to("meta"), INDEX, ONES), "hidden_states on meta, top_k_index on cpu"),
}


@pytest.mark.parametrize("case", BAD_EXPERTS)
def test_experts_name_bad_input(case):
    arguments, message = BAD_EXPERTS[case]
    with pytest.raises((TypeError, ValueError), match=message):
        GroupedExperts(E, H, I)(*arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FP8Linear(8, 8)(torch.ones(2, 9)), r"in_features = 8, got shape \[2, 9\]"),
        (lambda: FP8Linear(8, 8)(torch.ones(2, 8, dtype=torch.int64)), "got int64"),
        (lambda: FP8Linear.from_linear(nn.Identity()), "expected nn.Linear, got"),
        (lambda: GroupedExperts(2, 8, 8, layout="ragged"), "layout must be .*, got 'ragged'"),
        (
            lambda: GroupedExperts.from_weights(torch.ones(2, 9, 8), torch.ones(2, 8, 4)),
            r"= \[2, 8, 8\], got \[2, 9, 8\]",
        ),
        (lambda: TopKRouter(8, 4, 5), r"TopKRouter: top_k must be in \[1, E\] = \[1, 4\], got 5"),
        (lambda: TopKRouter(8, 4, 2, scoring="tanh"), "scoring must be .*, got 'tanh'"),
        (lambda: TopKRouter(8, 4, 2, num_groups=2), "are for scoring='sigmoid'"),
        (
            lambda: TopKRouter(8, 4, 2)(torch.ones(3, 9)),
            r"hidden_states must be \[T, 8\], got \[3, 9\]",
        ),
        (lambda: MoE(8, 8, 4, 5), "TopKRouter: top_k must be in"),
        (lambda: MoE(8, 8, 4, 2, shared_expert_gate=True), "needs shared_intermediate_size"),
    ],
)
def test_modules_name_bad_arguments(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()
