"""Families of transformers with experts: a sample of the table in docs, and its judge."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING

import moefp8
from benchmarks.families import RESULTS
from benchmarks.families.cells import CRASH, REFUSED, WORKS, WRONG, inputs_of, row_of
from benchmarks.families.judge import Wrong, judge, original
from benchmarks.families.models import tiny_model
from benchmarks.report import with_tables
from moefp8 import FP8Linear, GroupedExperts
from tests.hf.model_cases import RELEASE

pytestmark = pytest.mark.skipif(RELEASE < (5, 20), reason="the table is of newer families")

FOUND = json.loads(RESULTS.read_text())
PAGE = Path(__file__).parents[2] / "docs" / "families.md"
CELLS = {name: row["cells"] for name, row in FOUND["families"].items() if "cells" in row}


# The whole, as it was measured


def test_the_page_says_what_was_measured():
    assert with_tables(PAGE.read_text()) == PAGE.read_text()


def test_no_cell_is_wrong_and_every_refusal_has_a_way_out():
    assert len(CELLS) > 75
    for name, cells in CELLS.items():
        told = {column: cell["outcome"] for column, cell in cells.items()}
        assert not {WRONG, CRASH} & set(told.values()), (name, told)
        for column, cell in cells.items():
            has_way_out = cell["way_out"] or told["experts_implementation"] == WORKS
            assert cell["outcome"] != REFUSED or has_way_out, (name, column, cell)


# A sample


SAMPLE = (
    "qwen3_moe",
    "gpt_oss",  # experts with biases
    "dbrx",  # weights of another form, and batches
    "granitemoehybrid",  # an infinity in its config.json
    "jetmoe",  # experts of another make
    "minimax_m3_vl_text",  # the activation of gpt-oss, fused shared experts
    "step3p7",  # stacks of gate and of up
    "lara_mini",  # a fused projection, of which a part stays in BF16
)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SAMPLE if name in CONFIG_MAPPING])
def test_families_are_as_the_table_says(name, tmp_path):
    row = row_of(name, tmp_path)
    outcomes = {column: cell["outcome"] for column, cell in row.items()}
    if transformers.__version__ == FOUND["transformers"]:
        assert outcomes == {column: cell["outcome"] for column, cell in CELLS[name].items()}
    assert not {WRONG, CRASH} & set(outcomes.values()), row


# The judge


@pytest.fixture
def judged():
    """A converted model, and what judges it."""
    base = tiny_model("qwen3_moe")
    inputs = inputs_of(base)
    first = original(base, inputs)
    ours = moefp8.convert(tiny_model("qwen3_moe"))
    return ours, lambda: judge(ours, first, inputs)


def first_of(model: nn.Module, kind: type) -> nn.Module:
    return next(module for module in model.modules() if isinstance(module, kind))


def scale_is_doubled(model):
    first_of(model, FP8Linear).weight_scale_inv.data[0, 0] *= 2


def one_code_block_is_lost(model):
    first_of(model, FP8Linear).weight.data[:8] = 0


def gate_and_up_are_exchanged(model):
    experts = first_of(model, GroupedExperts)
    for name in ("gate_up_proj", "gate_up_proj_scale_inv"):
        x = experts.get_parameter(name).data.view(torch.uint8)
        x.copy_(torch.cat(x.chunk(2, dim=1)[::-1], dim=1).clone())


def one_expert_is_another(model):
    experts = first_of(model, GroupedExperts)
    for name in ("down_proj", "down_proj_scale_inv"):
        x = experts.get_parameter(name).data.view(torch.uint8)
        x[0].copy_(x[1].clone())


def experts_are_scaled(model):
    forward = (experts := first_of(model, GroupedExperts)).forward
    experts.forward = lambda *inputs: forward(*inputs) * 1.2


def a_norm_is_another(model):
    model.model.norm.weight.data[3] += 0.5


def a_router_is_fp8(model):
    router = nn.Linear(256, 8, bias=False)
    model.model.layers[1].mlp.gate.proj = FP8Linear.from_linear(router)


@pytest.mark.parametrize(
    "plant",
    [
        scale_is_doubled,
        one_code_block_is_lost,
        gate_and_up_are_exchanged,
        one_expert_is_another,
        experts_are_scaled,
        a_norm_is_another,
        a_router_is_fp8,
    ],
)
def test_the_judge_sees_what_is_wrong(judged, plant):
    model, verdict = judged
    verdict()
    plant(model)
    with pytest.raises(Wrong):
        verdict()
