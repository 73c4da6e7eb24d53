"""Whole transformers models of both families, loaded from FP8 checkpoints: the main job."""

import json

import pytest
import torch
from small_checkpoint import FAMILIES, small_config, write_small_checkpoint
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from moefp8 import FP8Linear, GroupedExperts, TopKRouter, convert, save_checkpoint
from moefp8.checkpoint import fp8_modules
from moefp8.testing import assert_matches_reference, reference_model, row_errors, teacher_forced
from tests.hf.model_cases import (
    MTP,
    RELEASE,
    dequantized_checkpoint,
    load,
    prompt,
    tensors_of,
    use_choices_of,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp(request.param) / "fp8"
    return directory, write_small_checkpoint(directory, request.param)


@torch.inference_mode()
def test_logits_match_the_reference_to_bf16_rounding(checkpoint):
    model, _ = load(checkpoint[0])
    ours, expected = teacher_forced(model, prompt())
    assert_matches_reference(ours.logits, expected.logits, 2e-2)
    errors = row_errors(ours.logits, expected.logits)
    assert float(errors.median()) < 1e-3
    assert float((errors > 6e-3).double().mean()) < 0.02


@torch.inference_mode()
def test_teacher_forcing_notices_one_wrong_scale(checkpoint):
    model, _ = load(checkpoint[0])
    reference = reference_model(model)
    experts = next(m for m in model.modules() if isinstance(m, GroupedExperts))
    ids = prompt()
    right, expected = teacher_forced(model, ids)
    experts.down_proj_scale_inv[3, 0, 0] *= 1.5
    wrong = model(ids).logits
    experts.down_proj_scale_inv[3, 0, 0] /= 1.5
    del reference, right
    with pytest.raises(AssertionError):
        assert_matches_reference(wrong, expected.logits, 6e-3)


@torch.inference_mode()
def test_loaded_weights_are_those_of_transformers(checkpoint, tmp_path):
    """transformers' own modules on the dequantized weights, in FP32, give the same logits."""
    plain = dequantized_checkpoint(checkpoint[0], tmp_path / "plain")
    theirs = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    model, _ = load(checkpoint[0])
    ours = reference_model(model.float(), quantize_activations=False)
    use_choices_of(theirs, ours)
    ids = prompt()
    expected = theirs(ids).logits
    assert_matches_reference(ours(ids).logits, expected, 6e-3)


@torch.inference_mode()
def test_fp8_is_good_enough(checkpoint):
    """Logits against the BF16 model: what the example prints and the README states."""
    model, _ = load(checkpoint[0])
    original = AutoModelForCausalLM.from_pretrained(checkpoint[1], dtype=torch.bfloat16)
    ids = prompt()
    errors = row_errors(model(ids).logits, original(ids).logits)
    assert float(errors.median()) < 0.15


def test_saving_gives_keys_and_config_back(checkpoint, tmp_path):
    model, report = load(checkpoint[0])
    save_checkpoint(model, tmp_path / "copy")
    keys, configs = [], []
    for directory in (checkpoint[0], tmp_path / "copy"):
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
    model, report = load(checkpoint[0])
    ours = {n for n, m in model.named_modules() if isinstance(m, FP8Linear | GroupedExperts)}
    assert ours == {*fp8_modules(checkpoint[0], model=model)}
    others = {n.rpartition(".")[2] for n, m in model.named_modules() if type(m) is torch.nn.Linear}
    has_gates = model.config.model_type == "qwen3_next"
    assert others == {"lm_head"} | ({"shared_expert_gate", "in_proj_ba"} if has_gates else set())
    assert all(key.startswith(MTP) for key in report.ignored)
    assert bool(report.ignored) == (model.config.model_type == "deepseek_v3")
    bias = [x for n, x in model.named_buffers() if n.endswith("e_score_correction_bias")]
    assert all(x.dtype == torch.float32 and x.unique().numel() > 7 for x in bias)


@torch.inference_mode()
def test_generates_the_same_text_every_time(checkpoint):
    model, _ = load(checkpoint[0])
    ids = prompt()[:1]
    arguments = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 6}
    first = model.generate(ids, **arguments)
    assert first.shape[1] > ids.shape[1]
    assert torch.equal(first, model.generate(ids, **arguments))


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
