"""Tables of engines, made of what a run has written."""

from benchmarks.serving.goals import QWEN3, judged
from benchmarks.serving.table import speedup, tables

MODEL = {"model": "m", "title": "Some model"}
ABOUT = {"cpu": "a CPU", "torch": "2.0", "date": "2026-11-29T00", "commit": "abc"}


def run(ms: float, start_s: float = 60.0, cold: bool = False, **more) -> dict:
    phase = {"tokens": 16000, "ms": ms, "first_ms": 2 * ms} | more
    phases = {"prefill 16 x 1000": phase}
    return {"cold": cold, "vllm": "0.26.0", "first_token_s": start_s, "phases": phases}


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
    assert any("vLLM 0.26.0 on one a CPU" in line for line in lines)
    assert any("Medians of 3 runs, engines in turns" in line for line in lines)


def test_models_with_other_numbers_of_runs_are_named():
    more, once = row(moefp8={"runs": [run(1.0), run(2.0)]}), row(moefp8={"runs": [run(3.0)]})
    rows = [more, {**once, "title": "Other"}]
    assert "Medians of 2 runs (Some model) and one run (Other), engines in turns" in tables(
        {**ABOUT, "rows": rows}
    )
    assert "One run of each engine" in tables({**ABOUT, "rows": rows[1:]})


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
    told = tables({**ABOUT, "rows": [measured]})
    assert "- experts of DeepGEMM with Some model: it ended with 1: X" in told
    assert "| Some model | prefill 16 x 1000 | 160000 | - (-) | - |" in told
