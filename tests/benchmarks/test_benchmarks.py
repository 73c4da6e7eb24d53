"""The GEMM benchmark without a GPU: ratios, goals, tables and plot on canned rows; operands."""

import importlib
import json
import os
import subprocess
import sys
from itertools import accumulate
from pathlib import Path

import pytest
import torch

import benchmarks
from benchmarks import circumstances, gemm, gemm_configs, peers, report, roofline, timing
from benchmarks.peers import BF16, BLOCK_SCALED, DEEP_GEMM, OURS, PEERS, PER_TENSOR, Case, Operands
from moefp8.kernels import fp8_gemm_nt, set_num_sms
from moefp8.testing import relative_error
from tests.fakes.emulator import emulated

REPOSITORY = Path(__file__).parents[2]
README = "before\n<!-- gemm -->\nnot measured yet\n<!-- /gemm -->\nafter\n"


def row(m: int, n: int, k: int, **us: float) -> dict:
    """moefp8 takes 10 us; the others what `us` says, or refuse."""
    case, found = Case(m, n, k), {}
    for name in PEERS:
        taken = {OURS: 10.0, **us}.get(name)
        found[name] = {"refused": "it does"}
        if taken:
            num_bytes = case.num_bytes(PEERS[name].operands)
            speed = {"tflops": case.flops / taken / 1e6, "gbps": num_bytes / taken / 1e3}
            found[name] = {"us": taken, **speed, "error": 1.7e-3}
    found[OURS]["repeatable"] = True
    return {**case._asdict(), "peers": found}


@pytest.fixture
def rows() -> list[dict]:
    return [
        row(1, 2112, 7168, deep_gemm=20.0, cublaslt_per_tensor=8.0, torch_bf16=30.0),
        row(16, 2112, 7168, deep_gemm=12.0, cublaslt_block_scaled=5.0, cublaslt_per_tensor=8.0),
        row(16, 4096, 7168, cublaslt_block_scaled=40.0),
        row(256, 4096, 7168, deep_gemm=9.0),
        row(4096, 2112, 7168, deep_gemm=11.0, torch_bf16=20.0),
        row(4096, 7168, 16384, deep_gemm=11.0, torch_bf16=20.0),
    ]


@pytest.fixture
def results(rows) -> dict:
    about = {"date": "2026-11-21T10:00:00+00:00", "commit": "abc1234", "torch": "2.11.0+cu130"}
    gpu = {"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "deep_gemm": "deep-gemm 1.0"}
    host = {OURS: 12.0, DEEP_GEMM: 21.0, BF16: 15.7}
    return {**about, **gpu, "copy_gbps": 4300.0, "host_us": host, "rows": rows}


def test_geomean():
    assert gemm.geomean([2.0, 8.0]) == pytest.approx(4.0)
    assert gemm.geomean([3.0]) == pytest.approx(3.0)


def test_ratios_are_theirs_to_ours_and_none_without_them(rows):
    assert gemm.ratio(rows[0], [DEEP_GEMM]) == 2.0
    assert gemm.ratio(rows[1], [DEEP_GEMM, BLOCK_SCALED]) == 0.5
    assert gemm.ratio(rows[0], [BLOCK_SCALED]) is None


def test_compare_takes_the_rows_of_its_m_that_both_ran(rows):
    found = gemm.compare(rows, (1, 16), "best")
    assert found.geomean == pytest.approx((2.0 * 0.5 * 4.0) ** (1 / 3))
    assert (found.worst, found.worst_case, found.num_cases) == (0.5, Case(16, 2112, 7168), 3)
    assert gemm.compare(rows, (1, 16), "deep_gemm").num_cases == 2
    assert gemm.compare(rows, (64,), "best") is None


@pytest.mark.parametrize(
    ("goal", "met"), [((1.5, 1.1), True), ((1.6, 1.1), False), ((1.5, 1.2), False)]
)
def test_a_goal_wants_geomean_and_worst(goal, met):
    found = gemm.Comparison(1.5, 1.1, Case(1, 1, 1), 2)
    assert found.meets(goal) == met


def test_every_m_is_in_one_group(rows):
    assert gemm.groups_of(rows) == [(1, 16), (256,), (4096,)]


def test_goals_name_groups_and_comparisons():
    assert {group for group, _ in gemm.GOALS} == set(gemm.GROUPS)
    assert {against for _, against in gemm.GOALS} <= set(gemm.AGAINST)
    assert sorted(m for group in gemm.GROUPS for m in group) == list(gemm.MS)


def test_what_is_printed(results):
    rows = results["rows"]
    table = list(gemm.lines_of_table([each for each in rows if each["m"] == 16]))
    assert table[0] == "M = 16"
    assert "12.0 x1.20" in table[2]
    assert len({len(line) for line in table[1:]}) == 1
    comparisons = "\n".join(gemm.lines_of_comparisons(rows))
    assert "geomean 1.100  worst 1.100 at 4096x2112x7168  goal 1.05, worst 1.00: met" in comparisons
    assert "goal 1.20, worst 1.03: MISSED" in comparisons
    rest = "\n".join(gemm.lines_of_the_rest(results))
    assert "= 1.00  goal 2.00: met" in rest
    assert "at K = 16384, moefp8 over DeepGEMM" in rest
    assert "the same bits before and after timing: yes" in rest
    assert "moefp8 12.0, DeepGEMM 21.0, torch BF16 15.7  goal torch BF16's: met" in rest
    rows[1]["peers"][OURS] |= {"repeatable": False, "error": 1.0}
    rest = "\n".join(gemm.lines_of_the_rest(results))
    assert "goal 2.00: MISSED" in rest
    assert "NOT at 16x2112x7168" in rest


def test_everything_prints_without_deep_gemm(results):
    for each in results["rows"]:
        del each["peers"][DEEP_GEMM]
    del results["host_us"][DEEP_GEMM]
    assert "DeepGEMM" not in "\n".join(gemm.lines_of_the_rest(results))
    assert gemm.compare(results["rows"], (16,), "best").num_cases == 2
    assert list(gemm.lines_of_comparisons(results["rows"]))
    assert report.gemm_tables(results)


def test_the_report_writes_the_tables(results, tmp_path):
    (tmp_path / "gemm.json").write_text(json.dumps(results))
    text = report.with_tables(README, tmp_path)
    assert text.startswith("before\n<!-- gemm -->\n| times as fast as | DeepGEMM |")
    assert text.endswith("</details>\n<!-- /gemm -->\nafter\n")
    assert "| M = 4096 | 1.100, worst 1.100 | 1.100, worst 1.100 | - | 2.000, worst 2.000 |" in text
    assert "| 16 | 2112x7168 | 10.0 | 12.0 | **5.0** | 8.0 | - |" in text
    assert "NVIDIA H200, driver 580.1, torch 2.11.0+cu130, deep-gemm 1.0; 2026-11-21" in text
    assert report.with_tables(text, tmp_path) == text
    for line in text.splitlines():  # every line of a table has as many cells as its head
        if line.startswith("|---"):
            width = line.count("|")
        assert not line.startswith("| M") or line.count("|") == width or "N x K" in line


def test_the_report_leaves_what_was_not_measured(tmp_path):
    assert report.with_tables(README, tmp_path) == README
    report.draw_plots(tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_plot_is_a_picture(results, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "gemm.json").write_text(json.dumps(results))
    report.draw_plots(tmp_path)
    data = (tmp_path / "gemm.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 10_000


def test_points_and_roofs(results):
    case = Case(16, 2112, 7168)
    x, y = roofline.points(results, DEEP_GEMM)[1]
    assert x == pytest.approx(case.flops / case.num_bytes("block_scaled"))
    assert y == pytest.approx(case.flops / 12.0 / 1e6)
    best = case.flops / 8.0 / 1e6
    assert roofline.roofs(results) == {"copy": 4.3, "datasheet": 1979.0, "measured": best}


def test_bytes_of_a_case():
    case = Case(3, 200, 300)
    codes = 3 * 300 + 200 * 300 + 2 * 3 * 200
    assert case.num_bytes("codes") == codes
    assert case.num_bytes("block_scaled") == codes + 4 * (3 * 3 + 2 * 3)
    assert case.num_bytes("bf16") == 2 * (3 * 300 + 200 * 300) + 2 * 3 * 200


@pytest.mark.parametrize("case", [Case(1, 130, 300), Case(5, 64, 128), Case(7, 256, 513)])
def test_references_of_ours_and_bf16(case):
    operands = Operands.random(case, device="cpu")
    results = {name: PEERS[name].prepare(operands)().clone() for name in (OURS, BF16)}
    errors = gemm.worst_row_errors(operands, results, rows_at_once=2)
    assert max(errors.values()) < 4e-3
    results[OURS][-1, -1] = torch.nan
    assert gemm.worst_row_errors(operands, results)[OURS] == torch.inf


def test_the_exact_operands_are_what_was_quantized():
    operands = Operands.random(Case(5, 130, 300), device="cpu")
    for kind, bound in (("bf16", 0.0), ("block_scaled", 0.04)):
        x, w = operands.exact(kind)
        assert x.dtype == w.dtype == torch.float64
        assert relative_error(x, operands.x) <= bound
        assert relative_error(w, operands.w) <= bound
    assert torch.equal(operands.exact("codes")[1].float(), operands.b.data.float())


def test_peers_say_what_they_cannot(monkeypatch):
    refuses = PEERS[BLOCK_SCALED].refuses
    assert refuses(Case(1, 128, 128)) == "it refuses M = 1"
    assert "multiple of 128" in refuses(Case(16, 2112, 128))
    assert refuses(Case(16, 4096, 128)) is None
    assert PEERS[OURS].why_missing() is None
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    why = PEERS[DEEP_GEMM].why_missing()
    assert why.startswith("DeepGEMM is left out (")
    assert "pip install" in why
    assert "\n" not in why
    assert PER_TENSOR in PEERS


def test_first_line():
    assert peers.first_line(ValueError("no\nstack")) == "ValueError: no"
    assert peers.first_line(KeyError()) == "KeyError: "


def one_after_the_other(*events: tuple[str, float]) -> list[timing.Event]:
    """Of names and durations, with a gap of 1 between two."""
    ends = accumulate(duration + 1 for _, duration in events)
    return [
        timing.Event(name, end - duration, end)
        for (name, duration), end in zip(events, ends, strict=True)
    ]


def test_time_goes_to_the_flush_before_it():
    flush = [("memset", 1.0), ("flush", 100.0)]
    calls = [("early", 9.0), *flush, ("a", 2.0), ("memset", 0.5), *flush, *flush, ("b", 4.0)]
    assert timing.busy_after(("memset", "flush"), one_after_the_other(*calls)) == [2.5, 0.0, 4.0]
    assert timing.busy_after(("memset", "flush"), []) == []
    flushes = one_after_the_other(("flush", 1.0), ("flush", 1.0))
    assert timing.busy_after(("flush",), flushes) == [0.0, 0.0]


@pytest.mark.parametrize(
    ("spans", "busy"),
    [
        ([(10, 14), (14, 20)], 10),
        ([(10, 14), (17, 20)], 7),  # a gap is nobody's time
        ([(10, 14), (12, 20)], 10),  # waits for the end of the one before it
        ([(10, 30), (12, 14), (13, 20), (28, 31)], 21),  # within another, and beyond it
        ([(9, 14)], 4),  # what the flush still runs is the flush's
    ],
)
def test_what_overlaps_counts_once(spans, busy):
    events = [timing.Event("flush", 0, 10), *(timing.Event("x", *span) for span in spans)]
    again = [timing.Event("flush", 40, 50), timing.Event("x", 50, 53)]
    assert timing.busy_after(("flush",), events + again) == [busy, 3]


def test_calls_take_turns_and_are_told_apart(monkeypatch):
    """Under a profiler that loses the first kernel of its first profile."""
    ran, lost = [], [True]

    def device_events(work):
        ran.clear()
        work()
        return one_after_the_other(*ran)[1 if lost and lost.pop() else 0 :]

    class Flush:
        marker = ("flush",)

        def __call__(self):
            ran.append(("flush", 99.0))

    monkeypatch.setattr(timing, "_device_events", device_events)
    monkeypatch.setattr(timing, "flush", lambda num_bytes: Flush())
    calls = {
        "slow": lambda: ran.extend([("x", 5.0), ("y", 2.0)]),
        "fast": lambda: ran.append(("x", 3.0)),
    }
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    found = timing.device_us_many(calls, repeats=5, warm_up_seconds=0.0)
    assert found == {"slow": 7.0, "fast": 3.0}
    with pytest.raises(RuntimeError, match=r"calls of \['idle'\] that ran nothing"):
        timing.device_us_many({"idle": lambda: None}, warm_up_seconds=0.0)


def test_the_commit_may_come_from_outside(monkeypatch):
    monkeypatch.setenv("MOEFP8_COMMIT", "abc1234")
    assert circumstances.circumstances()["commit"] == "abc1234"
    monkeypatch.delenv("MOEFP8_COMMIT")
    monkeypatch.setenv("PATH", "")
    assert circumstances.circumstances()["commit"] == "unknown"


@pytest.fixture
def cpu_as_gpu(monkeypatch):
    """Operands on the CPU, and timers that time nothing."""
    random = Operands.random
    monkeypatch.setattr(Operands, "random", lambda case: random(case, device="cpu"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    about = {"date": "2026-11-21", "commit": "abc", "gpu": "none", "driver": "0", "torch": "2"}
    monkeypatch.setattr(gemm, "circumstances", lambda: about)
    monkeypatch.setattr(gemm, "device_us_many", lambda calls: dict.fromkeys(calls, 10.0))
    monkeypatch.setattr(gemm, "host_us", lambda call: (call(), 5.0)[1])
    monkeypatch.setattr(gemm, "copy_gbps", lambda: 4300.0)
    monkeypatch.setattr(gemm, "HOST_CASE", Case(2, 64, 128))
    monkeypatch.setitem(sys.modules, "deep_gemm", None)


def run_main(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["gemm", "--compile-with", "0", *arguments])
    gemm.main()


@pytest.mark.usefixtures("cpu_as_gpu")
def test_from_end_to_end(monkeypatch, capsys, tmp_path):
    out = tmp_path / "gemm.json"
    run_main(monkeypatch, "--m", "1,16", "--shapes", "130x256,64x300", "--out", str(out))
    printed = capsys.readouterr().out
    assert "DeepGEMM is left out" in printed
    assert "4 of 4 cases" in printed
    results = json.loads(out.read_text())
    for each in results["rows"]:
        ours = each["peers"][OURS]
        assert ours["error"] < 4e-3
        assert ours["repeatable"]
        assert each["peers"][BF16]["error"] < 4e-3
        assert "refused" in each["peers"][BLOCK_SCALED]
    assert results["host_us"][OURS] == 5.0
    report.gemm_tables(results)


@pytest.mark.usefixtures("cpu_as_gpu")
def test_a_part_is_not_kept_and_a_failure_is_not_hidden(monkeypatch, capsys):
    def fail(*arguments: object) -> None:
        raise ValueError("no such shape")

    monkeypatch.setattr(gemm, "RESULTS", Path("/nowhere/gemm.json"))
    run_main(monkeypatch, "--m", "1", "--shapes", "64x128")
    assert "not kept: these are not all cases of gemm.json" in capsys.readouterr().out
    monkeypatch.setattr(peers, "fp8_gemm_nt", fail)
    with pytest.raises(SystemExit):
        run_main(monkeypatch, "--m", "1", "--shapes", "64x128")
    captured = capsys.readouterr()
    assert "no row for 1x64x128" in captured.out
    assert "moefp8 has no host time: ValueError: no such shape" in captured.out
    assert "ValueError: no such shape" in captured.err


def test_without_a_gpu_one_sentence():
    command = [sys.executable, "-m", "benchmarks.gemm", "--m", "64", "--shapes", "4096x7168"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=REPOSITORY, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 1
    assert "torch finds no CUDA GPU" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


@pytest.mark.parametrize(
    "path", sorted(Path(benchmarks.__file__).parent.glob("*.py")), ids=lambda x: x.stem
)
def test_every_benchmark_can_be_imported(path):
    importlib.import_module(f"benchmarks.{path.stem}")


def test_a_configuration_is_timed_whatever_would_be_chosen():
    case = Case(16, 64, 256)
    operands, expected = Operands.random(case, "cpu"), torch.empty(16, 64, dtype=torch.bfloat16)
    fp8_gemm_nt(operands.a, operands.b, expected)
    with emulated() as gpu:
        set_num_sms(132)
        chosen, *others = gemm_configs.possible(case)
        for config in (chosen, others[0], others[-1]):
            assert torch.equal(gemm_configs.call_of(config, operands)(), expected)
            assert gpu.launched[-1].config == config
    assert others
