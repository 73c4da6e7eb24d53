"""Whole transformers models on a GPU: loaded there, in CUDA graphs, compiled, generating."""

import copy

import pytest
import torch
from small_checkpoint import FAMILIES, small_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from moefp8.hf import FP8Config
from moefp8.testing import assert_matches_reference, row_errors, teacher_forced
from tests.checkpoint.transformers_cases import assert_equal, fp8_of
from tests.gpu import NEEDS_GPU
from tests.hf.model_cases import prompt
from tests.hf.test_experts import (
    decorated,
    first_experts,
    fp8_experts,
    inputs_for,
    other_config,
    run,
)

pytestmark = [
    *NEEDS_GPU,
    pytest.mark.filterwarnings("error:.*portable PyTorch body"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def pretrained(directory) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(
        directory, quantization_config=FP8Config(), device_map="cuda"
    )


def test_loads_to_the_gpu_what_it_loads_to_the_cpu(checkpoint):
    model = pretrained(checkpoint)
    assert {x.device.type for x in model.state_dict().values()} == {"cuda"}
    assert_equal(model.cpu(), fp8_of(checkpoint))


@torch.inference_mode()
def test_logits_match_the_reference(checkpoint):
    ours, expected = teacher_forced(pretrained(checkpoint), prompt().cuda())
    assert_matches_reference(ours.logits, expected.logits, 2e-2)
    errors = row_errors(ours.logits, expected.logits)
    assert float(errors.median()) < 8e-3  # sums in another order are rounded to BF16 otherwise


@pytest.mark.slow
@torch.inference_mode()
def test_generates_with_padding(checkpoint):
    model, ids = pretrained(checkpoint), prompt().cuda()
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    arguments = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    first = model.generate(ids, attention_mask=mask, **arguments)
    assert first.shape == (3, 46)
    assert torch.equal(first, model.generate(ids, attention_mask=mask, **arguments))


@torch.inference_mode()
def test_one_cuda_graph_serves_all_prompts(checkpoint):
    if "qwen3_next" in str(checkpoint):
        pytest.skip("transformers' own linear attention synchronises")
    model, ids = pretrained(checkpoint), prompt().cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            model(ids, use_cache=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = model(ids, use_cache=False).logits
    for _ in range(3):
        ids.copy_(torch.randint(2, 512, ids.shape))
        graph.replay()
        assert torch.equal(captured, model(ids, use_cache=False).logits)


@pytest.mark.slow
@torch.inference_mode()
def test_compiles_with_inductor(checkpoint):
    if "qwen3_next" in str(checkpoint):
        pytest.skip("transformers' own linear attention breaks the graph")
    model, ids = pretrained(checkpoint), prompt().cuda()
    expected = model(ids, use_cache=False).logits
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        got = compiled(ids, use_cache=False).logits.clone()
    # It keeps FP32 where eager code rounds to BF16, and rounding to FP8 amplifies.
    assert float(row_errors(got, expected).median()) < 0.1


@pytest.mark.parametrize("family", [*FAMILIES, "gpt_oss", "nemotron_h"])
def test_experts_of_transformers_are_those_of_the_cpu(family):
    config = small_config(family) if family in FAMILIES else other_config(family)
    experts = first_experts(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    inputs = inputs_for(experts)
    expected = run(experts, "moefp8", *inputs)
    on_gpu = copy.deepcopy(experts).cuda()
    ours = run(on_gpu, "moefp8", *(x.cuda() for x in inputs))
    # An activation that rounds to the neighbouring E4M3 code is an eighth off; I is only 192.
    assert_matches_reference(ours.cpu(), expected, 3e-2)


@pytest.mark.parametrize("make", [fp8_experts, lambda sizes: decorated(norm=True)])
def test_experts_in_a_cuda_graph(make):
    experts = make((5, 256, 256))
    inputs = inputs_for(experts)
    experts, inputs = experts.cuda(), [x.cuda() for x in inputs]
    run(experts, "moefp8", *inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(experts, "moefp8", *inputs)
    for _ in range(3):
        for old, new in zip(inputs, inputs_for(experts), strict=True):
            old.copy_(new)
        graph.replay()
        assert torch.equal(captured, run(experts, "moefp8", *inputs))
