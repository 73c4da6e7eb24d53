"""The grouped GEMM benchmark without a GPU: loads, rows of every peer, what is printed."""

import json
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import moefp8.deep_gemm
from benchmarks import grouped, grouped_cases, grouped_peers, report, speedups
from benchmarks.grouped_cases import CONTIGUOUS, MASKED, SETTINGS, Case, Setting
from benchmarks.grouped_peers import FORMS, GUARD_ROWS, PADDED, PEERS, Operands, Rows
from benchmarks.peers import BF16, DEEP_GEMM, OURS
from moefp8.testing import assert_matches_reference
from tests.benchmarks.cases import failing, fake_deep_gemm, found, run_main

COUNTS = [3, 0, 130, 1]
SMALL = {
    CONTIGUOUS: Setting(CONTIGUOUS, "small", COUNTS, ((40, 200), (130, 128)), 1.05),
    MASKED: Setting(MASKED, "small", COUNTS, ((40, 200), (130, 128)), 1.15, max_m=132),
}


def row(setting: Setting, n: int, k: int, **us: float) -> dict:
    known = {name: PEERS[name] for name in FORMS[setting.form]}
    about = {"form": setting.form, "loads": setting.loads, "n": n, "k": k}
    return {**about, "peers": found(known, Case(setting, n, k), us, untouched=True)}


SETTINGS_BY_NAME = {setting.name: setting for setting in SETTINGS}
NAMES = "contiguous-4x8192", "contiguous-128x8..64", "masked-1x1024"
LARGE, QWEN, MASKED_1 = (SETTINGS_BY_NAME[name] for name in NAMES)
ZIPF = SETTINGS_BY_NAME["contiguous-256x32-Zipf"]


@pytest.fixture
def results() -> dict:
    rows = [
        row(LARGE, 4096, 7168, deep_gemm=12.0, moefp8_padded=11.0, torch_bf16=30.0),
        row(LARGE, 7168, 2048, deep_gemm=10.0, moefp8_padded=11.0),
        row(QWEN, 1536, 2048, moefp8_padded=12.0, deep_gemm=13.0),
        row(MASKED_1, 4096, 7168, deep_gemm=20.0),
        row(MASKED_1, 7168, 2048),
    ]
    return {"copy_gbps": 4300.0, "rows": rows}


@pytest.mark.parametrize(("groups", "mean"), [(1, 1024), (32, 256), (64, 4)])
def test_loads_spread_around_their_mean(groups, mean):
    counts = grouped_cases.spread(groups, mean)
    assert counts == grouped_cases.spread(groups, mean)
    assert len(counts) == groups
    assert all(max(1, int(0.7 * mean)) <= count <= 1.3 * mean for count in counts)
    assert groups == 1 or len(set(counts)) > 2
    generator = torch.Generator().manual_seed(0)
    assert counts[0] == int(mean * (0.7 + 0.6 * torch.rand(1, generator=generator).item()))


def test_loads_between_two_numbers():
    counts = grouped_cases.between(128, 8, 64)
    assert counts == grouped_cases.between(128, 8, 64)
    assert (len(counts), min(counts), max(counts)) == (128, 8, 64)


def test_loads_by_zipf():
    counts = grouped_cases.zipf(256, 32)
    assert counts == grouped_cases.zipf(256, 32)
    assert sum(counts) == 256 * 32
    ranked = sorted(counts, reverse=True)
    assert counts != ranked
    assert min(counts) >= 1
    first = 256 * 32 / sum(1 / rank for rank in range(1, 257))
    assert all(abs(count - first / rank) <= 2 for rank, count in enumerate(ranked, 1))


def test_settings_have_names_and_fit_their_slabs():
    names = [setting.name for setting in SETTINGS]
    assert len({*names}) == len(names) == 15
    assert not any(" " in name for name in names)
    assert {"contiguous-4x8192", "contiguous-256x32-Zipf", "masked-128x8..64"} <= {*names}
    lopsided = SETTINGS_BY_NAME["contiguous-63-lopsided"].counts
    assert sorted(lopsided) == [0] * 30 + [7] * 32 + [3000]
    for setting in SETTINGS:
        assert len(setting.counts) == int(setting.loads.split()[0])
        assert (setting.max_m >= max(setting.counts)) == (setting.form == MASKED)
    assert SETTINGS[-1].expected_m == round(sum(SETTINGS[-1].counts) / 64)


def test_work_of_a_case_counted_by_hand():
    """Padding does not count, nor do weights of groups without a token."""
    case = Case(Setting(MASKED, "", [3, 0, 2], (), None, max_m=8), 200, 300)
    assert case.flops == 2 * 5 * 200 * 300
    data, d = 5 * 300 + 2 * 200 * 300, 2 * 5 * 200
    assert case.num_bytes("block_scaled") == data + d + 4 * (5 * 3 + 2 * 2 * 3)
    assert case.num_bytes("bf16") == 2 * data + d


def test_long_cases_compute_or_load_much():
    assert Case(LARGE, 4096, 7168).is_long
    assert Case(ZIPF, 4096, 7168).is_long
    assert not Case(SETTINGS[-1], 7168, 2048).is_long
    assert not Case(QWEN, 2048, 768).is_long


@pytest.fixture(params=[CONTIGUOUS, MASKED])
def operands(request) -> Operands:
    return Operands.random(Case(SMALL[request.param], 40, 200), device="cpu")


def test_operands_are_quantized_one_group_at_a_time(operands):
    assert operands.x.shape == (134, 200)
    for group, end in enumerate(accumulate(COUNTS)):
        for kind in ("bf16", "block_scaled"):
            x, w = operands.exact(kind, group)
            assert x.dtype == w.dtype == torch.float64
            assert_matches_reference(x, operands.x[end - COUNTS[group] : end].double(), 0.04)
            assert_matches_reference(w, operands.w[group].double(), 0.04)


def test_where_rows_lie(operands):
    """Rows lie one after the other, aligned, or slab by slab; what is between holds zeros."""
    padded, layout = Rows.padded(operands)
    expected = [0] * 3 + [-1] * 125 + [2] * 130 + [-1] * 126 + [3] + [-1] * 127
    assert layout.tolist() == expected
    assert layout.dtype == torch.int32
    is_token = [group >= 0 for group in expected]
    found = [(Rows.dense(operands), [True] * 134, (134, 200)), (padded, is_token, (512, 200))]
    if operands.case.setting.form == MASKED:
        slabs = [row < count for count in COUNTS for row in range(132)]
        found.append((Rows.masked(operands), slabs, (4, 132, 200)))
    for rows, are_tokens, shape in found:
        at = torch.tensor(are_tokens).nonzero().flatten()
        assert rows.a.data.shape == shape
        assert rows.a.scale_inv.shape == (*shape[:-1], 2)
        assert rows.a.scale_inv.stride(-2) == 1
        assert torch.equal(rows.at, at)
        codes = rows.a.data.view(torch.uint8).flatten(0, -2)
        assert torch.equal(codes[at], operands.a.data.view(torch.uint8))
        assert int(codes.count_nonzero()) == int(codes[at].count_nonzero())
        scales = rows.a.scale_inv.reshape(-1, 2)
        assert torch.equal(scales[at], operands.a.scale_inv)
        assert rows.d.shape == (*shape[:-1], 40)
        assert rows.d.data_ptr() == rows.memory.data_ptr()
        assert len(rows.memory) == len(codes) + GUARD_ROWS
        assert bool(rows.memory.isnan().all())


@pytest.fixture
def deep_gemm(monkeypatch) -> SimpleNamespace:
    """A release of 2025, as its masked form is named. Two functions keep their calls."""
    layout = Mock(wraps=moefp8.deep_gemm.transform_sf_into_required_layout)
    masked = Mock(wraps=moefp8.deep_gemm.fp8_m_grouped_gemm_nt_masked)
    return fake_deep_gemm(
        monkeypatch,
        transform_sf_into_required_layout=layout,
        fp8_m_grouped_gemm_nt_masked=masked,
        m_grouped_fp8_gemm_nt_masked=None,
    )


@pytest.mark.usefixtures("deep_gemm")
def test_every_peer_multiplies_each_token_by_its_own_weights(operands):
    form = operands.case.setting.form
    tokens = {name: PEERS[name].prepare(operands).tokens() for name in FORMS[form]}
    assert len(tokens) == (4 if form == CONTIGUOUS else 2)
    errors = grouped.worst_row_errors(operands, tokens)
    assert 0 < max(errors.values()) < 4e-3
    for name in tokens:  # the last row is now that of another group
        tokens[name][-1] = tokens[name][-2]
        assert grouped.worst_row_errors(operands, tokens)[name] > 0.5
    tokens[OURS][0, 0] = torch.nan
    assert grouped.worst_row_errors(operands, tokens)[OURS] == torch.inf


def test_what_deep_gemm_is_given(deep_gemm):
    made = {form: Operands.random(Case(SMALL[form], 40, 200), device="cpu") for form in SMALL}
    for operands in made.values():
        PEERS[DEEP_GEMM].prepare(operands)()
    given = [call.args for call in deep_gemm.transform_sf_into_required_layout.call_args_list]
    assert [(scales.shape, *rest) for scales, *rest in given] == [
        ((512, 2), 512, 200, (1, 128, 128), None, True),
        ((4, 132, 2), 132, 200, (1, 128, 128), 4, True),
    ]
    assert all(scales.is_contiguous() for scales, *_ in given)
    *_, masked_m, expected_m = deep_gemm.fp8_m_grouped_gemm_nt_masked.call_args.args
    assert (masked_m.tolist(), expected_m) == (COUNTS, 34)
    deep_gemm.get_mk_alignment_for_contiguous_layout = lambda: 256
    wide = Operands.random(made[CONTIGUOUS].case, device="cpu")
    assert len(Rows.padded(wide)[1]) == 768


def test_a_write_past_the_tokens_is_seen(operands):
    job = PEERS[OURS].prepare(operands)
    assert job.untouched()
    is_token = torch.zeros(len(job()), dtype=torch.bool)
    is_token[job.at] = True
    other = int((~is_token).nonzero()[0])
    job()[other, 7] = 0.0
    assert not job.untouched()


def test_large_weights_stay_out_of_bf16(monkeypatch):
    refuses = PEERS[BF16].refuses
    assert refuses(Case(ZIPF, 7168, 2048)) is None
    why = refuses(Case(ZIPF, 4096, 7168))
    assert why == "its weights would take 15.0 GB, more than 8"
    monkeypatch.setattr(grouped_peers, "MOST_BF16_BYTES", 1e3)
    assert Operands.random(Case(SMALL[CONTIGUOUS], 40, 200), device="cpu").w is None


def test_what_is_printed(results):
    rows = results["rows"]
    table = list(grouped.lines_of_table(LARGE, rows[:2]))
    total, least, most = (f(LARGE.counts) for f in (sum, min, max))
    assert table[0] == f"contiguous 4 x 8192: {total} tokens, {least} to {most} of a group"
    assert "12.0 x1.20" in table[2]
    assert len({len(line) for line in table[1:4]}) == 1
    assert table[4:] == ["torch BF16 is left out at 7168x2048: it does"]
    assert "padded" not in "\n".join(grouped.lines_of_table(MASKED_1, rows[3:]))
    comparisons = list(grouped.lines_of_comparisons(rows))
    assert comparisons[0].endswith("worst 1.000 at 7168x2048  geomean 1.095  goal 1.10: MISSED")
    assert comparisons[1].startswith("  by grouped_layout ")
    assert comparisons[1].endswith("worst 0.909 at 7168x2048  geomean 0.996  goal 1.00: MISSED")
    assert comparisons[2].endswith("geomean 1.300  goal 1.30: met")
    assert comparisons[3].endswith("geomean 1.083  goal 1.00: met")
    assert comparisons[4].endswith("geomean 2.000  goal 1.15: met")
    rest = "\n".join(grouped.lines_of_the_rest(results))
    assert "moefp8 1.70e-03, moefp8 (padded rows) 1.70e-03, DeepGEMM 1.70e-03" in rest
    assert "the same bits before and after timing: yes" in rest
    assert "rows of no group hold what they held: yes" in rest
    rows[3]["peers"][OURS] |= {"repeatable": False, "error": 1.0}
    rows[0]["peers"][PADDED] |= {"untouched": False}
    rest = "\n".join(grouped.lines_of_the_rest(results))
    assert "moefp8 1.00e+00" in rest
    assert "after timing: NOT at masked 1 x 1024 4096x7168 (moefp8)" in rest
    assert "held: NOT at contiguous 4 x 8192 4096x7168 (moefp8 (padded rows))" in rest


def test_a_setting_without_a_goal_is_compared_all_the_same(results):
    results["rows"] = [row(SETTINGS_BY_NAME["masked-128x8..64"], 1536, 2048, deep_gemm=9.0)]
    (line,) = grouped.lines_of_comparisons(results["rows"])
    assert line.endswith("geomean 0.900")
    assert speedups.bars(results, "masked") == [(0.0, "128 x 8..64", "1536x2048", 0.9)]


def add_without_rest(row: dict) -> None:
    """Ours takes 100 us; without rest DeepGEMM takes 1.3 times as long, and the padded one 1.2."""
    for name, ratio in ((OURS, None), (PADDED, 1.2), (DEEP_GEMM, 1.3)):
        found = row["peers"][name]
        found["us"] *= 10
        found["without_rest"] = {"us": 110 * (ratio or 1)} | ({"ratio": ratio} if ratio else {})


def test_what_takes_long_is_compared_without_rest(results):
    row = results["rows"][0]
    add_without_rest(row)
    ours, padded, *_ = grouped.lines_of_comparisons([row])
    assert ours.endswith("worst 1.300 at 4096x7168  geomean 1.300  goal 1.10: met")
    assert padded.endswith("worst 1.083 at 4096x7168  geomean 1.083  goal 1.00: met")


def test_bars_of_the_plot(results):
    assert speedups.bars(results, "contiguous") == [
        (0.0, "4 x 8192", "4096x7168", 1.2),
        (1.0, "", "7168x2048", 1.0),
        (2.6, "128 x 8..64", "1536x2048", 1.3),
    ]
    assert speedups.bars(results, "masked") == [(0.0, "1 x 1024", "4096x7168", 2.0)]
    add_without_rest(results["rows"][0])
    assert speedups.bars(results, "contiguous")[0].ratio == 1.3
    for each in results["rows"]:
        del each["peers"][DEEP_GEMM]
    assert speedups.bars(results, "contiguous") == []


@pytest.fixture
def cpu_as_gpu(no_gpu_needed, monkeypatch):
    """Operands are on the CPU, settings are small, and timers time nothing."""
    random = Operands.random
    monkeypatch.setattr(Operands, "random", lambda case: random(case, device="cpu"))
    monkeypatch.setattr(grouped, "device_us_many", lambda jobs, repeats: dict.fromkeys(jobs, 10.0))
    monkeypatch.setattr(grouped, "SETTINGS", tuple(SMALL.values()))


@pytest.mark.usefixtures("cpu_as_gpu", "deep_gemm")
def test_from_end_to_end(monkeypatch, capsys, tmp_path):
    out = tmp_path / "grouped.json"
    run_main(monkeypatch, grouped, "--out", str(out))
    printed = capsys.readouterr().out
    assert "contiguous small: 134 tokens, 0 to 130 of a group" in printed
    assert "4 of 4 cases" in printed
    results = json.loads(out.read_text())
    assert (results["deep_gemm"], results["copy_gbps"]) == ("1.0", 4300.0)
    for each in results["rows"]:
        assert {*each["peers"]} == {*FORMS[each["form"]]}
        assert max(found["error"] for found in each["peers"].values()) < 4e-3
        assert each["peers"][OURS]["repeatable"]
        assert each["peers"][OURS]["untouched"]
    report.grouped_tables(results)


@pytest.mark.usefixtures("cpu_as_gpu", "deep_gemm")
def test_a_setting_alone_and_a_peer_that_fails(monkeypatch, capsys):
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", failing(RuntimeError("not on this GPU")))
    monkeypatch.setattr(grouped, "RESULTS", Path("/nowhere/grouped.json"))
    run_main(monkeypatch, grouped, "--cases", "contiguous-small")
    printed = capsys.readouterr().out
    assert "torch BF16 is left out at 40x200: RuntimeError: not on this GPU" in printed
    assert "2 of 2 cases" in printed
