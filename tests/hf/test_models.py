"""Whole transformers models, loaded from FP8 checkpoints: what they compute."""

import json

import pytest
import torch
from small_checkpoint import FAMILIES, small_config, write_small_checkpoint
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from moefp8 import FP8Linear, GroupedExperts, TopKRouter, convert, save_checkpoint
from moefp8.checkpoint import fp8_modules
from moefp8.testing import assert_matches_reference, reference_model, row_errors, teacher_forced
from tests.checkpoint.transformers_cases import fp8_of
from tests.hf.model_cases import (
    MTP,
    RELEASE,
    dequantized_checkpoint,
    fp8_names,
    load,
    plain,
    prompt,
    tensors_of,
    use_choices_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@torch.inference_mode()
def test_logits_match_the_reference_to_bf16_rounding(checkpoint):
    model, _ = load(checkpoint)
    ours, expected = teacher_forced(model, prompt())
    assert_matches_reference(ours.logits, expected.logits, 2e-2)
    errors = row_errors(ours.logits, expected.logits)
    assert float(errors.median()) < 1e-3
    assert float((errors > 6e-3).double().mean()) < 0.02


@torch.inference_mode()
def test_teacher_forcing_notices_one_wrong_scale(checkpoint):
    model, _ = load(checkpoint)
    experts = next(m for m in model.modules() if isinstance(m, GroupedExperts))
    ids = prompt()
    _, expected = teacher_forced(model, ids)
    experts.down_proj_scale_inv[3, 0, 0] *= 1.5
    wrong = model(ids).logits
    with pytest.raises(AssertionError):
        assert_matches_reference(wrong, expected.logits, 6e-3)


@torch.inference_mode()
def test_loaded_weights_are_those_of_transformers(checkpoint, tmp_path):
    """transformers' own modules on the dequantized weights, in FP32, give the same logits."""
    dequantized = dequantized_checkpoint(checkpoint, tmp_path / "plain")
    theirs = AutoModelForCausalLM.from_pretrained(dequantized, dtype=torch.float32)
    model, _ = load(checkpoint)
    ours = reference_model(model.float(), quantize_activations=False)
    use_choices_of(theirs, ours)
    ids = prompt()
    expected = theirs(ids).logits
    assert_matches_reference(ours(ids).logits, expected, 6e-3)


@torch.inference_mode()
def test_fp8_is_good_enough(checkpoint):
    """Logits against the BF16 model: what the example prints and the README states."""
    model, _ = load(checkpoint)
    ids = prompt()
    original = plain(checkpoint.with_name("fp8-bf16"))
    errors = row_errors(model(ids).logits, original(ids).logits)
    assert float(errors.median()) < 0.15


def test_saving_gives_keys_and_config_back(checkpoint, tmp_path):
    model, report = load(checkpoint)
    save_checkpoint(model, tmp_path / "copy")
    keys, configs = [], []
    for directory in (checkpoint, tmp_path / "copy"):
        keys.append(tensors_of(directory).keys())
        configs.append(json.loads((directory / "config.json").read_text()))
    assert keys[1] == keys[0] - set(report.ignored)
    has_mtp = configs[0].pop("num_nextn_predict_layers", 0)
    assert has_mtp == (model.config.model_type == "deepseek_v3")
    assert configs[1].pop("num_nextn_predict_layers", 0) == 0
    assert configs[0] == configs[1]
    again, _ = load(tmp_path / "copy")
    ids = prompt()
    assert torch.equal(model(ids).logits, again(ids).logits)


def test_every_fp8_weight_became_ours(checkpoint):
    model, report = load(checkpoint)
    assert fp8_names(model) == {*fp8_modules(checkpoint, model=model)}
    others = {n.rpartition(".")[2] for n, m in model.named_modules() if type(m) is torch.nn.Linear}
    has_gates = model.config.model_type == "qwen3_next"
    assert others == {"lm_head"} | ({"shared_expert_gate", "in_proj_ba"} if has_gates else set())
    assert all(key.startswith(MTP) for key in report.ignored)
    assert bool(report.ignored) == (model.config.model_type == "deepseek_v3")
    bias = [x for n, x in model.named_buffers() if n.endswith("e_score_correction_bias")]
    assert all(x.dtype == torch.float32 and x.unique().numel() > 7 for x in bias)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_logits_match_transformers_dequantizing(family, tmp_path, monkeypatch):
    """Its own path must be able to load the checkpoint: whole blocks, no 576 rows."""
    sizes = {"moe_intermediate_size": 256, "intermediate_size": 256}
    if family == "qwen3_next":
        sizes |= {"shared_expert_intermediate_size": 256, "linear_num_value_heads": 8}
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
    model, ids = fp8_of(tmp_path / "fp8"), prompt()
    use_choices_of(theirs, model)
    expected = theirs(ids).logits
    assert_matches_reference(model(ids).logits, expected, 0.2)


@torch.inference_mode()
def test_generates_with_padding(checkpoint):
    """A prompt alone and the same prompt padded on the left, beside a longer one."""
    model, long = fp8_of(checkpoint), torch.randint(2, 512, (1, 12))
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


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch.inference_mode()
def test_compiles_whole(checkpoint, backend):
    if "qwen3_next" in str(checkpoint):
        pytest.skip("transformers' own linear attention breaks the graph")
    if backend == "inductor" and "qwen3_moe" not in str(checkpoint):
        pytest.skip("it takes long")
    model, ids = fp8_of(checkpoint), prompt()[:, :8]
    model.config.num_hidden_layers = 2  # the first of DeepSeek-V3 is dense
    model.model.layers = model.model.layers[:2]
    expected = model(ids, use_cache=False).logits
    torch._dynamo.reset()
    got = torch.compile(model, fullgraph=True, backend=backend)(ids, use_cache=False).logits
    # Inductor keeps FP32 where eager code rounds to BF16, and rounding to FP8 amplifies.
    bound = 0.1 if backend == "inductor" else 0.02
    assert float(row_errors(got, expected).median()) < bound


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_convert_quantizes_a_bf16_model(family):
    model = AutoModelForCausalLM.from_config(small_config(family), dtype=torch.bfloat16).eval()
    ids = prompt()
    before = model(ids).logits
    convert(model)
    assert sum(isinstance(m, FP8Linear) for m in model.modules()) > 10
    assert type(model.lm_head) is torch.nn.Linear
    assert float(row_errors(model(ids).logits, before).median()) < 0.15


@pytest.mark.skipif(RELEASE < (5, 20), reason="its routers give logits alone")
def test_our_routers_choose_as_transformers_do():
    config = small_config("deepseek_v3")
    theirs = DeepseekV3TopkRouter(config)
    theirs.weight.data.normal_(std=0.06)
    theirs.e_score_correction_bias.normal_(std=0.1)
    ours = TopKRouter(
        256, 16, 4, scoring="sigmoid", num_groups=4, topk_groups=2, scaling_factor=2.5,
        correction_bias=True,
    )  # fmt: skip
    check_router(ours, theirs)
    theirs = Qwen3MoeTopKRouter(small_config("qwen3_moe"))
    theirs.weight.data.normal_(std=0.06)
    check_router(TopKRouter(256, 8, 2), theirs)


def check_router(ours: TopKRouter, theirs: torch.nn.Module) -> None:
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(200, 256)
    _, weights, index = theirs(x)
    their_order, ours_index, ours_weights = index.argsort(), *ours(x)
    our_order = ours_index.argsort()
    assert torch.equal(ours_index.gather(1, our_order), index.gather(1, their_order))
    torch.testing.assert_close(ours_weights.gather(1, our_order), weights.gather(1, their_order))
