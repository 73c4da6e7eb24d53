"""The benchmark of choices without a GPU: what it calls, and that it leaves nothing changed."""

import json

import pytest
import torch

from benchmarks import moe_choices
from benchmarks.moe_cases import Model, random_experts
from moefp8.kernels import jit
from moefp8.kernels.common.prepared import prepared
from moefp8.kernels.gemm.sm90.gemms import Sm90
from tests.benchmarks.cases import run_main

SMALL = Model("small", 5, 3, 256, 128)


@pytest.fixture
def cpu_as_gpu(no_gpu_needed, monkeypatch):
    """A small model is on the CPU; timers call once and count."""

    def many(calls, repeats):
        return {name: float(len(calls[name]())) for name in calls}

    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 2**30)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 3 * 2**30)
    others = {
        "circumstances": lambda: {"commit": "abc"},
        "MODEL": SMALL,
        "LONG_TOKENS": 60,
        "MANY_TOKENS": 20,
        "random_experts": lambda model: random_experts(model, device="cpu"),
        "layer_us_many": many,
        "device_us": lambda call, repeats: len(call()) * 1e3,
        "captured": lambda call: call,
        "graph_us_many": many,
    }
    for name, other in others.items():
        monkeypatch.setattr(moe_choices, name, other)


@pytest.mark.usefixtures("cpu_as_gpu")
def test_from_end_to_end(monkeypatch, capsys, tmp_path):
    out = tmp_path / "choices.json"
    run_main(monkeypatch, moe_choices, "--out", str(out))
    results = json.loads(out.read_text())
    assert (results["commit"], results["model"]) == ("abc", "small")
    rows = {(row.pop("what"), row.pop("tokens")): row for row in results["rows"]}
    assert rows["layouts, us", 128] == {"auto": 128, "contiguous": 128, "masked": 128}
    assert rows["a long prompt", 60] == {"ms": 60, "GiB above": 2, "same bits": True}
    assert rows["tiles, us", 1024] == {"counter": 1024, "every n-th": 1024}
    assert rows["shared experts in a graph, us", 16] == {"beside": 16, "behind": 16}
    assert rows["shared experts, us", 20] == {"one op": 20, "three linears": 20}
    assert rows["router, us", 1] == {"router": 2}  # the result is a pair
    of_rank = {"its own": 16, "tiles for all": 16, "ids by PyTorch": 16, "same bits": True}
    assert rows["one of 8 ranks in a graph, us", 16] == of_rank
    printed = capsys.readouterr().out
    assert "a long prompt                      60 tokens: ms 60.0, GiB above 2.0, same" in printed


@pytest.mark.usefixtures("cpu_as_gpu")
def test_each_way_to_take_tiles_has_launches_of_its_own(monkeypatch):
    kept = []

    def many(calls, repeats):
        for call in (*calls.values(), *calls.values()):
            call()
        return dict.fromkeys(calls, 1.0)

    def run(case):
        kept.append(prepared("takes", Sm90.takes_tiles))

    monkeypatch.setattr(moe_choices, "layer_us_many", many)
    monkeypatch.setattr(moe_choices.Case, "run", run)
    list(moe_choices.counters(random_experts(SMALL, device="cpu")))
    assert kept == [True, False, True, False] * 3
    assert "takes" not in jit.current_driver().prepared()
