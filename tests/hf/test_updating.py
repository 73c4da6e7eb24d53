"""`moefp8.updating` of whole models of transformers: a trainer's tensors, by checkpoint names."""

import copy

import pytest
import torch
from small_checkpoint import small_config
from transformers import AutoModelForCausalLM

import moefp8
from moefp8.hf import DecodingGraphs
from tests.checkpoint.transformers_cases import assert_equal, fp8_of
from tests.checkpoint.update.cases import buckets, update
from tests.gpu import on_gpu
from tests.hf.model_cases import prompt, tensors_of


def spoiled(model: torch.nn.Module) -> torch.nn.Module:
    for x in model.state_dict().values():
        x.view(torch.uint8).fill_(0x3A)
    return model


@pytest.mark.parametrize("kind", ["fp8", "fp8-bf16"])
def test_families_take_the_tensors_of_their_checkpoints(checkpoint, kind):
    """In FP8, or in BF16, which is quantized: MTP layers and rotary tables are passed over."""
    path = checkpoint.with_name(kind)
    tensors = tensors_of(path)
    model = spoiled(copy.deepcopy(wanted := fp8_of(path)))
    update(model, *buckets(tensors, 3))
    assert_equal(model, wanted)


def test_state_dicts_of_transformers_are_taken(bf16):
    """As a trainer in the same process has them: experts are stacked."""
    state = AutoModelForCausalLM.from_pretrained(bf16, dtype=torch.bfloat16).state_dict()
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    model = spoiled(copy.deepcopy(wanted := fp8_of(bf16)))
    update(model, *buckets(state, 2))
    assert_equal(model, wanted)
    ids = prompt()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, wanted(ids).logits)


def test_the_base_models_names_are_taken(bf16):
    """Without the prefix of the whole model, as transformers itself loads them."""
    tensors = {
        key.removeprefix("model."): x
        for key, x in tensors_of(bf16).items()
        if key.startswith("model.layers.")
    }
    model = copy.deepcopy(wanted := fp8_of(bf16))
    for x in model.model.layers.state_dict().values():
        x.view(torch.uint8).fill_(0x3A)
    update(model, tensors)
    assert_equal(model, wanted)


def twice(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Other weights, with which the same tokens are chosen otherwise."""
    torch.manual_seed(3)
    return {
        name: torch.randn_like(x) * 0.05 if x.ndim == 3 else x
        for name, x in model.state_dict().items()
    }


@on_gpu
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_graphs_of_a_model_go_on_with_the_weights_of_a_fresh_load(bf16, compile):
    """Nothing is captured again: neither a whole model, nor steps of `DecodingGraphs`."""
    model = spoiled(fp8_of(bf16).cuda().eval())
    with torch.no_grad():
        for x in model.parameters():
            if x.dtype in (torch.bfloat16, torch.float32):
                x.fill_(0.01)
    wanted, ids = fp8_of(bf16).cuda().eval(), prompt().cuda()
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    graphs = DecodingGraphs(model, compile=compile)
    graphs.generate(ids, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode():
        model(ids, use_cache=False)
        with torch.cuda.graph(graph):
            logits = model(ids, use_cache=False).logits
    update(model, *buckets({name: x.cuda() for name, x in tensors_of(bf16).items()}, 3))
    graph.replay()
    with torch.inference_mode():
        assert torch.equal(logits, wanted(ids, use_cache=False).logits)
    fresh = DecodingGraphs(wanted, compile=compile)
    assert torch.equal(graphs.generate(ids, **options), fresh.generate(ids, **options))
    assert graphs.num_graphs == 1


def test_experts_that_transformers_keeps_follow_in_their_memory(bf16):
    """Their FP8 weights beside them are not parameters, and a CUDA graph would read them."""
    model = AutoModelForCausalLM.from_config(
        small_config("qwen3_moe"), dtype=torch.bfloat16, experts_implementation="moefp8"
    ).eval()
    ids = prompt()
    graphs = DecodingGraphs(model)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    with torch.no_grad():
        model(ids)
    before = graphs.generate(ids, **options)
    new = twice(model)
    kept = [x.data_ptr() for x in moefp8.hf.experts.weights_kept_beside(model)]
    assert kept
    update(model, *buckets(new, 2))
    assert [x.data_ptr() for x in moefp8.hf.experts.weights_kept_beside(model)] == kept
    other = AutoModelForCausalLM.from_config(
        small_config("qwen3_moe"), dtype=torch.bfloat16, experts_implementation="moefp8"
    ).eval()
    other.load_state_dict(new)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, other(ids).logits)
    after = graphs.generate(ids, **options)
    assert torch.equal(after, DecodingGraphs(other).generate(ids, **options))
    assert not torch.equal(after, before)
    assert graphs.num_graphs == 1
