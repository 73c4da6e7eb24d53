"""Whole models of transformers with frozen FP8 weights train all else, however they are run."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_checkpoint import small_config
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Trainer, TrainingArguments

import moefp8
from moefp8 import FP8Linear, GroupedExperts
from moefp8.adapters import add_lora, load_lora
from tests.checkpoint.transformers_cases import fp8_of
from tests.hf.test_experts import other_config

# The router of DeepSeek-V3 is transformers' own, a product in FP32 that autocast makes BF16.
FAMILIES = "qwen3_moe", "deepseek_v3", "mixtral"
Gradients = dict[str, torch.Tensor]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # transformers renames options


def model_of(family: str, **options: Any) -> PreTrainedModel:
    """A small BF16 model of two layers, whose attention is the same when it is compiled."""
    torch.manual_seed(0)
    config = other_config(family) if family == "gpt_oss" else small_config(family)
    config.num_hidden_layers = 2
    options["attn_implementation"] = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, **options).train()


def quantized(family: str) -> PreTrainedModel:
    return moefp8.convert(model_of(family))


def with_frozen_experts(family: str) -> PreTrainedModel:
    """transformers' modules, whose experts run in FP8."""
    model = model_of(family, experts_implementation="moefp8")
    for module in model.modules():
        if hasattr(module, "is_concatenated"):
            for name, weight in module.named_parameters():
                weight.requires_grad_("bias" in name)
    return model


def with_adapters(family: str) -> PreTrainedModel:
    model = quantized(family)
    add_lora(model, rank=8, alpha=16)
    for name, x in model.named_parameters():
        if name.endswith(".B"):
            nn.init.normal_(x, std=0.02)
    return model


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    **{family: lambda family=family: quantized(family) for family in FAMILIES},
    "LoRA qwen3_moe": lambda: with_adapters("qwen3_moe"),
    "BF16 qwen3_moe": lambda: with_frozen_experts("qwen3_moe"),
    "BF16 gpt_oss": lambda: with_frozen_experts("gpt_oss"),
}


@pytest.fixture(scope="module", params=MODELS)
def model(request) -> PreTrainedModel:
    return MODELS[request.param]()


def batch() -> torch.Tensor:
    return torch.randint(2, 512, (4, 9), generator=torch.Generator().manual_seed(1))


def gradients(run: nn.Module, model: nn.Module | None = None, num_parts: int = 1) -> Gradients:
    """Those of `model`, which `run` calls; they are taken out of it."""
    for ids in batch().chunk(num_parts):
        (run(ids, labels=ids, use_cache=False).loss / num_parts).backward()
    named = dict((model or run).named_parameters())
    found = {name: x.grad for name, x in named.items() if x.grad is not None}
    (model or run).zero_grad()
    return found


def assert_same_bits(got: Gradients, expected: Gradients) -> None:
    assert got.keys() == expected.keys()
    assert [name for name, x in got.items() if not torch.equal(x, expected[name])] == []


def bytes_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: x.detach().clone().view(torch.uint8) for name, x in model.named_parameters()}


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name, x in before.items() if not torch.equal(x, after[name])}


def names_of_fp8(model: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, FP8Linear | GroupedExperts)
        for name, _ in module.named_parameters(recurse=False)
    }


# ---- One step ----


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_bit(model, use_reentrant):
    """Also in a first call, in which experts are quantized."""
    for module in model.modules():
        vars(module).pop("_moefp8_experts", None)
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    checkpointed = gradients(model)
    model.gradient_checkpointing_disable()
    model.disable_input_require_grads()
    assert_same_bits(checkpointed, gradients(model))


def test_all_that_is_not_fp8_gets_a_gradient(model):
    found = gradients(model)
    trained = {name for name, x in model.named_parameters() if x.requires_grad}
    assert found.keys() == trained
    assert not trained & names_of_fp8(model)
    assert all(x.isfinite().all() and x.any() for x in found.values())


def test_gradients_are_close_to_those_of_bf16():
    """Routers' the least: where scores are as even as random weights make them, choices differ."""
    model = model_of("qwen3_moe")
    expected = gradients(model)
    for name, x in gradients(moefp8.convert(model)).items():
        similarity = nn.functional.cosine_similarity(
            x.flatten().double(), expected[name].flatten().double(), dim=0
        )
        assert similarity > (0.7 if "mlp.gate" in name else 0.9), name


def test_parts_of_a_batch_add_up(model):
    expected = gradients(model)
    for name, x in gradients(model, num_parts=2).items():
        size = expected[name].float().abs().max()
        assert (x.float() - expected[name].float()).abs().max() <= 0.02 * size, name


def test_autocast_changes_no_bit():
    model = quantized("mixtral")
    expected = gradients(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(gradients(model), expected)


def test_a_compiled_model_has_the_same_gradients():
    torch._dynamo.reset()
    model = quantized("qwen3_moe")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert_same_bits(gradients(compiled, model), gradients(model))


def test_trained_where_only_what_lies_below_asks_for_a_gradient():
    """As adapters do: the embedding is frozen, and its output is what reentrant checkpoints see."""
    model = quantized("mixtral").requires_grad_(False)
    model.model.layers[0].input_layernorm.requires_grad_(True)
    expected = gradients(model)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    found = gradients(model)
    assert found.keys() == {"model.layers.0.input_layernorm.weight"}
    assert_same_bits(found, expected)


# ---- Trainer ----


def trained(model: PreTrainedModel, folder: Any, **options: Any) -> dict[str, torch.Tensor]:
    """Its parameters after two steps on the batch."""
    arguments = TrainingArguments(
        str(folder), use_cpu=True, max_steps=2, per_device_train_batch_size=4, optim="sgd",
        learning_rate=0.1, lr_scheduler_type="constant", max_grad_norm=0.0, save_strategy="no",
        report_to=[], disable_tqdm=True, dataloader_pin_memory=False, **options,
    )  # fmt: skip
    rows = [{"input_ids": ids, "labels": ids} for ids in batch()]
    Trainer(model, arguments, train_dataset=rows).train()
    return bytes_of(model)


def trained_by_hand(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD([x for x in model.parameters() if x.requires_grad], 0.1)
    for _ in range(2):
        model(batch(), labels=batch(), use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return bytes_of(model)


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}, {"bf16": True}])
def test_the_trainer_trains_what_is_not_fp8(fp8, tmp_path, options):
    model = fp8_of(fp8).train()
    before, fp8_names = bytes_of(model), names_of_fp8(model)
    expected = trained_by_hand(copy.deepcopy(model))
    after = trained(model, tmp_path, **options)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= changed(before, after) - fp8_names
    assert not changed(before, after) & fp8_names
    rows = [(after[name].view(-1), expected[name].view(-1)) for name in changed(before, after)]
    assert all((x != y).float().mean() < 0.02 for x, y in rows)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_the_trainer_refuses_a_model_of_which_nothing_trains(fp8, tmp_path, is_loaded):
    model = fp8_of(fp8) if is_loaded else quantized("mixtral")
    assert model.hf_quantizer.is_trainable
    assert model.hf_quantizer.is_qat_trainable
    model.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"nothing of it trains, .*; moefp8\.unfreeze\(model\)"):
        assert not model.hf_quantizer.is_qat_trainable
    # A converted model does not call itself quantized, so that casts such as `float` go on.
    refused, told = RuntimeError, "does not require grad"
    if is_loaded:
        refused, told = ValueError, "cannot perform fine-tuning on purely quantized models"
    with pytest.raises(refused, match=told):
        trained(model, tmp_path)
    model.model.norm.requires_grad_(True)
    assert model.hf_quantizer.is_qat_trainable


class LoRATrainer(Trainer):
    """As docs/training.md tells it."""

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        load_lora(self.model, resume_from_checkpoint)

    def _load_best_model(self):
        load_lora(self.model, self.state.best_model_checkpoint)


def test_a_trainer_goes_on_from_adapters_and_loads_the_best(tmp_path):
    model, rows = with_adapters("qwen3_moe"), [{"input_ids": x, "labels": x} for x in batch()]
    base = copy.deepcopy(model)
    options = {
        "use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 3, "save_steps": 1,
        "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1e-3,
    }  # fmt: skip
    arguments = TrainingArguments(str(tmp_path / "all"), **options)
    Trainer(model, arguments, train_dataset=rows, eval_dataset=rows).train()
    again = copy.deepcopy(base)
    arguments = TrainingArguments(
        str(tmp_path / "again"), load_best_model_at_end=True, greater_is_better=True, **options
    )
    trainer = LoRATrainer(again, arguments, train_dataset=rows, eval_dataset=rows)
    trainer.train(resume_from_checkpoint=str(tmp_path / "all" / "checkpoint-1"))
    assert trainer.state.best_model_checkpoint.endswith("checkpoint-2")  # the worst, that is
    last = copy.deepcopy(base)
    load_lora(last, tmp_path / "again" / "checkpoint-3")
    assert not changed(bytes_of(model), bytes_of(last))
    load_lora(last, tmp_path / "again" / "checkpoint-2")
    assert not changed(bytes_of(again), bytes_of(last))
    assert changed(bytes_of(again), bytes_of(model))


# ---- Master weights ----


class MasterTrainer(Trainer):
    """As docs/training.md tells it."""

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        moefp8.load_checkpoint(self.model, resume_from_checkpoint)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_the_trainer_trains_master_weights(family, tmp_path):
    """All weights change, the loss falls, and what is saved is a plain checkpoint."""
    model = moefp8.convert(model_of(family), trainable=True)
    masters = {
        f"{prefix}.{name}"
        for prefix, module in model.named_modules()
        if isinstance(module, FP8Linear | GroupedExperts)
        for name in module.master_names
    }
    before, rows = bytes_of(model), [{"input_ids": x, "labels": x} for x in batch()]
    arguments = TrainingArguments(
        str(tmp_path), use_cpu=True, max_steps=6, per_device_train_batch_size=4, save_steps=3,
        learning_rate=3e-3, lr_scheduler_type="constant", logging_steps=1, report_to=[],
        disable_tqdm=True, gradient_checkpointing=True,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    losses = [x["loss"] for x in trainer.state.log_history if "loss" in x]
    assert losses[-1] < 0.8 * losses[0], losses
    after = bytes_of(model)
    assert masters
    assert masters <= changed(before, after)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-6", dtype=torch.bfloat16)
    assert not changed(after, bytes_of(moefp8.convert(plain, trainable=True)))
    again = moefp8.convert(model_of(family), trainable=True)
    MasterTrainer(again, arguments, train_dataset=rows).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-3")
    )
    assert not changed(after, bytes_of(again))


def test_a_copy_does_not_answer_for_its_original(fp8):
    model = fp8_of(fp8).requires_grad_(False)
    twin = copy.deepcopy(model)
    twin.model.norm.requires_grad_(True)
    assert twin.hf_quantizer.is_qat_trainable
    assert not model.hf_quantizer.is_qat_trainable
