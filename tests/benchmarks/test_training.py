"""The benchmark of training without a GPU: every peer's step, what is printed, goals, tables."""

import gc
import json
import signal
import sys
import time
import weakref
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from benchmarks import peers as dense_peers
from benchmarks import report, session
from benchmarks import without_rest as back_to_back
from benchmarks.gradient_cases import ExpertsCase, Results, error_of
from benchmarks.gradient_peers import COPY
from benchmarks.memory import saved_bytes
from benchmarks.moe_cases import Model
from benchmarks.peers import BF16, DEEP_GEMM, OURS
from benchmarks.training import __main__ as training
from benchmarks.training import goals, kernels, sonic
from benchmarks.training.cases import GroupedCase, LayerStep, LinearStep, Step
from benchmarks.training.kernels import (
    BOTH,
    COLUMNS,
    GATHERED,
    WEIGHTS,
    Quantize,
    QuantizeCase,
    Wgrad,
    WgradCase,
)
from benchmarks.training.parts import (
    GROUPED,
    LAYERS,
    LINEARS,
    PARTS,
    QUANTIZERS,
    SWIGLU,
    WGRAD,
)
from benchmarks.training.peers import (
    BLOCKS,
    EVERY,
    EVERY_BLOCKS,
    OF_OURS,
    SAVED_FP8,
    SONIC,
    TE_EVERY,
    TE_ONCE,
    TORCHAO,
)
from moefp8.functional.training.weights import codes_of
from tests.benchmarks.cases import failing, fake_deep_gemm, run_main

DENSE = dense_peers.Case(16, 128, 256)
EXPERTS = GroupedCase(3, 128, 48, 64)
LAYER = ExpertsCase(Model("small", 5, 2, 128, 128), 9)
SMALL_WGRADS = WgradCase((256,), 48, 80), WgradCase((128, 256, 128), 48, 80)
SMALL_QUANTIZERS = tuple(
    QuantizeCase(kind, GroupedCase(2, 256, 256, 128), 128, blocks)
    for kind, blocks in ((BOTH, False), (COLUMNS, False), (GATHERED, True), (WEIGHTS, False))
)


# ---- Libraries that are not here ----


class FakeLinear(nn.Module):
    """TransformerEngine's, in BF16: it tells how it was called."""

    told: ClassVar[list] = []

    def __init__(self, k, n, *, bias, params_dtype):
        super().__init__()
        assert not bias
        self.weight = nn.Parameter(torch.randn(n, k, dtype=params_dtype))

    def forward(self, x, *, is_first_microbatch):
        self.told.append(is_first_microbatch)
        return F.linear(x, self.weight)


class FakeGroupedLinear(nn.Module):
    def __init__(self, e, k, n, *, bias, params_dtype, use_grouped_tensor):
        super().__init__()
        self.native = use_grouped_tensor
        for i in range(e):
            weight = nn.Parameter(torch.randn(n, k, dtype=params_dtype))
            self.register_parameter(f"weight{i}", weight)

    def forward(self, x, counts, *, is_first_microbatch):
        assert isinstance(counts, torch.Tensor) == self.native
        counts = counts.tolist() if self.native else counts
        parts = zip(x.split(counts), self.parameters(), strict=True)
        return torch.cat([F.linear(rows, weight) for rows, weight in parts])


def sonic_layer(x, router, gate_up, gate_up_bias, down, down_bias, top_k, stream):
    scores, index = F.linear(x, router).float().topk(top_k, dim=-1)
    weights = torch.zeros(len(x), len(router)).scatter(1, index, scores.softmax(-1))
    y = torch.zeros_like(x)
    for e, weight in enumerate(weights.bfloat16().unbind(1)):
        gate, up = F.linear(x, gate_up[..., e]).chunk(2, dim=-1)
        y = y + weight[:, None] * F.linear(F.silu(gate) * up, down[..., e])
    return y, None, None


@pytest.fixture
def libraries(monkeypatch):
    """All libraries, which compute in BF16; the first call of SonicMoE ends."""

    @contextmanager
    def fp8_autocast(enabled, fp8_recipe):
        yield

    def put(name, **names):
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)

    te = {"Linear": FakeLinear, "GroupedLinear": FakeGroupedLinear, "fp8_autocast": fp8_autocast}
    monkeypatch.setattr(FakeLinear, "told", [])
    for name in ("transformer_engine", "transformer_engine.common", "torchao", "sonicmoe"):
        put(name, __version__="1.0")
    pytorch = ModuleType("transformer_engine.pytorch")
    vars(pytorch).update(te)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", pytorch)
    monkeypatch.setattr(sys.modules["transformer_engine"], "pytorch", pytorch, raising=False)
    put("transformer_engine.common.recipe", Float8BlockScaling=object)
    for name in ("", ".blockwise_fp8_training", ".moe_training", ".moe_training.blockwise_fp8"):
        put(f"torchao.prototype{name}")
    mm = SimpleNamespace(apply=lambda x, weight, block, dtype, triton: F.linear(x, weight))
    put("torchao.prototype.blockwise_fp8_training.linear", fp8_blockwise_mm=mm)
    put(
        "torchao.prototype.moe_training.blockwise_fp8.grouped_mm",
        _to_fp8_blockwise_then_scaled_grouped_mm=lambda x, w, offs: F.grouped_mm(x, w, offs=offs),
    )
    put("sonicmoe.functional", moe_TC_softmax_topk_layer=sonic_layer)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(sonic, "why_not", lambda command, patience_s: None)
    monkeypatch.setattr(sonic, "_found", [])
    fake_deep_gemm(monkeypatch)


def steps_of(part: str, operands: object, names=None) -> dict[str, Step]:
    return {name: PARTS[part].peers[name].prepare(operands) for name in names or PARTS[part].peers}


# ---- Steps ----


def test_cases_are_those_that_goals_are_of():
    assert [str(x) for x in PARTS[LINEARS].cases] == [
        "8192x4096x7168",
        "8192x7168x2048",
        "16384x2048x2048",
    ]
    assert [x[:4] for x in PARTS[GROUPED].cases] == [
        (32, 1024, 4096, 7168),
        (32, 1024, 7168, 2048),
        (128, 512, 1536, 2048),
    ]
    assert [(x.num_tokens, *x.model[1:]) for x in PARTS[LAYERS].cases] == [
        (4096, 32, 8, 7168, 2048),
        (8192, 128, 8, 2048, 768),
        (8192, 8, 2, 4096, 14336),
    ]
    for case in PARTS[GROUPED].cases:
        assert all(n % 128 == 0 for n in case.counts)
        assert 0.85 < sum(case.counts) / (case.num_experts * case.tokens) < 1.05
    for goal in goals.GOALS:
        assert {*goal.ours} <= {*PARTS[goal.part].peers}
        assert {*goal.least} <= {*map(str, PARTS[goal.part].cases)}


@pytest.mark.usefixtures("libraries")
@pytest.mark.parametrize(("part", "case"), [(LINEARS, DENSE), (GROUPED, EXPERTS)])
def test_linears_of_every_peer_have_the_same_gradients(part, case):
    torch.manual_seed(0)
    operands = LinearStep.random(case, "cpu")
    results = {name: step() for name, step in steps_of(part, operands).items()}
    errors = operands.errors(results)
    assert all(set(x) == {"error", "error_of_x", "error_of_weight"} for x in errors.values())
    for name in (OURS, BLOCKS, EVERY, EVERY_BLOCKS):
        assert 0.01 < errors[name]["error_of_weight"] < 0.06
        assert max(errors[name].values()) < 0.06
    for name in (TE_ONCE, TE_EVERY, TORCHAO):
        assert max(errors[name].values()) < 0.01
    assert results[OURS].equals(results[EVERY])
    y, dx, dw = results[OURS]
    assert operands.errors({BF16: results[BF16], "zeros": Results((y, 0 * dx, dw))})["zeros"][
        "error_of_x"
    ] == pytest.approx(1.0)
    flipped = Results((y, dx, dw.flip(0)))
    assert operands.errors({BF16: results[BF16], "": flipped})[""]["error_of_weight"] > 1
    if part == LINEARS:
        assert FakeLinear.told == [True, False, None]


@pytest.mark.usefixtures("libraries")
def test_transformer_engine_is_told_loads_beyond_what_it_takes_as_a_tensor(monkeypatch):
    monkeypatch.setattr("benchmarks.training.peers.MOST_EXPERTS_OF_TE", 2)
    operands = LinearStep.random(EXPERTS, "cpu")
    (step,) = steps_of(GROUPED, operands, [TE_ONCE]).values()
    assert [len(step.leaves), len(step())] == [4, 5]


@pytest.mark.usefixtures("libraries")
def test_layers_of_every_peer_have_the_same_gradients():
    torch.manual_seed(0)
    operands = LayerStep.random(LAYER, "cpu")
    results = {name: step() for name, step in steps_of(LAYERS, operands).items()}
    assert [x.shape for x in results.pop(SONIC)[:3]] == [(9, 128), (9, 128), (5, 128)]
    errors = operands.errors(results)
    for name in OF_OURS:
        judged = {key: x for key, x in errors[name].items() if key.startswith("error")}
        assert len(judged) == 4
        assert 0.01 < max(judged.values()) < training.MOST_ERROR
    assert results[OURS].equals(results[EVERY])
    assert results[BLOCKS].equals(results[EVERY_BLOCKS])
    assert not results[OURS].equals(results[SAVED_FP8])
    assert all(leaf.grad is None for leaf in operands.leaves)


def test_a_step_leaves_no_gradients_to_the_next_one():
    x = torch.ones(2, 3, requires_grad=True)
    step = Step(lambda: 2 * x, (x,), torch.ones(2, 3))
    x.grad = torch.ones(2, 3)  # of a step that failed
    y, dx = step()
    assert y.tolist() == dx.tolist() == [[2.0] * 3] * 2
    assert x.grad is None
    with pytest.raises(RuntimeError, match=r"no gradient of the leaves \[1\]"):
        Step(lambda: 2 * x, (x, torch.ones(1, requires_grad=True)), torch.ones(2, 3))()


def test_weights_are_quantized_once_or_in_every_step():
    """Writes through `.data` tell nobody: only who quantizes anew sees them."""
    operands = LinearStep.random(DENSE, "cpu")
    once, every = steps_of(LINEARS, operands, [OURS, EVERY]).values()
    first = once(), every()
    with torch.no_grad():
        operands.weight.data.zero_()
        operands.weight_anew.data.zero_()
    assert once()[0].equal(first[0][0])
    assert every()[0].count_nonzero() == 0
    assert codes_of(operands.weight).data is not codes_of(operands.weight_anew).data


def test_what_autograd_keeps_of_a_token():
    operands = LayerStep.random(LAYER, "cpu")
    (_, e, k, h, i), num_tokens = LAYER
    named = steps_of(LAYERS, operands, [OURS, SAVED_FP8])
    plain, fp8 = (
        saved_bytes(step.forward, step.leaves[1:]) / num_tokens for step in named.values()
    )
    routed = 2 * h + k * (8 + 4) + 2 * e  # hidden states, choices, and logits of all experts
    assert plain == routed + 2 * 2 * k * i
    assert fp8 == routed + 2 * k * i + 4 * 2 * k * i // 128


def test_a_first_call_that_does_not_end_is_ended(monkeypatch):
    started = time.perf_counter()
    assert sonic.why_not((sys.executable, "-c", "pass"), 60) is None
    why = sonic.why_not((sys.executable, "-c", "raise ValueError('it is so')"), 60)
    assert str(why) == "its first call failed: ValueError: it is so"
    why = sonic.why_not((sys.executable, "-c", "import time; time.sleep(1000)"), 0.5)
    assert isinstance(why, TimeoutError)
    assert time.perf_counter() - started < 300
    asked = []
    monkeypatch.setattr(sonic, "_found", [])
    monkeypatch.setattr(sonic, "why_not", lambda *given: (asked.append(given), why)[1])
    kept = [ask_for(case) for case in ("one", "another")]
    assert len(asked) == 1
    gc.collect()
    assert [operands() for operands in kept] == [None, None]


def ask_for(case: str) -> weakref.ref:
    operands = torch.empty(0)
    with pytest.raises(TimeoutError, match=r"did not end in 0\.5 s"):
        sonic.check_it_ends(case)
    return weakref.ref(operands)


# ---- Kernels ----


@pytest.mark.parametrize("case", SMALL_WGRADS)
def test_every_gemm_over_tokens_is_right_and_seen_to_be(case, monkeypatch):
    fake_deep_gemm(monkeypatch)
    torch.manual_seed(0)
    operands = Wgrad.random(case, "cpu")
    calls = {name: peer.prepare(operands) for name, peer in PARTS[WGRAD].peers.items()}
    results = {name: call().clone() for name, call in calls.items()}
    errors = {name: found["error"] for name, found in operands.errors(results).items()}
    assert 0.01 < min(errors.values()) <= max(errors.values()) < 0.06
    assert results[kernels.FP32].equals(results[kernels.ADDS])
    assert error_of(results[DEEP_GEMM][0], results[kernels.ADDS][0]) < 1e-6
    assert results[OURS][0].dtype == torch.bfloat16
    (d,) = calls[kernels.ADDS]()
    assert error_of(d, 2 * results[kernels.FP32][0]) < 1e-6
    wrong = {OURS: Results((results[OURS][0].flip(-1),))}
    assert operands.errors(wrong)[OURS]["error"] > 1


@pytest.mark.parametrize("case", SMALL_QUANTIZERS, ids=str)
def test_every_quantization_is_right_and_seen_to_be(case):
    torch.manual_seed(0)
    operands = Quantize.random(case, "cpu")
    calls = {name: peer.prepare(operands) for name, peer in PARTS[QUANTIZERS].peers.items()}
    results = {name: call() for name, call in calls.items()}
    errors = operands.errors(results)
    assert errors[COPY] == {"error": 0.0}
    assert 0.01 < errors[OURS]["error"] < 0.05
    assert max(errors[OURS].values()) < 0.05
    wrong = operands.errors({OURS: Results(map(torch.zeros_like, results[OURS]))})
    assert wrong[OURS]["error"] == 1.0
    written = sum(x.numel() * x.element_size() for x in results[OURS])
    spare = 2 * 128 * 128 * (1 if case.kind == WEIGHTS else 2)  # blocks that no expert has
    read = 2 * operands.x.numel()
    assert read < operands.num_bytes <= read + written
    assert case.kind == BOTH or written + read - operands.num_bytes < 3 * spare


# ---- From end to end ----


@pytest.fixture
def on_cpu(no_gpu_needed, monkeypatch):
    """Small cases are on the CPU, and timers time nothing."""
    small = {LINEARS: (DENSE,), GROUPED: (EXPERTS,), LAYERS: (LAYER,), WGRAD: SMALL_WGRADS}
    small |= {QUANTIZERS: SMALL_QUANTIZERS[:1], SWIGLU: ()}
    for name, part in list(PARTS.items()):
        operands = partial(part.operands, device="cpu")
        monkeypatch.setitem(PARTS, name, replace(part, operands=operands, cases=small[name]))
    for timer in ("layer_us_many", "device_us_many"):
        monkeypatch.setattr(training, timer, lambda calls, repeats: dict.fromkeys(calls, 1e3))
    monkeypatch.setattr(training, "host_us", lambda call, repeats: 70.0)
    monkeypatch.setattr(training, "peak_bytes", lambda call: (call(), 1 << 30)[1])
    monkeypatch.setattr(training, "num_copies", lambda num_bytes: 2)
    monkeypatch.setattr(back_to_back, "captured", lambda call: call)
    turns = {"us": 1100.0, "ratio": 1.1, "least": 1.0, "most": 1.2}
    monkeypatch.setattr(session, "without_rest", lambda loops, *_: dict.fromkeys(loops, turns))


@pytest.mark.usefixtures("on_cpu", "libraries")
def test_from_end_to_end(monkeypatch, capsys, tmp_path):
    out = tmp_path / "training.json"
    run_main(monkeypatch, training, "--out", str(out))
    printed = capsys.readouterr().out
    assert "6 of 6 cases" in printed
    assert f"{PARTS[LINEARS].title}: 16x128x256: {OURS}, {BLOCKS}" in printed
    assert "TransformerEngine                1100.0 / 1000.0 eager  host 70" in printed
    results = json.loads(out.read_text())
    assert results["libraries"] == {
        "TransformerEngine": "1.0",
        "torchao": "1.0",
        "SonicMoE": "1.0",
    }
    assert (results["missing"], results["left_out"]) == ({}, [])
    assert [x["part"] for x in results["rows"]] == [*list(PARTS)[:3], WGRAD, WGRAD, QUANTIZERS]
    for row in results["rows"]:
        assert {*row["peers"]} == {*PARTS[row["part"]].peers}
        for name, found in row["peers"].items():
            assert (found["us"], found["without_rest"]["us"]) == (1e3, 1100.0)
            is_eager = name in (TE_ONCE, TE_EVERY, TORCHAO)
            assert found["without_rest"].get("eager", False) == is_eager
    layer = results["rows"][2]["peers"]
    assert layer[OURS]["saved_bytes_per_token"] > layer[SAVED_FP8]["saved_bytes_per_token"]
    assert "host 70" in report.TABLES["training"](results)


@pytest.mark.usefixtures("on_cpu")
def test_who_is_missing_is_named(monkeypatch, capsys, tmp_path):
    for name in ("transformer_engine", "torchao", "sonicmoe", "deep_gemm"):
        monkeypatch.setitem(sys.modules, name, None)  # so that an import fails
    out = tmp_path / "training.json"
    run_main(monkeypatch, training, "--parts", "linears,layers", "--quick", "--out", str(out))
    assert "not there: TransformerEngine, every step is left out" in capsys.readouterr().out
    results = json.loads(out.read_text())
    assert set(results["missing"]) == {
        "TransformerEngine",
        "TransformerEngine, every step",
        "torchao, every step",
        "SonicMoE, BF16",
    }
    assert {*results["rows"][0]["peers"]} == {OURS, BLOCKS, EVERY, EVERY_BLOCKS, BF16}
    assert "without_rest" not in results["rows"][0]["peers"][OURS]
    assert "Not there: SonicMoE, BF16, TransformerEngine, " in report.TABLES["training"](results)


@pytest.mark.usefixtures("on_cpu", "libraries")
def test_what_had_no_time_is_named_and_may_follow(monkeypatch, capsys, tmp_path):
    out = tmp_path / "training.json"
    asked = "--peers", TE_ONCE, "--rounds", "0", "--out", str(out)
    with pytest.raises(SystemExit):
        run_main(monkeypatch, training, "--minutes", "0", "--parts", "linears", *asked)
    assert "there was no time for linears: 16x128x256" in capsys.readouterr().out
    assert json.loads(out.read_text())["rows"] == []

    def stop(step: object) -> int:
        signal.raise_signal(signal.SIGTERM)
        return 0

    monkeypatch.setattr(training, "peak_bytes", stop)
    with pytest.raises(SystemExit):
        run_main(monkeypatch, training, "--parts", "linears,layers", *asked)
    assert "stopped" in capsys.readouterr().out
    first = json.loads(out.read_text())
    assert [row["part"] for row in first["rows"]] == [LINEARS]
    assert first["left_out"] == ["layers: small, 9 tokens"]
    assert {*first["rows"][0]["peers"]} == {OURS, BF16, TE_ONCE}
    run_main(monkeypatch, training, "--parts", "grouped", "--only", "OF 48", *asked, "--keep")
    kept = json.loads(out.read_text())
    assert [row["part"] for row in kept["rows"]] == [LINEARS, GROUPED]
    out.write_text(json.dumps(kept | {"gpu": "another"}))
    with pytest.raises(ValueError, match="must have this run's gpu, none, got another"):
        run_main(monkeypatch, training, "--parts", "grouped", *asked, "--keep")


@pytest.mark.usefixtures("on_cpu", "libraries")
def test_who_fails_or_is_wrong_is_left_out(monkeypatch, capsys):
    error = torch.OutOfMemoryError("CUDA out of memory.")
    monkeypatch.setattr(FakeLinear, "forward", failing(error))
    mm = SimpleNamespace(apply=lambda x, weight, *_: 2 * F.linear(x, weight))
    monkeypatch.setattr(
        sys.modules["torchao.prototype.blockwise_fp8_training.linear"], "fp8_blockwise_mm", mm
    )
    monkeypatch.setattr(session, "without_rest", failing(error))
    run_main(monkeypatch, training, "--parts", "linears")
    printed = capsys.readouterr().out
    assert "TransformerEngine is left out: OutOfMemoryError: CUDA out of memory." in printed
    assert "torchao, every step is left out: it is wrong: {'error': 1.0" in printed
    assert "16x128x256 is not timed without rest: OutOfMemoryError" in printed
    monkeypatch.setattr(training, "MOST_ERROR", 0.001)
    with pytest.raises(SystemExit):
        run_main(monkeypatch, training, "--parts", "linears")
    assert "is wrong: {'error'" in capsys.readouterr().err
