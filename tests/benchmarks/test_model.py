"""Whole models: checkpoints that are written, who loads them, where the time goes, the report."""

import json
import re
import time
from importlib import import_module
from itertools import chain
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from benchmarks import report
from benchmarks.model import HF_BF16, HF_FP8, HF_HUB, PREFILL, TITLES, decode_name, phases, table
from benchmarks.model.checkpoint import MODELS, tensors_of, write_checkpoint
from benchmarks.model.phases import BATCHED, GROUPED
from benchmarks.model.providers import PROVIDERS
from benchmarks.model.timeline import moe_us, parts_of_call
from benchmarks.model.worker import Settings, run_in_a_process
from benchmarks.peers import OURS
from moefp8 import FP8Linear, GroupedExperts, dequantize
from moefp8.checkpoint import inspect_checkpoint
from moefp8.hf import FP8Config
from moefp8.testing import row_errors
from tests.benchmarks.cases import run_main

CPU = torch.device("cpu")
FEW = "--tiny", "--prompt", "24", "--context", "16", "--batches", "2"


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("model") / request.param
    config = MODELS[request.param].make_config(tiny=True)
    num_bytes = write_checkpoint(config, directory, CPU, max_shard_bytes=300_000)
    shards = list(directory.glob("*.safetensors"))
    assert len(shards) > 2
    assert num_bytes <= sum(file.stat().st_size for file in shards) < 1.5 * num_bytes
    return directory


def test_a_checkpoint_has_the_published_sizes():
    sizes = {name: list(tensors_of(model.make_config())) for name, model in MODELS.items()}
    num_bytes = {name: sum(x.num_bytes for x in each) / 1e9 for name, each in sizes.items()}
    assert num_bytes["qwen3_30b_a3b"] == pytest.approx(31.2, abs=0.3)  # 30.5 B parameters
    assert num_bytes["deepseek_v3"] == pytest.approx(17, abs=0.5)
    last = {x.key for x in sizes["deepseek_v3"] if x.key.startswith("model.layers.3.mlp.")}
    assert "model.layers.3.mlp.experts.255.down_proj.weight_scale_inv" in last
    assert MODELS["deepseek_v3"].title_of(MODELS["deepseek_v3"].make_config(1)).endswith("1 layers")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("num_layers", [1, 2])
def test_fewer_layers_have_experts_too(name, num_layers):
    keys = [x.key for x in tensors_of(MODELS[name].make_config(num_layers))]
    assert any(f"layers.{num_layers - 1}.mlp.experts.0." in key for key in keys)
    assert not any(f"layers.{num_layers}." in key for key in keys)


def from_transformers(checkpoint):
    """The model as transformers itself dequantizes it."""
    config = FineGrainedFP8Config(dequantize=True)
    return AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=config, dtype=torch.bfloat16
    )


def test_the_checkpoint_loads_into_moefp8_and_transformers_alike(checkpoint):
    assert not inspect_checkpoint(checkpoint, weights=True).anomalies
    ours = AutoModelForCausalLM.from_pretrained(checkpoint, quantization_config=FP8Config())
    layer = ours.model.layers[-1]
    assert isinstance(layer.mlp.experts, GroupedExperts)
    assert isinstance(layer.self_attn.o_proj, FP8Linear)
    assert type(ours.lm_head) is nn.Linear
    ids = torch.randint(512, (2, 12))
    with torch.inference_mode():
        hidden = ours.model(ids).last_hidden_state.float()
        logits = ours(ids).logits.float()
    assert hidden.isfinite().all()
    assert 0.3 < logits.std() < 3

    theirs = from_transformers(checkpoint)
    expected = theirs.state_dict()
    found = dequantize(ours).state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert torch.equal(tensor, expected[key].to(tensor.dtype)), key


def test_bf16_runs_the_experts_of_transformers(checkpoint):
    model = PROVIDERS[HF_BF16].load(checkpoint, CPU)
    theirs = from_transformers(checkpoint)
    assert type(model.model.layers[-1].mlp.experts) is type(theirs.model.layers[-1].mlp.experts)
    assert not any(isinstance(x, FP8Linear | GroupedExperts) for x in model.modules())
    ids = torch.randint(512, (1, 9))
    with torch.inference_mode():
        assert torch.equal(model(ids).logits, theirs(ids).logits)
        ours = PROVIDERS[OURS].load(checkpoint, CPU)(ids).logits
        assert 0 < row_errors(ours, model(ids).logits).median() < 0.3  # some get another expert


class Sleeps(nn.Module):
    def __init__(self, milliseconds: float, **modules: nn.Module) -> None:
        super().__init__()
        self.milliseconds = milliseconds
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        time.sleep(self.milliseconds / 1e3)
        return x


def layer_of(mlp: nn.Module) -> Sleeps:
    names = "input_layernorm", "self_attn", "post_attention_layernorm"
    parts = dict(zip(names, (Sleeps(2), Sleeps(8), Sleeps(2)), strict=True))
    return Sleeps(1, **parts, mlp=mlp)


@pytest.fixture
def sleeping_model() -> Sleeps:
    moe = Sleeps(0, gate=Sleeps(3), experts=Sleeps(12), shared_experts=Sleeps(4))
    layers = nn.ModuleList([layer_of(Sleeps(6)), layer_of(moe)])
    model = nn.Module()
    model.layers, model.norm = layers, Sleeps(1)
    whole = Sleeps(0)
    whole.model, whole.lm_head = model, Sleeps(5)
    return whole


def test_the_parts_sum_up_to_the_call(sleeping_model, monkeypatch):
    """By a clock that only sleep moves: what else the machine does takes no time."""
    slept_s = [0.0]
    monkeypatch.setattr(time, "sleep", slept_s.append)
    monkeypatch.setattr(time, "perf_counter", lambda: sum(slept_s))
    x, walls = torch.zeros(1), []

    def call() -> None:
        started = time.perf_counter()
        for layer in sleeping_model.model.layers:
            layer(x)
        sleeping_model.lm_head(sleeping_model.model.norm(x))
        walls.append(time.perf_counter() - started)

    parts = parts_of_call(sleeping_model, call, CPU, 3, in_graph=False)
    slept = {
        "attention": [8, 8, 0],
        "dense MLP": [6, 0, 0],
        "router": [0, 3, 0],
        "experts": [0, 12, 0],
        "shared experts": [0, 4, 0],
        "norms": [4, 4, 1],
        "head": [0, 0, 5],
        "rest": [1, 1, 0],
    }
    assert parts.keys() == slept.keys()
    for part, milliseconds in slept.items():
        for us, expected in zip(parts[part], milliseconds, strict=True):
            assert us == pytest.approx(1e3 * expected, abs=1e-3)
    total = sum(chain.from_iterable(parts.values()))
    assert total == pytest.approx(1e6 * sorted(walls)[1])
    assert moe_us(parts) == pytest.approx(19e3)
    assert not any(module._forward_pre_hooks for module in sleeping_model.modules())


@pytest.mark.slow
@torch.inference_mode()
def test_decoding_is_timed_in_both_ways_of_experts(checkpoint):
    """Here as it is called: without a GPU, `DecodingGraphs` captures and compiles nothing."""
    for name, ways in ((OURS, {None}), (HF_BF16, {BATCHED, GROUPED})):
        model = PROVIDERS[name].load(checkpoint, CPU)
        (_, decode) = phases.phases(model, 8, [2], 16)
        figures = phases.measure(model, decode) | phases._in_graphs(model, decode)
        assert figures.get("experts") in ways
        with phases.decoding_by(model, figures.get("experts")):
            graphs, told = phases.compile_steps(model, decode.prompts)
        figures |= told | phases.measure_compiled(graphs, decode.prompts)
        assert min(figures[f"{mode}_ms"] for mode in ("eager", "graph", "compiled")) > 0
        assert "_optimize_model_for_decode" not in vars(model)


def test_a_cache_that_is_not_taken_is_an_error():
    layers = [SimpleNamespace(keys=None, values=None)]
    with pytest.raises(RuntimeError, match="has not written into the cache"):
        phases.fill_at_random(SimpleNamespace(layers=layers))


def test_a_cache_without_values_is_filled():
    keys, values = torch.zeros(2, 8), torch.zeros(2, 8)
    layers = [SimpleNamespace(keys=keys, values=None), SimpleNamespace(keys=keys, values=values)]
    phases.fill_at_random(SimpleNamespace(layers=layers))
    assert (keys != 0).all()
    assert (values != 0).all()


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What `--tiny` gives for one model without a GPU: results, and the folder it worked in."""
    folder = tmp_path_factory.mktemp("run")
    out = folder / "out.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: False)
        main = import_module("benchmarks.model.__main__")
        names = "--models", "deepseek_v3", "--providers", f"{OURS},{HF_FP8},{HF_BF16}"
        run_main(patch, main, *names, *FEW, "--dir", str(folder), "--out", str(out))
    return json.loads(out.read_text()), folder


@pytest.mark.slow
def test_a_run_measures_and_tells_who_refused(measured):
    results, folder = measured
    assert [file.name for file in folder.iterdir()] == ["out.json"]
    (row,) = results["rows"]
    assert row["layers"] == 2
    assert row["checkpoint_gib"] >= 0
    assert row["peers"][HF_FP8]["refused"] == "without a GPU, transformers dequantizes to BF16"
    for name in (OURS, HF_BF16):
        found = row["peers"][name]
        assert found["load_s"] > 0
        assert list(found["phases"]) == [PREFILL, decode_name(2)]
        for phase, tokens in ((PREFILL, 24), (decode_name(2), 2)):
            figures = found["phases"][phase]
            assert figures["tokens"] == tokens
            assert figures["eager_ms"] > 0
            assert figures["parts_of"] == "eager"
            assert {len(us) for us in figures["parts"].values()} == {row["layers"] + 1}
            assert 0 < figures["moe_ms"] * 1e3 < sum(chain(*figures["parts"].values()))
            assert figures["moe_alone_ms"] > 0
    assert 0 < row["peers"][OURS]["logits_error"] < 0.3


def test_the_page_of_a_run(measured):
    results, _ = measured
    text = table.tables(results)
    assert (
        "transformers FP8, DeepGEMM with DeepSeek-V3, 2 layers was refused: without a GPU" in text
    )
    assert "| DeepSeek-V3, 2 layers | decode, batch 2 |" in text


def test_a_process_that_fails_tells_why(tmp_path):
    settings = Settings(OURS, str(tmp_path / "none"), str(tmp_path), "cpu", 8, (1,), 16)
    assert "none" in run_in_a_process(settings, patience_s=200)["refused"]
    assert run_in_a_process(settings, patience_s=0.01) == {"refused": "not done in 0 s"}


def figures(tokens: int, eager_ms: float, graph_ms: float | None) -> dict:
    parts = {"attention": [100.0, 90.0, 0.0], "experts": [20.0, 30.0, 0.0], "rest": [1.0, 1.0, 9.0]}
    found = {"tokens": tokens, "eager_ms": eager_ms, "parts": parts, "parts_of": "graph"}
    graph = {"graph_refused": "it waits"} if graph_ms is None else {"graph_ms": graph_ms}
    return {**found, **graph, "peak_gib": 40.0, "moe_ms": 1.04, "moe_alone_ms": 1.0}


@pytest.fixture
def kept() -> dict:
    """Results as they may be kept: of two models, and of providers that did not do all."""
    decode = decode_name(16)
    ours = {"load_s": 9.0, "weights_gib": 30.0, "logits_error": 0.1}
    ours["phases"] = {PREFILL: figures(4096, 100.0, 90.0), decode: figures(16, 10.0, 4.0)}
    theirs = {"load_s": 30.0, "phases": {PREFILL: figures(4096, 250.0, None)}, "ended": "no memory"}
    ours["phases"][decode] |= {"compiled_ms": 2.0, "compile_s": 88.0}
    theirs["phases"][decode] = figures(16, 30.0, 6.0) | {"compiled_refused": "a break"}
    refused = {"refused": "ImportError: no kernels"}
    row = {"model": "m", "title": "M", "layers": 2, "peers": {OURS: ours, HF_FP8: theirs}}
    row["peers"][HF_HUB] = refused
    only_ours = {"model": "n", "title": "N", "layers": 2, "peers": {OURS: ours, HF_FP8: refused}}
    about = {"cpu": "c", "gpu": "G", "torch": "2", "transformers": "5", "deep_gemm": "d"}
    about |= {"date": "2026-11-25T", "commit": "abc", "prompt": 4096, "context": 256}
    return {**about, "rows": [row, only_ours]}


def test_the_report_with_and_without_results(kept, tmp_path):
    page = "before\n<!-- model -->\n<!-- /model -->\nafter\n"
    assert report.with_tables(page, tmp_path) == page
    (tmp_path / "model.json").write_text(json.dumps(kept))
    text = report.with_tables(page, tmp_path)
    assert report.with_tables(text, tmp_path) == text
    assert "| M | prefill | 40960 / 45511 | 2.50 / - | 1.040 |" in text
    assert "| M | decode, batch 16 | 1600 / 4000 / 8000 | 3.00 / 1.50 / - | 1.040 |" in text
    assert "| N | prefill | 40960 / 45511 | - | 1.040 |" in text
    assert "At worst it is 2.50 as it is called (M, prefill), 1.50 in CUDA graphs" in text
    assert "takes 88 to 88 s" in text
    assert "DeepGEMM with M, decode, batch 16, does not compile: a break" in text
    assert "DeepGEMM with M, prefill, has no graph: it waits" in text
    assert "DeepGEMM with M ended before all was done: no memory" in text
    assert re.search(r"hub kernels with M was refused: ImportError: no kernels", text)
    assert "| M | moefp8 | 9.0 | 30.0 | 40.0 | 1.0e-01 |" in text


def test_the_plot_of_what_is_kept(kept, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "model.json").write_text(json.dumps(kept))
    report.draw_plots(tmp_path)
    assert (tmp_path / "model.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_without_a_gpu_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match=r"^benchmarks\.model times GPU kernels"):
        run_main(monkeypatch, import_module("benchmarks.model.__main__"))


@pytest.mark.parametrize("wrong", [("--context", "8"), ("--providers", "vllm"), ("--batches", "0")])
def test_options_that_cannot_be_meant(monkeypatch, capsys, wrong):
    with pytest.raises(SystemExit, match="2"):
        run_main(monkeypatch, import_module("benchmarks.model.__main__"), *wrong)
    assert "must be" in capsys.readouterr().err


def test_every_provider_has_a_title():
    assert PROVIDERS.keys() == TITLES.keys()
