"""Convergence: runs that stop and go on, probes, figures of curves, the table and the plot."""

import json
import math
import time
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import report
from benchmarks.convergence import VARIANTS, figures, plot, table
from benchmarks.convergence import __main__ as convergence
from benchmarks.convergence.example import train
from benchmarks.convergence.probes import cosines, gradients, probe, underflow
from benchmarks.convergence.runs import Plan, Run, Text
from moefp8.quant import quantize_1x128
from tests.benchmarks.cases import run_main

TINY = replace(train.SIZES["small"], layers=1, experts=4, rows=2, length=16)
PLAN = Plan(TINY, steps=25, lr=1e-3, num_probes=2, held_out_batches=3)


@pytest.fixture(scope="module")
def text() -> Text:
    pattern = torch.arange(2000, dtype=torch.int64)
    every = (pattern % 7 * 5 + 60).to(torch.uint8)
    return Text(every, every[:500])


# ---- Runs ----


def test_a_run_tells_means_of_losses_and_what_is_held_out(text):
    told = []
    run = Run(PLAN, text, "bf16", 0, None)
    assert run.go_on(told=told.append)
    found = run.result()
    assert len(found["loss"]) == 3  # the last of five steps
    assert found["loss"][0] > found["loss"][-1]
    assert [step for step, _ in found["held_out"]] == [10, 20, 25]
    assert len(told) == 3
    assert found["probes"] == []
    assert found["tokens_per_s"] > 0
    run.plan = PLAN._replace(shares_gpu=True)
    assert "tokens_per_s" not in run.result()
    assert (found["variant"], found["seed"], found["options"]) == ("bf16", 0, None)


def test_a_run_that_stopped_goes_on_to_the_same_bits(text, tmp_path, monkeypatch):
    """By a clock that counts how often it was read."""
    whole = Run(PLAN, text, "bf16", 3, None)
    assert whole.go_on(told=str)
    ticks = iter(range(1000))
    monkeypatch.setattr(time, "perf_counter", lambda: next(ticks))
    first = Run(PLAN, text, "bf16", 3, None)
    assert not first.go_on(until_s=2, told=str)
    assert 0 < first.step < PLAN.steps
    first.save(tmp_path / "state" / "run.pt")
    second = Run(PLAN, text, "bf16", 3, None)
    second.restore(tmp_path / "state" / "run.pt")
    assert second.go_on(told=str)
    for what in ("loss", "held_out"):
        assert second.record[what] == whole.record[what]
    for x, y in zip(second.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(x, y)
    other = Run(PLAN._replace(lr=2e-3), text, "bf16", 3, None)
    with pytest.raises(ValueError, match=r"run\.pt: must be of a run with"):
        other.restore(tmp_path / "state" / "run.pt")


def test_seeds_have_other_weights_and_the_same_text(text):
    runs = [Run(PLAN, text, "bf16", seed, None) for seed in (0, 1)]
    first, second = (run.model.lm_head.weight for run in runs)
    assert not torch.equal(first, second)
    assert torch.equal(*(train.batch(run.text.train, TINY, 5) for run in runs))


def test_settings_tell_what_curves_must_have_in_common(text):
    settings = PLAN.settings(text)
    assert json.loads(json.dumps(settings)) == settings
    other = Text(text.train.flip(0), text.held_out)
    assert PLAN.settings(other) != settings
    assert PLAN._replace(steps=26).settings(text) != settings
    assert PLAN._replace(num_probes=9).settings(text) == settings


def test_probes_are_from_beginning_to_end():
    plan = Plan(TINY, 3000, 1e-3, 4)
    assert sorted(plan.probed()) == [30, 1019, 2009, 2999]
    assert plan._replace(num_probes=0).probed() == set()


# ---- Probes ----


def test_cosines_are_1_for_the_same_model_and_tell_another():
    model = train.make_model(TINY, "bf16", "cpu")
    ids = torch.randint(256, (2, 17))
    found = gradients(model, ids)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(x.grad is None for x in model.parameters())
    assert set(cosines(found, gradients(model, ids)).values()) == {1.0}
    opposite = {name: -x for name, x in found.items()}
    assert set(cosines(found, opposite).values()) == {-1.0}
    with pytest.raises(ValueError, match="the same parameters"):
        cosines(found, {})


def test_underflow_is_of_values_below_half_the_least_subnormal():
    x = torch.zeros(2, 128)
    x[:, 0] = 448.0  # the scale is 1, and the least code 2^-9
    x[0, 1:5] = torch.tensor([2.0**-9, 2.0**-10 * 1.01, 2.0**-10, 2.0**-12])
    assert underflow(quantize_1x128(x).data, x) == pytest.approx(2 / 6)
    assert underflow(quantize_1x128(x[1:] * 0).data, x[1:] * 0) == 0


def test_a_probe_tells_of_every_linear_and_leaves_both_models_as_they_are():
    model, plain = (train.make_model(TINY, "bf16", "cpu", seed) for seed in (1, 2))
    before = {name: x.clone() for name, x in model.named_parameters()}
    ids = torch.randint(256, (2, 17))
    found = probe(model, plain, ids)
    assert set(found["cosine"].values()) == {1.0}  # plain got the weights of model
    assert {figures.kind_of(name) for name in found["underflow"]} == {
        "attention.qkv_proj",
        "attention.o_proj",
        "shared_expert.gate_up_proj",
        "shared_expert.down_proj",
        "experts.gate_up_proj",
        "experts.down_proj",
    }
    for shares in found["underflow"].values():
        assert shares.keys() == {"x", "x columns", "dy", "dy columns", "w"}
        assert all(0 <= share < 0.5 for share in shares.values())
    for each in (model, plain):
        assert all(torch.equal(x, before[name]) for name, x in each.named_parameters())
        assert not any(module._forward_hooks for module in each.modules())
    assert probe(model, plain, ids) == found


def test_operands_of_experts_are_those_of_their_gemms():
    """A row of x that is nearly all tiny beside one value, and weights likewise."""
    model, plain = (train.make_model(TINY, "bf16", "cpu") for _ in range(2))
    experts = model.layers[0].experts
    with torch.no_grad():
        experts.down_proj.fill_(1e-9)
        experts.down_proj[:, 0, 0] = 1.0
        model.layers[0].moe_norm.weight.fill_(1e-9)
        model.layers[0].moe_norm.weight[0] = 1.0
    shares = probe(model, plain, torch.randint(256, (2, 17)))["underflow"]
    last = 127 / 128
    assert shares["layers.0.experts.down_proj"]["w"] == pytest.approx(1, abs=1e-3)
    assert shares["layers.0.experts.gate_up_proj"]["x"] == pytest.approx(last, abs=0.02)
    assert shares["layers.0.experts.gate_up_proj"]["x columns"] < 0.5
    assert shares["layers.0.experts.down_proj"]["x"] < 0.5


# ---- Figures, tables, the plot ----


def made_up(variant: str, seed: int, factor: float, steps: int = 400, **more: object) -> dict:
    """A run whose losses fall, and which is `factor` times a BF16 run."""
    num = steps // 10
    losses = [factor * (1 + 4 * math.exp(-i / 8) + 0.01 * math.sin(i)) for i in range(num)]
    run = {
        "variant": variant,
        "seed": seed,
        "options": None if variant == "bf16" else {},
        "date": "2026-11-27T12:00:00",
        "commit": "abc",
        "cpu": "a CPU",
        "gpu": "NVIDIA H200",
        "torch": "2.13",
        "parameters": 104_000_000,
        "loss": losses,
        "held_out": [[steps // 2, 1.3 * factor], [steps, 1.2 * factor]],
        "probes": [],
        "tokens_per_s": 500_000,
    }
    return run | more


def a_probe(step: int, low: float) -> dict:
    shares = {"x": 0.001, "x columns": 0.002, "dy": 0.003, "dy columns": 0.01, "w": 0.0001}
    return {
        "step": step,
        "cosine": {
            "layers.0.experts.down_proj": low,
            "layers.1.experts.down_proj": 0.9991,
            "norm.weight": 0.9999,
        },
        "underflow": {
            "layers.0.experts.down_proj": shares,
            "layers.1.experts.down_proj": shares | {"dy": 0.5},
        },
    }


SETTINGS = {
    "steps": 400,
    "lr": 6e-4,
    "size": {k: v for k, v in vars(train.SIZES["large"]).items() if k not in ("steps", "lr")},
    "text": {"bytes": 10, "sha256": "0"},
}


def results(*factors: float) -> dict:
    """Three seeds of BF16, 0.4 % apart, and runs in FP8, factors times as high."""
    runs = [made_up("bf16", seed, 1 + seed / 500) for seed in range(3)]
    for seed, factor in enumerate(factors):
        probes = [a_probe(3, 0.98), a_probe(399, 0.97)]
        runs.append(made_up("fp8", seed, factor * (1 + seed / 500), probes=probes))
    return {"settings": SETTINGS, "runs": runs}


def test_smoothed_losses_are_means_of_the_last():
    assert figures.smoothed([4.0, 2.0, 3.0, 7.0], 2) == [4, 3, 2.5, 5]


def test_figures_of_curves():
    made = results(1.002)
    found = figures.curve(made["runs"][3], made["runs"][0])
    assert found.end == pytest.approx(0.2)
    assert found.largest == pytest.approx(0.2)
    assert found.held_out == pytest.approx(0.2)
    between = figures.spread(made)
    assert between.end == pytest.approx(0.4, rel=0.01)
    assert figures.spread({"runs": made["runs"][:1]}) is None


def test_the_largest_difference_is_behind_the_first_tenth():
    run, beside = made_up("fp8", 0, 1.0), made_up("bf16", 0, 1.0)
    run["loss"] = [2 * run["loss"][0], *run["loss"][1:]]
    assert figures.curve(run, beside).by_step[0] == pytest.approx(100)
    run["loss"] = [*beside["loss"][:-1], 1.1 * beside["loss"][-1]]
    assert figures.curve(run, beside).largest == pytest.approx(1, rel=0.1)  # one of ten means


def test_the_table_tells_of_all_runs():
    page = table.tables(results(1.001, 0.9995, 1.004))
    rows = [line.split(" | ") for line in page.splitlines()[2:10]]
    assert [row[1] for row in rows] == ["bf16"] * 4 + ["fp8"] * 4
    assert [row[3] for row in rows[4:]] == ["+0.100 %", "-0.050 %", "+0.400 %", "+0.150 %"]
    assert rows[7][0] == "| mean"
    assert [row[7] for row in rows[2:5]] == ["500,000 |", " |", "500,000 |"]
    assert rows[3][0] == "| all"
    assert rows[3][2] == "0.399 % apart"
    ends = "At the end, runs in FP8 differ from the BF16 run of their seed by at most 0.400 %"
    assert f"{ends}; BF16 runs of other seeds are 0.399 % apart." in page
    assert "104.0 M parameters (8 layers of 8 experts, 2 chosen, H = 768, I = 512" in page
    cosines_and_codes = "| `experts.down_proj` | 0.9800 | 0.9700 | 0.100 / 0.200 | 50.000 / 1.000"
    assert cosines_and_codes in page
    assert "| `norm` | 0.9999 | 0.9999 | - | - | - |" in page
    assert "NVIDIA H200, torch 2.13; 2026-11-27, commit abc." in page


def test_the_table_of_few_runs_says_no_more_than_they_do():
    only = results()
    assert "FP8" not in table.tables(only)
    only["runs"].append(made_up("bf16-again", 0, 1.002, options=None))
    again = "BF16 runs that are made again from the BF16 run of their seed by at most 0.200 %"
    assert f"At the end, {again}" in table.tables(only)
    del only["runs"][-1]["tokens_per_s"]
    (row,) = (x for x in table.tables(only).splitlines() if x.startswith("| 0 | bf16-again"))
    assert row.endswith(" |  |")
    assert " | +0.200 % | +0.200 % | " in row
    only["runs"] = [made_up("fp8", 7, 1.0)]
    page = table.tables(only)
    assert "apart" not in page
    assert page.splitlines()[2].startswith("| 7 | fp8 | ")


def test_runs_that_were_made_again_are_averaged():
    made = results(1.001, 0.999, 1.5)
    assert figures.means(made) is None
    again = [("bf16-again", 0, 1.004), ("bf16-again", 1, 1.0), ("fp8-again", 0, 1.005)]
    for variant, seed, factor in again:
        factor *= 1 + seed / 500
        made["runs"].append(made_up(variant, seed, factor, options=None if "bf" in variant else {}))
    assert figures.variants_of(made) == ["bf16-again", "fp8", "fp8-again"]
    found = figures.means(made)  # of seed 0 alone
    assert found.num_runs == 2
    assert found.end == pytest.approx(100 * (2.006 / 2.004 - 1))
    assert found.held_out == pytest.approx(found.end)
    assert "mean of 2 runs in FP8 is +0.100 % from that of as many in BF16" in table.tables(made)
    made["runs"].append(made_up("mine", 0, 1.0, options={}))
    made["runs"].append(made_up("fp8-again", 1, 1.002 * 0.999, options={}))
    assert figures.variants_of(made)[-1] == "mine"
    found = figures.means(made)
    assert found.num_runs == 4
    of_bf16 = 1 + 1.004 + 2 * 1.002
    assert found.end == pytest.approx(100 * ((2.006 + 2 * 1.002 * 0.999) / of_bf16 - 1))


def test_ends_of_the_plot_are_of_all_runs_of_a_kind():
    made = results(1.001, 0.999)
    made["runs"].append(made_up("fp8-again", 0, 1.002))
    made["runs"].append(made_up("bf16-again", 0, 1.003, options=None))
    ends = plot.ends(made)
    assert list(ends) == ["BF16, run again", "FP8"]
    assert ends["FP8"] == pytest.approx([0.1, -0.1, 0.2])
    assert ends["BF16, run again"] == pytest.approx([0.3])
    assert plot.ends(results()) == {}


@pytest.mark.parametrize("made", [results(1.001, 0.999, 1.002), results()], ids=["all", "bf16"])
def test_the_plot_is_a_picture(made, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "convergence.json").write_text(json.dumps(made))
    report.draw_plots(tmp_path)
    data = (tmp_path / "convergence.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 10_000


# ---- The command ----

FEW = "--size", "small", "--rows", "1", "--length", "16", "--steps", "10", "--device", "cpu"


def test_runs_are_added_to_a_file_and_not_made_twice(monkeypatch, tmp_path, capsys):
    out = tmp_path / "out.json"
    call = *FEW, "--out", str(out), "--state", str(tmp_path / "state"), "--run", "bf16:1,bf16:0"
    with pytest.raises(SystemExit, match="the same call goes on"):
        run_main(monkeypatch, convergence, *call, "--minutes", "0")
    assert [x.name for x in (tmp_path / "state").iterdir()] == ["bf16-1.pt"]
    run_main(monkeypatch, convergence, *call)
    assert "bf16:1 goes on behind step 0" in capsys.readouterr().out
    assert not list((tmp_path / "state").iterdir())
    found = json.loads(out.read_text())
    assert [(run["variant"], run["seed"]) for run in found["runs"]] == [("bf16", 1), ("bf16", 0)]
    run_main(monkeypatch, convergence, *call)
    assert capsys.readouterr().out.count("already") == 2
    assert json.loads(out.read_text()) == found


def test_files_are_put_together(monkeypatch, tmp_path, capsys):
    made = results(1.001)
    for name, runs in (("a", made["runs"][:2]), ("b", made["runs"][1:])):
        (tmp_path / f"{name}.json").write_text(json.dumps({"settings": SETTINGS, "runs": runs}))
    files = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    out = tmp_path / "all.json"
    run_main(monkeypatch, convergence, "--report", *files, "--out", str(out))
    assert json.loads(out.read_text()) == made
    assert "| 0 | fp8 | " in capsys.readouterr().out
    other = {"settings": SETTINGS | {"lr": 1.0}, "runs": made["runs"]}
    (tmp_path / "b.json").write_text(json.dumps(other))
    with pytest.raises(ValueError, match="equal settings"):
        run_main(monkeypatch, convergence, "--report", *files, "--out", str(out))


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--run", "fp8"), "must be VARIANT:SEED"),
        (("--run", "other:1"), "no --variant explains"),
        (("--variant", "other=1"), "a JSON object"),
        (("--variant", "bf16={}"), "a new NAME"),
        (("--minutes", "3"), "needs --state"),
    ],
)
def test_wrong_options_are_told(arguments, why, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_main(monkeypatch, convergence, *arguments)
    assert why in capsys.readouterr().err


def test_variants_are_options_of_convert():
    given = "--variant", 'mine={"a": 1}', "--variant", "again=null", "--run", "mine:0"
    options = convergence.options_of([*given])
    assert dict(options.variant) == {"mine": {"a": 1}, "again": None}
    assert options.run == [("mine", 0)]
    usual = convergence.options_of([]).run
    assert usual == [(variant, seed) for seed in (0, 1, 2) for variant in ("bf16", "fp8")]


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name.startswith("fp8")])
def test_a_run_in_fp8_is_probed(text, variant):
    run = Run(PLAN, text, variant, 0, VARIANTS[variant])
    assert run.go_on(told=str)
    found = run.result()
    assert [each["step"] for each in found["probes"]] == [0, 24]
    of_weights = [x for name, x in found["probes"][0]["cosine"].items() if "expert" in name]
    assert min(of_weights) > 0.95
    assert any(isinstance(x, nn.Linear) for x in run.plain.modules())
    beside = Run(PLAN, text, "bf16", 0, None)
    assert beside.go_on(told=str)
    assert found["loss"][-1] == pytest.approx(beside.record["loss"][-1], rel=0.03)


def test_probes_change_nothing(text):
    plans = PLAN, PLAN._replace(num_probes=0)
    probed, other = (Run(plan, text, "fp8", 0, {}) for plan in plans)
    assert probed.go_on(told=str)
    assert other.go_on(told=str)
    assert probed.record["loss"] == other.record["loss"]
