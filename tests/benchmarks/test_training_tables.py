"""Goals and tables of the benchmark of training, and files of several GPUs."""

import json

import pytest

from benchmarks import report
from benchmarks.figures import PAUSES, WITHOUT_REST, Row
from benchmarks.gradient_peers import COPY
from benchmarks.peers import BF16, OURS
from benchmarks.training import __main__ as training
from benchmarks.training import cases, goals, kernels
from benchmarks.training.parts import GROUPED, LAYERS, LINEARS, QUANTIZERS, WGRAD
from benchmarks.training.peers import (
    BLOCKS,
    EVERY,
    EVERY_BLOCKS,
    SAVED_FP8,
    SONIC,
    TE_ONCE,
    TORCHAO,
)
from tests.benchmarks.cases import headline_of, run_main


def test_files_of_several_gpus_are_put_together(results, monkeypatch, capsys, tmp_path):
    first, second, out = (tmp_path / f"{name}.json" for name in ("first", "second", "out"))
    linear, *others = results["rows"]
    newer = {**linear, "peers": linear["peers"] | {TORCHAO: {"refused": "newer"}}}
    waiting = [f"{LINEARS}: {linear['case']}", f"{GROUPED}: none has it"]
    first.write_text(
        json.dumps(results | {"rows": [linear], "left_out": waiting, "deep_gemm": "missing"})
    )
    second.write_text(json.dumps(results | {"rows": [*others, newer], "libraries": {"TE": "2"}}))
    run_main(monkeypatch, training, "--report", str(first), str(second), "--out", str(out))
    found = json.loads(out.read_text())
    assert found["rows"] == [*others, newer]
    assert found["left_out"] == [f"{GROUPED}: none has it"]
    assert found["libraries"] == {"SonicMoE": "0.1", "TE": "2"}
    assert "goals met: 10 of 15" in capsys.readouterr().out
    assert found["deep_gemm"] == "sgl-deep-gemm 0.1.5"  # the first file had nobody to tell it
    second.write_text(json.dumps(results | {"commit": "other"}))
    with pytest.raises(ValueError, match="must have this run's commit, abc, got other"):
        run_main(monkeypatch, training, "--report", str(first), str(second), "--out", str(out))
    assert json.loads(out.read_text()) == found


def row(part: str, case: str, us: dict[str, tuple[float, float]], **more: object) -> Row:
    """Times without rest and with pauses."""
    found: Row = {
        name: {
            "us": pauses,
            "tflops": 1e6 / pauses,
            "gbps": 4e5 / pauses,
            "without_rest": {"us": rest, "ratio": rest / us[OURS][0], "least": 1.0, "most": 2.0},
        }
        for name, (rest, pauses) in us.items()
    }
    del found[OURS]["without_rest"]["ratio"]
    return {"part": part, "case": case, "peers": found}


@pytest.fixture
def results() -> dict:
    linear = {OURS: (1000.0, 900.0), BLOCKS: (950.0, 850.0), BF16: (1400.0, 1350.0)}
    layers = row(LAYERS, goals.QWEN3, {OURS: (100.0, 90.0), BF16: (210.0, 200.0)})
    layers["peers"][SONIC] = {"refused": "TimeoutError: its first call did not end in 40 s"}
    layers["peers"][SAVED_FP8] = dict(layers["peers"][OURS])
    for found in (layers["peers"][name] for name in (OURS, SAVED_FP8, BF16)):
        found |= {"step_bytes": 3 << 29, "saved_bytes_per_token": 16.5 * 1024, "host_us": 70.4}
    rows = [
        row(LINEARS, str(cases.LINEARS[0]), {**linear, TE_ONCE: (1200.0, 950.0)}),
        row(GROUPED, str(cases.GROUPED[2]), {OURS: (99.0, 99.0), EVERY_BLOCKS: (100.0, 100.0)}),
        layers,
        row(WGRAD, str(kernels.DENSE_WGRAD), {OURS: (1000.0, 900.0)}),
        row(QUANTIZERS, str(kernels.QUANTIZE_CASES[0]), {OURS: (100.0, 90.0), COPY: (85.0, 70.0)}),
    ]
    rows[0]["peers"][TE_ONCE]["without_rest"]["eager"] = True
    about = {"gpu": "a GPU", "driver": "0", "torch": "2", "date": "2026-11-27T00", "commit": "abc"}
    turns = {"rounds": 3, "seconds": 0.25, "settling_seconds": 3.0}
    about |= {"missing": {"torchao, every step": "it is"}, "left_out": [], "copy_gbps": 4300.0}
    about |= {"libraries": {"SonicMoE": "0.1"}, "deep_gemm": "sgl-deep-gemm 0.1.5", "turns": turns}
    return {**about, "rows": rows}


def test_goals_are_judged_in_both_modes(results):
    found = {(x.goal.part, x.goal.what): x for x in goals.judged(results["rows"])}
    assert len(found) == 6
    linear = found[LINEARS, "times as fast as BF16, cuBLAS"].found
    assert linear[OURS] == {WITHOUT_REST: pytest.approx(1.4), PAUSES: pytest.approx(1.5)}
    assert linear[BLOCKS][WITHOUT_REST] == pytest.approx(1400 / 950)
    (saved,) = found[LAYERS, "KiB kept for a token"].found.values()
    assert saved == {PAUSES: 16.5}
    (share,) = found[QUANTIZERS, "times as fast as a copy"].found.values()
    assert share == {WITHOUT_REST: pytest.approx(0.70), PAUSES: pytest.approx(70 / 90)}
    met, all_of_them = goals.num_met([*found.values()])
    assert (met, all_of_them) == (10, 15)
    results["rows"][2]["peers"][SAVED_FP8]["saved_bytes_per_token"] = 18000.0
    assert goals.num_met([*goals.judged(results["rows"])]) == (9, 15)


def test_a_miss_never_looks_like_the_goal(results):
    """Rounding would make it."""
    (judged,) = (x for x in goals.judged(results["rows"]) if x.goal.what.endswith("BF16, cuBLAS"))
    told = [judged.told(value) for value in (1.4449, 1.4496, 1.45, 1.4549)]
    assert told == ["1.44 MISSED", "1.4496 MISSED", "1.45 met", "1.45 met"]


def test_what_is_printed(results):
    linear, _, layer, *_ = results["rows"]
    title, ours, _, bf16, te = training.lines_of_row(linear)
    assert title == "linears: 8192x4096x7168, us without rest / with pauses"
    assert ours.split() == ["moefp8,", "128x1", "1000.0", "/", "900.0", "x1.400", "x1.500"]
    assert "x1" not in bf16.replace("x1.000", "")
    assert "1200.0 / 950.0 eager" in te
    assert any("SonicMoE, BF16 is left out" in line for line in training.lines_of_row(layer))
    assert any("GiB 1.50  KiB a token 16.5" in line for line in training.lines_of_row(layer))
    rest = "\n".join(training.lines_of_the_rest(results))
    assert "goal 1.45: without rest 1.40 MISSED; with pauses 1.50 met" in rest
    assert "goals met: 10 of 15" in rest
    assert "not there: it is" in rest


def test_the_tables(results):
    text = report.TABLES["training"](results)
    speeds = "times as fast as BF16, cuBLAS | 1.40 / 1.50 | 1.47 / 1.59 |"
    assert f"| linears: 8192x4096x7168 | {speeds}" in text
    assert "| dW alone: 4096x7168x8192 | TFLOP/s | 1000 / 1111 | - |" in text
    assert "| KiB kept for a token | 16.5 | - |" in text
    assert "| *1200.0 / 950.0 |" in text
    assert "| 100.0 / 90.0, host 70 |" in text
    assert "| 1.50 GiB, 16.5 KiB |" in text
    assert "Not there: torchao, every step." in text
    assert (
        "a GPU, driver 0, torch 2, SonicMoE 0.1, sgl-deep-gemm 0.1.5; 2026-11-27, commit abc."
        in text
    )


def test_the_headline_has_the_least_and_most_without_rest(results):
    assert headline_of(training=results) == (
        "- Steps of training beside BF16, on one a GPU, without rest, times as fast, with weights "
        "that are quantized once (in every step): linears 1.40 to 1.40, expert layers with their "
        "router 2.10 to 2.10."
    )
    results["rows"][0]["peers"][EVERY] = results["rows"][0]["peers"][BF16]
    assert "linears 1.40 to 1.40 (1.00 to 1.00)," in headline_of(training=results)
