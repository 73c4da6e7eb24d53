"""Adapters and the rest of moefp8: checkpoints, conversion, parts, savers."""

import copy
import pickle
import warnings

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import moefp8
from moefp8.adapters import add_lora, lora_state_dict, remove_lora
from tests.adapters.cases import H, Net, tokens, trained

WEIGHTS = "adapter_model.safetensors"


def adapted(targets=("first", "experts", "head")) -> nn.Module:
    model = Net()
    add_lora(model, 4, 8, targets)
    return trained(model)


def test_a_checkpoint_is_loaded_before_or_after(tmp_path):
    """It is the model's own; nothing of it is missing, and it has nothing of adapters."""
    model, x = adapted(), tokens()
    with pytest.warns(UserWarning, match=r"4 adapters are left out.*save_lora"):
        moefp8.save_checkpoint(model, tmp_path / "checkpoint")
    base = remove_lora(copy.deepcopy(model))
    for other in (Net(), adapted()):
        moefp8.load_checkpoint(other, tmp_path / "checkpoint")
        assert torch.equal(remove_lora(other)(x), base(x))
    after = adapted()
    before = {key: x.clone() for key, x in lora_state_dict(after).items()}
    moefp8.load_checkpoint(after, tmp_path / "checkpoint")
    assert all(map(torch.equal, lora_state_dict(after).values(), before.values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (moefp8.dequantize, "dequantize: the model must have no adapters.*save_lora.*remove_lora"),
        (lambda m: moefp8.shard(m, {"*experts": "experts"}, 0, 2), "shard: the model must have no"),
        (moefp8.testing.reference_model, "reference_model: the model must have no adapters"),
    ],
)
def test_what_would_lose_adapters_is_refused(change, message):
    model, x = adapted(), tokens()
    y = model(x)
    with pytest.raises(ValueError, match=message):
        change(model)
    assert torch.equal(model(x), y)


def test_convert_leaves_what_has_an_adapter():
    model, x = adapted(), tokens()
    model.tail = nn.Linear(16, 16).bfloat16()
    y = model(x)
    moefp8.convert(model, filter_fn=lambda module, name: True)
    assert isinstance(model.tail, moefp8.FP8Linear)
    assert torch.equal(model(x), y)


def test_frozen_parameters_are_all_but_adapters():
    model = adapted()
    frozen = moefp8.frozen_parameters(model)
    assert "first.weight" in frozen
    assert not any("lora_" in name for name in frozen)


@pytest.mark.filterwarnings("ignore")
def test_save_pretrained_writes_adapters_or_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("moefp8.hf")
    config = transformers.Qwen3Config(
        hidden_size=H,
        intermediate_size=H,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        vocab_size=32,
    )
    model = moefp8.convert(transformers.Qwen3ForCausalLM(config).bfloat16())
    add_lora(model)
    for twin in (model, pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        trained(twin).save_pretrained(tmp_path / "adapter", state_dict=twin.state_dict())
        state, wanted = load_file(tmp_path / "adapter" / WEIGHTS), lora_state_dict(twin)
        assert state.keys() == wanted.keys()
        assert all(torch.equal(x, wanted[key]) for key, x in state.items())
        assert not (tmp_path / "adapter" / "config.json").exists()
    with pytest.raises(ValueError, match="push_to_hub must be False"):
        model.save_pretrained(tmp_path, push_to_hub=True)
    with pytest.raises(ValueError, match="save_pretrained: the model must have no adapters"):
        type(model).save_pretrained(model, tmp_path / "both")
    remove_lora(model).save_pretrained(tmp_path / "model")
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert "model.layers.0.self_attn.q_proj.weight_scale_inv" in written
    assert not any("lora" in key for key in written)


def test_nothing_warns_without_adapters(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        moefp8.save_checkpoint(remove_lora(adapted()), tmp_path / "checkpoint")


def test_adapters_of_a_sharded_model_are_saved_whole():
    model = adapted()
    whole = lora_state_dict(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for module in (model.moe.experts, model):
            fully_shard(module, mesh=mesh)
        assert type(model.moe.experts.lora_down_proj.A).__name__ == "DTensor"
        gathered = lora_state_dict(model)
        assert gathered.keys() == whole.keys()
        assert all(map(torch.equal, gathered.values(), whole.values()))
        with pytest.raises(ValueError, match="fully_shard and parametrizations change the class"):
            remove_lora(model)
    finally:
        dist.destroy_process_group()
