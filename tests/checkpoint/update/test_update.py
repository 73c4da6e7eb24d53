"""What `updating` writes is what a load of the same tensors gives, bit by bit, and in place."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import moefp8
from moefp8 import FP8Linear, GroupedExperts, MoE
from moefp8.checkpoint.update.bucket import device_of_all
from moefp8.checkpoint.update.places import Places
from tests.checkpoint.cases import (
    E,
    H,
    I,
    StackedExperts,
    Tiny,
    bytes_of,
    deepseek_tensors,
    minimax_name,
    model_bytes,
    qwen_name,
)
from tests.checkpoint.update.cases import (
    EXPERTS,
    assert_same_model,
    buckets,
    frozen,
    loaded,
    quantized,
    spoiled_tiny,
    stacked,
    trainer_tensors,
    update,
)
from tests.fakes.emulator import emulated


@pytest.mark.parametrize("naming", [str, qwen_name, minimax_name])
@pytest.mark.parametrize("form", [dict, stacked])
@pytest.mark.parametrize("num_calls", [1, 5])
def test_weights_are_quantized_as_after_a_load(tmp_path, naming, form, num_calls):
    tensors = trainer_tensors()
    sent = {naming(key): x for key, x in form(tensors).items()}
    update(model := spoiled_tiny(), *buckets(sent, num_calls))
    assert_same_model(model, quantized(tmp_path, tensors))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_weights_of_other_dtypes_are_quantized(tmp_path, dtype):
    tensors = trainer_tensors(dtype=dtype)
    update(model := spoiled_tiny(), tensors.items())
    wanted = moefp8.unfreeze(Tiny(1), dtype)
    assert_same_model(model, frozen(loaded(tmp_path, tensors, wanted)))


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("num_calls", [1, 2, 7])
def test_codes_and_scales_are_taken_as_they_are(tmp_path, scales, num_calls):
    tensors = deepseek_tensors(1, scales)
    update(model := spoiled_tiny(), *buckets(tensors, num_calls))
    assert_same_model(model, loaded(tmp_path, tensors, Tiny(1)))


@pytest.mark.parametrize("form", [dict, stacked])
def test_kernels_are_given_what_the_cpu_quantizes(tmp_path, form):
    """Of a stack, all experts of a call are one launch."""
    tensors = trainer_tensors()
    model = spoiled_tiny()
    with emulated() as gpu:
        update(model, form(tensors))
    assert_same_model(model, quantized(tmp_path, tensors))
    assert {launch.kernel.source.stem for launch in gpu.launched} == {"each"}
    grids = sorted(launch.grid for launch in gpu.launched)  # blocks of 128x128
    assert grids == sorted([5 * 2, 3 * 2, 2 * 3, 2 * E * 3 * 2, E * 2 * 3])


def test_experts_may_come_in_both_formats(tmp_path):
    codes, weights = deepseek_tensors(1), trainer_tensors()
    wanted = quantized(tmp_path, weights)
    update(model := spoiled_tiny(), weights)
    mixed = {key: x for key, x in weights.items() if ".experts.1." not in key}
    mixed |= {key: x for key, x in codes.items() if ".experts.1." in key}
    update(model, mixed)
    experts = loaded(tmp_path, codes, Tiny(1)).model.layers[0].mlp.experts.state_dict()
    for name, x in model.model.layers[0].mlp.experts.state_dict().items():
        other = wanted.model.layers[0].mlp.experts.state_dict()[name]
        for expert, source in enumerate((other, experts[name], other)):
            assert bytes_of(x[expert]) == bytes_of(source[expert])


def test_tensors_may_lie_anyhow(tmp_path):
    """Transposed, in columns of others, expanded: their values count."""
    tensors = trainer_tensors()
    sent = {key: x.clone() for key, x in tensors.items()}
    wide = torch.zeros(I, 2 * H, dtype=torch.bfloat16)
    for turned in (f"{EXPERTS}.0.gate_proj.weight", "lm_head.weight"):
        sent[turned] = sent[turned].t().contiguous().t()
    for shifted in (f"{EXPERTS}.2.up_proj.weight", f"{EXPERTS}.1.gate_proj.weight"):
        (part := wide.clone()[:, 1 : H + 1]).copy_(sent[shifted])
        sent[shifted] = part
    name = "model.layers.0.norm.bias"
    tensors[name] = torch.full((H,), 2.0).bfloat16()
    sent[name] = torch.tensor(2.0).bfloat16().expand(H)
    update(model := spoiled_tiny(), sent)
    assert_same_model(model, quantized(tmp_path, tensors))


def test_parameters_that_ask_for_gradients_are_taken(tmp_path):
    tensors = trainer_tensors()
    update(model := spoiled_tiny(), {key: nn.Parameter(x) for key, x in tensors.items()})
    assert_same_model(model, quantized(tmp_path, tensors))
    assert not any(x.requires_grad for x in model.model.layers[0].mlp.experts.parameters())


def test_other_tensors_are_cast_as_a_load_casts_them(tmp_path):
    tensors = {key: x.float() if "norm" in key else x for key, x in deepseek_tensors(1).items()}
    tensors["lm_head.weight"] = tensors["lm_head.weight"].half()
    update(model := spoiled_tiny(), tensors)
    assert_same_model(model, loaded(tmp_path, tensors, Tiny(1)))


def test_a_block_may_bring_some_tensors_alone():
    model = spoiled_tiny(2)
    before = model_bytes(model)
    weight = torch.randn(H, dtype=torch.bfloat16)
    update(model, {"model.layers.1.norm.weight": weight})
    changed = [name for name, x in model_bytes(model).items() if x != before[name]]
    assert changed == ["model.layers.1.norm.weight"]
    assert bytes_of(model.model.layers[1].norm.weight) == bytes_of(weight)
    update(model)  # nothing at all


def test_a_tied_tensor_may_come_under_both_names():
    model = Tiny(1, tied=True)
    weight = torch.randn(16, H, dtype=torch.bfloat16)
    update(model, {"lm_head.weight": weight})
    assert torch.equal(model.model.embed_tokens.weight, weight)
    update(model, {"model.embed_tokens.weight": weight + 1}, {"lm_head.weight": weight + 1})
    assert torch.equal(model.lm_head.weight, weight + 1)
    update(model, {"lm_head.weight": weight, "model.embed_tokens.weight": weight - 1})
    assert torch.equal(model.lm_head.weight, weight - 1)


def test_a_tied_fp8_weight_may_come_under_both_names():
    model = nn.ModuleDict({name: FP8Linear(H, I, bias=False) for name in ("one", "other")})
    for name in ("weight", "weight_scale_inv"):
        model["other"]._parameters[name] = model["one"]._parameters[name]
    plain = nn.Linear(H, I, bias=False).bfloat16()
    sent = {"one.weight": torch.zeros(I, H), "other.weight": plain.weight.detach().float()}
    update(model, sent)
    wanted = FP8Linear.from_linear(plain)
    assert bytes_of(model["one"].weight) == bytes_of(wanted.weight)
    assert bytes_of(model["other"].weight_scale_inv) == bytes_of(wanted.weight_scale_inv)


@pytest.mark.parametrize("rename", [None, lambda name: name.removeprefix("actor/")])
@pytest.mark.parametrize("form", [dict, stacked])
def test_the_same_names_bring_other_values_and_dtypes(tmp_path, form, rename):
    tensors, model = trainer_tensors(), spoiled_tiny()
    prefix = "actor/" if rename else ""
    for dtype in (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32):
        tensors = {key: (x.float() / 2).to(dtype) for key, x in tensors.items()}
        named = {prefix + key: x for key, x in form(tensors).items()}
        update(model, *buckets(named, 2), rename=rename)
        assert_same_model(model, quantized(tmp_path, tensors))
    codes = deepseek_tensors(1)
    update(model, {prefix + key: x for key, x in codes.items()}, rename=rename)
    assert_same_model(model, loaded(tmp_path, codes, Tiny(1)))


def test_names_that_came_before_are_known():
    """Else each tensor would be looked at again."""
    tensors, model = trainer_tensors(), spoiled_tiny()
    names = tuple(tensors)
    for is_known in (False, True, True):
        places, _ = Places.of(model)
        sent = tuple(tensors.values())
        found = places.buckets.find(names, names, sent, device_of_all(sent))
        assert (found is not None) == is_known
        update(model, tensors)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda x: torch.zeros(x.shape[::-1]).t(),
        lambda x: x.bfloat16(),
        lambda x: torch.zeros(1, 1),
        lambda x: torch.zeros(x.shape, device="meta"),
    ],
)
def test_scales_that_no_kernel_could_write_are_refused(spoil):
    linear = FP8Linear(256, 512, bias=False)
    linear._parameters["weight_scale_inv"] = nn.Parameter(
        spoil(linear.weight_scale_inv.detach()), requires_grad=False
    )
    with emulated() as gpu, pytest.raises((TypeError, ValueError)):
        update(linear, {"weight": torch.randn(512, 256).bfloat16()})
    assert gpu.launched == []


def test_names_of_a_trainer():
    model = spoiled_tiny()
    weight = torch.randn(H, dtype=torch.bfloat16)
    update(
        model,
        {"actor/layers.0.norm.weight": weight},
        rename=lambda name: name.replace("actor/", "model."),
    )
    assert torch.equal(model.model.layers[0].norm.weight, weight)


def test_layers_compute_with_the_new_weights():
    """And so do modules of ours that are no part of a model."""
    torch.manual_seed(0)
    weight, bias, x = torch.randn(200, 136), torch.randn(200), torch.randn(3, 136).bfloat16()
    plain = nn.Linear(136, 200).bfloat16()
    linear = FP8Linear.from_linear(plain)
    linear(x)
    update(linear, {"weight": weight.bfloat16(), "bias": bias.bfloat16()})
    with torch.no_grad():
        plain.weight.copy_(weight)
        plain.bias.copy_(bias)
    assert torch.equal(linear(x), FP8Linear.from_linear(plain)(x))
    one, other = (MoE(128, 64, num_experts=4, top_k=2) for _ in range(2))
    tokens = torch.randn(5, 128).bfloat16()
    assert not torch.equal(one(tokens), other(tokens))
    update(one, other.state_dict())
    assert torch.equal(one(tokens), other(tokens))


def test_stacks_in_bf16_are_copied():
    model = nn.ModuleDict({"experts": StackedExperts()})
    tensors = trainer_tensors()
    sent = {key.partition("mlp.")[2]: x for key, x in tensors.items() if ".experts." in key}
    update(model, sent)
    for name, wanted in stacked({f"model.{key}": x for key, x in sent.items()}).items():
        assert bytes_of(model.get_parameter(name.removeprefix("model."))) == bytes_of(wanted)


@pytest.mark.parametrize("make", [trainer_tensors, deepseek_tensors])
@pytest.mark.parametrize("plan", [{}, {"*.experts": "intermediate", "*.gate_proj": "rows"}])
def test_writes_are_counted_as_those_of_torch_are(make, plan):
    """Whoever keeps what is made of a weight, and autograd, see that it has changed."""
    model = moefp8.shard(Tiny(1), plan, 1, 2) if plan else Tiny(1)
    before = {name: x._version for name, x in model.state_dict(keep_vars=True).items()}
    update(model, make(1))
    now = {name: x._version for name, x in model.state_dict(keep_vars=True).items()}
    assert [name for name, version in now.items() if version == before[name]] == []


def test_a_model_that_changed_is_looked_at_again(tmp_path):
    tensors = trainer_tensors()
    update(model := spoiled_tiny(), tensors)
    moefp8.unfreeze(model)
    update(model, tensors)
    assert torch.equal(
        model.model.layers[0].mlp.experts.down_proj[0], tensors[f"{EXPERTS}.0.down_proj.weight"]
    )
    model.model.layers[0].norm = nn.LayerNorm(2 * H, dtype=torch.bfloat16)
    update(model, {"model.layers.0.norm.weight": torch.ones(2 * H)})
    frozen(model)
    update(model, {"lm_head.weight": tensors["lm_head.weight"]})


def test_what_is_kept_with_a_model_holds_nothing_of_it():
    model = spoiled_tiny()
    update(model, trainer_tensors())
    weight = weakref.ref(model.model.layers[0].mlp.experts.down_proj)
    model.model.layers[0].mlp.experts = GroupedExperts(E, H, I)
    gc.collect()
    assert weight() is None


def test_a_copy_of_a_model_is_updated_alone():
    model = spoiled_tiny()
    update(model, trainer_tensors())
    before = model_bytes(model)
    new = {key: x * 2 for key, x in trainer_tensors().items()}
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in copies:
        update(each, new)
    assert_same_model(*copies)
    assert model_bytes(model) == before != model_bytes(copies[0])


@pytest.mark.parametrize("made_in", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("called_in", [torch.inference_mode, torch.no_grad])
def test_any_mode(tmp_path, made_in, called_in):
    tensors = trainer_tensors()
    with made_in():
        model = spoiled_tiny()
    with called_in():
        update(model, *buckets(tensors, 3))
    assert_same_model(model, quantized(tmp_path, tensors))
