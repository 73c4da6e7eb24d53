"""quantize_checkpoint where transformers converts keys: what it takes, and what stays as it is."""

import re

import pytest
import torch
import transformers
from safetensors.torch import save_file
from transformers import GPT2Config, conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter

from benchmarks.families.models import OVERRIDES, tiny_model
from moefp8.checkpoint import CheckpointError, inspect_checkpoint, quantize_checkpoint
from tests.checkpoint.cases import read
from tests.checkpoint.transformers_cases import loaded_alike, saved
from tests.hf.model_cases import RELEASE

pytestmark = pytest.mark.skipif(
    RELEASE < (5, 20), reason="older transformers build no tiny model of these"
)


def change(path, edit) -> None:
    """Have `edit(tensors)` change those of a checkpoint in one file."""
    tensors = read(path)
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_a_conv1d_that_is_converted_stays(tmp_path, monkeypatch):
    """The Conv1D is square, so that no shape tells that it is transposed."""
    parts = [rf"attn\.c_proj{part}\.weight" for part in "AB"]
    step = WeightConverter(parts, "attn.c_proj.weight", [Concatenate(dim=0)])
    known = conversion_mapping.get_checkpoint_conversion_mapping
    known("gpt2")  # fills the cache
    monkeypatch.setitem(conversion_mapping._checkpoint_conversion_mapping_cache, "gpt2", [step])

    saved(GPT2Config(vocab_size=256, n_embd=256, n_layer=1, n_head=2), tmp_path / "s")
    assert "transformer.h.0.attn.c_projB.weight" in read(tmp_path / "s")
    done = quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    assert "stored in another form" in done.conversion.kept["transformer.h.0.attn.c_proj"]
    assert len(done.conversion.swapped) == 3
    loaded_alike(tmp_path, skip="attn.c_proj")


@pytest.mark.parametrize(
    "key", ["encoder.layer.0.attention.qkv_proj.input_amax", "encoder.layer.²³.scalar"]
)
def test_a_scalar_that_looks_like_a_part_is_kept(tmp_path, key):
    tiny_model("gte").save_pretrained(tmp_path / "s")
    plain = quantize_checkpoint(tmp_path / "s", tmp_path / "u")
    change(tmp_path / "s", lambda tensors: tensors.update({key: torch.tensor(1.0)}))
    done = quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    assert done.conversion == plain.conversion
    assert read(tmp_path / "t")[key] == 1


def test_experts_that_transformers_cannot_order_stay(tmp_path):
    tiny_model("ernie4_5_vl_moe").save_pretrained(tmp_path / "s")

    def renumber(tensors):
        for name in ("gate", "up", "down"):
            key = f"model.layers.1.mlp.experts.{{}}.{name}_proj.weight"
            tensors[key.format("²")] = tensors.pop(key.format("2"))

    change(tmp_path / "s", renumber)
    with pytest.warns(UserWarning, match="experts stay in 16 bits: 1 .*stored in another form"):
        done = quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    assert "model.language_model.layers.2.mlp.text_moe.experts" in done.conversion.swapped


def ernie(path, monkeypatch, **text) -> type:
    """Save a tiny ERNIE, which stores experts for texts and for images as if of one kind."""
    changed = OVERRIDES["ernie4_5_vl_moe"]["text_config"] | text
    monkeypatch.setitem(OVERRIDES, "ernie4_5_vl_moe", {"text_config": changed})
    model = tiny_model("ernie4_5_vl_moe")
    model.save_pretrained(path)
    return type(model)


EXPERTS = "model.language_model.layers.1.mlp.{}_moe.experts"
WITH_TEXT = "converted together with model.language_model.layers.*.mlp.text_moe.experts, which"


@pytest.mark.parametrize(
    ("text", "skip", "why"),
    [
        ({"moe_intermediate_size": [256, 128]}, "model.layers.*.mlp.experts.[0-7].*", "skipped"),
        # No key has these names, but reports and errors print them.
        ({}, "mlp.text_moe.experts", "skipped"),
        ({}, "text_moe", "skipped"),
        ({}, EXPERTS.format("text"), "skipped"),
    ],
)
def test_what_one_conversion_fills_stays_together(tmp_path, monkeypatch, text, skip, why):
    kind = ernie(tmp_path / "s", monkeypatch, **text)
    with pytest.warns(UserWarning, match=f"experts stay in 16 bits: .*{re.escape(WITH_TEXT)}"):
        done = quantize_checkpoint(tmp_path / "s", tmp_path / "t", skip=skip)
    kept = done.conversion.kept
    assert why in kept[EXPERTS.format("text")]
    assert WITH_TEXT in kept[EXPERTS.format("vision")]
    is_one_layer = EXPERTS.format("text") == skip
    assert ("experts" in done.conversion.swapped.values()) == is_one_layer
    loaded_alike(tmp_path, kind, skip=[name for name in kept if name.endswith("experts")])


def test_what_one_conversion_fills_stays_together_where_an_expert_is_missing(tmp_path, monkeypatch):
    """The last expert is missing, which is for images: those for texts are complete."""
    ernie(tmp_path / "s", monkeypatch)
    key = "model.layers.1.mlp.experts.15.down_proj.weight"
    change(tmp_path / "s", lambda tensors: tensors.pop(key))
    with pytest.warns(UserWarning, match="converted together with .*vision_moe.experts, which"):
        done = quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    assert {EXPERTS.format(kind) for kind in ("text", "vision")} <= done.conversion.kept.keys()


def test_a_name_to_skip_is_of_a_key_or_a_module(tmp_path, monkeypatch):
    ernie(tmp_path / "s", monkeypatch)
    with pytest.raises(ValueError, match=r"a key of .*, or a module of its model, got 'test_moe'"):
        quantize_checkpoint(tmp_path / "s", tmp_path / "u", skip="test_moe")


def test_what_a_refusal_tells_to_skip_can_be_skipped(tmp_path, monkeypatch):
    ernie(tmp_path / "s", monkeypatch, hidden_act="relu")
    skip: list[str] = []
    while len(skip) < 2:
        with pytest.raises(CheckpointError) as refused:  # long errors are cut: it may tell of one
            quantize_checkpoint(tmp_path / "s", tmp_path / "t", skip=skip)
        skip += re.findall(r"pass skip='([\w.*]+)'", str(refused.value))
    assert sorted(skip) == [
        f"model.language_model.layers.*.mlp.{kind}_moe.experts" for kind in ("text", "vision")
    ]
    done = quantize_checkpoint(tmp_path / "s", tmp_path / "t", skip=skip)
    assert set(done.conversion.swapped.values()) == {"linear"}


def test_what_is_fused_is_called_as_the_rest_is(tmp_path, monkeypatch):
    """The keys lack the prefix that transformers adds when it loads."""

    def cut(tensors):
        for key in list(tensors):
            tensors[key.removeprefix("model.")] = tensors.pop(key)

    kind = ernie(tmp_path / "s", monkeypatch)
    change(tmp_path / "s", cut)
    quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    assert not any(key.startswith("model.") for key in read(tmp_path / "t"))
    loaded_alike(tmp_path, kind)


TWICE = {
    "dbrx": ("transformer.blocks.1.ffn.experts.mlp.v1", "transformer."),
    "gpt2": ("transformer.h.1.attn.c_attn.weight", "transformer."),
    "qwen3_moe": ("model.layers.1.self_attn.q_proj.weight", "model."),
}


@pytest.mark.parametrize("family", TWICE)
@pytest.mark.filterwarnings("ignore:quantize_checkpoint. experts stay")
def test_what_is_stored_twice_stays(tmp_path, monkeypatch, family):
    """transformers takes the first of the two."""
    monkeypatch.setitem(OVERRIDES, "gpt2", {"n_head": 4})
    key, prefix = TWICE[family]
    other = key.removeprefix(prefix)
    model = tiny_model(family)
    model.save_pretrained(tmp_path / "s")
    change(tmp_path / "s", lambda tensors: tensors.update({other: tensors[key] + 1}))
    done = quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    module = key.removesuffix(".mlp.v1").removesuffix(".weight")
    first, second = sorted((key, other))
    assert done.conversion.kept[module] == f"stored twice, as {first} and {second}"
    loaded_alike(tmp_path, type(model), skip=module)


def test_a_weight_of_another_dtype_is_kept_by_its_module(tmp_path):
    """A part of the module cannot be skipped alone."""
    tiny_model("dbrx").save_pretrained(tmp_path / "s")
    module = "transformer.blocks.1.ffn.experts"
    key = f"{module}.mlp.v1"
    change(tmp_path / "s", lambda tensors: tensors.update({key: tensors[key].double()}))
    with pytest.raises(CheckpointError, match=f"got F64; skip '{re.escape(module)}' to keep it"):
        quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    done = quantize_checkpoint(tmp_path / "s", tmp_path / "t", skip=module)
    assert done.conversion.kept[module] == "skipped"


def test_a_linear_of_two_parts_that_are_no_whole_blocks_stays(tmp_path, monkeypatch):
    """Its scales would be of blocks that hold rows of both parts."""
    changed = {"text_config": {"shared_intermediate_size": 192}}
    monkeypatch.setitem(OVERRIDES, "minimax_m3_vl", changed)
    tiny_model("minimax_m3_vl").save_pretrained(tmp_path / "s")
    done = quantize_checkpoint(tmp_path / "s", tmp_path / "t", skip="mlp.experts")
    name = "shared_experts.gate_up_proj"
    why = {why for module, why in done.conversion.kept.items() if module.endswith(name)}
    assert why == {"made of parts of sizes that 128 does not divide, which loaders cut otherwise"}


@pytest.mark.skipif(not hasattr(transformers, "Dots3NoteVisionModel"), reason="too old for Dots 3")
def test_layers_may_have_numbers_of_experts_of_their_own(tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 384, "moe_intermediate_size": 128}
    sizes |= {"adapter_in_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 4}
    sizes |= {"num_hidden_layers": 3, "pyramid_num_routed": [-1, 12, 16]}
    config = transformers.Dots3NoteVisionConfig(**sizes)
    model = transformers.Dots3NoteVisionModel._from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "s")
    quantize_checkpoint(tmp_path / "s", tmp_path / "t")
    assert inspect_checkpoint(tmp_path / "t").is_loadable

    def cut(tensors):
        for key in ("blocks.2.mlp.experts.down_proj", "blocks.2.mlp.experts.down_proj_scale_inv"):
            tensors[key] = tensors[key][:15]

    change(tmp_path / "t", cut)
    errors = [a for a in inspect_checkpoint(tmp_path / "t").anomalies if a.severity == "error"]
    assert "15 experts, config.json tells of 12 or 16 or 64" in errors[0].examples[0]
