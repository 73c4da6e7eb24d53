"""quantize_checkpoint where transformers converts keys: what it takes, and what stays as it is."""

import pytest
from model_cases import RELEASE
from quantize_cases import read
from safetensors.torch import save_file
from test_quantize_choices import assert_equal, fp8_of, saved
from transformers import AutoModelForCausalLM, GPT2Config, conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter

import moefp8.hf
from moefp8.checkpoint import quantize_checkpoint

pytestmark = pytest.mark.skipif(
    RELEASE < (5, 20), reason="older transformers build no tiny model of these"
)


def change(path, edit) -> None:
    """Have `edit(tensors)` change those of a checkpoint in one file."""
    tensors = read(path)
    edit(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def test_a_conv1d_that_is_converted_stays(tmp_path, monkeypatch):
    """Square, so that no shape tells that a matrix is transposed."""
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
    config = moefp8.hf.FP8Config(skip="attn.c_proj")
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path / "s", quantization_config=config)
    assert_equal(fp8_of(tmp_path / "t"), wanted)
