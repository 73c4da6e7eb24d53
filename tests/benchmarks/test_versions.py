"""Two checkouts in turns, without a GPU: every case on the CPU, ratios, and what is left out."""

import io
import json

import pytest
import torch

from benchmarks import circumstances, report, versions
from benchmarks.versions import CannotRun, Model, Worker
from tests.benchmarks.cases import run_main

DEEPSEEK = {**versions.MODELS["DeepSeek-V3"].router, "num_groups": 4, "topk_groups": 2}
SMALL = {"routed": Model(4, 2, 256, 128), "shared": Model(8, 2, 256, 128, 128, DEEPSEEK)}
CASES = versions.cases_of([(256, 128)], SMALL, (3,), (2,))


@pytest.fixture
def on_cpu(monkeypatch):
    """Layers are made on the CPU; a group of ranks ends with the test."""
    monkeypatch.setattr(versions, "DEVICE", "cpu")
    yield
    versions._made.cache_clear()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("case", CASES)
def test_every_case_runs(case):
    with torch.no_grad():
        result = CASES[case]()()
    if "backward" in case:
        assert all(grad is not None and grad.isfinite().all() for grad in result)
        assert any(grad.any() for grad in result)
        assert len(result) > 1 or case.startswith(("FP8Linear", "shared"))
    elif not case.startswith("fp8_gemm_nt"):
        assert result.shape[0] == 3
        assert not result.requires_grad
        assert result.isfinite().all()


@pytest.mark.usefixtures("on_cpu")
def test_a_trained_case_trains_weights_and_a_frozen_one_does_not():
    shapes = {}
    for variant in ("", ", trained", ", LoRA"):
        grads = CASES[f"FP8Linear 256 -> 128{variant}, forward and backward, 2 tokens"]()()
        shapes[variant] = [tuple(grad.shape) for grad in grads]
    tokens = (2, 256)
    assert shapes == {
        "": [tokens],
        ", trained": [tokens, (128, 256)],
        ", LoRA": [tokens, (16, 256), (128, 16)],
    }


def test_a_stored_case_keeps_its_name():
    stored = json.loads(versions.RESULTS.read_text())["rows"]
    assert {row["case"] for row in stored} <= versions.cases_of().keys()


class Canned:
    """A worker that takes so many microseconds in each turn, in order, or cannot run a mode."""

    def __init__(self, *us: float, refuses: str = "") -> None:
        self.turns, self.refuses = iter(us * len(versions.MODES)), refuses

    def us(self, case: str, mode: str) -> float:
        if mode == self.refuses:
            raise CannotRun("/other cannot run it: RuntimeError: no graph")
        return next(self.turns)


def test_replays_count_by_their_median_and_eager_calls_by_the_fastest():
    this, other = Canned(10, 10, 10, 20, 40), Canned(10, 30, 30, 30, 30)
    graph, eager = versions.measure(this, other, ["a case"])
    assert (graph["us"], graph["other_us"], graph["ratio"]) == (10, 30, 1.5)
    assert (eager["us"], eager["other_us"], eager["ratio"]) == (10, 10, 1.0)
    assert graph["ratio_spread"] == [1.0, 3.0]


def test_what_cannot_be_captured_is_timed_eagerly_alone(capsys):
    this, other = Canned(*[10] * 5), Canned(*[20] * 5, refuses="graph")
    (row,) = versions.measure(this, other, ["a case"])
    assert (row["mode"], row["ratio"]) == ("eager", 2.0)
    printed = capsys.readouterr().out
    assert "a case, graph: left out, /other cannot run it: RuntimeError: no graph" in printed
    results = {"commit": "abc", "other": "def", "gpu": "none", "rows": [row]}
    assert "| a case | - | 10.0, 20.0 (2.00) |" in report.versions_table(results)


def test_a_mode_has_its_mean_and_its_worst_cases(monkeypatch):
    monkeypatch.setattr(versions, "NUM_WORST", 1)
    ratios = {"fast": 4.0, "slow": 0.25, "same": 1.0}
    rows = [{"case": case, "mode": "graph", "ratio": ratio} for case, ratio in ratios.items()]
    assert versions.lines_of_modes(rows) == [
        "graph: 1.000 (3 cases, 0.250 to 4.000)",
        "  0.250 slow",
    ]


def test_a_worker_answers_times_and_why_there_is_none(monkeypatch, capsys):
    def broken():
        raise ValueError("no\nsuch shape")

    made = []
    cases = {"fine": lambda: made.append("fine") or (lambda: 12.5), "broken": broken}
    monkeypatch.setattr(versions, "cases_of", lambda: cases)
    monkeypatch.setattr(versions, "_captured", lambda call: lambda: -call())
    monkeypatch.setattr(versions, "_us_without_rest", lambda call: call())
    asked = "fine\tgraph\nfine\teager\nfine\tgraph\nbroken\tgraph\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(asked))
    versions.work()
    assert capsys.readouterr().out.splitlines() == ["-12.5", "12.5", "-12.5", "ValueError: no"]
    assert len(made) == len(versions.MODES)  # a case is made once for each mode


def test_a_process_that_cannot_run_a_case_says_why():
    worker = Worker(versions.ROOT)
    for _ in range(2):  # and goes on
        with pytest.raises(CannotRun, match=f"{versions.ROOT} cannot run it: KeyError: 'no case'"):
            worker.us("no case", "eager")


def test_from_end_to_end(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(circumstances, "require_gpu", lambda name: None)
    monkeypatch.setattr(circumstances, "circumstances", lambda: {"commit": "abc", "gpu": "none"})
    monkeypatch.setattr(versions, "RESULTS", tmp_path / "versions.json")
    monkeypatch.setattr(versions, "Worker", lambda at: Canned(*[10.0] * 10))
    only = "--only", "^router.*, 1 tokens"
    run_main(monkeypatch, versions, str(tmp_path / "other"), *only, "--json")
    assert "eager: 1.000 (2 cases, 1.000 to 1.000)" in capsys.readouterr().out
    results = json.loads(versions.RESULTS.read_text())
    assert {row["case"] for row in results["rows"]} == {
        "router of Qwen3-30B-A3B, 1 tokens",
        "router of DeepSeek-V3, 1 tokens",
    }
    assert results["other"] == "other"
    with pytest.raises(SystemExit):
        run_main(monkeypatch, versions, "other", "--only", "no such case")
    assert "no case matches 'no such case'" in capsys.readouterr().err
