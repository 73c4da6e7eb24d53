"""`from_pretrained` puts checkpoints into our modules, `save_pretrained` gives them back."""

import pytest
import torch
from small_checkpoint import small_config
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    Qwen3_5MoeConfig,
)

import moefp8
from moefp8 import FP8Linear, GroupedExperts
from moefp8.checkpoint import quantize_checkpoint
from moefp8.hf import pretrained_config
from moefp8.testing import row_errors
from tests.checkpoint.cases import assert_same_tensors
from tests.checkpoint.quantize.cases import quantization_of
from tests.checkpoint.transformers_cases import assert_equal, fp8_of
from tests.hf.model_cases import (
    BLOCKS,
    MTP,
    change_config,
    change_tensors,
    fp8_names,
    load,
    plain,
    prompt,
    tensors_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def test_holds_what_load_checkpoint_loads(checkpoint):
    """Every byte, every dtype, every module: the strict loader is the judge."""
    model, (expected, _) = fp8_of(checkpoint), load(checkpoint)
    assert_equal(model, expected)
    ours = fp8_names(model)
    assert ours == fp8_names(expected)
    assert all(type(model.get_submodule(n)) is type(expected.get_submodule(n)) for n in ours)
    assert not any(p.requires_grad for n in ours for p in model.get_submodule(n).parameters())
    assert not model.training


def test_save_pretrained_gives_keys_and_config_back(checkpoint, tmp_path):
    model = fp8_of(checkpoint)
    model.save_pretrained(tmp_path / "copy", max_shard_size="2MB")
    wanted = {
        key: x.float() if key.endswith("_scale_inv") else x
        for key, x in tensors_of(checkpoint).items()
        if not key.startswith(MTP)
    }
    assert_same_tensors(tensors_of(tmp_path / "copy"), wanted)
    assert quantization_of(tmp_path / "copy") == quantization_of(checkpoint)
    assert quantization_of(checkpoint)["quant_method"] == "fp8"
    assert_equal(fp8_of(tmp_path / "copy"), model)
    assert_equal(load(tmp_path / "copy")[0], model)


def test_a_model_without_its_head(checkpoint):
    """Keys begin with `model.`, the model's names do not."""
    assert_equal(fp8_of(checkpoint, AutoModel), fp8_of(checkpoint).model)


def test_a_head_for_another_task_may_be_new(qwen):
    assert_equal(fp8_of(qwen, AutoModelForSequenceClassification).model, fp8_of(qwen).model)


def test_quantizes_what_is_not_fp8_yet(qwen):
    bf16, copy = qwen.with_name("fp8-bf16"), qwen.with_name("saved")
    model = fp8_of(bf16)
    assert_equal(model, moefp8.convert(plain(bf16)))
    model.save_pretrained(copy)
    assert_equal(fp8_of(copy), model)


def test_quantized_files_are_what_a_quantized_load_gives(checkpoint, tmp_path):
    bf16 = checkpoint.with_name("fp8-bf16")
    quantize_checkpoint(bf16, tmp_path / "fp8", progress=False)
    model = fp8_of(tmp_path / "fp8")
    assert_equal(model, fp8_of(bf16))
    assert_equal(model, load(tmp_path / "fp8")[0])


@pytest.mark.parametrize("is_zip", [True, False])
def test_pickles_that_are_not_fp8_are_quantized(qwen, is_zip):
    bf16 = qwen.with_name("fp8-bf16")
    expected, tensors = fp8_of(bf16), tensors_of(bf16)
    for file in [*bf16.glob("*.safetensors*")]:
        file.unlink()
    torch.save(tensors, bf16 / "pytorch_model.bin", _use_new_zipfile_serialization=is_zip)
    assert_equal(fp8_of(bf16), expected)


@torch.inference_mode()
def test_a_text_model_inside_of_another(tmp_path):
    """Keys under `model.language_model.`; the vision tower stays as it is."""
    text = small_config("qwen3_next").to_dict()
    sizes = {"depth": 1, "hidden_size": 64, "intermediate_size": 128, "num_heads": 2}
    sizes |= {"out_hidden_size": 256, "patch_size": 4, "num_position_embeddings": 16}
    names = "vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads"
    names += " head_dim moe_intermediate_size shared_expert_intermediate_size num_experts"
    names += " num_experts_per_tok linear_num_key_heads linear_num_value_heads"
    names += " linear_key_head_dim linear_value_head_dim layer_types"
    config = Qwen3_5MoeConfig(
        text_config={name: text[name] for name in names.split()}, vision_config=sizes
    )
    original = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16).eval()
    original.save_pretrained(tmp_path / "bf16")
    quantize_checkpoint(tmp_path / "bf16", tmp_path / "fp8", progress=False)
    model = fp8_of(tmp_path / "fp8", AutoModelForImageTextToText)
    experts = [n for n, m in model.named_modules() if isinstance(m, GroupedExperts)]
    assert len(experts) == 3
    assert all(name.startswith("model.language_model.layers.") for name in experts)
    assert not any(isinstance(m, FP8Linear) for m in model.model.visual.modules())
    ids = prompt()[:, :9]
    errors = row_errors(model(input_ids=ids).logits, original(input_ids=ids).logits)
    assert float(errors.median()) < 0.15
    model.save_pretrained(tmp_path / "copy")
    assert tensors_of(tmp_path / "copy").keys() == tensors_of(tmp_path / "fp8").keys()
    assert_equal(fp8_of(tmp_path / "fp8").model, model.model.language_model)


def test_compressed_tensors(qwen, tmp_path):
    def loaded(path):
        return AutoModelForCausalLM.from_pretrained(path, config=pretrained_config(path))

    expected = fp8_of(qwen)
    change_tensors(qwen, lambda key, x: [(key.replace("weight_scale_inv", "weight_scale"), x)])
    change_config(qwen, quantization_config=BLOCKS)
    model = loaded(qwen)
    assert_equal(model, expected)
    model.save_pretrained(tmp_path / "copy")
    assert tensors_of(tmp_path / "copy").keys() == tensors_of(qwen).keys()
    assert quantization_of(tmp_path / "copy") == BLOCKS
    changed = "model.layers.0.self_attn.q_proj"
    model.set_submodule(changed, model.get_submodule(changed).to_linear())
    model.save_pretrained(tmp_path / "changed")
    assert {"lm_head", changed} <= {*quantization_of(tmp_path / "changed")["ignore"]}
    keys = tensors_of(qwen).keys() - {f"{changed}.weight_scale"}
    assert tensors_of(tmp_path / "changed").keys() == keys
    assert_equal(loaded(tmp_path / "changed"), model)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e8m0fnu])
def test_scales_of_other_dtypes_and_names(qwen, dtype):
    """`.scale` in E8M0 is DeepSeek-V4's."""

    def change(key, x):
        if not key.endswith("_scale_inv"):
            return [(key, x)]
        name = key.replace("weight_scale_inv", "scale") if dtype.itemsize == 1 else key
        return [(name, (x.float().log2().round().exp2()).to(dtype))]

    change_tensors(qwen, change)
    assert_equal(fp8_of(qwen), load(qwen)[0])


def test_a_tensor_called_scale_that_is_none(qwen):
    """Gemma 4's routers have one; the name is that of scales only beside a weight."""
    norm = "model.norm.weight"
    scale = tensors_of(qwen)[norm].clone()
    change_tensors(qwen, lambda key, x: [(key, x), ("model.router.scale", scale)])
    assert fp8_of(qwen).hf_quantizer._scale_leaves == set()
