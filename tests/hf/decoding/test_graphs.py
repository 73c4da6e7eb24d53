"""`DecodingGraphs`: the tokens and logits of transformers' own `generate`; here without a graph."""

import copy
from functools import partial
from inspect import signature

import pytest
import torch
from small_checkpoint import FAMILIES, small_config
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LogitsProcessor,
    LogitsProcessorList,
    StaticCache,
    StoppingCriteria,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)

from moefp8 import convert
from moefp8.hf import DecodingGraphs
from moefp8.hf.decoding.step import Step
from tests.hf.model_cases import prompt

LENGTH = 128  # of the static cache: what the graphs take for up to 128 tokens


@pytest.fixture(scope="module")
def models():
    """A model in FP8 of each family whose attention is full."""
    made = {}
    for family in FAMILIES:
        if family != "qwen3_next":
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(small_config(family), dtype=torch.bfloat16)
            convert(model.eval())
            made[family] = model
    return made


@pytest.fixture(params=[family for family in FAMILIES if family != "qwen3_next"])
def model(request, models):
    return models[request.param]


def by_transformers(model, ids, **kwargs):
    """`model.generate` with a static cache of LENGTH, as it is called."""
    cache = {cache_name(model): StaticCache(config=model.config, max_cache_len=LENGTH)}
    return model.generate(ids, disable_compile=True, **cache, **kwargs)


def padded(ids):
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    return mask


OPTIONS = {"max_new_tokens": 8, "pad_token_id": 0, "do_sample": False}
LOGITS = {"return_dict_in_generate": True, "output_logits": True, "output_scores": True}


def assert_same(got, expected):
    assert torch.equal(got.sequences, expected.sequences)
    for name in ("logits", "scores"):
        steps = got[name], expected[name]
        assert len(steps[0]) == len(steps[1])
        assert all(torch.equal(*pair) for pair in zip(*steps, strict=True))


@pytest.mark.parametrize("has_padding", [False, True])
def test_gives_the_logits_of_transformers(model, has_padding):
    ids, graphs = prompt(), DecodingGraphs(model)
    mask = {"attention_mask": padded(ids)} if has_padding else {}
    expected = by_transformers(model, ids, **OPTIONS, **LOGITS, **mask)
    for _ in range(2):  # the second call takes what the first one left
        assert_same(graphs.generate(ids, **OPTIONS, **LOGITS, **mask), expected)


def test_takes_processors_criteria_and_samples(models):
    model, ids = models["qwen3_moe"], prompt()
    options = OPTIONS | {
        "do_sample": True,
        "top_k": 5,
        "temperature": 0.7,
        "num_return_sequences": 2,
    }
    options |= {"repetition_penalty": 1.3, **LOGITS}
    results = []
    for generate in (
        DecodingGraphs(model).generate,
        lambda *x, **y: by_transformers(model, *x, **y),
    ):
        torch.manual_seed(1)
        results.append(generate(ids, logits_processor=LogitsProcessorList([Only()]), **options))
    assert_same(*results)
    assert set(results[0].sequences[:, 40:].flatten().tolist()) <= {*range(100, 110)}


class Only(LogitsProcessor):
    """Words 100 to 109 are all there is."""

    def __call__(self, input_ids, scores):
        others = torch.ones_like(scores, dtype=torch.bool)
        others[:, 100:110] = False
        return scores.masked_fill(others, -torch.inf)


class After(StoppingCriteria):
    """Each sequence ends after another number of tokens."""

    def __call__(self, input_ids, scores, **kwargs):
        ends = torch.arange(len(input_ids)) * 2 + 43
        return input_ids.shape[1] >= ends


@pytest.mark.parametrize("pad", [None, 0])
def test_ends_when_all_sequences_have_ended(models, pad):
    model, ids = models["qwen3_moe"], prompt()
    options = OPTIONS | {"pad_token_id": pad, "eos_token_id": None, "max_new_tokens": 30}
    criteria = {"stopping_criteria": StoppingCriteriaList([After()])}
    got = DecodingGraphs(model).generate(ids, **options, **criteria)
    assert got.shape == (3, 47)
    assert torch.equal(got, by_transformers(model, ids, **options, **criteria))


def test_pads_what_follows_the_last_word_of_a_sequence(models):
    model, ids = models["qwen3_moe"], prompt()
    free = DecodingGraphs(model).generate(ids, **OPTIONS | {"eos_token_id": None})
    options = OPTIONS | {"eos_token_id": int(free[0, 43])}  # the first sequence ends after 4
    got = DecodingGraphs(model).generate(ids, **options)
    assert got[0, 44:].eq(0).all()
    assert torch.equal(got, by_transformers(model, ids, **options))


class Words:
    """A streamer that keeps what it is given."""

    def __init__(self):
        self.given, self.has_ended = [], False

    def put(self, value):
        self.given.append(value.flatten())

    def end(self):
        self.has_ended = True


def test_streams_each_token_once(models):
    model, ids, words = models["qwen3_moe"], prompt()[:1], Words()
    free = DecodingGraphs(model).generate(ids, **OPTIONS | {"eos_token_id": None})
    options = OPTIONS | {"eos_token_id": int(free[0, 45])}
    got = DecodingGraphs(model).generate(ids, streamer=words, **options)
    assert words.has_ended
    assert torch.cat(words.given).tolist() == got[0].tolist()


def test_keeps_so_many_graphs(models):
    model, ids = models["qwen3_moe"], prompt()
    graphs = DecodingGraphs(model, max_graphs=1)
    first = graphs.generate(ids, **OPTIONS)
    graphs.generate(ids[:2], **OPTIONS)
    assert torch.equal(graphs.generate(ids, **OPTIONS), first)
    assert graphs.num_graphs == 1


def test_weights_may_change_in_place():
    torch.manual_seed(0)
    config = small_config("qwen3_moe")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    graphs, ids = DecodingGraphs(model), prompt()
    before = graphs.generate(ids, **OPTIONS)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.lm_head.weight.flip(0))
    assert not torch.equal(graphs.generate(ids, **OPTIONS), before)


def test_a_step_is_of_weights_where_they_are():
    config = small_config("qwen3_moe")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.set_experts_implementation("moefp8")  # it keeps FP8 weights beside those of the model
    model(prompt(), use_cache=False)
    step = Step(model, 1, LENGTH, has_padding=False)
    assert step.is_of(model)
    with torch.no_grad():
        model.model.layers[0].mlp.experts.down_proj.mul_(2)
    assert step.is_of(model)  # FP8 weights are made again in their memory
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    assert not step.is_of(model)


def test_sampling_draws_as_often_as_there_are_tokens(models):
    """Random numbers of the next call are those that follow, also if sequences ended early."""
    model, ids = models["qwen3_moe"], prompt()
    criteria = {"stopping_criteria": StoppingCriteriaList([After()])}
    options = OPTIONS | {"do_sample": True, "max_new_tokens": 20, "eos_token_id": None}
    results = []
    for generate in (DecodingGraphs(model).generate, partial(by_transformers, model)):
        torch.manual_seed(1)
        results += [generate(ids, **options, **criteria) for _ in range(2)]
    assert torch.equal(results[0], results[2])
    assert torch.equal(results[1], results[3])


def test_both_inference_modes(models):
    model, ids = models["qwen3_moe"], prompt()
    graphs = DecodingGraphs(model)
    with torch.inference_mode():
        first = graphs.generate(ids, **OPTIONS)
    assert torch.equal(graphs.generate(ids, **OPTIONS), first)


def cache_name(model):
    """What the model calls its cache: it was renamed in transformers 5.24."""
    inputs = signature(model.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in inputs else "past_key_values"


def test_refuses_what_it_does_not_run(models):
    model, ids = models["qwen3_moe"], prompt()
    graphs = DecodingGraphs(model)
    cache = StaticCache(config=model.config, max_cache_len=LENGTH)
    for asked_for, word, way in (
        ({"num_beams": 2}, "beam", "model.generate"),
        (
            {"output_hidden_states": True, "return_dict_in_generate": True},
            "output_hidden_states",
            "model.generate",
        ),
        ({"assistant_model": model}, "assistant_model", "model.generate"),
        ({"custom_generate": print}, "custom_generate", "model.generate"),
        ({cache_name(model): cache}, cache_name(model), "model.generate"),
        ({"cache_implementation": "offloaded"}, "offloaded", "model.generate"),
        ({"stop_strings": ["x"]}, "stop_strings", "StopStringCriteria"),
        ({"inputs_embeds": torch.randn(3, 4, 256)}, "inputs_embeds", "model.generate"),
    ):
        with pytest.raises(ValueError, match=word) as error:
            graphs.generate(ids, **OPTIONS, **asked_for)
        assert way in str(error.value)
    with pytest.raises(ValueError, match="max_graphs must be at least 1, got 0"):
        DecodingGraphs(model, max_graphs=0)


def test_refuses_models_that_are_not_captured(models):
    def changed(change):
        model = copy.deepcopy(models["qwen3_moe"])
        change(model)
        return model

    ways = {
        "must be on one device, but is on cpu, meta": lambda x: x.lm_head.to("meta"),
        'attention must be one of sdpa, eager, but is "flex': lambda x: x.set_attn_implementation(
            "flex_attention"
        ),
        "rotary embedding changes": lambda x: x.config.rope_parameters.update(rope_type="dynamic"),
        "does not write into": lambda x: x.model.register_forward_pre_hook(
            lambda _, args, kwargs: (args, kwargs | {cache_name(x): None, "attention_mask": None}),
            with_kwargs=True,
        ),
    }
    for word, change in ways.items():
        with pytest.raises(ValueError, match=f"Qwen3Moe.*{word}.*use model.generate"):
            DecodingGraphs(changed(change)).generate(prompt(), **OPTIONS)


def test_refuses_other_models():
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16}
    sliding = AutoModelForCausalLM.from_config(Gemma2Config(**sizes, **heads)).eval()
    with pytest.raises(ValueError, match=r"full attention .*SlidingWindow.* cache_implementation"):
        DecodingGraphs(sliding).generate(torch.ones(1, 4, dtype=torch.int64), max_new_tokens=2)
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1)
    )
    with pytest.raises(ValueError, match="must be a decoder of transformers, got T5"):
        DecodingGraphs(t5)
    with pytest.raises(ValueError, match="must be a decoder of transformers, got Linear"):
        DecodingGraphs(torch.nn.Linear(4, 4))
