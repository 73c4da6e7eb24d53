"""Experts with biases, on a CPU: against `PlainExperts` in FP32, and launches against the body."""

import itertools

import pytest
import torch

from moefp8 import Activation, GroupedExperts
from tests.fakes.emulator import emulated
from tests.functional.experts.bias_cases import (
    FORMS,
    GPT_OSS,
    SHAPES,
    assert_near,
    call_of,
    layer_of,
    reference_of,
    results_of,
    with_gaps,
)

SWIGLU = Activation()


# Every shape and every form;
PAIRS = [*zip(SHAPES, itertools.cycle(FORMS), strict=False), *(("some for each", x) for x in FORMS)]


@pytest.mark.parametrize(("shape", "form"), PAIRS)
def test_results_and_gradients_are_those_of_plain_experts(shape, form):
    sizes = SHAPES[shape]
    layer = layer_of(*sizes[2:], **FORMS[form])
    call = call_of(sizes)
    assert_near(results_of(layer, call), reference_of(layer, call), call, 0.1)


@pytest.mark.parametrize(("form", "kind"), [("frozen", "repeated"), ("trained", "one expert")])
def test_any_routing(form, kind):
    sizes = SHAPES["few"]
    layer = layer_of(*sizes[2:], SWIGLU, **FORMS[form])
    call = call_of(sizes, kind)
    assert_near(results_of(layer, call), reference_of(layer, call), call, 0.1)


@pytest.mark.parametrize(("shape", "form"), [*PAIRS, *(("no intermediate", x) for x in FORMS)])
def test_launches_compute_what_the_body_does(shape, form):
    sizes = SHAPES[shape]
    dtype = torch.float32 if form == "trained, blocks" else torch.bfloat16
    layer = layer_of(*sizes[2:], dtype=dtype, **FORMS[form])
    call = call_of(sizes, "repeated" if shape == "few" else "distinct")
    right = results_of(layer, call)
    with emulated():
        found = results_of(layer, call)
    assert_near(found, right, call, 2e-2)


@pytest.mark.parametrize("form", ["frozen", "trained", "trained, bf16"])
def test_zeros_change_no_bit(form):
    sizes = SHAPES["some for each"]
    layer, call = layer_of(*sizes[2:], **FORMS[form]), call_of(sizes)
    without = GroupedExperts(*sizes[2:], activation=GPT_OSS, **FORMS[form])
    for name, x in without.named_parameters():
        x.data = layer.get_parameter(name).data
    for bias in layer.biases.values():
        bias.data.zero_()
    found, right = results_of(layer, call), results_of(without, call)
    assert all(torch.equal(found[name], x) for name, x in right.items())


@pytest.mark.parametrize("form", FORMS)
def test_strides_do_not_matter(form):
    sizes = SHAPES["few"]
    layer, call = layer_of(*sizes[2:], **FORMS[form]), call_of(sizes)
    right = results_of(layer, call)
    with emulated():
        launched = results_of(layer, call)
        assert_near(results_of(with_gaps(layer), call), launched, call, 1e-5)
    assert_near(results_of(layer, call), right, call, 1e-5)


def test_the_bias_of_down_counts_for_scores():
    """Also where no bias asks for a gradient."""
    sizes = SHAPES["few"]
    layer, call = layer_of(*sizes[2:]).requires_grad_(False), call_of(sizes)
    right = results_of(layer, call)
    with emulated():
        assert_near(results_of(layer, call), right, call, 0.02)
