"""`compare_models`, against plain loops, and on models of which one layer is known to be worse."""

import copy

import pytest
import torch
from small_checkpoint import small_config
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

from moefp8 import convert
from moefp8.testing import compare_models, row_errors

VOCABULARY, HIDDEN, NUM_LAYERS = 50, 128, 3


class Branch(nn.Module):
    """It adds to the hidden states, in place if it is asked to."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.up, self.act = nn.Linear(HIDDEN, HIDDEN), nn.SiLU()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        y = self.act(self.up(x))
        return (x.add_(y) if self.in_place else x + y), None


class Model(nn.Module):
    """A causal model whose blocks see one token; it returns what is not a tensor."""

    def __init__(self, in_place: bool = False, num_layers: int = NUM_LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Branch(in_place) for _ in range(num_layers))
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY)
        self.to(torch.bfloat16)

    def forward(self, ids: torch.Tensor, scale: float = 1.0) -> dict[str, torch.Tensor]:
        x = self.embedding(ids) * scale
        for block in self.blocks:
            x, _ = block(x)
        return {"scores": self.lm_head(x)}


def scores(output: dict[str, torch.Tensor]) -> torch.Tensor:
    return output["scores"]


IDS = torch.randint(VOCABULARY, (3, 20), generator=torch.Generator().manual_seed(1))


def a_pair(in_place: bool = False) -> tuple[Model, Model]:
    """A model, and the same in FP8."""
    model = Model(in_place)
    return model, convert(copy.deepcopy(model))


@pytest.mark.parametrize("in_place", [False, True])
@torch.no_grad()
def test_figures_are_those_of_plain_loops(in_place):
    a, b = a_pair(in_place)
    comparison = compare_models(a, b, IDS, logits=scores, scale=2.0)
    log_p, log_q = (scores(m(IDS, 2.0)).double().log_softmax(-1)[:, :-1] for m in (a, b))
    nll = [-x.gather(-1, IDS[:, 1:, None]).flatten() for x in (log_p, log_q)]
    kl = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
    assert comparison.num_tokens == 3 * 19
    assert comparison.perplexity_a == pytest.approx(nll[0].mean().exp().item())
    assert comparison.perplexity_b == pytest.approx(nll[1].mean().exp().item())
    assert comparison.change == pytest.approx(comparison.perplexity_b / comparison.perplexity_a - 1)
    std = (nll[1] - nll[0]).std(correction=0).item() / 57**0.5
    assert comparison.change_std == pytest.approx(std, rel=0.1)
    assert comparison.kl_mean == pytest.approx(kl.mean().item())
    assert comparison.kl_max == pytest.approx(kl.max().item())
    same = log_p.argmax(-1) == log_q.argmax(-1)
    assert comparison.same_top_1 == pytest.approx(same.double().mean().item())

    x = y = a.embedding(IDS) * 2.0
    for i, layer in enumerate(comparison.layers):
        assert layer.name == f"blocks.{i}"
        mixed = copy.deepcopy(a)
        mixed.blocks[i] = b.blocks[i]
        log_q = scores(mixed(IDS, 2.0)).double().log_softmax(-1)[:, :-1]
        alone = F.kl_div(log_q, log_p, log_target=True, reduction="none").sum(-1)
        assert layer.kl == pytest.approx(alone.mean().item())
        parts = b.blocks[i].up(x), a.blocks[i].up(x)
        own, x = b.blocks[i](x.clone())[0], a.blocks[i](x.clone())[0]
        y = b.blocks[i](y.clone())[0]
        pairs = (layer.own, own, x), (layer.total, y, x), (layer.parts["up"], *parts)
        for errors, actual, expected in pairs:
            rows = row_errors(actual, expected)
            assert errors.median == pytest.approx(rows.median().item())
            assert errors.worst == pytest.approx(rows.max().item())
        assert {*layer.parts} == {"up"}


def test_a_model_beside_itself_costs_nothing_and_stays_as_it_is():
    model = Model()
    blocks = [*model.blocks]
    comparison = compare_models(model, model, [IDS, IDS.flip(1)], logits=scores)
    assert (
        comparison.change,
        comparison.kl_max,
        comparison.same_top_1,
        comparison.logits.worst,
    ) == (0, 0, 1, 0)
    for layer in comparison.layers:
        assert (layer.kl, layer.own.worst, layer.total.worst, layer.parts) == (0, 0, 0, {})
    assert all(x is y for x, y in zip(model.blocks, blocks, strict=True))
    assert not any(x._forward_hooks or x._forward_pre_hooks for x in model.modules())


@pytest.mark.parametrize("wrong", range(NUM_LAYERS))
def test_the_layer_that_is_wrong_costs_most(wrong):
    a, b = Model(), Model()
    b.blocks[wrong].up.weight.data *= 1.5
    comparison = compare_models(a, b, IDS, logits=scores)
    assert comparison.costliest is comparison.layers[wrong]
    assert comparison.costliest.kl == pytest.approx(comparison.kl_mean)
    assert [layer.own.worst > 0 for layer in comparison.layers] == [i == wrong for i in range(3)]
    assert [layer.total.worst > 0 for layer in comparison.layers] == [i >= wrong for i in range(3)]


def test_the_floor_is_what_another_rounding_does():
    """Far below what FP8 does, far above nothing, and the smaller, the finer the dtype."""
    a, b = a_pair()
    comparison = compare_models(a, b, IDS, logits=scores)
    assert 0 < 5 * comparison.kl_floor < comparison.kl_mean
    exact = compare_models(a.float(), b.float(), IDS, logits=scores)
    assert exact.kl_floor < 1e-6 * comparison.kl_floor
    assert exact.kl_mean == pytest.approx(comparison.kl_mean, rel=0.2)


def test_one_wrong_token_is_seen():
    a, b = Model(), Model()
    b.embedding.weight.data[-1] *= -1
    ids = IDS.clamp(max=VOCABULARY - 2)
    ids[1, 4] = VOCABULARY - 1
    comparison = compare_models(a, b, ids, logits=scores)
    assert comparison.logits.median == 0
    assert comparison.logits.worst > 0.5
    assert comparison.kl_max == pytest.approx(comparison.num_tokens * comparison.kl_mean)


def test_nan_is_infinitely_far():
    a, b = Model(), Model()
    b.blocks[1].up.bias.data[0] = torch.nan
    comparison = compare_models(a, b, IDS, logits=scores)
    assert comparison.kl_mean == comparison.perplexity_b == comparison.logits.median == torch.inf
    assert comparison.costliest is comparison.layers[1]
    assert comparison.costliest.own.median == torch.inf


def test_several_tensors_and_long_rows_are_one_text():
    a, b = a_pair()
    ids = torch.randint(VOCABULARY, (45, 50))
    whole = compare_models(a, b, ids, logits=scores)
    parts = compare_models(a, b, [*ids.split(7)], logits=scores)
    assert whole.num_tokens == parts.num_tokens == 45 * 49
    assert whole.kl_mean == pytest.approx(parts.kl_mean, rel=1e-6)
    assert whole.layers[2].total.worst == pytest.approx(parts.layers[2].total.worst, rel=1e-6)


def test_labels_say_which_positions_count():
    a, b = a_pair()
    labels = torch.full_like(IDS, -100)
    labels[0, 3], labels[2, 0] = 7, 8
    comparison = compare_models(a, b, IDS, labels=labels, logits=scores)
    log_p = scores(a(IDS)).double().log_softmax(-1)
    expected = (-(log_p[0, 3, 7] + log_p[2, 0, 8]) / 2).exp().item()
    assert comparison.num_tokens == 2
    assert comparison.perplexity_a == pytest.approx(expected)


def test_a_cache_is_not_filled_twice():
    """transformers' models have one unless they are message not to."""
    torch.manual_seed(0)
    config = small_config("qwen3_moe")
    config.num_hidden_layers, config.num_experts = 2, 2
    a = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    b = convert(copy.deepcopy(a))
    ids = torch.randint(config.vocab_size, (1, 12))
    comparison, without = (compare_models(a, b, ids, use_cache=x) for x in (True, False))
    assert comparison == without
    assert [layer.name for layer in comparison.layers] == ["model.layers.0", "model.layers.1"]
    assert {*comparison.layers[0].parts} == {"self_attn", "mlp"}


class Loop(Model):
    """It calls its first block twice and its last one never."""

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(ids)
        for i in (0, 1, 0):
            x, _ = self.blocks[i](x)
        return {"scores": self.lm_head(x)}


def test_layers_may_be_called_twice_or_never():
    a, b = Loop(), convert(Loop())
    comparison = compare_models(a, b, IDS, logits=scores)
    assert [layer.name for layer in comparison.layers] == ["blocks.0", "blocks.1"]
    assert comparison.layers[0].own.worst < 0.1
    assert all(layer.total.worst >= layer.own.median > 0 for layer in comparison.layers)
    for model in (a, b):
        model.unused = nn.ModuleList([nn.Linear(1, 1)])
    with pytest.raises(ValueError, match=r"a must call its layers, got no call of unused\.0"):
        compare_models(a, b, IDS, layers="unused", logits=scores)


def test_layers_can_be_named():
    embedding, head = nn.Embedding(VOCABULARY, HIDDEN), nn.Linear(HIDDEN, VOCABULARY)
    model = nn.Sequential(embedding, nn.Linear(HIDDEN, HIDDEN), head).bfloat16()
    other = convert(copy.deepcopy(model))
    comparison = compare_models(model, other, IDS, layers="")
    assert [layer.name for layer in comparison.layers] == ["0", "1", "2"]
    assert [layer.kl > 0 for layer in comparison.layers] == [False, True, False]
    with pytest.raises(ValueError, match=r"must have its layers in an nn\.ModuleList, got none"):
        compare_models(model, other, IDS)
    with pytest.raises(ValueError, match="'1' must have layers, got none; name another"):
        compare_models(model, other, IDS, layers="1")


class OtherVocabulary(Model):
    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scores": F.pad(super().forward(ids)["scores"], (0, 3))}


REFUSED = {
    "the same layers, got 3 and 2 in 'blocks'": (Model(num_layers=2), IDS, {}),
    "one vocabulary, got logits of 50 and 53 tokens": (OtherVocabulary(), IDS, {}),
    "a position must have a label, got none": (Model(), IDS[:, :1], {}),
    r"labels as ids, got \[\[3, 20\]\] and \[\[2, 20\]\]": (Model(), IDS, {"labels": IDS[:2]}),
    r"ids must be \[R, S\], and labels as ids, got \[\[20\]\]": (Model(), IDS[0], {}),
    r"on one device, got cpu and meta; ": (Model().to("meta"), IDS, {}),
    r"logits of a must be \[R, S, V\] = \[3, 20, 'V'\], got dict": (Model(), IDS, {"logits": None}),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_compared_is_told(message):
    b, ids, options = REFUSED[message]
    with pytest.raises(ValueError, match=f"compare_models: .*{message}"):
        compare_models(Model(), b, ids, **{"logits": scores, **options})
