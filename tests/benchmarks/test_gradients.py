"""The benchmark of gradients without a GPU: every peer's gradients, what is printed, tables."""

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from benchmarks import gradient_peers, gradients, peers, report, session
from benchmarks import without_rest as back_to_back
from benchmarks.figures import Row
from benchmarks.gradient_cases import (
    MODELS,
    TOKENS,
    AdaptedStep,
    ExpertsCase,
    ExpertsStep,
    LinearStep,
    Results,
    error_of,
)
from benchmarks.gradient_gemms import FORWARD, Codes, GemmPair, Weight
from benchmarks.gradient_parts import (
    ADAPTED,
    DGRAD,
    EXPERTS,
    LINEARS,
    PARTS,
    SWIGLU_COLUMNS,
    TRANSPOSE,
)
from benchmarks.gradient_peers import ANEW, COPY, DEQUANTIZING, FROZEN, LEAST, SAVED_FP8
from benchmarks.gradient_swiglu import SwigluCase, SwigluOfExperts
from benchmarks.grouped_cases import CONTIGUOUS, Setting
from benchmarks.grouped_cases import Case as Grouped
from benchmarks.moe_cases import Model
from benchmarks.moe_peers import _as_in_transformers
from benchmarks.peers import BF16, OURS
from moefp8.kernels import m_grouped_fp8_gemm_nt_contiguous
from moefp8.quant import quantize_1x128
from tests.benchmarks.cases import failing, headline_of, run_main

SMALL = Model("small", 5, 2, 256, 128)
DENSE = peers.Case(16, 128, 256)
GROUPED = Grouped(Setting(CONTIGUOUS, "3 x 3", [4, 0, 5], ((128, 256),), None), 128, 256)
WEIGHT = Weight((3, 256, 48), 2)


SWIGLU = SwigluCase(3, 128, 40)


@pytest.fixture
def step() -> ExpertsStep:
    torch.manual_seed(0)
    return ExpertsStep.random(ExpertsCase(SMALL, 9), "cpu")


def results_of(part: str, operands: object) -> dict[str, Results]:
    return {name: peer.prepare(operands)() for name, peer in PARTS[part].peers.items()}


def test_cases_are_those_that_goals_are_of():
    assert TOKENS == (16, 1024, 4096, 16384)
    assert [model[1:] for model in MODELS.values()] == [
        (32, 8, 7168, 2048),
        (128, 8, 2048, 768),
        (8, 2, 4096, 14336),
    ]
    assert [*map(tuple, PARTS[LINEARS].cases)] == [(8192, 4096, 7168), (8192, 7168, 2048)]
    for part in PARTS.values():
        assert {*part.goals} <= {*part.peers}


def test_experts_of_every_peer_have_the_same_gradients(step):
    results = results_of(EXPERTS, step)
    errors = step.errors(results)
    assert max(x for found in errors.values() for x in found.values()) < gradients.MOST_ERROR
    assert max(errors[BF16].values()) < 0.01
    assert errors[DEQUANTIZING]["error"] < errors[OURS]["error"] < errors[SAVED_FP8]["error"]
    assert results[OURS].equals(results[ANEW])
    assert results[SAVED_FP8].equals(results[LEAST])
    dx, of_weights = results[OURS]
    wrong = {"zeros": Results((0 * dx, of_weights)), "swapped": Results((dx, of_weights.flip(1)))}
    assert step.errors(wrong)["zeros"]["error"] == 1.0
    assert step.errors(wrong)["swapped"]["error_of_weights"] > 0.3


def test_adapters_of_every_peer_have_the_same_gradients():
    torch.manual_seed(0)
    step = AdaptedStep.random(ExpertsCase(SMALL, 9), "cpu")
    results = results_of(ADAPTED, step)
    errors = step.errors(results)
    assert max(x for found in errors.values() for x in found.values()) < gradients.MOST_ERROR
    assert len(results[FROZEN]) == 2
    assert len(results[OURS]) == 6
    for ours, theirs in zip(results[OURS], results[BF16], strict=True):
        assert error_of(ours, theirs) < gradients.MOST_ERROR
    assert not any("lora" in name for name, _ in step.case.experts.named_modules())


@pytest.mark.parametrize("num_bytes", [1 << 30, 2 * 2 * 256 * 256])
def test_dequantizing_is_what_transformers_does(step, monkeypatch, num_bytes):
    """In one go, and two experts at a time."""
    hf = pytest.importorskip("transformers.integrations.finegrained_fp8")
    if not hasattr(hf, "FP8GroupedMatmulFunction"):
        pytest.skip("this transformers has no gradients through FP8")

    def grouped_matmul(x, weight, scale_inv, offsets, tokens_per_expert, block_size):
        d, a = x.new_empty(len(x), weight.shape[1]), quantize_1x128(x)
        ends = F.pad(offsets, (1, 0))
        m_grouped_fp8_gemm_nt_contiguous(a, (weight, scale_inv), d, expert_offsets=ends)
        return d

    kernel = SimpleNamespace(grouped_matmul=grouped_matmul)
    monkeypatch.setattr(hf, "load_finegrained_fp8_kernel", lambda: kernel)
    monkeypatch.setattr(hf.FP8GroupedMatmulFunction, "dequant_budget_bytes", num_bytes)
    monkeypatch.setattr(gradient_peers, "BYTES_AT_ONCE", num_bytes)
    experts = step.case.experts
    module = _as_in_transformers(
        experts.gate_up_proj,
        experts.down_proj,
        gate_up_proj_scale_inv=experts.gate_up_proj_scale_inv,
        down_proj_scale_inv=experts.down_proj_scale_inv,
        block_size=(128, 128),
        activation_scheme="dynamic",
    )
    theirs = step.call(partial(hf.fp8_grouped_mm_experts_forward, module))()
    assert gradient_peers.makes_host_wait(DEQUANTIZING, step) == (num_bytes < 1 << 30)
    assert not gradient_peers.makes_host_wait(BF16, step)
    assert PARTS[EXPERTS].peers[DEQUANTIZING].prepare(step)().equals(theirs)


def test_bf16_is_what_transformers_does(step):
    moe = pytest.importorskip("transformers.integrations.moe")
    weights = step.case.top_k_weights.bfloat16()  # FP32 ones would make FP32 of the rows
    step = replace(step, case=replace(step.case, top_k_weights=weights))
    module = _as_in_transformers(*step.case.experts.dequantize())
    theirs = step.call(partial(moe.grouped_mm_experts_forward, module))()
    assert PARTS[EXPERTS].peers[BF16].prepare(step)().equals(theirs)


def test_linears_gemms_and_transpositions_are_right_and_seen_to_be():
    torch.manual_seed(0)
    for part, operands in (
        (LINEARS, LinearStep.random(DENSE, "cpu")),
        (DGRAD, GemmPair.random(DENSE, "cpu")),
        (DGRAD, GemmPair.random(GROUPED, "cpu")),
        (TRANSPOSE, Codes.random(WEIGHT, "cpu")),
    ):
        results = results_of(part, operands)
        errors = [found["error"] for found in operands.errors(results).values()]
        assert max(errors) < 0.05
        wrong = {OURS: Results(0 * x.float() for x in results[OURS])}
        if part == TRANSPOSE:
            wrong = {OURS: Results((results[OURS][0].mT.reshape(results[OURS][0].shape),))}
        assert operands.errors(wrong)[OURS]["error"] == 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("blocks", [False, True])
def test_the_gradient_of_swiglu_is_right_and_seen_to_be(dtype, blocks):
    torch.manual_seed(0)
    case = SWIGLU._replace(saved_dtype=dtype, blocks=blocks)
    operands = SwigluOfExperts.random(case, "cpu")
    results = results_of(SWIGLU_COLUMNS, operands)
    errors = operands.errors(results)
    assert 0.01 < errors[OURS]["error"] < 0.05
    assert max(errors[OURS].values()) < 0.05
    assert errors[OURS].keys() == {
        "error",
        "error_of_columns",
        "error_of_activated",
        "error_of_weights",
    }
    assert errors[COPY] == {"error": 0.0}
    assert results[OURS].equals(operands.differentiate())
    wrong = Results(map(torch.zeros_like, results[OURS]))
    assert set(operands.errors({OURS: wrong})[OURS].values()) == {1.0}
    assert operands.errors({COPY: Results((operands.bytes * 0,))})[COPY] == {"error": 1.0}
    moved = 3 * 128 * (40 * 2 + (40 * 2 * 2 if dtype == torch.bfloat16 else 40 * 2 + 8))
    moved += 3 * 128 * 2 * (128 + 4) + 3 * 3 * 40 * 128 + 4 * 3 * (80 + (1 if blocks else 40))
    assert operands.num_bytes == moved


@pytest.fixture
def on_cpu(no_gpu_needed, monkeypatch):
    """Small cases are on the CPU, and timers time nothing."""
    small = {LINEARS: (DENSE,), DGRAD: (DENSE, GROUPED), TRANSPOSE: (WEIGHT,)}
    for name, part in list(PARTS.items()):
        operands = partial(part.operands, device="cpu")
        monkeypatch.setitem(
            PARTS, name, replace(part, operands=operands, cases=small.get(name, ()))
        )
    monkeypatch.setitem(MODELS, "small", SMALL)
    for timer in ("layer_us_many", "eager_us_many", "device_us_many"):
        monkeypatch.setattr(gradients, timer, lambda calls, repeats: dict.fromkeys(calls, 1e3))
    monkeypatch.setattr(gradients, "peak_bytes", lambda call: (call(), 1 << 20)[1])
    monkeypatch.setattr(gradients, "num_copies", lambda num_bytes: 2)
    monkeypatch.setattr(back_to_back, "captured", lambda call: call)
    turns = {"us": 1100.0, "ratio": 1.1, "least": 1.0, "most": 1.2}
    monkeypatch.setattr(session, "without_rest", lambda loops, *_: dict.fromkeys(loops, turns))


ON_SMALL = "--models", "small"


@pytest.mark.usefixtures("on_cpu")
def test_from_end_to_end(monkeypatch, capsys, tmp_path):
    out = tmp_path / "gradients.json"
    run_main(monkeypatch, gradients, *ON_SMALL, "--tokens", "12", "--out", str(out))
    printed = capsys.readouterr().out
    assert "6 of 6 cases" in printed
    assert "transformers, dequantizing   us: 1000.0, 1100.0 without rest, 1000.0 eager" in printed
    assert "goal 1.80: MISSED (0 of 1)" in printed
    results = json.loads(out.read_text())
    parts = [LINEARS, EXPERTS, ADAPTED, DGRAD, DGRAD, TRANSPOSE]
    assert [row["part"] for row in results["rows"]] == parts
    for row in results["rows"]:
        assert {*row["peers"]} == {*PARTS[row["part"]].peers}
        for found in row["peers"].values():
            assert found["us"] == 1e3
            assert found["without_rest"]["us"] == 1100.0
            assert found["error"] < gradients.MOST_ERROR
        assert row["peers"][OURS]["repeatable"]
    text = report.TABLES["gradients"]({**results, "turns": {"rounds": 5, "seconds": 0.2}})
    assert "5 turns of 0.2 s" in text
    assert "small, 12 tokens" in report.TABLES["gradients"](results)


@pytest.mark.usefixtures("on_cpu")
def test_a_quick_run_is_of_one_length_with_pauses(monkeypatch, capsys):
    monkeypatch.setattr(gradients, "QUICK_TOKENS", (4,))
    run_main(monkeypatch, gradients, *ON_SMALL, "--parts", "experts", "--quick")
    printed = capsys.readouterr().out
    assert "1 of 1 cases" in printed
    assert "small, 4 tokens" in printed
    assert "without rest" not in printed


@pytest.mark.usefixtures("on_cpu")
def test_who_lacks_memory_or_is_wrong_is_left_out(monkeypatch, capsys):
    error = torch.OutOfMemoryError("CUDA out of memory.")
    of_experts = dict(PARTS[EXPERTS].peers)
    of_experts[BF16] = replace(of_experts[BF16], prepare=failing(error))
    dequantized = gradient_peers.dequantized
    monkeypatch.setattr(gradient_peers, "dequantized", lambda *given: 0 * dequantized(*given))
    monkeypatch.setattr(session, "without_rest", failing(error))
    monkeypatch.setitem(PARTS, EXPERTS, replace(PARTS[EXPERTS], peers=of_experts))
    run_main(monkeypatch, gradients, *ON_SMALL, "--parts", "experts", "--tokens", "2")
    printed = capsys.readouterr().out
    assert "BF16, grouped_mm is left out: OutOfMemoryError: CUDA out of memory." in printed
    assert "transformers, dequantizing is left out: it is wrong: {'error': 1.0" in printed
    assert "small, 2 tokens is not timed without rest: OutOfMemoryError" in printed
    assert "1 of 1 cases" in printed


@pytest.mark.usefixtures("on_cpu")
def test_ours_is_not_timed_if_it_is_wrong(monkeypatch, capsys):
    monkeypatch.setattr(gradients, "MOST_ERROR", 0.001)
    with pytest.raises(SystemExit):
        run_main(monkeypatch, gradients, *ON_SMALL, "--parts", "experts", "--tokens", "2")
    told = capsys.readouterr()
    assert "moefp8 is wrong" in told.err
    assert "no row for small, 2 tokens" in told.out


def row(part: str, case: str, us: dict[str, float], **more: object) -> Row:
    found: Row = {name: {"us": taken, "error": 0.04} for name, taken in us.items()}
    for each in found.values():
        each |= {"tflops": 1e5 / each["us"], "gbps": 4e5 / each["us"]}
    found[OURS]["repeatable"] = True
    return {"part": part, "case": case, **more, "peers": found}


@pytest.fixture
def results() -> dict:
    of_small = {"model": "small", "tokens": 16}
    experts = row(EXPERTS, "small, 16 tokens", {OURS: 100.0, DEQUANTIZING: 200.0}, **of_small)
    experts["peers"][BF16] = {"refused": "no room"}
    memory = {"weights_bytes": 2 << 30, "step_bytes": 1 << 29}
    experts["peers"][OURS] |= memory | {"without_rest": {"us": 125.0}}
    slower = {"us": 212.5, "ratio": 1.7, "least": 1.6, "most": 1.8}
    experts["peers"][DEQUANTIZING] |= memory | {"without_rest": slower, "eager_us": 300.0}
    rows = [
        row(LINEARS, "16x128x256", {OURS: 20.0, BF16: 30.0}),
        experts,
        row(DGRAD, "64x128x256", {OURS: 100.0, FORWARD: 96.0}),
        row(TRANSPOSE, "3 x 256 x 48", {OURS: 100.0, COPY: 70.0}),
    ]
    about = {"gpu": "a GPU", "driver": "0", "torch": "2", "date": "2026-11-27T00", "commit": "abc"}
    turns = {"rounds": 3, "seconds": 0.2, "settling_seconds": 3.0}
    return {**about, "copy_gbps": 4300.0, "turns": turns, "rows": rows}


def test_what_is_printed(results):
    _, experts, dgrad, _ = results["rows"]
    title, ours, theirs, refused = gradients.lines_of_row(experts)
    assert title == "frozen experts, forward + backward: small, 16 tokens"
    assert "us: 100.0, 125.0 without rest  error 0.04  GiB 2.00 + 0.50 = 2.50" in ours
    assert "200.0, 212.5 without rest, 300.0 eager" in theirs
    assert theirs.endswith("  x1.700 without rest (1.600 to 1.800)  goal 1.80: MISSED")
    assert refused == "  BF16, grouped_mm is left out: no room"
    _, ours, forward = gradients.lines_of_row(dgrad)
    assert "TFLOP/s: 1000.0" in ours
    assert forward.endswith("x0.960 with pauses  goal 0.95: met")
    rest = "\n".join(gradients.lines_of_the_rest(results))
    assert "worst 0.700 at 3 x 256 x 48  goal 0.80: MISSED (0 of 1)" in rest
    assert "the same bits before and after timing: yes" in rest
    dgrad["peers"][OURS]["repeatable"] = False
    assert "NOT at 64x128x256" in "\n".join(gradients.lines_of_the_rest(results))


def test_the_tables(results):
    text = report.TABLES["gradients"](results)
    met = "| linears, forward + dX | torch BF16 | 1.500 | 1.500 | 16x128x256 |"
    assert met in text
    assert "| small, 16 tokens | 100.0 / 125.0 | 200.0 / 212.5 | 1.700 (2.000) |" in text
    assert "| small, 16 tokens | 2.00 + 0.50 = 2.50 | 2.00 + 0.50 = 2.50 |" in text
    assert "| 64x128x256 | 1000 | 1042 | 0.960 |" in text
    assert "| 3 x 256 x 48 | 4000 | 5714 | 0.700 |" in text
    assert "3 turns of 0.2 s" in text
    assert "a GPU, driver 0, torch 2; 2026-11-27, commit abc." in text


def test_a_headline_once_it_was_measured(results):
    what = "- Forward and backward of frozen experts, on one a GPU: "
    told = "1.70 times as fast as transformers, dequantizing (1.70 to 1.70)."
    assert headline_of(gradients=results) == what + told
