"""A trained linear: all gradients against FP64 sums of the same codes, and against BF16.

M rows, K in, N out.
"""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from moefp8.functional.training.linear import linear
from moefp8.quant import quantize_128x128
from moefp8.quant.columns import quantize_128x1
from moefp8.quant.quantize import quantize_1x128
from moefp8.testing import relative_error, sizes
from tests.gpu import on_cpu_and_gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
MIN_GRADIENT = 2.0**-60
WGRADS = ["128x1", "128x128", "bf16"]


class Case(NamedTuple):
    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    grad: torch.Tensor

    def to(self, device: str) -> "Case":
        moved = (None if x is None else x.to(device) for x in self)
        return Case(*moved)  # type: ignore[arg-type]


class Gradients(NamedTuple):
    y: torch.Tensor
    of_x: torch.Tensor
    of_weight: torch.Tensor | None
    of_bias: torch.Tensor | None


def case(
    m: int,
    k: int,
    n: int,
    dtype: torch.dtype = BF16,
    master: torch.dtype = BF16,
    bias: bool = True,
) -> Case:
    weight = (torch.randn(n, k) / k**0.5).to(master)
    return Case(
        torch.randn(m, k).to(dtype),
        weight,
        torch.randn(n).to(master) if bias else None,
        torch.randn(m, n).to(BF16),
    )


def run(made: Case, wgrad: str, **attributes) -> Gradients:
    """The parameters are new leaves; attributes are set on the weight."""
    x = made.x.clone().requires_grad_()
    weight = torch.nn.Parameter(made.weight.clone())
    for name, value in attributes.items():
        setattr(weight, name, value)
    bias = None if made.bias is None else torch.nn.Parameter(made.bias.clone())
    y = linear("test", x, weight, bias, wgrad)
    y.backward(made.grad)
    return Gradients(y.detach(), x.grad, weight.grad, None if bias is None else bias.grad)


# ---- What the codes stand for, in FP64 ----


def of_rows(x: torch.Tensor, min_amax: float) -> torch.Tensor:
    data, scale_inv = quantize_1x128(x, False, min_amax)
    return data.double() * scale_inv.double().repeat_interleave(128, 1)[:, : x.shape[1]]


def of_weight(weight: torch.Tensor) -> torch.Tensor:
    data, scale_inv = quantize_128x128(weight)
    scales = scale_inv.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return data.double() * scales[: weight.shape[0], : weight.shape[1]]


def of_columns(x: torch.Tensor, min_amax: float, blocks: bool = False) -> torch.Tensor:
    data, scale_inv = quantize_128x1(x, None, None, False, min_amax, blocks)
    scales = scale_inv.double()
    if blocks:
        scales = scales.repeat_interleave(128, 1)[:, : x.shape[1]]
    return (data.double() * scales[:, :, None]).transpose(1, 2).flatten(0, 1)[: len(x)]


def precision_of(x: torch.Tensor) -> float:
    """Of a sum, beside the sum of magnitudes: tensor cores sum 128 products with about 14 bits."""
    return 2.0**-12 if x.is_cuda else 2.0**-18


def assert_sums(
    found: torch.Tensor, a: torch.Tensor, b: torch.Tensor, through: torch.dtype | None = None
) -> None:
    """found = a b, in FP32 sums, rounded to its dtype or `through` another: each element."""
    wanted, room = a @ b, a.abs() @ b.abs()
    rounding = {BF16: 2.0**-8, FP16: 2.0**-10, FP32: 2.0**-22}[through or found.dtype]
    smallest = 2.0**-24 if found.dtype == FP16 else 0.0
    allowed = rounding * wanted.abs() + precision_of(found) * room + smallest
    assert ((found.double() - wanted).abs() <= allowed).all()


def assert_right(
    made: Case, found: Gradients, wgrad: str, of_w: torch.Tensor | None = None
) -> None:
    """of_w: the gradient of the weight, if it is elsewhere."""
    x, weight, bias, grad = made
    codes = of_weight(weight)
    y = of_rows(x, 1e-4) @ codes.T
    wanted = y if bias is None else y + bias.double()
    room = of_rows(x, 1e-4).abs() @ codes.abs().T
    assert (
        (found.y.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + precision_of(found.y) * room
    ).all()
    assert_sums(found.of_x, of_rows(grad, MIN_GRADIENT), codes, through=BF16)
    of_w = found.of_weight if of_w is None else of_w
    assert of_w is not None
    if wgrad == "bf16":
        a, b = grad.double(), x.to(BF16).double()
        assert of_w.shape == weight.shape
        wanted = a.T @ b
        allowed = 2.0**-7 * wanted.abs() + precision_of(of_w) * (a.abs().T @ b.abs()) + 2.0**-24
        assert ((of_w.double() - wanted).abs() <= allowed).all()
    else:
        columns = of_columns(x, 1e-4, wgrad == "128x128")
        assert_sums(of_w, of_columns(grad, MIN_GRADIENT).T, columns)
    if bias is not None:
        assert found.of_bias is not None
        ones = torch.ones(1, len(x), dtype=torch.float64, device=x.device)
        assert_sums(found.of_bias[None], ones, grad.double())


@on_cpu_and_gpu
@settings(deadline=None, max_examples=15)
@given(
    shape=st.tuples(sizes(260, 1), sizes(200, 1), sizes(200, 1)),
    dtype=st.sampled_from([BF16, FP16, FP32]),
    master=st.sampled_from([BF16, FP16, FP32]),
    wgrad=st.sampled_from(WGRADS),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_gradients_are_sums_of_the_codes(device, shape, dtype, master, wgrad, bias, seed):
    torch.manual_seed(seed)
    made = case(*shape, dtype, master, bias).to(device)
    found = run(made, wgrad)
    assert found.of_x.dtype == dtype
    assert found.of_weight is not None
    assert found.of_weight.dtype == master
    assert_right(made, found, wgrad)


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("master", [BF16, FP32])
def test_fp8_is_good_enough_beside_bf16(device, wgrad, master):
    torch.manual_seed(0)
    made = case(500, 384, 272, BF16, master).to(device)
    found = run(made, wgrad)
    x, weight, bias = (y.clone().float().requires_grad_() for y in (made.x, made.weight, made.bias))
    F.linear(x, weight, bias).backward(made.grad.float())
    assert relative_error(found.of_x, x.grad) < 0.05  # of the worst row
    assert relative_error(found.of_weight, weight.grad) < (0.01 if wgrad == "bf16" else 0.06)
    assert relative_error(found.of_bias[None], bias.grad[None]) < 0.005


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", ["128x1", "bf16"])
@pytest.mark.parametrize("power", [-20, 20])
def test_tokens_of_other_sizes_are_as_exact(device, wgrad, power):
    """Every third token is 2**20 times as large or small, in x and, the other way round, in dY."""
    torch.manual_seed(0)
    made = case(300, 200, 136, FP32, FP32, bias=False)
    made.x[::3] *= 2.0**power
    made.grad[::3] *= 2.0**-power
    made = made.to(device)
    found = run(made, wgrad)
    assert_right(made, found, wgrad)
    of_x = (made.grad.float() @ made.weight).double()
    errors = (found.of_x - of_x).norm(dim=1) / of_x.norm(dim=1)
    assert errors.max() < 0.05  # small tokens are not lost beside large ones


@on_cpu_and_gpu
def test_tiny_gradients_do_not_vanish(device):
    torch.manual_seed(0)
    made = case(64, 256, 128).to(device)
    found = run(made._replace(grad=made.grad * 2.0**-40), "128x1")
    again = run(made, "128x1")
    assert torch.equal(found.of_x * 2.0**40, again.of_x)
    assert torch.equal(found.of_weight * 2.0**40, again.of_weight)


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", WGRADS)
@pytest.mark.parametrize("master", [BF16, FP16, FP32])
@pytest.mark.parametrize("is_told", [True, False])
def test_main_grad(device, wgrad, master, is_told):
    """It is added to in FP32, and what comes back is what Megatron-LM wants."""
    torch.manual_seed(0)
    made = case(150, 136, 72, BF16, master).to(device)
    before = torch.randn(72, 136, device=device)
    main_grad = before.clone()
    told = {"grad_added_to_main_grad": False, "zero_out_wgrad": True} if is_told else {}
    found = run(made, wgrad, main_grad=main_grad, **told)
    assert (found.of_weight is not None) == is_told
    if is_told:
        assert found.of_weight.dtype == master
        assert not found.of_weight.any()
    added = (main_grad.double() - before.double()).float()
    if wgrad == "bf16":
        assert_right(made, found, wgrad, added)
    else:
        columns = of_columns(made.x, 1e-4, wgrad == "128x128")
        of_y = of_columns(made.grad, MIN_GRADIENT).T
        errors = (main_grad.double() - before.double() - of_y @ columns).abs()
        assert (errors <= precision_of(main_grad) * (of_y.abs() @ columns.abs() + 1)).all()
    overwritten = torch.full_like(before, torch.nan)
    run(made, wgrad, main_grad=overwritten, overwrite_main_grad=True)
    assert torch.allclose(overwritten, main_grad - before, atol=1e-5)


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", ["128x1", "bf16"])
def test_nan_in_a_token_stays_in_its_row_and_the_gradient_of_weights(device, wgrad):
    torch.manual_seed(0)
    made = case(200, 136, 72).to(device)
    made.x[7, 3] = torch.nan
    found = run(made, wgrad)
    others = torch.arange(200, device=device) != 7
    assert found.y[7].isnan().all()
    assert found.y[others].isfinite().all()
    assert found.of_x.isfinite().all()
    assert found.of_weight[:, 3].isnan().all()
    assert found.of_weight[:, torch.arange(136, device=device) != 3].isfinite().all()


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", WGRADS)
def test_only_what_is_asked_for(device, wgrad):
    """A frozen master weight gives dX alone; an input without gradient takes none."""
    made = case(40, 136, 72).to(device)
    x = made.x.clone().requires_grad_()
    frozen = torch.nn.Parameter(made.weight, requires_grad=False)
    linear("test", x, frozen, None, wgrad).backward(made.grad)
    assert frozen.grad is None
    assert_sums(x.grad, of_rows(made.grad, MIN_GRADIENT), of_weight(made.weight))
    weight = torch.nn.Parameter(made.weight.clone())
    linear("test", made.x, weight, None, wgrad).backward(made.grad)
    assert torch.equal(weight.grad, run(made._replace(bias=None), wgrad).of_weight)


@on_cpu_and_gpu
@pytest.mark.parametrize("wgrad", WGRADS)
def test_no_rows(device, wgrad):
    made = case(0, 136, 72).to(device)
    found = run(made, wgrad)
    assert found.of_x.shape == (0, 136)
    assert not found.of_weight.any()
    assert not found.of_bias.any()


def test_second_derivatives_are_refused():
    made = case(4, 16, 16)
    x = made.x.clone().requires_grad_()
    weight = torch.nn.Parameter(made.weight)
    y = linear("test", x, weight, None, "128x1")
    (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"differentiate|derivative"):
        dx.sum().backward()


def test_bf16_gradients_heed_no_autocast_in_a_backward():
    torch.manual_seed(0)
    made = case(64, 128, 64, FP32, FP32)
    made = made._replace(x=made.x * 300, grad=made.grad * 300)
    found = run(made, "bf16").of_weight
    with torch.autocast("cpu", torch.float16):
        assert torch.equal(run(made, "bf16").of_weight, found)
    assert found.isfinite().all()
