"""The benchmark of new weights, without a GPU: what it measures, prints and tables."""

import json
import sys

import pytest
import torch

from benchmarks import report, updating


def test_it_measures_and_writes_all_cases(tmp_path, monkeypatch, capsys):
    file = tmp_path / "updating.json"
    options = {"layers": 3, "experts": 4, "hidden-size": 128, "intermediate-size": 64, "rounds": 1}
    options |= {"device": "cpu", "out": file}
    argv = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["updating", *argv])
    updating.main()
    results = json.loads(file.read_text())
    rows = results["rows"]
    assert {name: row["num_tensors"] for name, row in rows.items()} == {
        "stacked": 6,
        "stacked with W^T": 6,
        "expert by expert": 36,
        "expert by expert with W^T": 36,
    }
    assert all(row["ms"] > 0 and row["copy_ms"] > 0 for row in rows.values())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("stacked, 6 tensors: ")
    assert "of copy_'s" in lines[1]
    assert "torch._foreach_copy_'s" in lines[3]
    for row in rows.values():
        row["share_of_copy"] = 0.9
    verdicts = [line.rpartition(" ")[2] for line in updating.lines_of(rows)]
    assert verdicts == ["MISSED", "met", "met", "met"]
    assert "| expert by expert | 36 | " in report.updating_table(results)


def test_what_was_written_is_checked():
    sizes = 2, 128, 64
    sources = [updating.weights_of(sizes, "cpu")]
    model = updating.model_of(1, sizes, "cpu")
    updating.update(model, updating.buckets_of(sources, 1))
    updating.check(model, sources)
    experts = model["layers"][0].mlp.experts
    for name, message in (("down_proj", "down_proj"), ("gate_up_proj_scale_inv", "gate_up_proj")):
        before = experts.get_parameter(name).detach().clone()
        experts.get_parameter(name).detach().view(torch.uint8)[-1, -1, -1] ^= 1
        with pytest.raises(ValueError, match=f"{message} of the last layer"):
            updating.check(model, sources)
        experts.get_parameter(name).detach().copy_(before)
