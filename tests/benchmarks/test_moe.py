"""The benchmark of whole layers without a GPU: references, every peer, what is printed."""

import json
import sys
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks import floors, mega_kernel, moe, report
from benchmarks.moe_accuracy import accuracy, reference
from benchmarks.moe_cases import MODELS, Case, Model, dequantized, random_experts
from benchmarks.moe_peers import HF_BF16, HF_FP8, MEGA, PEERS
from benchmarks.peers import OURS
from moefp8.testing import relative_error
from moefp8.testing.reference import rounded_to_fp8
from tests import naive
from tests.benchmarks.cases import failing, found, run_main

SMALL = Model("small", 5, 2, 256, 128)
UNEVEN = Model("uneven", 3, 2, 200, 136)


def row(model: str, tokens: int, **us: float) -> dict:
    case = SimpleNamespace(flops=10**9, num_bytes=lambda operands: 10**8)
    peers = found(PEERS, case, us, error=0.04, worst_row=0.06, fp8_error=0.002)
    for name in (OURS, *us):
        peers[name] |= {"eager_us": peers[name]["us"] + 50, "graph_us": peers[name]["us"] + 1}
    return {"model": model, "tokens": tokens, "active": 8, "floor_us": 5.0, "peers": peers}


@pytest.fixture
def results() -> dict:
    rows = [
        row("qwen3_30b_a3b", 1, sgl_megamoe=20.0, hf_deepgemm=40.0, hf_bf16=30.0),
        row("qwen3_30b_a3b", 128, sgl_megamoe=12.0, hf_deepgemm=40.0),
        row("qwen3_30b_a3b", 16384, sgl_megamoe=12.0, hf_deepgemm=40.0),
        row("deepseek_v3", 1, sgl_megamoe=13.0),
        row("mixtral_8x7b", 16, hf_deepgemm=15.0),
    ]
    return {"copy_gbps": 4300.0, "rows": rows}


@pytest.fixture
def case() -> Case:
    torch.manual_seed(0)
    return Case.random(SMALL, random_experts(SMALL, device="cpu"), 7)


def test_models_and_floors():
    """Sizes are those of the models' papers; floors at one token are counted by hand."""
    assert list(MODELS) == ["qwen3_30b_a3b", "deepseek_v3", "mixtral_8x7b"]
    assert moe.GOALS.keys() <= MODELS.keys()
    assert all({*goals} <= {*moe.TOKENS} for goals in moe.GOALS.values())
    model = MODELS["deepseek_v3"]
    index = torch.arange(8).view(1, 8)
    one = Case(model, None, torch.empty(1, 7168), index, index / 28)
    assert one.num_active == 8
    assert one.flops == 6 * 8 * 7168 * 2048
    assert one.floor_us == pytest.approx(8 * 3 * 7168 * 2048 / 4.3e6)
    scales = 3 * 56 * 16
    assert one.num_bytes("block_scaled") == 8 * (3 * 7168 * 2048 + 4 * scales) + 4 * 7168
    assert one.num_bytes("bf16") == 8 * 6 * 7168 * 2048 + 4 * 7168
    many = one.only(torch.zeros(16384, dtype=torch.int64))
    assert many.floor_us == pytest.approx(16384 * one.flops / 1450e6)


@pytest.mark.parametrize("model", [SMALL, UNEVEN])
def test_weights_are_normal_and_dequantize_to_what_the_codes_say(model):
    made = random_experts(model, device="cpu")
    h, i = model.hidden_size, model.intermediate_size
    gate_up, down = dequantized(made, 1)
    assert gate_up.shape == (2 * i, h)
    assert down.shape == (h, i)
    assert float(gate_up.std()) == pytest.approx(h**-0.5, rel=0.05)
    assert float(down.std()) == pytest.approx(i**-0.5, rel=0.05)
    exact = naive.values(made.down_proj[1], made.down_proj_scale_inv[1], 128)
    assert relative_error(down, exact) < 1e-6
    up = made.gate_up_proj[1, i:], made.gate_up_proj_scale_inv[1].chunk(2)[1]
    assert relative_error(gate_up[i:], naive.values(*up, 128)) < 1e-6


@pytest.mark.parametrize("model", [SMALL, UNEVEN])
def test_the_reference_is_the_layer_token_by_token(model):
    case = Case.random(model, random_experts(model, device="cpu"), 6)
    weights = [dequantized(case.experts, expert) for expert in range(model.num_experts)]
    gate_up, down = (torch.stack(parts) for parts in zip(*weights, strict=True))
    routing = case.top_k_index, case.top_k_weights
    exact = naive.experts(case.x, *routing, gate_up, down)
    assert relative_error(reference(case), exact) < 1e-5
    of_fp8 = relative_error(reference(case, rounded_to_fp8), exact)
    assert 0.01 < of_fp8 < 0.08
    assert torch.equal(case.top_k_weights.sum(dim=1).round(decimals=5), torch.ones(6))


def test_errors_tell_right_layers_from_wrong_ones(case):
    i = SMALL.intermediate_size
    right = PEERS[OURS].prepare(case)()
    weights = case.top_k_weights.clone()
    weights[case.top_k_index == case.top_k_index[0, 0]] = 0
    swapped = deepcopy(case.experts)
    swapped.gate_up_proj.copy_(case.experts.gate_up_proj.roll(i, dims=1))
    swapped.gate_up_proj_scale_inv.copy_(case.experts.gate_up_proj_scale_inv.roll(1, dims=1))
    lost_row = right.clone()
    lost_row[-1] = 0
    wrong = {
        "zeros": torch.zeros_like(right),
        "a lost expert": PEERS[OURS].prepare(replace(case, top_k_weights=weights))(),
        "gate for up": PEERS[OURS].prepare(replace(case, experts=swapped))(),
        "a lost row": lost_row,
    }
    (found,) = accuracy(case, {OURS: right}).values()
    assert 0.01 < found["error"] < found["worst_row"] < 0.08
    assert found["fp8_error"] < 0.02
    for what, result in wrong.items():
        (errors,) = accuracy(case, {OURS: result}).values()
        assert errors["worst_row"] > 0.3, what
        assert errors["fp8_error"] > 0.3, what
    lost_row[-1] = torch.nan
    assert set(accuracy(case, {OURS: lost_row})[OURS].values()) == {torch.inf}
    assert "fp8_error" not in accuracy(case, {HF_BF16: right})[HF_BF16]


def test_of_many_tokens_the_last_is_compared_too():
    case = Case.random(SMALL, random_experts(SMALL, device="cpu"), 150)
    result = reference(case)
    assert accuracy(case, {OURS: result})[OURS]["error"] < 1e-6
    result[-1] = 0
    assert accuracy(case, {OURS: result})[OURS]["worst_row"] == 1


@pytest.mark.usefixtures("deep_gemm")
def test_every_peer_is_the_same_layer(case):
    from torch.distributed import _symmetric_memory as memory

    untouched = memory.empty
    found = accuracy(case, {name: PEERS[name].prepare(case)() for name in PEERS})
    assert memory.empty is untouched
    for name, errors in found.items():
        assert errors["worst_row"] < 0.08
        assert errors["error"] < (0.01 if name == HF_BF16 else 0.05)
        assert errors.get("fp8_error", 0) < 0.03  # transformers rounds to BF16 on the way


def test_the_mega_kernel_is_that_of_the_newer_module(monkeypatch):
    def old(y, gate_up, down, buffer):
        pass

    def new(y, gate_up, down, buffer, num_tokens_bound=None):
        pass

    modules = {
        "deep_gemm": SimpleNamespace(fp8_mega_moe=old, __version__="0.1.5"),
        "deep_gemm_025": SimpleNamespace(fp8_mega_moe=new, __version__="0.2.5"),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    assert mega_kernel.version() == "sgl-deep-gemm 0.2.5"
    monkeypatch.setitem(sys.modules, "deep_gemm_025", None)
    assert mega_kernel.version() == "missing"
    why = PEERS[MEGA].why_missing()
    assert why.startswith("SGLang mega-kernel is left out (ImportError: ")
    assert "deep_gemm is too old" in why
    assert "deep_gemm_025" in why
    modules["deep_gemm"].fp8_mega_moe = new
    assert PEERS[MEGA].why_missing() is None
    assert mega_kernel.module() is modules["deep_gemm"]


def test_bf16_wants_room(case, monkeypatch):
    num_bytes = 2 * 5 * 3 * 256 * 128 + 12 * 14 * (256 + 128)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (num_bytes, 0))
    assert PEERS[HF_BF16].refuses(case) is None
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (num_bytes - 1, 0))
    assert PEERS[HF_BF16].refuses(case) == "it would take about 0.0 GB, and 0.0 are free"


def test_what_is_printed(results):
    first, second, *_, mixtral = results["rows"]
    head, (line,) = moe.head_of_table(PEERS), moe.lines_of_row(first)
    assert "20.0 x2.00" in line
    assert line.endswith("  goal 1.08: met")
    assert len(line.removesuffix("  goal 1.08: met")) == len(head)
    second["peers"][MEGA]["us"] = 10.7
    missed, refused = moe.lines_of_row(second)
    assert missed.endswith("-  goal 1.08: MISSED")
    assert refused == "transformers, BF16 is left out at 128 tokens: it does"
    assert not any("goal" in line for line in moe.lines_of_row(mixtral))
    first["peers"][HF_FP8] |= {"graph_refused": "it waits"}
    del first["peers"][OURS]["graph_us"]
    line, refused = moe.lines_of_row(first)
    assert refused == "transformers, DeepGEMM is no CUDA graph at 1 tokens: it waits"
    assert len(line.removesuffix("  goal 1.08: met")) == len(head)


def test_without_rest_is_printed_and_counts_where_it_takes_long(results):
    row = results["rows"][0]
    for name, us in ((OURS, 110.0), (MEGA, 150.0)):
        row["peers"][name] |= {"us": us, "without_rest": {"us": us + 10, "mhz": 1500, "watts": 690}}
    row["peers"][MEGA]["without_rest"] |= {"ratio": 1.07, "least": 1.06, "most": 1.09}
    line, below, *_ = moe.lines_of_row(row)
    assert line.endswith("  goal 1.08: MISSED")
    assert "without rest" in below
    assert below.split()[2:5] == ["120.0", "1500", "690"]
    assert "160.0 x1.070 (1.060 to 1.090) 1500 690" in below
    row["peers"][OURS]["us"] = 99.0  # it is short: what counts is with pauses
    line, *_ = moe.lines_of_row(row)
    assert line.endswith("  goal 1.08: met")


def test_what_is_printed_at_the_end(results):
    rest = "\n".join(moe.lines_of_the_rest(results))
    assert "Qwen3-30B-A3B, 1 tokens, us: moefp8 60.0, SGLang mega-kernel 70.0" in rest
    assert "same FP8 weights, worst case: moefp8 4.00e-02, SGLang mega-kernel 4.00e-02" in rest
    assert "moefp8 over SGLang mega-kernel: at most 1.00 at" in rest
    assert "the same bits before and after timing: yes" in rest
    mean = (2.0 * 1.2 * 1.2 * 1.3) ** 0.25
    assert f"geometric mean: {mean:.3f}  goal 1.40: MISSED" in rest
    assert rest.count("MISSED") == 1
    results["rows"][3]["peers"][OURS] |= {"repeatable": False, "eager_us": 99.0, "error": 0.041}
    rest = "\n".join(moe.lines_of_the_rest(results))
    assert "us: moefp8 99.0, SGLang mega-kernel 63.0  goal at most that: MISSED" in rest
    assert "mega-kernel: at most 1.02 at DeepSeek-V3, 1 tokens  goal 1.00: MISSED" in rest
    assert "NOT at DeepSeek-V3, 1 tokens" in rest


def test_points_of_the_plot(results):
    rows = results["rows"][:3]
    assert floors.points(rows, MEGA) == [("1", 4.0), ("128", 2.4), ("16384", 2.4)]
    assert floors.points(rows, HF_BF16) == [("1", 6.0)]
    assert floors.with_pauses(rows, MEGA) == []
    for name, us in ((OURS, 100.0), (MEGA, 120.0)):
        rows[2]["peers"][name] |= {"us": us, "without_rest": {"us": us + 10}}
    assert floors.points(rows, MEGA) == [("1", 4.0), ("128", 2.4), ("16384", 26.0)]
    assert floors.with_pauses(rows, MEGA) == [("16384", 24.0)]
    for each in rows:
        del each["peers"][MEGA]
        assert "goal" not in "".join(moe.lines_of_row(each))


def test_the_plot_says_why_a_point_is_below_the_floor():
    """One expert of Mixtral is 176 MB, which 4.3 TB/s give in 41 us."""
    row = {"model": "mixtral_8x7b", "tokens": 1, "active": 1, "floor_us": 41.0}
    row["peers"] = {OURS: {"us": 42.0}, MEGA: {"us": 40.0}}
    assert floors.below_the_floor([row]) == ""
    row["peers"][OURS]["us"] = 40.0
    assert "up to 4.40 TB/s here" in floors.below_the_floor([row])


@pytest.fixture
def cpu_as_gpu(no_gpu_needed, monkeypatch):
    """One small model is on the CPU, and timers time nothing."""
    monkeypatch.setitem(MODELS, "small", SMALL)
    monkeypatch.setattr(moe, "random_experts", lambda model: random_experts(model, device="cpu"))
    monkeypatch.setattr(moe, "layer_us_many", lambda calls, repeats: dict.fromkeys(calls, 10.0))
    monkeypatch.setattr(moe, "eager_us_many", lambda calls, repeats: dict.fromkeys(calls, 60.0))
    monkeypatch.setattr(moe, "captured", lambda call: (call(), call)[1])
    monkeypatch.setattr(moe, "graph_us_many", lambda calls, repeats: dict.fromkeys(calls, 11.0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**9, 10**9))


ON_SMALL = "--models", "small"


@pytest.mark.usefixtures("cpu_as_gpu", "deep_gemm")
def test_from_end_to_end(monkeypatch, capsys, tmp_path):
    out = tmp_path / "moe.json"
    run_main(monkeypatch, moe, *ON_SMALL, "--tokens", "1,16", "--out", str(out))
    printed = capsys.readouterr().out
    assert printed.index("small") < printed.index("tokens active")
    assert "2 of 2 cases" in printed
    results = json.loads(out.read_text())
    assert (results["deep_gemm"], results["copy_gbps"]) == ("1.0", 4300.0)
    assert results["mega_kernel"] == "sgl-deep-gemm 1.0"
    assert [each["tokens"] for each in results["rows"]] == [1, 16]
    for each in results["rows"]:
        assert {*each["peers"]} == {*PEERS}
        assert max(found["worst_row"] for found in each["peers"].values()) < 0.08
        assert {found["graph_us"] for found in each["peers"].values()} == {11.0}
        assert each["peers"][OURS]["repeatable"]
    assert report.moe_tables(results)


@pytest.mark.usefixtures("cpu_as_gpu")
def test_refusals_have_reasons(monkeypatch, capsys, deep_gemm, tmp_path):
    """The rows so far are in the file when a later case fails."""
    fail, times = failing(RuntimeError("not this shape")), iter([{OURS: 10.0}])
    monkeypatch.setattr(deep_gemm, "mega_moe_pre_dispatch_sm90", fail)
    monkeypatch.setattr(moe, "captured", fail)
    monkeypatch.setattr(moe, "layer_us_many", lambda calls, repeats: next(times))
    monkeypatch.setattr(moe, "finish", fail)
    out = tmp_path / "moe.json"
    with pytest.raises(RuntimeError):
        run_main(monkeypatch, moe, *ON_SMALL, "--tokens", "2,3", "--peers", MEGA, "--out", str(out))
    printed = capsys.readouterr().out
    assert "SGLang mega-kernel is left out at 2 tokens: RuntimeError: not this shape" in printed
    assert "moefp8 is no CUDA graph at 2 tokens: RuntimeError: not this shape" in printed
    assert "no row for small, 3 tokens" in printed
    (each,) = json.loads(out.read_text())["rows"]
    assert [*each["peers"]] == [OURS, MEGA]


def test_unknown_names_are_refused(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_main(monkeypatch, moe, "--peers", "moefp8,vllm")
    assert "vllm: must be of moefp8,sgl_megamoe,hf_deepgemm,hf_bf16" in capsys.readouterr().err
