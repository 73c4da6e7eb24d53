"""Whole transformers models on a GPU: loaded there, in CUDA graphs, compiled, generating."""

import copy
from functools import partial

import pytest
import torch
from small_checkpoint import FAMILIES, small_config
from transformers import AutoModelForCausalLM, PreTrainedModel

from moefp8.hf import DecodingGraphs, FP8Config
from moefp8.testing import assert_matches_reference, row_errors, teacher_forced
from tests.checkpoint.transformers_cases import assert_equal, fp8_of
from tests.gpu import NEEDS_GPU
from tests.hf.decoding.test_graphs import LOGITS, OPTIONS, assert_same, by_transformers, padded
from tests.hf.model_cases import plain, prompt
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


@pytest.mark.parametrize("has_padding", [False, True])
def test_decoding_graphs_give_the_bits_of_generate(checkpoint, has_padding):
    if "qwen3_next" in str(checkpoint):
        pytest.skip("its linear attention is refused")
    model = pretrained(checkpoint)
    graphs = DecodingGraphs(model)
    for _ in range(2):  # the graph of the first prompts serves the second ones
        ids = prompt().cuda()
        mask = {"attention_mask": padded(ids)} if has_padding else {}
        expected = by_transformers(model, ids, **OPTIONS, **LOGITS, **mask)
        assert_same(graphs.generate(ids, **OPTIONS, **LOGITS, **mask), expected)
    assert graphs.num_graphs == 1


def test_decoding_graphs_follow_weights_that_move(qwen):
    model, ids = pretrained(qwen), prompt().cuda()
    graphs = DecodingGraphs(model)
    before = graphs.generate(ids, **OPTIONS, **LOGITS)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert_same(
        graphs.generate(ids, **OPTIONS, **LOGITS), by_transformers(model, ids, **OPTIONS, **LOGITS)
    )
    moved = model.lm_head.weight.detach().flip(0).clone()
    model.lm_head.weight.data = torch.empty(0, device="cuda")  # the old memory may be taken
    model.lm_head.weight = torch.nn.Parameter(moved)
    assert_same(graphs.generate(ids, **OPTIONS, **LOGITS), before)


def test_the_only_graph_makes_room_for_another(qwen):
    """Its memory may outlive it: what cuBLAS takes for itself in a capture, it keeps."""
    model = pretrained(qwen)
    graphs = DecodingGraphs(model, max_graphs=1)
    for ids in prompt().cuda(), prompt()[:1].cuda():
        torch._C._cuda_clearCublasWorkspaces()  # so that it is taken in this capture
        expected = by_transformers(model, ids, **OPTIONS, **LOGITS)
        assert_same(graphs.generate(ids, **OPTIONS, **LOGITS), expected)
    assert graphs.num_graphs == 1


def test_decoding_graphs_sample_and_stream(qwen):
    model, ids, given = pretrained(qwen), prompt()[:1].cuda(), []
    options = OPTIONS | {"do_sample": True, "top_k": 5, "max_new_tokens": 60}

    class Words:
        put = given.append
        end = staticmethod(lambda: None)

    torch.manual_seed(1)
    got = DecodingGraphs(model).generate(ids, streamer=Words(), **options)
    torch.manual_seed(1)
    assert torch.equal(got, by_transformers(model, ids, **options))
    assert torch.cat([x.flatten() for x in given]).tolist() == got[0].tolist()


def test_decoding_graphs_end_as_generate_does(qwen):
    """Also in the middle: the host learns of it a step late, and draws no number more."""
    model, ids = pretrained(qwen), prompt().cuda()
    graphs, options = DecodingGraphs(model), OPTIONS | {"max_new_tokens": 60}
    last = {"eos_token_id": [*range(0, 512, 5)], **options}
    assert torch.equal(graphs.generate(ids, **last), by_transformers(model, ids, **last))
    results = []
    for generate in (graphs.generate, partial(by_transformers, model)):
        torch.manual_seed(1)
        results += [generate(ids, **last | {"do_sample": True}) for _ in range(3)]
    assert all(map(torch.equal, results[:3], results[3:]))
    assert {x.shape[1] for x in results} != {100}


def test_decoding_graphs_on_another_stream(qwen):
    model, ids = pretrained(qwen), prompt().cuda()
    graphs = DecodingGraphs(model)
    expected = graphs.generate(ids, **OPTIONS)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        others = graphs.generate(ids.flip(0), **OPTIONS)
    assert torch.equal(graphs.generate(ids, **OPTIONS), expected)
    assert torch.equal(others, expected.flip(0))


def test_decoding_graphs_follow_kept_fp8_weights(qwen):
    """`experts_implementation="moefp8"` quantizes again, into other memory, what has changed."""
    model, ids = plain(qwen.with_name("fp8-bf16")).cuda().eval(), prompt().cuda()
    model.set_experts_implementation("moefp8")
    graphs = DecodingGraphs(model)
    for _ in range(2):
        expected = by_transformers(model, ids, **OPTIONS, **LOGITS)
        assert_same(graphs.generate(ids, **OPTIONS, **LOGITS), expected)
        with torch.no_grad():
            for layer in model.model.layers:
                layer.mlp.experts.down_proj.mul_(0.5)


def test_a_step_that_waits_is_refused(qwen):
    model, ids = pretrained(qwen), prompt().cuda()
    wait = model.lm_head.register_forward_hook(lambda module, args, y: y * float(y.amax() < 1e9))
    with pytest.raises(ValueError, match=r"could not be captured .*use model.generate"):
        DecodingGraphs(model).generate(ids, **OPTIONS)
    wait.remove()
    torch.cuda.synchronize()
    expected = by_transformers(model, ids, **OPTIONS)
    assert torch.equal(DecodingGraphs(model).generate(ids, **OPTIONS), expected)


@pytest.mark.slow
def test_compiled_decoding_graphs_are_near(qwen):
    model, ids = pretrained(qwen), prompt().cuda()
    options = {"eos_token_id": None, **OPTIONS, **LOGITS}
    graphs = DecodingGraphs(model, compile=True)
    got, expected = graphs.generate(ids, **options), by_transformers(model, ids, **options)
    first = torch.stack([got.logits[1], expected.logits[1]])  # both after the same tokens
    assert torch.equal(got.sequences[:, :41], expected.sequences[:, :41])
    assert float(row_errors(*first).median()) < 0.05
    assert_same(graphs.generate(ids, **options), got)
    assert "forward" not in vars(model.model.layers[0])  # the model itself is as it was


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
