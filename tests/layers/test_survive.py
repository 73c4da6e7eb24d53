"""What users do to modules: casts, copies, state dicts, meta, compile, autocast, gradients."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrize

from moefp8 import FP8Linear, GroupedExperts
from moefp8.quant import BlockScaled, dequantize
from moefp8.testing import assert_matches_reference
from tests.layers.cases import E, H, I, hidden, make_moe

FP8 = torch.float8_e4m3fn
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
    with pytest.raises(RuntimeError, match=r"float8_e4m3fn, got bfloat16; quantize with"):
        linear.load_state_dict(state, assign=assign)
    assert same_bytes(before, linear.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight_scale_inv": torch.ones(1, 1, dtype=torch.uint8)},
            "scale_inv must be .* got uint8",
        ),
        ({"weight_scale_inv": torch.ones(2, 1)}, r"must be the model's = \[1, 1\], got \[2, 1\]"),
        ({"weight_scale_inv": None}, "weight_scale_inv must come with weight"),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_data_and_scales_are_loaded_together_or_not_at_all(change, message, strict):
    linear, other = FP8Linear(16, 16), FP8Linear(16, 16)
    before = {name: x.clone() for name, x in linear.state_dict().items()}
    state = {name: x for name, x in {**other.state_dict(), **change}.items() if x is not None}
    with pytest.raises(RuntimeError, match=message):
        linear.load_state_dict(state, strict=strict)
    assert same_bytes(before, linear.state_dict())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_reach_the_sums(dtype):
    moe, x = make_moe(), hidden()
    linear, router, experts = moe.shared_experts.up_proj, moe.gate, moe.experts
    routing = router(x)
    expected = linear(x), experts(x, *routing)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(router(x).top_k_index, routing.top_k_index)
        assert torch.equal(router(x).top_k_weights, routing.top_k_weights)
        assert torch.equal(linear(x), expected[0])
        assert torch.equal(experts(x, *routing), expected[1])


def test_ties_and_requires_grad_outlive_deepcopy():
    a, b = FP8Linear(8, 8), FP8Linear(8, 8)
    b.weight = a.weight
    a.weight.requires_grad_()
    twin = copy.deepcopy(nn.ModuleList([a, b]))
    assert twin[0].weight is twin[1].weight
    assert twin[0].weight.requires_grad
    assert twin[0].weight.data_ptr() != a.weight.data_ptr()
    assert pickle.loads(pickle.dumps(a)).weight.requires_grad


@pytest.mark.parametrize("make", [lambda: FP8Linear(8, 24), lambda: GroupedExperts(3, 8, 16)])
def test_tensors_may_be_no_parameters_any_more(make):
    """Sharding wrappers and data parallelism put tensors in their place, or compute them."""
    layer = make()
    tokens = torch.randn(5, 8), torch.randint(3, (5, 2)), torch.rand(5, 2)
    arguments = tokens if isinstance(layer, GroupedExperts) else tokens[:1]
    expected = layer(*arguments)
    *kept, computed = layer.fp8_names + layer.fp32_names
    parametrize.register_parametrization(layer, computed, nn.Identity())
    for name in kept:
        data = getattr(layer, name).detach()
        delattr(layer, name)
        setattr(layer, name, data)
    assert torch.equal(layer(*arguments), expected)


def test_moe_takes_any_leading_shape():
    moe, x = make_moe(), hidden(6)
    for shape in ((6, H), (1, 6, H), (2, 3, H)):
        assert torch.equal(moe(x.view(shape)).view(6, H), moe(x))
    assert moe(x[0]).shape == (H,)
    assert moe(x[:0].view(2, 0, H)).shape == (2, 0, H)


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
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(moe, backend=counter, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        # Twice: torch takes the router's float for a variable until an op asks for its value.
        compiled(hidden())
        counter.frame_count = 0
        for num_tokens in (7, 12, 3, 30, 64, 5):
            x = hidden(num_tokens)
            assert_matches_reference(compiled(x), moe(x), 8e-2)
    assert counter.frame_count == 0


def test_compiled_linear_is_bit_equal():
    torch._dynamo.reset()
    linear, x = FP8Linear(300, 200), hidden(5, 300)
    assert torch.equal(torch.compile(linear, fullgraph=True)(x), linear(x))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("trained", ["weight", "down_proj", "gate_up_proj_scale_inv"])
def test_the_gradient_of_a_weight_is_an_error_that_says_so(trained, compiled):
    torch._dynamo.reset()
    x = hidden().requires_grad_()
    if trained == "weight":
        module, arguments = FP8Linear(H, 40), (x,)
    else:
        module = GroupedExperts(E, H, I)
        arguments = x, torch.zeros(9, 1, dtype=torch.int64), torch.ones(9, 1)
    name = type(module).__name__
    getattr(module, trained).requires_grad_()
    if compiled:
        module = torch.compile(module, backend="aot_eager", fullgraph=True)
    y = module(*arguments)
    with pytest.raises(NotImplementedError, match=f"{name}: FP8 weights .*add_lora"):
        y.float().sum().backward()
    with torch.no_grad():
        assert not module(*arguments).requires_grad


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
