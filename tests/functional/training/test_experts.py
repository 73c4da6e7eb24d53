"""Trained experts: all gradients against a reference of the same codes, and against BF16.

T tokens, k choices each, E experts, H hidden, I intermediate. Gate, up and their gradients are
rounded to BF16 on the way, and two orders of sums may round them to neighbours: then a code may be
the next one, which counts in a whole row or column of a gradient in weights, and a block may have
another scale. So the median row of each expert is judged tightly, and the worst one loosely.
"""

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from moefp8 import GroupedExperts
from moefp8.layers import PlainExperts
from moefp8.testing import reference_model, row_errors, sizes
from tests.gpu import on_cpu_and_gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
E, H, I, K = 5, 200, 136, 3
WGRADS = ["128x1", "128x128", "bf16"]


class Case(NamedTuple):
    """x [T, H], ids [T, k], weights [T, k], and the gradient of the result."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    grad: torch.Tensor

    def to(self, device: str) -> "Case":
        return Case(*(x.to(device) for x in self))


class Found(NamedTuple):
    y: torch.Tensor
    x: torch.Tensor
    weights: torch.Tensor
    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor


def layer_of(device: str, master: torch.dtype = FP32, **options: Any) -> GroupedExperts:
    sizes_of = options.pop("sizes", (E, H, I))
    return GroupedExperts(*sizes_of, trainable=True, dtype=master, device=device, **options)


def case(num_tokens: int, ids: torch.Tensor | None = None, h: int = H) -> Case:
    """Some ids are of no expert here, and a token names one twice."""
    if ids is None:
        ids = torch.rand(num_tokens, E).topk(K).indices
        ids[::7, 1] = E
        ids[2:3, 2] = ids[2:3, 0]
    weights = torch.rand(ids.shape)
    return Case(
        torch.randn(num_tokens, h).to(BF16), ids, weights, torch.randn(num_tokens, h).to(BF16)
    )


def run(layer: torch.nn.Module, made: Case, home: torch.nn.Module | None = None) -> Found:
    """home: whose parameters get the gradients, if not those of the layer."""
    home = home or layer
    x, weights = made.x.clone().requires_grad_(), made.weights.clone().requires_grad_()
    for parameter in home.parameters():
        parameter.grad = None
    y = layer(x, made.ids, weights)
    y.backward(made.grad)
    of_weights = [home.get_parameter(name).grad for name in Found._fields[3:]]
    return Found(y.detach(), x.grad, weights.grad, *of_weights)


def reference(layer: GroupedExperts, made: Case) -> Found:
    twin = reference_model(torch.nn.Sequential(layer))[0]
    return run(twin, made, home=layer)


def errors_of(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """Of each row that is not zeros; those that are must be zeros in both."""
    a, b = found.double().flatten(0, -2), wanted.double().flatten(0, -2)
    is_live = b.norm(dim=1) > 0
    assert not a[~is_live].any()
    return row_errors(a[is_live], b[is_live])


def assert_right(found: Found, right: Found, worst: float = 0.08) -> None:
    """The median row of each expert, and the worst one.

    A GPU forms gate and up with about 14 bits. So more of what is rounded on the way goes to a
    neighbour, and values near the limit of SwiGLU to its other side, where their gradient ends; and
    the gradient of one weight of a choice may be what is left of terms that cancel.
    """
    on_gpu = found.y.is_cuda
    for name in Found._fields[3:]:
        came, wanted = getattr(found, name), getattr(right, name)
        assert (came.dtype, came.shape) == (wanted.dtype, wanted.shape)
        for of_expert in zip(came, wanted, strict=True):
            errors = errors_of(*of_expert)
            if len(errors):
                assert errors.max() < worst * (4 if on_gpu else 1), name
                assert errors.median() < 1e-2 * (3 if on_gpu else 1), name
    for came, wanted in zip(found[:3], right[:3], strict=True):
        errors = errors_of(came, wanted)
        if on_gpu:
            assert (came.double() - wanted.double()).norm() < 0.03 * wanted.double().norm()
        else:
            assert errors.numel() == 0 or errors.max() < 0.03


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("master", [FP32, BF16, FP16])
@pytest.mark.parametrize("limit", [None, 0.5])
def test_gradients_are_those_of_the_codes(device, wgrad, master, limit):
    """More rows than a block has, so that blocks begin anew with each expert."""
    torch.manual_seed(0)
    layer = layer_of(device, master, wgrad=wgrad, swiglu_limit=limit)
    made = case(400).to(device)
    found = run(layer, made)
    assert_right(found, reference(layer, made))
    sentinel = made.ids == E
    assert not found.weights[sentinel].any()


@on_cpu_and_gpu
@settings(deadline=None, max_examples=10)
@given(
    shape=st.tuples(sizes(200, 1), sizes(200, 2), sizes(200, 2)),
    num_experts=st.integers(1, 6),
    top_k=st.integers(1, 3),
    wgrad=st.sampled_from(WGRADS),
    seed=st.integers(0, 2**31),
)
def test_any_sizes(device, shape, num_experts, top_k, wgrad, seed):
    torch.manual_seed(seed)
    num_tokens, h, i = shape
    layer = layer_of(device, sizes=(num_experts, h, i), wgrad=wgrad)
    ids = torch.randint(num_experts + 1, (num_tokens, top_k))  # some twice, some nobody's
    assume((ids < num_experts).any())
    made = case(num_tokens, ids, h).to(device)
    found, right = run(layer, made), reference(layer, made)
    # In small layers sums of few terms may cancel, and single codes weigh: all is judged at once.
    for came, wanted in zip(found, right, strict=True):
        assert (came.double() - wanted.double()).norm() <= 0.05 * wanted.double().norm() + 1e-6


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("loads", [[300, 0, 0, 0, 0], [0, 129, 0, 1, 128], [0, 0, 0, 0, 0]])
def test_loads(device, wgrad, loads):
    """One expert with all tokens, experts at the edges of blocks, and no rows at all."""
    torch.manual_seed(0)
    layer = layer_of(device, wgrad=wgrad)
    num_tokens = max(sum(loads), 4)
    ids = torch.full((num_tokens, 1), E)
    ids[: sum(loads), 0] = torch.arange(E).repeat_interleave(torch.tensor(loads))
    made = case(num_tokens, ids).to(device)
    found = run(layer, made)
    for name in Found._fields[3:]:
        for expert, load in enumerate(loads):
            assert getattr(found, name)[expert].any() == (load > 0)
    if sum(loads):
        assert_right(found, reference(layer, made), worst=0.15)
    else:
        assert not any(x.any() for x in found)


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("saved_dtype", [BF16, torch.float8_e4m3fn])
def test_fp8_is_good_enough_beside_bf16(device, wgrad, saved_dtype):
    torch.manual_seed(0)
    layer = layer_of(device, BF16, wgrad=wgrad, saved_dtype=saved_dtype)
    plain = PlainExperts(E, H, I, device=device, dtype=FP32)
    with torch.no_grad():
        plain.gate_up_proj.copy_(layer.gate_up_proj)
        plain.down_proj.copy_(layer.down_proj)
    made = case(400).to(device)
    made = made._replace(ids=made.ids.clamp(max=E - 1))
    found, right = run(layer, made), run(plain, made)
    for name in Found._fields:
        errors = errors_of(getattr(found, name), getattr(right, name))
        assert errors.median() < 0.09, name
        assert errors.max() < 0.15 or name == "weights", name  # those may cancel
    assert (found.weights - right.weights).norm() < 0.08 * right.weights.norm()


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", WGRADS)
def test_the_dtype_that_is_saved_changes_gradients_alone(device, wgrad):
    torch.manual_seed(0)
    layer, made = layer_of(device, wgrad=wgrad), case(100).to(device)
    exact = run(layer, made)
    layer.saved_dtype = torch.float8_e4m3fn
    rounded = run(layer, made)
    assert torch.equal(exact.y, rounded.y)
    assert errors_of(rounded.down_proj, exact.down_proj).median() < 0.06
    assert errors_of(rounded.gate_up_proj, exact.gate_up_proj).median() < 0.06
    assert not torch.equal(rounded.down_proj, exact.down_proj)


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", WGRADS)
def test_an_expert_alone_has_the_same_gradient(device, wgrad):
    """No token of another expert counts, to the bit."""
    torch.manual_seed(0)
    layer, made = layer_of(device, wgrad=wgrad), case(300).to(device)
    whole = run(layer, made)
    for expert in (0, 3):
        alone = run(layer, made._replace(ids=made.ids.where(made.ids == expert, E)))
        assert torch.equal(alone.gate_up_proj[expert], whole.gate_up_proj[expert])
        assert torch.equal(alone.down_proj[expert], whole.down_proj[expert])
        others = [x for x in range(E) if x != expert]
        assert not alone.down_proj[others].any()


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", WGRADS)
def test_experts_held_elsewhere(device, wgrad):
    """Two ranks with 2 and 3 experts have the gradients of the whole, and add up to its dX."""
    torch.manual_seed(0)
    layer, made = layer_of(device, wgrad=wgrad), case(200).to(device)
    whole, parts = run(layer, made), []
    for begin, end in ((0, 2), (2, 5)):
        part = GroupedExperts.from_weights(
            layer.gate_up_proj[begin:end].detach().clone(),
            layer.down_proj[begin:end].detach().clone(),
            trainable=True,
            wgrad=wgrad,
        )
        part.expert_offset, part.num_global_experts = begin, E
        parts.append(run(part, made))
    for name in Found._fields[3:]:
        assert torch.equal(torch.cat([getattr(x, name) for x in parts]), getattr(whole, name))
    assert errors_of(parts[0].x.float() + parts[1].x.float(), whole.x).max() < 0.01
    assert torch.allclose(parts[0].weights + parts[1].weights, whole.weights)


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("where", ["x", "grad"])
def test_nan_in_a_token_reaches_the_gradients_of_its_experts_alone(device, wgrad, where):
    torch.manual_seed(0)
    layer, made = layer_of(device, wgrad=wgrad), case(60)
    made.ids[9] = torch.tensor([1, 3, E])
    (made.x if where == "x" else made.grad)[9, 5] = torch.nan
    found = run(layer, made.to(device))
    for name in Found._fields[3:]:
        has_nan = getattr(found, name).isnan().flatten(1).any(1).tolist()
        assert has_nan == [x in (1, 3) for x in range(E)], name
    others = torch.arange(60, device=device) != 9
    assert found.x[others].isfinite().all()
    assert found.weights[others].isfinite().all()
    assert found.y[others].isfinite().all()


@on_cpu_and_gpu
@pytest.mark.parametrize("power", [-20, 20])
def test_tokens_of_other_sizes_are_as_exact(device, power):
    """Every third token has a gradient 2**20 times as large or small."""
    torch.manual_seed(0)
    layer, made = layer_of(device), case(200)
    made.grad[::3] *= 2.0**power
    made = made.to(device)
    found, right = run(layer, made), reference(layer, made)
    assert errors_of(found.x, right.x).max() < 0.03
    assert_right(found, right)


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("master", [BF16, FP16, FP32])
@pytest.mark.parametrize("is_told", [True, False])
def test_main_grad(device, wgrad, master, is_told):
    torch.manual_seed(0)
    layer, made = layer_of(device, master, wgrad=wgrad), case(150).to(device)
    plain = run(layer, made)
    before = {}
    for name in Found._fields[3:]:
        weight = layer.get_parameter(name)
        before[name] = torch.randn(weight.shape, device=device)
        weight.main_grad = before[name].clone()
        if is_told:
            weight.grad_added_to_main_grad = False
    found = run(layer, made)
    for name in Found._fields[3:]:
        weight = layer.get_parameter(name)
        assert (getattr(found, name) is not None) == is_told
        assert not is_told or weight.grad_added_to_main_grad is True
        added, wanted = weight.main_grad - before[name], getattr(plain, name).float()
        rounding = 0.0 if master == FP32 else 2.0**-8
        assert ((added - wanted).abs() <= rounding * wanted.abs() + 2e-5).all()


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj", "both"])
def test_frozen_master_weights_have_no_gradient(device, wgrad, frozen):
    torch.manual_seed(0)
    layer, made = layer_of(device, wgrad=wgrad), case(50).to(device)
    whole = run(layer, made)
    names = Found._fields[3:] if frozen == "both" else (frozen,)
    for name in names:
        layer.get_parameter(name).requires_grad_(False)
    found = run(layer, made)
    assert torch.equal(found.x, whole.x)
    assert torch.equal(found.weights, whole.weights)
    for name in Found._fields[3:]:
        came = getattr(found, name)
        assert came is None if name in names else torch.equal(came, getattr(whole, name))


@on_cpu_and_gpu
def test_an_addend_has_the_gradient_of_the_result(device):
    layer, made = layer_of(device, BF16), case(40).to(device)
    addend = torch.randn_like(made.x).requires_grad_()
    y = layer(made.x, made.ids, made.weights, addend=addend)
    y.backward(made.grad)
    assert torch.equal(addend.grad, made.grad)


def test_references_reject_what_is_wrong():
    """The bounds above can be missed: another kind of blocks, a lost row, a weight of a choice."""
    torch.manual_seed(0)
    layer, made = layer_of("cpu"), case(300)
    right = reference(layer, made)
    layer.wgrad = "128x128"
    with pytest.raises(AssertionError):
        assert_right(run(layer, made), right)
    layer.wgrad = "128x1"
    lost = made.ids.clone()
    lost[17, 0] = E
    with pytest.raises(AssertionError):
        assert_right(run(layer, made._replace(ids=lost)), right)
    heavier = made.weights.clone()
    heavier[20] *= 1.1
    with pytest.raises(AssertionError):
        assert_right(run(layer, made._replace(weights=heavier)), right)
    assert_right(run(layer, made), right)
