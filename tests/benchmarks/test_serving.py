"""What is measured of an engine, without one, and tables of what runs have written."""

import sys
from types import SimpleNamespace

import pytest
import torch

from benchmarks.serving.engine import Settings, measure, pools
from benchmarks.serving.goals import QWEN3, judged
from benchmarks.serving.table import speedup, tables

MODEL = {"model": "m", "title": "Some model"}
ABOUT = {"cpu": "a CPU", "torch": "2.0", "date": "2026-11-29T00", "commit": "abc"}


def run(ms: float, start_s: float = 60.0, cold: bool = False, of="vllm", **more) -> dict:
    phase = {"tokens": 16000, "ms": ms, "first_ms": 2 * ms} | more
    phases = {"prefill 16 x 1000": phase}
    return {"cold": cold, of: "0.26.0", "first_token_s": start_s, "phases": phases}


def row(**engines) -> dict:
    return {**MODEL, "engines": engines}


def test_speeds_are_those_of_medians_over_runs():
    measured = row(
        moefp8={"runs": [run(100.0, experts_share=0.5), run(110.0), run(400.0)]},
        default={"runs": [run(200.0, 90.0, cold=True), run(220.0), run(230.0)]},
    )
    assert speedup(measured, "default", "prefill 16 x 1000") == 2.0
    lines = tables({**ABOUT, "rows": [measured]}).splitlines()
    assert "| Some model | prefill 16 x 1000 | 145455 | 2.00 (2.00) | 50 % |" in lines
    assert "| Some model | vLLM's default | 90.0 | 60.0 | - |" in lines
    assert "| Some model | moefp8 | - | 60.0 | - |" in lines
    assert any("CUDA graphs on one a CPU" in line for line in lines)
    assert any("Medians of 3 runs, engines in turns" in line for line in lines)


def test_models_with_other_numbers_of_runs_are_named():
    more, once = row(moefp8={"runs": [run(1.0), run(2.0)]}), row(moefp8={"runs": [run(3.0)]})
    rows = [more, {**once, "title": "Other"}]
    assert "Medians of 2 runs (Some model) and one run (Other), engines in turns" in tables(
        {**ABOUT, "rows": rows}
    )
    assert "One run of each engine" in tables({**ABOUT, "rows": rows[1:]})
    more["engines"]["default"] = {"runs": [run(1.0)]}
    assert "Medians of 1 to 2 runs, engines" in tables({**ABOUT, "rows": [more]})


def test_an_engine_that_did_not_run_has_no_ratio():
    rows = [row(moefp8={"runs": [run(1.0)]}), row(triton={"runs": [run(2.0)]})]
    lines = tables({**ABOUT, "rows": rows}).splitlines()
    assert "| Some model | prefill 16 x 1000 | 16000000 | - | - |" in lines


def test_a_goal_names_the_engines_that_ran():
    phases = {"decode 1": {"tokens": 1, "ms": 2.0, "first_ms": 2.0}}
    runs = {"runs": [{"cold": True, "vllm": "0", "first_token_s": 1.0, "phases": phases}]}
    qwen3 = {"model": QWEN3, "title": "Qwen3", "engines": {"moefp8": runs, "default": runs}}
    goal = "decoding, times as fast as vLLM's default"
    assert goal in [x.goal for x in judged([qwen3])]
    qwen3["engines"]["triton"] = runs
    goal = "decoding, times as fast as the faster of vLLM's default and without DeepGEMM"
    assert goal in [x.goal for x in judged([qwen3])]


def test_an_engine_that_did_not_run_is_told():
    measured = row(
        moefp8={"runs": [run(100.0)]}, deep_gemm={"runs": [], "refused": "it ended with 1: X"}
    )
    text = tables({**ABOUT, "rows": [measured]})
    assert "- experts of DeepGEMM with Some model: it ended with 1: X" in text
    assert "| Some model | prefill 16 x 1000 | 160000 | - | - |" in text


def test_engines_of_sglang_are_beside_each_other_and_beside_those_of_vllm():
    ours, theirs = {"runs": [run(100.0, of="sglang")]}, {"runs": [run(150.0, of="sglang")]}
    sglang = {"sglang_moefp8": ours, "sglang": theirs}
    vllm = {"moefp8": {"runs": [run(80.0)]}, "default": {"runs": [run(160.0)]}}
    text = tables({**ABOUT, "rows": [row(**sglang)]})
    assert "| model | phase | SGLang with moefp8, tokens/s | times as fast as SGLang's d" in text
    assert "| Some model | prefill 16 x 1000 | 160000 | 1.50 (1.50) |\n" in text
    assert "| Some model | SGLang's default | - | 60.0 | - |" in text
    assert "SGLang 0.26.0 with CUDA graphs on one a CPU" in text
    assert "vLLM" not in text
    text = tables({**ABOUT, "rows": [row(**vllm, **sglang)]})
    assert "| prefill 16 x 1000 | 200000 | 2.00 (2.00) | 160000 | 1.50 (1.50) | - |\n" in text
    assert "and CUDA graphs and SGLang 0.26.0 with CUDA graphs on one a CPU" in text


class FakeVllm:
    """As far as the benchmark calls it."""

    cached = 0

    def __init__(self, checkpoint: str, **options) -> None: ...

    def generate(self, prompts, sampling, use_tqdm):
        made = SimpleNamespace(token_ids=[0] * sampling.max_tokens)
        return [SimpleNamespace(outputs=[made], num_cached_tokens=self.cached) for _ in prompts]


class FakeSglang:
    cached = 0

    def __init__(self, model_path: str, **options) -> None: ...

    def generate(self, input_ids, sampling_params):
        about = {"completion_tokens": sampling_params["max_new_tokens"]}
        return [{"meta_info": about | {"cached_tokens": self.cached}} for _ in input_ids]


@pytest.fixture
def packages(monkeypatch) -> None:
    """vLLM and SGLang that generate zeros."""
    for name, names in (
        ("vllm", {"LLM": FakeVllm, "SamplingParams": SimpleNamespace}),
        ("sglang", {"Engine": FakeSglang}),
    ):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(__version__="1.2", **names))
        monkeypatch.delitem(sys.modules, f"benchmarks.serving.{name}", raising=False)


def settings(engine: str) -> Settings:
    return Settings(engine, "/nowhere", "", 2, ((2, 10), (1, 20)), (1, 3), 100, shares=True)


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(("engine", "package"), [("default", "vllm"), ("sglang_moefp8", "sglang")])
def test_phases_of_engines(engine, package):
    *_, results = measure(settings(engine))
    assert results[package] == "1.2"
    assert results["first_token_s"] >= results["start_s"]
    tokens = {name: phase["tokens"] for name, phase in results["phases"].items()}
    assert tokens == {"prefill 2 x 10": 20, "prefill 1 x 20": 20, "decode 1": 1, "decode 3": 3}


@pytest.mark.usefixtures("packages")
@pytest.mark.parametrize(("engine", "fake"), [("default", FakeVllm), ("sglang", FakeSglang)])
def test_a_prompt_from_a_cache_is_refused(engine, fake, monkeypatch):
    monkeypatch.setattr(fake, "cached", 5)
    with pytest.raises(RuntimeError, match="taken a prompt from its cache"):
        list(measure(settings(engine)))


def test_memory_by_pool(monkeypatch):
    snapshot = [
        {"segment_pool_id": pool, "total_size": size * 2**30, "allocated_size": live * 2**30}
        for pool, size, live in (((0, 0), 4, 3), ((0, 1), 2, 2), ((0, 0), 6, 1))
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: snapshot)
    assert pools() == {
        "0,0": {"segments_gib": 10.0, "live_gib": 4.0},
        "0,1": {"segments_gib": 2.0, "live_gib": 2.0},
    }
