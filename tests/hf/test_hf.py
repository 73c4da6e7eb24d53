"""`from_pretrained` puts FP8 checkpoints into our modules, `save_pretrained` gives them back."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoint import FAMILIES, small_config, write_small_checkpoint
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    FineGrainedFP8Config,
    PreTrainedModel,
    Qwen3_5MoeConfig,
)

import moefp8
from moefp8 import FP8Linear, GroupedExperts
from moefp8.checkpoint import CheckpointError, quantize_checkpoint
from moefp8.hf import FP8Config, pretrained_config
from moefp8.testing import assert_matches_reference, row_errors, teacher_forced
from tests.hf.model_cases import (
    MTP,
    dequantized_checkpoint,
    load,
    prompt,
    states_differ,
    tensors_of,
    use_choices_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param) / "fp8"
    write_small_checkpoint(directory, request.param)
    return directory


@pytest.fixture
def qwen(tmp_path):
    """One that a test may damage: an FP8 directory, with the BF16 original beside it."""
    write_small_checkpoint(tmp_path / "fp8", "qwen3_moe", num_shards=1)
    return tmp_path / "fp8"


def pretrained(directory, **kwargs) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=FP8Config(), **kwargs
    )


def test_holds_what_load_checkpoint_loads(checkpoint):
    """Every byte, every dtype, every module: the strict loader is the judge."""
    model, (expected, _) = pretrained(checkpoint), load(checkpoint)
    assert states_differ(model, expected) == []
    ours = {
        n: type(m) for n, m in model.named_modules() if isinstance(m, FP8Linear | GroupedExperts)
    }
    assert ours == {n: type(expected.get_submodule(n)) for n in ours}
    assert not any(p.requires_grad for n in ours for p in model.get_submodule(n).parameters())
    assert not model.training


@torch.inference_mode()
def test_logits_match_dequantized_weights(checkpoint, tmp_path):
    """transformers' own modules on weights dequantized by hand: what FP8 activations cost."""
    plain = dequantized_checkpoint(checkpoint, tmp_path / "plain")
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
    model, ids = pretrained(checkpoint), prompt()
    use_choices_of(theirs, model)
    expected = theirs(ids).logits
    assert_matches_reference(model(ids).logits, expected, 0.2)
    ours, reference = teacher_forced(pretrained(checkpoint), ids)
    assert_matches_reference(ours.logits, reference.logits, 2e-2)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_match_transformers_dequantizing(family, tmp_path, monkeypatch):
    """Where its own path can load the checkpoint: whole blocks, no 576 rows."""
    sizes = {"moe_intermediate_size": 256, "intermediate_size": 256}
    sizes |= {"shared_expert_intermediate_size": 256} if family == "qwen3_next" else {}
    sizes |= {"linear_num_value_heads": 8} if family == "qwen3_next" else {}
    config = small_config(family)
    for name, size in sizes.items():
        setattr(config, name, size)
    monkeypatch.setattr("small_checkpoint.small_config", lambda family: config)
    write_small_checkpoint(tmp_path / "fp8", family)
    dequantize = FineGrainedFP8Config(dequantize=True)
    try:
        theirs = AutoModelForCausalLM.from_pretrained(
            tmp_path / "fp8", quantization_config=dequantize, dtype=torch.bfloat16
        )
    except (RuntimeError, ValueError):
        assert family == "deepseek_v3"  # kv_a_proj_with_mqa
        return
    model, ids = pretrained(tmp_path / "fp8"), prompt()
    use_choices_of(theirs, model)
    expected = theirs(ids).logits
    assert_matches_reference(model(ids).logits, expected, 0.2)


def test_save_pretrained_gives_keys_and_config_back(checkpoint, tmp_path):
    model = pretrained(checkpoint)
    model.save_pretrained(tmp_path / "copy", max_shard_size="2MB")
    before = {k: x for k, x in tensors_of(checkpoint).items() if not k.startswith(MTP)}
    after = tensors_of(tmp_path / "copy")
    assert after.keys() == before.keys()
    for key, tensor in before.items():
        wanted = tensor.float() if key.endswith("_scale_inv") else tensor
        assert after[key].dtype == wanted.dtype, key
        assert torch.equal(after[key].view(torch.uint8), wanted.view(torch.uint8)), key
    written, read = (
        json.loads((d / "config.json").read_text())["quantization_config"]
        for d in (tmp_path / "copy", checkpoint)
    )
    assert written == read
    assert written["quant_method"] == "fp8"
    assert states_differ(pretrained(tmp_path / "copy"), model) == []
    assert states_differ(load(tmp_path / "copy")[0], model) == []


@torch.inference_mode()
def test_generate_with_padding(checkpoint):
    """A prompt alone and the same prompt padded on the left, beside a longer one."""
    model, long = pretrained(checkpoint), torch.randint(2, 512, (1, 12))
    short = long[:, 5:]
    padded = torch.cat((torch.zeros(1, 5, dtype=torch.long), short), dim=1)
    ids, mask = torch.cat((long, padded)), torch.ones(2, 12, dtype=torch.long)
    mask[1, :5] = 0
    arguments = {"do_sample": False, "max_new_tokens": 5, "min_new_tokens": 5, "pad_token_id": 0}
    both = model.generate(ids, attention_mask=mask, **arguments)
    assert both.shape == (2, 17)
    assert torch.equal(both, model.generate(ids, attention_mask=mask, **arguments))
    for prompt_ids, row in ((long, both[0]), (short, both[1])):
        alone = model(prompt_ids).logits[:, -1]
        chosen = alone[0, row[12]]  # the same token, or one as likely but for rounding
        assert float(alone.max() - chosen) <= 0.05 * float(alone.std() * 4)


@torch.inference_mode()
def test_compiles_whole(checkpoint):
    if "qwen3_next" in str(checkpoint):
        pytest.skip("transformers' own linear attention breaks the graph")
    model, ids = pretrained(checkpoint), prompt()
    expected = model(ids, use_cache=False).logits
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    got = compiled(ids, use_cache=False).logits
    assert float(row_errors(got, expected).median()) < 0.02


@torch.inference_mode()
def test_compiles_with_inductor(qwen):
    model, ids = pretrained(qwen), prompt()[:1, :8]
    expected = model(ids, use_cache=False).logits
    got = torch.compile(model)(ids, use_cache=False).logits
    # It keeps FP32 where eager code rounds to BF16, and rounding to FP8 amplifies.
    assert float(row_errors(got, expected).median()) < 0.1


@torch.inference_mode()
def test_a_model_without_its_head(checkpoint):
    """Keys begin with `model.`, the model's names do not."""
    model = AutoModel.from_pretrained(checkpoint, quantization_config=FP8Config())
    whole = pretrained(checkpoint)
    assert states_differ(model, whole.model) == []


def test_quantizes_what_is_not_fp8_yet(qwen):
    bf16 = qwen.with_name("fp8-bf16")
    model = pretrained(bf16)
    expected = moefp8.convert(AutoModelForCausalLM.from_pretrained(bf16, dtype=torch.bfloat16))
    assert states_differ(model, expected) == []
    model.save_pretrained(qwen.with_name("saved"))
    assert states_differ(pretrained(qwen.with_name("saved")), model) == []
    skip = FP8Config(skip=("lm_head", "gate", "experts"))
    model = AutoModelForCausalLM.from_pretrained(bf16, quantization_config=skip)
    assert not any(isinstance(m, GroupedExperts) for m in model.modules())
    assert any(isinstance(m, FP8Linear) for m in model.modules())


def test_quantized_files_are_what_a_quantized_load_gives(checkpoint, tmp_path):
    bf16 = checkpoint.with_name("fp8-bf16")
    quantize_checkpoint(bf16, tmp_path / "fp8", progress=False)
    model = pretrained(tmp_path / "fp8")
    assert states_differ(model, pretrained(bf16)) == []
    assert states_differ(model, load(tmp_path / "fp8")[0]) == []


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
    model = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "fp8", quantization_config=FP8Config()
    )
    experts = [n for n, m in model.named_modules() if isinstance(m, GroupedExperts)]
    assert len(experts) == 3
    assert all(name.startswith("model.language_model.layers.") for name in experts)
    assert not any(isinstance(m, FP8Linear) for m in model.model.visual.modules())
    ids = prompt()[:, :9]
    errors = row_errors(model(input_ids=ids).logits, original(input_ids=ids).logits)
    assert float(errors.median()) < 0.15
    model.save_pretrained(tmp_path / "copy")
    assert tensors_of(tmp_path / "copy").keys() == tensors_of(tmp_path / "fp8").keys()
    alone = pretrained(tmp_path / "fp8")
    assert states_differ(alone.model, model.model.language_model) == []


def rewrite(directory, change, **config) -> None:
    """change: (key, tensor) -> pairs to write instead."""
    file = directory / "model.safetensors"
    tensors = dict(pair for item in load_file(file).items() for pair in change(*item))
    save_file(tensors, file, metadata={"format": "pt"})
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


@pytest.fixture
def one_shard(qwen):
    """The same checkpoint in one file, which `rewrite` changes."""
    tensors = tensors_of(qwen)
    for file in [*qwen.glob("*.safetensors*")]:
        file.unlink()
    save_file(tensors, qwen / "model.safetensors", metadata={"format": "pt"})
    return qwen


BLOCKS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"strategy": "block", "block_structure": [128, 128], "num_bits": 8},
        }
    },
    "ignore": ["lm_head"],
}


def test_compressed_tensors(one_shard, tmp_path):
    expected = pretrained(one_shard)
    rewrite(
        one_shard,
        lambda key, x: [(key.replace("weight_scale_inv", "weight_scale"), x)],
        quantization_config=BLOCKS,
    )
    model = AutoModelForCausalLM.from_pretrained(one_shard, config=pretrained_config(one_shard))
    assert states_differ(model, expected) == []
    model.save_pretrained(tmp_path / "copy")
    assert tensors_of(tmp_path / "copy").keys() == tensors_of(one_shard).keys()
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config["quantization_config"] == BLOCKS
    attention = model.model.layers[0].self_attn
    attention.q_proj = attention.q_proj.to_linear()
    model.save_pretrained(tmp_path / "changed")
    config = json.loads((tmp_path / "changed" / "config.json").read_text())
    assert {"lm_head", "model.layers.0.self_attn.q_proj"} <= {
        *config["quantization_config"]["ignore"]
    }
    keys = tensors_of(one_shard).keys() - {"model.layers.0.self_attn.q_proj.weight_scale"}
    assert tensors_of(tmp_path / "changed").keys() == keys
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "changed", config=pretrained_config(tmp_path / "changed")
    )
    assert states_differ(again, model) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float8_e8m0fnu])
def test_scales_of_other_dtypes_and_names(one_shard, dtype):
    """`.scale` in E8M0 is DeepSeek-V4's."""

    def change(key, x):
        if not key.endswith("_scale_inv"):
            return [(key, x)]
        name = key.replace("weight_scale_inv", "scale") if dtype.itemsize == 1 else key
        return [(name, (x.float().log2().round().exp2()).to(dtype))]

    rewrite(one_shard, change)
    assert states_differ(pretrained(one_shard), load(one_shard)[0]) == []


EXPERT = "model.layers.1.mlp.experts.5"


def without(*missing):
    return lambda key, x: [] if key in missing else [(key, x)]


def replaced(name, tensor):
    return lambda key, x: [(key, tensor if key == name else x)]


@pytest.mark.parametrize(
    ("change", "needles"),
    [
        (
            without(f"{EXPERT}.up_proj.weight", f"{EXPERT}.up_proj.weight_scale_inv"),
            [f"{EXPERT}.up_proj.weight: missing"],
        ),
        (without(f"{EXPERT}.down_proj.weight_scale_inv"), [f"{EXPERT}.down_proj.weight in"]),
        (
            replaced(f"{EXPERT}.down_proj.weight_scale_inv", torch.ones(1, 3)),
            ["shape must be [2, 3], got [1, 3]"],
        ),
        (
            replaced(f"{EXPERT}.down_proj.weight", torch.ones(256, 320, dtype=torch.bfloat16)),
            [f"{EXPERT}.down_proj.weight in", "got BF16"],
        ),
        (
            replaced(f"{EXPERT}.down_proj.weight_scale_inv", torch.full((2, 3), torch.nan)),
            [f"{EXPERT}.down_proj.weight_scale_inv in", "6 of 6 scales are NaN or infinite"],
        ),
        (
            without("model.layers.0.self_attn.k_proj.weight_scale_inv"),
            ["model.layers.0.self_attn.k_proj.weight in", "without its scale"],
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused(one_shard, change, needles):
    rewrite(one_shard, change)
    with pytest.raises(CheckpointError) as caught:
        pretrained(one_shard)
    for needle in [*needles, str(one_shard / "model.safetensors")]:
        assert needle in str(caught.value)


def forget_quantization(directory) -> None:
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))


def test_an_fp8_checkpoint_whose_config_does_not_say_so_is_refused(one_shard):
    """transformers would take codes for weights, and leave scales out."""
    forget_quantization(one_shard)
    with pytest.raises(CheckpointError, match="config has no quantization_config") as caught:
        pretrained(one_shard)
    assert f"_proj.weight in {one_shard / 'model.safetensors'}: FP8" in str(caught.value)


@pytest.mark.parametrize("shards", [1, 2])
def test_so_it_is_if_its_files_are_pickles(one_shard, shards):
    file = one_shard / "model.safetensors"
    tensors = load_file(file)
    file.unlink()
    weight = next(key for key, x in tensors.items() if x.dtype == torch.float8_e4m3fn)
    codes = {key: x for key, x in tensors.items() if key.removesuffix("_scale_inv") == weight}
    parts = [tensors] if shards == 1 else [tensors.copy(), codes]
    names = ["pytorch_model.bin"]
    if shards == 2:
        for key, x in tensors.items():
            parts[0][key] = x.bfloat16()
            if key in codes:
                del parts[0][key]
        names = [f"pytorch_model-{i:05}-of-00002.bin" for i in (1, 2)]
        weight_map = {key: name for part, name in zip(parts, names, strict=True) for key in part}
        index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
        (one_shard / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for part, name in zip(parts, names, strict=True):
        torch.save(part, one_shard / name)
    forget_quantization(one_shard)
    with pytest.raises(CheckpointError, match="config has no quantization_config") as caught:
        pretrained(one_shard)
    assert f"{weight} in {one_shard / names[-1]}: FP8" in str(caught.value)


@pytest.mark.parametrize("is_zip", [True, False])
def test_pickles_that_are_not_fp8_are_quantized(qwen, is_zip):
    bf16 = qwen.with_name("fp8-bf16")
    expected = pretrained(bf16)
    tensors = tensors_of(bf16)
    for file in bf16.glob("*.safetensors*"):
        file.unlink()
    file = bf16 / "pytorch_model.bin"
    torch.save(tensors, file, _use_new_zipfile_serialization=is_zip)
    assert states_differ(pretrained(bf16), expected) == []


ROUTER = "model.layers.1.mlp.gate.weight"


def test_decoder_layers_must_be_filled(one_shard):
    """transformers would draw at random what is missing, all experts of a layer too."""
    rewrite(one_shard, without(ROUTER))
    with pytest.raises(CheckpointError, match=f"{ROUTER}: not in the checkpoint"):
        pretrained(one_shard)


def test_a_layer_more_than_the_checkpoint_has(one_shard):
    rewrite(one_shard, without(), num_hidden_layers=4)
    with pytest.raises(CheckpointError, match=r"layers\.3\.mlp\.experts\.gate_up_proj: not in"):
        pretrained(one_shard)


def test_other_tensors_may_be_new(one_shard):
    """Such as a head for another task."""
    model = AutoModelForSequenceClassification.from_pretrained(
        one_shard, quantization_config=FP8Config()
    )
    assert states_differ(model.model, pretrained(one_shard).model) == []


def test_a_tensor_called_scale_that_is_none(one_shard):
    """Gemma 4's routers have one; of a name for scales it takes a weight beside it."""
    rewrite(
        one_shard,
        lambda key, x: [(key, x), ("model.router.scale", x.clone())][: 1 + (key == ROUTER)],
    )
    quantizer = pretrained(one_shard).hf_quantizer
    assert quantizer._scale_leaves == set()


def test_other_blocks_are_refused(one_shard):
    stored = json.loads((one_shard / "config.json").read_text())["quantization_config"]
    rewrite(one_shard, without(), quantization_config=stored | {"weight_block_size": [64, 64]})
    with pytest.raises(CheckpointError, match=r"must be \[128, 128\], got \[64, 64\]"):
        pretrained(one_shard)


PARALLEL = """
import sys
from transformers import AutoModelForCausalLM
import moefp8.hf
config = moefp8.hf.FP8Config()
AutoModelForCausalLM.from_pretrained(sys.argv[1], quantization_config=config, tp_plan="auto")
"""


def test_tensor_parallelism_of_transformers_is_refused(qwen, tmp_path):
    """It would cut scales by integer division; `moefp8.shard` carries them."""
    (tmp_path / "script.py").write_text(PARALLEL)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, tmp_path / "script.py", qwen],
        capture_output=True,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode != 0
    assert "cannot cut FP8 blocks; use moefp8.shard" in done.stderr, done.stderr


def test_offloading_to_the_disk_is_refused(qwen, tmp_path):
    names = "model.embed_tokens model.norm model.rotary_emb lm_head model.layers.0 model.layers.2"
    places = {**dict.fromkeys(names.split(), "cpu"), "model.layers.1": "disk"}
    with pytest.raises(ValueError, match=r"model\.layers\.1\..*must not be offloaded to"):
        pretrained(qwen, device_map=places, offload_folder=tmp_path / "offload")


def test_files_that_are_no_safetensors_are_refused(qwen):
    for file in qwen.glob("*.safetensors*"):
        file.unlink()
    torch.save({}, qwen / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin"):
        pretrained(qwen)


def test_a_config_for_a_checkpoint_that_is_not_fp8(qwen, tmp_path):
    with pytest.raises(ValueError, match="must have a quantization_config"):
        pretrained_config(qwen.with_name("fp8-bf16"))
    shutil.copytree(qwen, tmp_path / "other")
    path = tmp_path / "other" / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "awq"}}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match="weight_block_size"):
        pretrained_config(tmp_path / "other")
