"""The benchmark of whole MoE layers without a GPU: routers, every peer, what is printed."""

import json

import pytest
import torch

from benchmarks import moe, moe_layers, report, session, without_rest
from benchmarks.moe_cases import MODELS, Model
from benchmarks.moe_layer_cases import OPTIONS, Layer, random_moe, torch_router
from benchmarks.moe_layer_peers import LAYERS, ROUTERS, TORCH
from benchmarks.moe_layers import LAYER, ROUTER
from benchmarks.moe_peers import HF_FP8, MEGA
from benchmarks.peers import OURS
from moefp8 import TopKRouter
from tests.benchmarks.cases import run_main

SMALL = Model("small", 8, 2, 256, 128)
GROUPED = {
    "shared_intermediate_size": 128,
    "scoring": "sigmoid",
    "num_groups": 4,
    "topk_groups": 2,
    "scaling_factor": 2.5,
    "correction_bias": True,
}
CHOICES = {"softmax": {}, "sigmoid": GROUPED}


@pytest.fixture(params=CHOICES)
def layer(request, monkeypatch) -> Layer:
    torch.manual_seed(0)
    monkeypatch.setitem(MODELS, "small", SMALL)
    monkeypatch.setitem(OPTIONS, "small", CHOICES[request.param])
    with torch.inference_mode():
        return Layer.random(SMALL, random_moe("small", "cpu"), 9)


def test_layers_are_those_of_their_papers():
    assert {*OPTIONS} <= {*MODELS}
    assert {model for _, model, _ in moe_layers.GOALS} <= {*OPTIONS}
    options = OPTIONS["deepseek_v3"]
    assert (options["num_groups"], options["topk_groups"], options["scaling_factor"]) == (8, 4, 2.5)
    assert OPTIONS["qwen3_30b_a3b"].get("shared_intermediate_size", 0) == 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_pytorchs_router_chooses_as_ours(choice, bias):
    torch.manual_seed(0)
    options = {k: v for k, v in CHOICES[choice].items() if k != "shared_intermediate_size"}
    if options:
        options["correction_bias"] = bias
    gate = TopKRouter(64, 8, 2, **options)
    if gate.e_score_correction_bias is not None:
        gate.e_score_correction_bias.normal_()
    x = torch.randn(50, 64).bfloat16()
    with torch.no_grad():
        ours, theirs = gate(x), torch_router(gate)(x)
    at, same_at = ours[0].argsort(dim=1), theirs[0].argsort(dim=1)
    assert torch.equal(ours[0].gather(1, at), theirs[0].gather(1, same_at))
    torch.testing.assert_close(ours[1].gather(1, at), theirs[1].gather(1, same_at))


@pytest.mark.usefixtures("deep_gemm")
def test_every_peer_is_the_same_layer(layer):
    with torch.inference_mode():
        found = layer.errors({name: LAYERS[name].prepare(layer)() for name in LAYERS})
        wrong = layer.errors({"zeros": torch.zeros_like(layer.x)})
    assert {*found} == {OURS, MEGA, HF_FP8}
    assert 0 < max(found.values()) < 0.06
    assert wrong["zeros"] == pytest.approx(1.0)


def test_routers_agree(layer):
    with torch.inference_mode():
        index = {name: ROUTERS[name].prepare(layer)() for name in ROUTERS}
        assert {name: layer.agreement(x) for name, x in index.items()} == {OURS: 1.0, TORCH: 1.0}
        lost = index[OURS].clone()
        lost[0] = (lost[0] + 1) % 8
        assert layer.agreement(lost) == pytest.approx(8 / 9, abs=1e-4)


def row(what: str, model: str, tokens: int, **us: float) -> dict:
    peers = {}
    for name, taken in us.items():
        peers[name] = {"us": taken, "eager_us": taken + 50, "graph_us": taken + 1}
    peers[OURS]["repeatable"] = True
    return {"what": what, "model": model, "tokens": tokens, "peers": peers}


@pytest.fixture
def results() -> dict:
    slower = {"us": 230.0, "ratio": 1.9, "least": 1.8, "most": 2.0}
    rows = [
        row(LAYER, "deepseek_v3", 1, moefp8=100.0, sgl_megamoe=150.0, hf_deepgemm=300.0),
        row(LAYER, "deepseek_v3", 16, moefp8=110.0, sgl_megamoe=220.0),
        row(ROUTER, "deepseek_v3", 1, moefp8=6.0, torch=5.0),
    ]
    rows[1]["peers"][OURS]["without_rest"] = {"us": 121.0}
    rows[1]["peers"][MEGA]["without_rest"] = slower
    rows[1]["peers"][HF_FP8] = {"refused": "it does"}
    about = {"gpu": "a GPU", "torch": "2", "date": "2026-11-21", "commit": "abc"}
    return {**about, "mega_kernel": "sgl-deep-gemm 0.2.5", "rows": rows}


def test_what_is_printed(results):
    first, second, third = results["rows"]
    title, ours, mega, _ = moe_layers.lines_of_row(first)
    assert title == "layer of DeepSeek-V3, 1 tokens"
    assert "device 100.0, eager 150.0, graph 101.0" in ours
    assert ours.endswith("  goal graph 105: met")
    assert mega.endswith("  x1.50 with pauses")
    _, ours, mega, refused = moe_layers.lines_of_row(second)
    assert ours.endswith(", without rest 121.0")
    assert mega.endswith(", without rest 230.0  x1.90 without rest")
    assert refused.endswith("is left out: it does")
    assert next(x for x in moe_layers.lines_of_row(third) if "goal" in x).endswith("5: MISSED")
    rest = "\n".join(moe_layers.lines_of_the_rest(results))
    assert "slower than a peer on the device: router of DeepSeek-V3, 1 tokens" in rest
    first["peers"][OURS]["repeatable"] = False
    rest = "\n".join(moe_layers.lines_of_the_rest(results))
    assert "NOT at layer of DeepSeek-V3, 1 tokens" in rest


def test_the_tables(results):
    tables = report.TABLES["moe_layers"](results)
    assert "| 1 | 100.0 / 150.0 / 101.0 |" in tables
    assert "| 110.0 / 160.0 / 111.0 / 121.0 |" in tables
    assert "| 1.90 (2.00) | - |" in tables
    assert "mega-kernel of sgl-deep-gemm 0.2.5" in tables


@pytest.mark.usefixtures("deep_gemm", "no_gpu_needed")
def test_from_end_to_end(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(MODELS, "small", SMALL)
    monkeypatch.setitem(OPTIONS, "small", GROUPED)
    monkeypatch.setattr(moe_layers, "random_moe", lambda name: random_moe(name, "cpu"))
    for name in ("layer_us_many", "eager_us_many", "graph_us_many"):
        monkeypatch.setattr(moe, name, lambda calls, repeats: dict.fromkeys(calls, 60.0))
    monkeypatch.setattr(moe, "captured", lambda call: (call(), call)[1])
    monkeypatch.setattr(moe_layers, "num_copies", lambda num_bytes: 2)
    monkeypatch.setattr(without_rest, "captured", lambda call: (call(), call)[1])
    figures = {"us": 66.0, "ratio": 1.1, "least": 1.0, "most": 1.2}
    monkeypatch.setattr(session, "without_rest", lambda loops, *_: dict.fromkeys(loops, figures))
    out = tmp_path / "layers.json"
    run_main(monkeypatch, moe_layers, "--models", "small", "--tokens", "1,5", "--out", str(out))
    assert "4 of 4 cases" in capsys.readouterr().out
    results = json.loads(out.read_text())
    assert [(each["what"], each["tokens"]) for each in results["rows"]] == [
        (what, tokens) for tokens in (1, 5) for what in (LAYER, ROUTER)
    ]
    for each in results["rows"]:
        assert {*each["peers"]} == {*moe_layers.PEERS[each["what"]]}
        for found in each["peers"].values():
            assert found["without_rest"] == figures
            assert found.get("error", 0) < 0.06
            assert found.get("agreement", 1) == 1
    assert report.layers_tables({**results, "torch": "2"})
