"""Master weights are updated in place, and what is made of them follows."""

import pytest
import torch

import moefp8
from moefp8 import GroupedExperts
from tests.checkpoint.cases import Tiny, deepseek_tensors
from tests.checkpoint.test_master_weights import assert_same_values
from tests.checkpoint.update.cases import (
    EXPERTS,
    assert_same_model,
    buckets,
    loaded,
    stacked,
    trainer_tensors,
    update,
)


def trained(dtype: torch.dtype = torch.bfloat16) -> Tiny:
    return moefp8.unfreeze(Tiny(1), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("form", [dict, stacked])
def test_weights_are_cast_to_the_masters_dtype(tmp_path, dtype, form):
    tensors = trainer_tensors(dtype=torch.float32)
    update(model := trained(dtype), *buckets(form(tensors), 3))
    assert_same_model(model, loaded(tmp_path, tensors, trained(dtype)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("num_calls", [1, 2, 5])
@pytest.mark.parametrize("form", [dict, stacked])
def test_codes_and_scales_are_dequantized(tmp_path, dtype, num_calls, form):
    """In one call, or in two of which either may bring the scales."""
    tensors = deepseek_tensors(1, torch.bfloat16)
    wanted = loaded(tmp_path, tensors, trained(dtype))
    for calls in (
        list(buckets(form(tensors), num_calls)),
        [*buckets(form(tensors), num_calls)][::-1],
    ):
        update(model := trained(dtype), *calls)
        assert_same_values(model, wanted)


def test_codes_may_be_stacked_and_scales_not(tmp_path):
    tensors = deepseek_tensors(1)
    codes = {key: x for key, x in tensors.items() if not key.endswith("_scale_inv")}
    scales = {key: x for key, x in tensors.items() if key.endswith("_scale_inv")}
    update(model := trained(), scales, stacked(codes))
    assert_same_values(model, loaded(tmp_path, tensors, trained()))


def test_a_layer_computes_with_the_new_weights_in_any_mode():
    torch.manual_seed(0)
    one, other = (GroupedExperts(4, 128, 64, trainable=True) for _ in range(2))
    tokens = torch.randn(6, 128).bfloat16()
    routing = torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    for mode in (True, False):
        one.train(mode)
        other.train(mode)
        assert not torch.equal(one(tokens, *routing), other(tokens, *routing))
        update(one, other.state_dict())
        assert torch.equal(one(tokens, *routing), other(tokens, *routing))
        update(other, {name: -2 * x for name, x in other.state_dict().items()})


def test_a_step_that_was_recorded_before_raises():
    """Its backward would read weights that are no longer those of its forward."""
    experts = GroupedExperts(2, 128, 64, trainable=True)
    tokens = torch.randn(3, 128).bfloat16().requires_grad_()
    y = experts(tokens, torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1))
    update(experts, {"down_proj": torch.ones(2, 128, 64), "gate_up_proj": torch.ones(2, 128, 128)})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_missing_scales_of_a_master_weight_are_named():
    codes = {key: x for key, x in deepseek_tensors(1).items() if "scale_inv" not in key}
    name = rf"{EXPERTS}\.0\.gate_proj\.weight_scale_inv"
    with pytest.raises(ValueError, match=rf"{name}, .* more did not come"):
        update(trained(), {key: x for key, x in codes.items() if "experts" in key})
