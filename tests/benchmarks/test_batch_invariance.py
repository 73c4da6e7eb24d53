"""The price of batch invariance without a GPU: a run with fake times, and its table."""

import json

import pytest

from benchmarks import batch_invariance
from benchmarks.peers import Operands
from tests.benchmarks.cases import run_main


@pytest.fixture
def cpu_as_gpu(no_gpu_needed, monkeypatch):
    """Operands are on the CPU; the second call takes 1.5 times as long as the first."""
    random = Operands.random
    monkeypatch.setattr(Operands, "random", lambda case: random(case, device="cpu"))
    monkeypatch.setattr(batch_invariance, "MS", (1, 20))
    monkeypatch.setattr(batch_invariance, "SHAPES", ((130, 256), (64, 300)))
    times = 10.0, 15.0
    monkeypatch.setattr(
        batch_invariance,
        "device_us_many",
        lambda calls: {
            name: us + len(call()) * 0.0
            for (name, call), us in zip(calls.items(), times, strict=True)
        },
    )


@pytest.mark.usefixtures("cpu_as_gpu")
def test_from_end_to_end(monkeypatch, capsys, tmp_path):
    out = tmp_path / "prices.json"
    run_main(monkeypatch, batch_invariance, "--m", "1,20", "--out", str(out))
    printed = capsys.readouterr().out
    assert "4 of 4 cases" in printed
    assert "| 1 | 1.500 | 1.500 (130 x 256) |" in printed
    results = json.loads(out.read_text())
    for row in results["rows"]:
        assert row["us"] == {"default": 10.0, "batch_invariant": 15.0}
    assert batch_invariance.price_table(results) in printed


@pytest.mark.usefixtures("cpu_as_gpu")
def test_no_row_is_timed_whose_bits_move(monkeypatch, capsys):
    product = batch_invariance.product
    monkeypatch.setattr(
        batch_invariance, "product", lambda operands, m, which: product(operands, m, which) * m
    )
    with pytest.raises(SystemExit):
        run_main(monkeypatch, batch_invariance, "--m", "1")
    assert "1x130x256: 1 rows depend on the batch" in capsys.readouterr().err
