"""What benchmarks beside peers do with cases and peers that fail, and with results."""

import importlib
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from benchmarks import session
from benchmarks.peers import OURS, Peer
from tests.benchmarks.cases import failing, run_main

FOLDER = Path(session.__file__).parent
ON_GPU = sorted(x.stem for x in FOLDER.glob("*.py") if 'require_gpu("' in x.read_text())
FAILURE = RuntimeError("not this shape\nbut another")


def test_a_peer_that_cannot_says_why():
    peers = {
        OURS: Peer("moefp8", "", prepare=lambda x: lambda: x),
        "picky": Peer("Picky", "", prepare=failing(FAILURE), refuses=lambda case: f"not {case}"),
        "broken": Peer("Broken", "", prepare=lambda x: failing(FAILURE)),
    }
    x = torch.ones(2)
    calls, first, found = session.first_calls(peers, peers, "this", x)
    assert found.pop(OURS) == {}
    assert found == {
        "picky": {"refused": "not this"},
        "broken": {"refused": "RuntimeError: not this shape"},
    }
    assert (calls.keys(), first.keys()) == ({OURS}, {OURS})
    assert torch.equal(first[OURS], x)
    assert first[OURS] is not x
    with pytest.raises(RuntimeError):
        session.first_calls(peers, peers, "this", x, needed=(OURS, "broken"))


def test_a_case_that_fails_is_told_and_others_are_measured(capsys):
    rows = session.measured([3, 0, 1], lambda case: {"third": 3 // case}, lambda case: f"<{case}>")
    assert list(rows) == [{"third": 1}, {"third": 3}]
    told = capsys.readouterr()
    assert told.out == "no row for <0>\n"
    assert "ZeroDivisionError" in told.err


@pytest.mark.parametrize("out", ["out.json", None])
@pytest.mark.parametrize("is_all", [True, False])
@pytest.mark.parametrize("num_cases", [1, 2])
def test_results_are_kept_if_complete_or_asked_for(tmp_path, capsys, out, is_all, num_cases):
    results, usual = {"rows": [{}]}, tmp_path / "usual.json"
    options = {"is_all": is_all, "started": 0.0}
    with pytest.raises(SystemExit, match="1") if num_cases == 2 else nullcontext():
        session.finish(results, num_cases, ["a line"], out and tmp_path / out, usual, **options)
    is_kept = bool(out) or (is_all and num_cases == 1)
    kept = [(file.name, json.loads(file.read_text())) for file in tmp_path.iterdir()]
    assert kept == ([(out or "usual.json", results)] if is_kept else [])
    printed = capsys.readouterr().out
    assert ("not kept: these are not all cases of usual.json" in printed) != is_kept
    assert f"\na line\n1 of {num_cases} cases in" in printed


@pytest.mark.parametrize("name", ON_GPU)
def test_without_a_gpu_one_sentence(monkeypatch, capsys, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    told = f"^benchmarks.{name} times GPU kernels, and torch finds no CUDA GPU"
    with pytest.raises(SystemExit, match=told):
        run_main(monkeypatch, importlib.import_module(f"benchmarks.{name}"))
    assert capsys.readouterr().out == ""
