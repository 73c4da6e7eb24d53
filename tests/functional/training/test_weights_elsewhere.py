"""Codes of master weights that others handle: swapped blocks, copies, eval mode, inference mode."""

import pytest
import torch
from torch import nn

from moefp8.functional.training.weights import codes_of, requantize
from moefp8.functional.transposed import transposed
from moefp8.kernels import E4M3
from tests.functional.training.weights_cases import (
    OfCopies,
    assert_right,
    change,
    make_weight,
    num_made,
)
from tests.gpu import on_gpu


def swap(out: nn.Parameter, into: nn.Parameter) -> None:
    """Put the values of `into` where those of `out` were, as who keeps few layers on a GPU does."""
    place = out.data
    out.data = place.clone()
    place.copy_(into.data)
    into.data = place


def test_memory_of_one_weight_may_become_that_of_another(gpu):
    one, other = make_weight(), make_weight()
    codes_of(one)
    swap(one, other)
    assert one._version == other._version
    assert_right(other)
    codes_of(one)
    num_before = num_made(gpu)
    codes_of(other.detach())  # what a backward gets may be such a view
    assert num_made(gpu) == num_before
    swap(other, one)
    assert_right(one)


@on_gpu  # on a CPU nothing of W^T is kept
def test_so_may_that_of_a_frozen_weight():
    codes = torch.randint(0, 127, (2, 128, 256), dtype=torch.uint8, device="cuda").view(E4M3)
    one, other = (nn.Parameter(x.clone(), requires_grad=False) for x in codes)
    transposed(one, True)
    swap(one, other)
    found = transposed(other, True)
    assert torch.equal(found.view(torch.uint8), codes[1].view(torch.uint8).T)


def test_a_step_with_copies_beside_weights_makes_all_old(gpu):
    """FP32 weights are stepped themselves, BF16 ones by FP32 copies, all by one optimizer."""
    weight, of_fp32 = make_weight(), make_weight(dtype=torch.float32)
    codes_of(weight), codes_of(of_fp32)
    copies = weight.detach().float()
    copies.grad, of_fp32.grad = torch.ones_like(copies), torch.ones_like(of_fp32)
    OfCopies([copies, of_fp32], lr=0.5).step()
    weight.data.copy_(copies)
    assert_right(weight)
    assert_right(of_fp32)


def test_what_was_stepped_by_copies_and_is_frozen_then_is_made_anew(gpu):
    weight = make_weight()
    codes_of(weight)
    copies = weight.detach().float()
    copies.grad = torch.ones_like(copies)
    OfCopies([copies], lr=0.5).step()
    weight.data.copy_(copies)
    weight.requires_grad_(False)
    assert_right(weight)


def test_a_backward_in_eval_mode_does_not_end_what_eval_mode_means(gpu):
    weight = make_weight()
    before = weight.detach().clone()
    codes_of(weight)
    change(weight)
    assert_right(weight, reuse_codes=False)
    assert_right(weight, is_backward=True)
    weight.data.copy_(before)
    assert_right(weight)
    num_before = num_made(gpu)
    codes_of(weight), codes_of(weight, is_backward=True)
    assert num_made(gpu) == num_before


@pytest.mark.parametrize("reuse_codes", [True, False])
def test_codes_made_in_inference_mode_may_be_made_anew_outside(gpu, reuse_codes):
    weight = make_weight()
    with torch.inference_mode():
        assert_right(weight, reuse_codes=reuse_codes)
    with torch.no_grad():
        weight.mul_(2)
    assert_right(weight)
    with torch.inference_mode():
        weight.mul_(2)
        assert_right(weight)


def test_requantize_takes_weights_that_ask_for_no_gradient(gpu):
    """As those of a moving average do."""
    layer = nn.Linear(72, 140).requires_grad_(False)
    codes_of(layer.weight)
    change(layer.weight)
    requantize(layer)
    num_before = num_made(gpu)
    assert_right(layer.weight)
    assert num_made(gpu) == num_before


def test_a_step_with_weights_of_one_buffer_makes_each_anew_once(gpu):
    flat = torch.randn(6, 140, 72)
    weights = [nn.Parameter(x) for x in flat]
    for weight in weights:
        codes_of(weight)
        weight.grad = torch.ones_like(weight)
    torch.optim.SGD(weights, lr=0.5).step()
    num_before = num_made(gpu)
    for weight in weights:
        assert_right(weight)
    assert num_made(gpu) == num_before + len(weights)


def test_codes_that_a_backward_makes_first_are_kept(gpu):
    """As after FSDP has gathered weights for it anew."""
    weight = make_weight()
    for is_backward in (True, True, False):
        assert_right(weight, is_backward=is_backward)
    assert num_made(gpu) == 1
