"""`dequantize`: exact, in place, one module at a time, and `convert` makes the same codes again."""

import copy
import weakref
from types import SimpleNamespace

import pytest
import torch
from small_checkpoint import write_small_checkpoint
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import moefp8
from moefp8 import FP8Linear, GroupedExperts, TopKRouter
from moefp8.layers import PlainExperts
from moefp8.layers.parts import parts_of
from moefp8.quant import BlockScaled
from moefp8.quant import dequantize as dequantize_blocks
from moefp8.testing import assert_matches_reference, reference_model, relative_error
from tests.checkpoint.cases import assert_same_tensors
from tests.layers.cases import E, H, I, hidden, make_moe
from tests.layers.test_layers import dequantized_experts

FLOATS = torch.bfloat16, torch.float16, torch.float32
EXPERTS = "gate_up_proj", "down_proj"


def fp8_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Codes as bytes, and scales."""
    return {
        f"{name}.{leaf}": x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
        for name, module in model.named_modules()
        if isinstance(module, FP8Linear | GroupedExperts)
        for leaf, x in module.named_parameters(recurse=False)
    }


def kinds(model: nn.Module) -> list[type]:
    return [type(module) for module in model.modules()]


# One module


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("size", [(200, 300), (128, 128), (1, 7), (0, 5)])
def test_a_linear_is_data_times_scale(dtype, size):
    fp8 = FP8Linear(size[1], size[0])
    exact = dequantize_blocks(BlockScaled(fp8.weight, fp8.weight_scale_inv), dtype)
    assert torch.equal(fp8.dequantize(dtype), exact)
    linear = fp8.eval().to_linear(dtype)
    assert type(linear) is nn.Linear
    assert (linear.in_features, linear.out_features) == (size[1], size[0])
    assert torch.equal(linear.weight, exact)
    assert torch.equal(linear.bias, fp8.bias.to(dtype))
    assert not linear.training
    assert linear.weight.requires_grad


def test_the_bias_of_a_linear_is_a_copy():
    fp8 = FP8Linear(8, 4)
    linear = fp8.to_linear(fp8.bias.dtype)
    before = fp8.bias.clone()
    linear.bias.data.zero_()
    assert torch.equal(fp8.bias, before)
    assert FP8Linear(8, 4, bias=False).to_linear().bias is None


@pytest.mark.parametrize("size", [128, 200, 320, 0])
def test_experts_are_data_times_scale(size):
    experts = GroupedExperts(E, 136, size, swiglu_limit=0.5)
    plain = experts.to_plain(torch.float32)
    assert type(plain) is PlainExperts
    assert plain.swiglu_limit == 0.5
    for name, came in zip(EXPERTS, experts.dequantize(torch.float32), strict=True):
        assert torch.equal(plain.get_parameter(name), came)
        if size:
            exact = dequantized_experts(experts)[EXPERTS.index(name)]
            assert torch.equal(came, exact.float())


@pytest.mark.parametrize("limit", [None, 0.05])
def test_plain_experts_compute_what_the_weights_say(limit):
    experts = GroupedExperts(E, H, I, swiglu_limit=limit)
    x, routing = hidden(30).float(), TopKRouter(H, E, 2)(hidden(30))
    index = routing.top_k_index.clone()
    index[0, 1], index[1] = E, index[1, 0]  # held elsewhere; one expert named twice
    exact = reference_model(experts, quantize_activations=False)(x, index, routing.top_k_weights)
    y = experts.to_plain(torch.float32)(x, index, routing.top_k_weights)
    assert y.dtype == torch.float32
    assert_matches_reference(y, exact, 6e-3)  # the reference rounds to BF16
    bf16 = experts.to_plain()(x, index, routing.top_k_weights)
    assert_matches_reference(bf16, exact, 2e-2)


def test_plain_experts_refuse_ids_of_no_expert():
    plain = GroupedExperts(E, H, I).to_plain()
    with pytest.raises(ValueError, match="top_k_index must be in"):
        plain(hidden(2), torch.tensor([[0], [E + 1]]), torch.ones(2, 1))


# Whole models


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_model_in_place(dtype):
    moe, x = make_moe(), hidden()
    before = reference_model(moe, quantize_activations=False)(x)
    assert moefp8.dequantize(moe, dtype) is moe
    assert not {FP8Linear, GroupedExperts} & {*kinds(moe)}
    weights = [moe.experts.down_proj, moe.shared_experts.up_proj.weight]
    assert {weight.dtype for weight in weights} == {dtype}
    assert moe.gate.weight.dtype == torch.float32
    y = moe(x)
    assert y.dtype == x.dtype
    assert_matches_reference(y, before, 3e-2)


def test_a_dequantized_model_trains():
    moe = moefp8.dequantize(make_moe(), torch.float32)
    moe(hidden(50).float()).square().sum().backward()
    for weight in (*moe.experts.parameters(), *moe.shared_experts.parameters()):
        assert weight.grad is not None
        assert weight.grad.abs().sum() > 0


@pytest.mark.parametrize("dtype", FLOATS)
def test_converted_again_it_has_the_same_codes(dtype):
    moe = make_moe()
    before = {name: x.clone() for name, x in fp8_tensors(moe).items()}
    after = fp8_tensors(moefp8.convert(moefp8.dequantize(moe, dtype)))
    assert before.keys() == after.keys()
    for name, x in before.items():
        if x.dtype == torch.uint8:
            assert torch.equal(after[name], x), name
        else:
            rounding = {torch.bfloat16: 2**-8, torch.float16: 2**-10, torch.float32: 2**-22}[dtype]
            torch.testing.assert_close(after[name], x, rtol=rounding, atol=0)


def test_a_model_that_is_one_module_is_returned():
    for fp8, kind in ((FP8Linear(8, 4), nn.Linear), (GroupedExperts(2, 8, 4), PlainExperts)):
        assert type(moefp8.dequantize(fp8)) is kind


def test_flags_and_what_is_no_fp8_stay():
    inner = nn.Linear(4, 4)
    model = nn.Sequential(FP8Linear(8, 4).eval(), inner, FP8Linear(4, 4, bias=False), nn.GELU())
    moefp8.dequantize(model)
    assert [module.training for module in model] == [False, True, True, True]
    assert model[1] is inner
    assert inner.weight.dtype == torch.float32


def test_a_module_under_two_names_stays_one():
    fp8 = FP8Linear(8, 8)
    model = nn.ModuleDict({"a": fp8, "b": nn.Sequential(fp8)})
    moefp8.dequantize(model)
    assert type(model["a"]) is nn.Linear
    assert model["a"] is model["b"][0]


def test_tied_weights_stay_tied():
    model = nn.Sequential(FP8Linear(8, 8), FP8Linear(8, 8), FP8Linear(8, 8))
    model[1].weight, model[1].weight_scale_inv = model[0].weight, model[0].weight_scale_inv
    model[2].weight = model[0].weight  # with scales of its own, so of other values
    model[2].weight_scale_inv.data = 2 * model[0].weight_scale_inv
    moefp8.dequantize(model)
    assert model[0].weight is model[1].weight
    assert torch.equal(model[2].weight, 2 * model[0].weight)


def test_a_meta_model_stays_on_meta():
    with torch.device("meta"):
        moe = make_moe()
    moefp8.dequantize(moe, torch.float16)
    assert all(x.is_meta for x in moe.parameters())
    assert moe.experts.gate_up_proj.dtype == torch.float16
    assert moe.experts.gate_up_proj.shape == (E, 2 * I, H)


def make_linear() -> nn.Sequential:
    return nn.Sequential(FP8Linear(200, 200))


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(
    ("make", "plan"),
    [
        (make_moe, {"experts": "experts", "shared_experts": "intermediate"}),
        (make_moe, {"experts": "intermediate", "shared_experts": "intermediate"}),
        (make_linear, {"0": "rows"}),
        (make_linear, {"0": "columns"}),
    ],
)
def test_sharded_before_or_after_is_the_same(make, plan, rank):
    model = make()
    before = moefp8.dequantize(moefp8.shard(copy.deepcopy(model), plan, rank, 3), torch.float32)
    after = moefp8.shard(moefp8.dequantize(model, torch.float32), plan, rank, 3)
    assert_same_tensors(before.state_dict(), after.state_dict())
    for name, module in after.named_modules():
        assert parts_of(before.get_submodule(name)) == parts_of(module), name
    if make is make_moe:
        x = hidden()
        assert torch.equal(before(x), after(x))
    with pytest.raises(ValueError, match="convert before shard"):
        moefp8.convert(before)


class Alive(TorchDispatchMode):
    """How many of some modules there are, at every operation."""

    def __init__(self, modules):
        super().__init__()
        self.modules, self.counts = [weakref.ref(module) for module in modules], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts.append(sum(module() is not None for module in self.modules))
        return func(*args, **(kwargs or {}))


def test_modules_are_given_back_one_at_a_time():
    model = nn.Sequential(*(FP8Linear(64, 64) for _ in range(5)))
    with Alive(model) as watched:
        moefp8.dequantize(model)
    assert watched.counts[0] == 5
    assert watched.counts[-1] == 1


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_a_model_of_transformers_saves_and_loads_as_a_plain_one(family, tmp_path):
    transformers = pytest.importorskip("transformers")
    from moefp8.hf import FP8Config

    write_small_checkpoint(tmp_path / "fp8", family, num_shards=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", quantization_config=FP8Config()
    )
    ids = torch.randint(2, 500, (1, 12))
    with torch.inference_mode():
        exact = reference_model(model, quantize_activations=False)(ids).logits
    moefp8.dequantize(nn.Sequential(model))  # be it within another
    model.save_pretrained(tmp_path / "bf16")
    assert "quantization_config" not in (tmp_path / "bf16" / "config.json").read_text()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "bf16")
    with torch.inference_mode():
        logits = model(ids).logits
        assert relative_error(again(ids).logits, logits) < 3e-2
        assert relative_error(logits, exact) < 0.2  # BF16, of random weights
    for name, x in again.state_dict().items():
        assert torch.equal(x, model.state_dict()[name]), name


# What is refused


def test_wrong_arguments_are_refused_before_anything_changes():
    moe = make_moe()
    before = kinds(moe)
    with pytest.raises(TypeError, match=r"torch\.float16, torch\.float32, got torch\.float64"):
        moefp8.dequantize(moe, torch.float64)
    with pytest.raises(TypeError, match=r"use moefp8\.quant\.dequantize"):
        moefp8.dequantize(moefp8.quant.quantize_128x128(torch.ones(2, 2)))
    moe.shared_experts.down_proj.register_forward_hook(lambda *args: None)
    with pytest.raises(ValueError, match=r"shared_experts.down_proj \(FP8Linear\) must have no"):
        moefp8.dequantize(moe)
    assert kinds(moe) == before


class Saved(nn.Sequential):
    def save_pretrained(self, path):
        torch.save(self.state_dict(), path)


def test_a_part_leaves_the_config_of_the_whole():
    model = Saved(nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    model[0].config = model.config = SimpleNamespace(quantization_config="of another method")
    moefp8.dequantize(moefp8.convert(model)[0])
    assert model.config.quantization_config == "of another method"
    moefp8.dequantize(model)
    assert not hasattr(model.config, "quantization_config")


def test_a_model_without_fp8_is_told():
    model = Saved(nn.Linear(4, 4))
    model.config = SimpleNamespace(quantization_config="of another method")
    with pytest.warns(UserWarning, match="no FP8 modules; nothing was changed"):
        assert moefp8.dequantize(model) is model
    assert model.config.quantization_config == "of another method"
    converted = moefp8.convert(model)  # a method that knows of no quantizer
    assert not hasattr(moefp8.dequantize(converted).config, "quantization_config")


def test_it_undoes_convert():
    linear = nn.Linear(512, 256).bfloat16()
    model = moefp8.dequantize(moefp8.convert(nn.Sequential(copy.deepcopy(linear))))
    assert 1e-3 < relative_error(model[0].weight, linear.weight) < 0.06
    assert torch.equal(model[0].bias, linear.bias)
