"""fp8_layers: modules of the sizes of what a checkpoint stores in FP8, from its headers."""

import pytest
import torch
from generate import load
from small_checkpoint import write_small_checkpoint

from moefp8 import FP8Linear, GroupedExperts, TopKRouter
from moefp8.checkpoint import CheckpointError, fp8_layers
from moefp8.layers.moe import SharedExperts
from moefp8.precompile import layers as ahead
from tests.checkpoint.inspect.cases import E4M3, EXPERT, LINEAR, headers_only


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_a_checkpoint_s_layers_are_those_of_its_model(tmp_path, family):
    write_small_checkpoint(tmp_path / "fp8", family)
    model = load(tmp_path / "fp8", "cpu")
    found = fp8_layers(tmp_path / "fp8")
    assert all(x.is_meta for x in found.parameters())

    def sizes(module) -> set:
        linears = {(x.out_features, x.in_features) for x in module if isinstance(x, FP8Linear)}
        experts = {
            (x.num_experts, x.hidden_size, x.intermediate_size)
            for x in module
            if isinstance(x, GroupedExperts)
        }
        return linears | experts

    assert sizes(found.modules()) == sizes(model.modules())
    assert found.top_k == model.config.num_experts_per_tok
    needed = set(ahead.kernels_of(model, 50))
    assert needed <= set(ahead.kernels_of(found, 50, dtype=torch.bfloat16))
    (router,) = (x for x in found if isinstance(x, TopKRouter))
    is_deepseek = model.config.model_type == "deepseek_v3"
    assert router.scoring == ("sigmoid" if is_deepseek else "softmax")
    assert any(isinstance(x, SharedExperts) for x in found) == is_deepseek


def test_fused_experts_and_biases_are_found(tmp_path):
    tensors = {
        "layers.0.mlp.experts.gate_up_proj": (E4M3, [3, 512, 128]),
        "layers.0.mlp.experts.gate_up_proj_scale_inv": ("F32", [3, 4, 1]),
        "layers.0.mlp.experts.down_proj": (E4M3, [3, 128, 256]),
        "layers.0.mlp.experts.down_proj_scale_inv": ("F32", [3, 1, 2]),
        "layers.0.q_proj.weight": (E4M3, [256, 128]),
        "layers.0.q_proj.weight_scale_inv": ("F32", [2, 1]),
        "layers.0.q_proj.bias": ("F16", [256]),
    }
    path = headers_only(tmp_path / "x.safetensors", tensors)
    found = fp8_layers(path)
    (experts,) = (x for x in found if isinstance(x, GroupedExperts))
    assert (experts.num_experts, experts.hidden_size, experts.intermediate_size) == (3, 128, 256)
    (linear,) = (x for x in found if isinstance(x, FP8Linear))
    assert linear.bias.dtype == torch.float16
    assert found.top_k is None
    with pytest.raises(ValueError, match="top_k="):
        ahead.kernels_of(found, 8)
    with_router = set(ahead.kernels_of(fp8_layers(path, 2), 8))
    assert with_router > set(ahead.kernels_of(found, 8, top_k=2))


SHARED = "m.mlp.shared_experts.down_proj.weight"
MANY = "m.mlp.experts.999999999.down_proj.weight"


@pytest.mark.parametrize(
    ("tensors", "told"),
    [
        ({"a.bias": ("F4", [8])}, "a.bias in .*: dtype of a bias must be one of .*, got F4"),
        ({"a.bias": ("I64", [8])}, "a.bias in .*: dtype of a bias must be one of .*, got I64"),
        ({SHARED: (E4M3, [8])}, rf"{SHARED} in .*: must have two dimensions, got \[8\]"),
        ({EXPERT: (E4M3, [8])}, rf"{EXPERT} in .*: must have two dimensions, got \[8\]"),
        ({EXPERT: (E4M3, [1, 2, 4])}, rf"{EXPERT} in .*: must have two dimensions"),
        ({MANY: (E4M3, [2**40, 0])}, rf"{MANY} in .*: shape .* is of no GroupedExperts"),
        ({MANY: (E4M3, [2**62, 0])}, rf"{MANY} in .*: shape .* is of no GroupedExperts"),
    ],
)
def test_headers_that_no_layer_has(tmp_path, tensors, told):
    scales = {f"{x}_scale_inv": ("F32", [1]) for x in tensors if x.endswith("weight")}
    path = headers_only(tmp_path / "x.safetensors", LINEAR | tensors | scales)
    with pytest.raises(CheckpointError, match=told):
        fp8_layers(path)


@pytest.mark.parametrize("dtype", ["BF16", "I8", "F8_E5M2"])
def test_what_a_load_refuses_is_no_fp8_layer(tmp_path, dtype):
    tensors = {"b.weight": (dtype, [16, 8]), "b.weight_scale_inv": ("F32", [1, 1])}
    with pytest.raises(CheckpointError, match="nothing in FP8"):
        fp8_layers(headers_only(tmp_path / "x.safetensors", tensors))
    (linear,) = fp8_layers(headers_only(tmp_path / "x.safetensors", LINEAR | tensors))
    assert linear.out_features == 8
