"""examples/hopper_gemm on a GPU."""

import json
import runpy
import sys

import pytest
import torch
from hopper_gemm.levels import FOLDER, LEVELS
from hopper_gemm.run import VARIANTS, call_of, check

from benchmarks.peers import Case, Operands
from moefp8.kernels import fp8_gemm_nt
from tests.gpu import NEEDS_GPU, no_synchronisation

pytestmark = NEEDS_GPU

EVERY = LEVELS + VARIANTS
SHAPES = (1, 8, 128), (65, 136, 256), (128, 256, 1152), (392, 1352, 2176), (2500, 3080, 1536)


@pytest.mark.parametrize("level", EVERY, ids=[level.title for level in EVERY])
@pytest.mark.parametrize("shape", SHAPES)
def test_levels_are_right_and_wrong_scales_are_seen(level, shape):
    operands = Operands.random(Case(*shape))
    x, w = operands.exact("block_scaled")
    check(level, operands, x @ w.T)


@pytest.mark.parametrize("shape", SHAPES)
def test_levels_with_wgmma_have_the_bits_of_the_library(shape):
    operands = Operands.random(Case(*shape))
    expected = operands.x.new_empty(shape[:2])
    fp8_gemm_nt(operands.a, operands.b, expected, batch_invariant=True)
    for level in EVERY[1:]:
        call = call_of(level, operands)
        with no_synchronisation():
            results = [call().clone() for _ in range(5)]
        assert all(torch.equal(expected, d) for d in results), level.title


@pytest.mark.slow
def test_the_command_checks_times_and_keeps_all(monkeypatch, capsys, tmp_path):
    file = tmp_path / "results.json"
    arguments = ["--m", "512", "--n", "1024", "--k", "512", "--rounds", "2", "--seconds", "0.1"]
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments, "--try", "--json", str(file)])
    runpy.run_path(str(FOLDER / "run.py"), run_name="__main__")
    results = json.loads(file.read_text())
    titles = [row["title"] for row in results["rows"]]
    assert {level.title for level in EVERY} < {*titles}
    assert all(row["us"] > 0 and row["error"] < 4e-3 for row in results["rows"])
    output = capsys.readouterr().out
    assert "| 5 overlap |" in output
    assert {"gpu", "driver", "commit", "date", "compiler"} <= {*results}
