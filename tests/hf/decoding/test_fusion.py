"""What `DecodingGraphs(compile=True)` makes of a step: nearly the numbers of the step as called.

Here it runs without a graph; blocks are traced, and run as they are called.
"""

import pytest
import torch
from small_checkpoint import FAMILIES, small_config
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, StaticCache

from moefp8 import FP8Linear, convert
from moefp8.hf.decoding.attention import grouped_attention, grouped_sdpa
from moefp8.hf.decoding.fusion import Fusion
from moefp8.hf.decoding.merged import Merged, shared_inputs
from moefp8.hf.decoding.replaced import replaced_forwards
from moefp8.hf.decoding.routers import routers_of
from moefp8.hf.decoding.step import cache_name
from moefp8.testing import row_errors


def model_of(family, **sizes):
    torch.manual_seed(0)
    config = small_config(family)
    config.update(sizes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    convert(model)
    return model


@pytest.fixture(scope="module")
def qwen():
    return model_of("qwen3_moe")


class Step:
    """A call of one token of each sequence, after a prompt of five tokens."""

    def __init__(self, model):
        self.model, self.ids = model, torch.randint(2, 500, (3, 6))
        self.cache = StaticCache(config=model.config, max_cache_len=16)

    @torch.no_grad()
    def logits(self):
        self.cache.reset()
        self.model(self.ids[:, :5], **{cache_name(self.model): self.cache})
        return self.run()

    @torch.no_grad()
    def run(self):
        options = {cache_name(self.model): self.cache}
        return self.model(self.ids[:, 5:], **options).logits[:, -1].float()


def assert_near(logits, expected):
    """A score that is rounded to BF16 otherwise moves a row a little."""
    errors = row_errors(logits, expected)
    assert float(errors.max()) < 0.1
    assert float(errors.median()) < 1e-2


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_step_gives_nearly_the_logits(family):
    if family == "qwen3_next":
        pytest.skip("its linear attention is refused")
    model = model_of(family)
    step = Step(model)
    expected = step.logits()
    fusion = Fusion(model, step.cache, step.run, backend=None)
    for _ in range(2):
        with fusion.fused():
            assert_near(step.logits(), expected)
        assert torch.equal(step.logits(), expected)  # outside, the model is as it was


def test_q_k_and_v_are_one_linear(qwen):
    step = Step(qwen)
    step.logits()
    with shared_inputs(qwen) as groups:
        step.run()
    layers = qwen.model.layers
    attention = [[x.self_attn.q_proj, x.self_attn.k_proj, x.self_attn.v_proj] for x in layers]
    assert [group for group in groups if len(group) == 3] == attention


def test_gate_and_up_and_what_compresses_queries_and_keys_are_one_linear():
    model = model_of("deepseek_v3", q_lora_rank=128)  # a block of rows ends with it
    step = Step(model)
    step.logits()
    with shared_inputs(model) as groups:
        step.run()
    names = {id(x): name for name, x in model.named_modules()}
    merged = [[names[id(x)].removeprefix("model.layers.") for x in group] for group in groups]
    assert ["0.mlp.gate_proj", "0.mlp.up_proj"] in merged
    assert ["0.self_attn.q_a_proj", "0.self_attn.kv_a_proj_with_mqa"] in merged


def in_fp8(model):
    for name, child in model.bfloat16().named_children():
        setattr(model, name, FP8Linear.from_linear(child))
    return model


class Three(nn.Module):
    """Two linears that share an input, and one that only seems to: it is changed in between."""

    def __init__(self, bias):
        super().__init__()
        self.first = nn.Linear(256, 128, bias=bias)
        self.second = nn.Linear(256, 200, bias=bias)
        self.third = nn.Linear(256, 64, bias=bias)

    def forward(self, x):
        return torch.cat([self.first(x), self.second(x), self.third(x * 2)], -1)


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_parts_of_a_merged_linear_are_those_of_the_linears(bias):
    torch.manual_seed(0)
    model = in_fp8(Three(bias))
    x = torch.randn(2, 3, 256).bfloat16()
    expected = model(x)
    with shared_inputs(model) as groups:
        model(x)
    assert groups == [[model.first, model.second]]
    merged = [Merged(group) for group in groups]
    with replaced_forwards(merged[0].forwards()):
        assert float(row_errors(model(x), expected).max()) < 1e-2
        model.second.weight_scale_inv.mul_(2)  # a weight that changes in place
        merged[0].refresh()
        changed = model(x)
    assert torch.equal(model(x)[..., :128], expected[..., :128])
    assert float(row_errors(changed, model(x)).max()) < 1e-2
    assert not torch.equal(changed, expected)


@torch.no_grad()
def test_linears_called_otherwise_than_before_are_an_error():
    model = in_fp8(Three(False))
    with shared_inputs(model) as groups:
        model(torch.randn(2, 256).bfloat16())
    (group,) = groups
    with replaced_forwards(Merged(group).forwards()):
        with pytest.raises(RuntimeError, match="use compile=False"):
            model.second(torch.randn(2, 256).bfloat16())
        model(torch.randn(2, 256).bfloat16())


def test_linears_that_are_called_twice_or_cannot_be_cut_stay_as_they_are():
    class Twice(nn.Module):
        def __init__(self, first_size):
            super().__init__()
            self.first, self.second = nn.Linear(256, first_size), nn.Linear(256, 128)

        def forward(self, x, again=True):
            y = self.first(x).sum() + self.second(x).sum()
            return y + self.first(x).sum() if again else y

    for size, again, num_groups in ((128, True, 0), (128, False, 1), (100, False, 0)):
        model = in_fp8(Twice(size))
        with shared_inputs(model) as groups:
            model(torch.randn(2, 256).bfloat16(), again=again)
        assert len(groups) == num_groups
        assert isinstance(model.first, FP8Linear)


def test_routers_of_softmax_are_found_and_give_the_same(qwen):
    step = Step(qwen)
    step.logits()
    with routers_of(qwen) as routers:
        step.run()
    gates = [layer.mlp.gate for layer in qwen.model.layers]
    assert [router.module for router in routers] == gates
    x = torch.randn(200, qwen.config.hidden_size).bfloat16()
    logits, scores, ids = gates[0](x)
    own_logits, own_scores, own_ids = routers[0].forward(x)
    assert torch.equal(own_logits, logits)
    is_clear = (ids.sort(-1).values == own_ids.sort(-1).values).all(-1)
    assert is_clear.float().mean() > 0.9  # the others have a tie
    torch.testing.assert_close(own_scores[is_clear], scores[is_clear], rtol=1e-2, atol=1e-3)


class Gate(nn.Module):
    def __init__(self, top_k, scores_of, weight, bias=None):
        super().__init__()
        self.top_k, self.scores_of, self.weight = top_k, scores_of, nn.Parameter(weight)
        self.register_buffer("bias", bias)

    def forward(self, x):
        logits = nn.functional.linear(x, self.weight)
        scores, ids = self.scores_of(logits).topk(self.top_k)
        return logits, scores, ids


def softmax(logits):
    return logits.softmax(-1)


@pytest.mark.parametrize(
    ("gate", "is_known"),
    [
        (lambda weight: Gate(2, softmax, weight), True),
        (lambda weight: Gate(2, softmax, weight * 30), True),  # nearly all is the best expert's
        (lambda weight: Gate(8, softmax, weight), True),
        (lambda weight: Gate(2, lambda x: softmax(-x), weight), False),
        (lambda weight: Gate(2, lambda x: softmax(1.1 * x), weight), False),
        (lambda weight: Gate(2, lambda x: 2.5 * x.sigmoid(), weight), False),
        (lambda weight: Gate(2, lambda x: 0.4 * x.sigmoid(), weight * 0), False),  # ties alone
        (lambda weight: Gate(2, softmax, weight, torch.zeros(8)), False),  # it may change
    ],
)
def test_routers_of_another_kind_are_left(gate, is_known):
    torch.manual_seed(0)
    model = nn.Sequential(gate(torch.randn(8, 256)))
    with routers_of(model) as routers:
        model(torch.randn(5, 256))
    assert len(routers) == is_known
    if is_known:
        x = torch.randn(9, 256) / 100
        for got, expected in zip(routers[0].forward(x), model(x), strict=True):
            torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("has_mask", [False, True])
def test_heads_that_share_keys_are_rows_of_one_product(has_mask):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 8, 1, 32), torch.randn(2, 2, 9, 32), torch.randn(2, 2, 9, 16)
    mask = (torch.rand(2, 1, 1, 9) < 0.6) | (torch.arange(9) == 0) if has_mask else None
    module = nn.Module()
    module.num_key_value_groups = 4
    y, _ = grouped_sdpa(module, query, key, value, mask, scaling=0.2)
    scores = 0.2 * torch.einsum("bhd,bhld->bhl", query[:, :, 0], key.repeat_interleave(4, 1))
    scores = scores if mask is None else scores.masked_fill(~mask[:, 0], -torch.inf)
    expected = torch.einsum("bhl,bhlv->bhv", scores.softmax(-1), value.repeat_interleave(4, 1))
    assert y.shape == (2, 1, 8, 16)
    torch.testing.assert_close(y[:, 0], expected)


def test_attention_that_was_chosen_stays(qwen):
    with grouped_attention(qwen):
        assert qwen.config._attn_implementation != "sdpa"
    assert qwen.config._attn_implementation == "sdpa"
    qwen.set_attn_implementation("eager")
    with grouped_attention(qwen):
        assert qwen.config._attn_implementation == "eager"
    qwen.set_attn_implementation("sdpa")


@pytest.mark.parametrize(("family", "num_kinds"), [("qwen3_moe", 1), ("deepseek_v3", 2)])
def test_blocks_of_one_kind_are_compiled_once(family, num_kinds):
    model = model_of(family)
    step = Step(model)
    expected, counter = step.logits(), CompileCounter()
    with torch.no_grad():
        fusion = Fusion(model, step.cache, step.run, backend=counter)
    counts = []
    for _ in range(3):
        with fusion.fused():
            assert_near(step.logits(), expected)
        counts.append(counter.frame_count)
    assert counts == [2 * num_kinds] * 3  # of prompts and of steps
    assert torch.equal(step.logits(), expected)
