"""The GEMM benchmark without a GPU: ratios, goals and what is printed of canned rows; operands."""

import importlib
import json
import sys
from functools import partial
from itertools import accumulate
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import benchmarks
from benchmarks import (
    circumstances,
    figures,
    gemm,
    gemm_cases,
    gemm_configs,
    gemm_goals,
    gemm_sweep,
    peers,
    power,
    report,
    roofline,
    session,
    timing,
    without_rest,
)
from benchmarks.figures import PAUSES, WITHOUT_REST
from benchmarks.peers import BF16, BLOCK_SCALED, DEEP_GEMM, OURS, PEERS, Case, Operands
from moefp8.kernels import fp8_gemm_nt, set_num_sms
from moefp8.testing import relative_error
from tests.benchmarks.cases import failing, found, run_main
from tests.fakes.emulator import emulated


def row(m: int, n: int, k: int, **us: float) -> dict:
    case = Case(m, n, k)
    return {**case._asdict(), "peers": found(PEERS, case, us)}


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
    host = {OURS: 12.0, DEEP_GEMM: 21.0, BF16: 15.7}
    return {"copy_gbps": 4300.0, "host_us": host, "rows": rows}


def test_geomean():
    assert figures.geomean([2.0, 8.0]) == pytest.approx(4.0)
    assert figures.geomean([3.0]) == pytest.approx(3.0)


def test_ratios_are_theirs_to_ours_and_none_without_them(rows):
    assert figures.ratio(rows[0], [DEEP_GEMM]) == 2.0
    assert figures.ratio(rows[1], [DEEP_GEMM, BLOCK_SCALED]) == 0.5
    assert figures.ratio(rows[0], [BLOCK_SCALED]) is None


def test_compare_takes_the_rows_of_its_m_that_both_ran(rows):
    found = gemm_goals.compare(rows, (1, 16), "best")
    assert found.geomean == pytest.approx((2.0 * 0.5 * 4.0) ** (1 / 3))
    assert (found.worst, found.worst_case, found.num_cases) == (0.5, Case(16, 2112, 7168), 3)
    assert gemm_goals.compare(rows, (1, 16), "deep_gemm").num_cases == 2
    assert gemm_goals.compare(rows, (64,), "best") is None


@pytest.mark.parametrize(
    ("goal", "met"), [((1.5, 1.1), True), ((1.6, 1.1), False), ((1.5, 1.2), False)]
)
def test_a_goal_wants_geomean_and_worst(goal, met):
    found = gemm_goals.Comparison(1.5, 1.1, Case(1, 1, 1), 2)
    assert found.meets(goal) == met


def test_every_m_is_in_one_group(rows):
    assert gemm_goals.groups_of(rows) == [(1, 16), (256,), (4096,)]
    assert gemm_goals.groups_of(rows, WITHOUT_REST)[-1] == (4096, 8192, 16384)


def test_goals_name_groups_and_comparisons():
    for mode, goals in gemm_goals.GOALS.items():
        assert {group for group, _ in goals} <= set(gemm_goals.GROUPS[mode])
        assert {against for _, against in goals} <= set(gemm_goals.AGAINST)
    every = [m for group in gemm_goals.GROUPS[PAUSES] for m in group]
    assert sorted(every) == list(gemm_cases.MS)


def test_what_is_printed(results):
    rows = results["rows"]
    table = list(gemm.lines_of_table([each for each in rows if each["m"] == 16]))
    assert table[0] == "M = 16"
    assert "12.0 x1.20" in table[2]
    assert len({len(line) for line in table[1:]}) == 1
    comparisons = "\n".join(gemm_goals.lines_of_comparisons(rows))
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


def test_points_and_roofs(results):
    case = Case(16, 2112, 7168)
    x, y = roofline.points(results, DEEP_GEMM)[1]
    assert x == pytest.approx(case.flops / case.num_bytes("block_scaled"))
    assert y == pytest.approx(case.flops / 12.0 / 1e6, abs=0.05)
    best = pytest.approx(case.flops / 8.0 / 1e6, abs=0.05)
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


def test_first_line():
    assert peers.first_line(ValueError("no\nstack")) == "ValueError: no"
    assert peers.first_line(KeyError()) == "KeyError: "


def one_after_the_other(*events: tuple[str, float]) -> list[timing.Event]:
    """Events of these names and durations, with a gap of 1 between two."""
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
        ([(10, 14), (12, 20)], 10),  # one waits for the end of the one before it
        ([(10, 30), (12, 14), (13, 20), (28, 31)], 21),  # two lie within one, one ends later
        ([(9, 14)], 4),  # what the flush still runs counts as the flush
    ],
)
def test_what_overlaps_counts_once(spans, busy):
    events = [timing.Event("flush", 0, 10), *(timing.Event("x", *span) for span in spans)]
    again = [timing.Event("flush", 40, 50), timing.Event("x", 50, 53)]
    assert timing.busy_after(("flush",), events + again) == [busy, 3]


def test_calls_take_turns_and_are_told_apart(monkeypatch):
    """The profiler here loses the first kernel of its first profile."""
    ran, lost = [], [True]

    def device_events(work):
        ran.clear()
        work()
        return one_after_the_other(*ran)[1 if lost and lost.pop() else 0 :]

    flush = Mock(marker=("flush",), side_effect=lambda: ran.append(("flush", 99.0)))
    monkeypatch.setattr(timing, "_device_events", device_events)
    monkeypatch.setattr(timing, "flush", lambda num_bytes: flush)
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
def cpu_as_gpu(no_gpu_needed, monkeypatch):
    """Operands are on the CPU, and timers time nothing."""
    random = Operands.random
    monkeypatch.setattr(Operands, "random", lambda case: random(case, device="cpu"))
    monkeypatch.setattr(gemm, "device_us_many", lambda calls: dict.fromkeys(calls, 10.0))
    monkeypatch.setattr(gemm, "host_us", lambda call: (call(), 5.0)[1])
    monkeypatch.setattr(gemm, "HOST_CASE", Case(2, 64, 128))
    monkeypatch.setitem(sys.modules, "deep_gemm", None)


@pytest.mark.usefixtures("cpu_as_gpu")
def test_from_end_to_end(monkeypatch, capsys, tmp_path):
    out = tmp_path / "gemm.json"
    cases = "--m", "1,16", "--shapes", "130x256,64x300"
    run_main(monkeypatch, gemm, "--compile-with", "0", *cases, "--out", str(out))
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
def test_random_shapes_from_end_to_end(monkeypatch, capsys, tmp_path):
    out, cases = tmp_path / "sweep.json", [Case(3, 64, 128), Case(40, 130, 64)]
    monkeypatch.setattr(gemm_sweep, "random_cases", lambda models, count, seed: cases[:count])
    run_main(monkeypatch, gemm_sweep, "--compile-with", "0", "--cases", "2", "--out", str(out))
    printed = capsys.readouterr().out
    assert "3x64x128     10.0" in printed
    assert "2 of 2 cases" in printed
    results = json.loads(out.read_text())
    assert BF16 not in results["rows"][0]["peers"]
    assert report.sweep_table(results)


@pytest.mark.usefixtures("no_gpu_needed")
def test_power_from_end_to_end(monkeypatch, capsys, tmp_path):
    out, random = tmp_path / "power.json", Operands.random
    monkeypatch.setattr(power, "CASES", (Case(16, 128, 256),))
    monkeypatch.setattr(power, "operands_of", partial(power.operands_of, device="cpu"))
    monkeypatch.setattr(Operands, "random", lambda case, device: random(case, device="cpu"))
    monkeypatch.setattr(power, "circumstances", lambda: {"gpu": "none"})
    monkeypatch.setattr(power, "num_copies", lambda num_bytes: 2)
    monkeypatch.setattr(without_rest, "captured", lambda call: (call(), call)[1])
    monkeypatch.setattr(
        power,
        "without_rest",
        lambda loops, *_: {name: {"us": 10.0, "ratio": 1.0} for name in loops},
    )
    run_main(monkeypatch, power, "--out", str(out))
    assert "16x128x256: random 10.0 us, 0 TFLOP/s, - MHz, - W" in capsys.readouterr().out
    results = json.loads(out.read_text())
    assert [*results["rows"][0]["data"]] == ["random", "constant", "zero"]
    assert report.power_table(results)


def test_constants_and_zeros_are_what_they_say():
    case = Case(16, 128, 256)
    for data, value in ((power.CONSTANT, 256.0), (power.ZERO, 0.0)):
        d = PEERS[OURS].prepare(power.operands_of(case, data, device="cpu"))()
        assert torch.equal(d.float(), torch.full((16, 128), value))


@pytest.mark.usefixtures("cpu_as_gpu")
def test_long_calls_are_timed_without_rest_too(monkeypatch, capsys, tmp_path):
    out, num_operands = tmp_path / "gemm.json", []
    random = Operands.random
    monkeypatch.setattr(Operands, "random", lambda case: (num_operands.append(1), random(case))[1])
    monkeypatch.setattr(gemm, "device_us_many", lambda calls: dict.fromkeys(calls, 110.0))
    monkeypatch.setattr(gemm, "num_copies", lambda num_bytes: 3)
    monkeypatch.setattr(without_rest, "captured", lambda call: (call(), call)[1])
    turns = {"us": 120.0, "ratio": 1.1, "least": 1.0, "most": 1.2, "mhz": 1500, "watts": 700}
    monkeypatch.setattr(session, "without_rest", lambda loops, *_: dict.fromkeys(loops, turns))
    arguments = "--compile-with", "0", "--m", "4096", "--shapes", "64x128", "--out", str(out)
    run_main(monkeypatch, gemm, *arguments, "--peers", f"{OURS},{BF16}")
    printed = capsys.readouterr().out
    assert "120.0 x1.100 (1.000 to 1.200) 1500 700" in printed
    assert "without rest, M = 4096" in printed
    (row,) = json.loads(out.read_text())["rows"]
    assert row["peers"][BF16]["without_rest"] == turns
    with_one_set = len(num_operands) - 2
    num_operands.clear()
    run_main(monkeypatch, gemm, *arguments, "--peers", f"{OURS},{BF16}", "--rounds", "0")
    assert len(num_operands) == with_one_set
    assert "without rest" not in capsys.readouterr().out


@pytest.mark.usefixtures("cpu_as_gpu")
def test_a_peer_that_fails_has_no_host_time(monkeypatch, capsys):
    monkeypatch.setattr(peers, "fp8_gemm_nt", failing(ValueError("no such shape")))
    assert gemm.host_times([OURS, BF16]) == {BF16: 5.0}
    assert "moefp8 has no host time: ValueError: no such shape" in capsys.readouterr().out


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
