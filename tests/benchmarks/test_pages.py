"""What the report makes of results, and that every benchmark of kernels asks for a GPU."""

import json
import os
import re
import subprocess
import sys

import pytest

from benchmarks import grouped_cases, report
from tests.benchmarks.canned import RESULTS

_CASE = grouped_cases.Case(grouped_cases.SETTINGS[4], 1536, 2048)
_SPEED = f"{_CASE.flops / 1e7:.0f} | {_CASE.num_bytes('block_scaled') / 1e4:.0f}"
LINES = {
    "gemm": [
        "| times as fast as | DeepGEMM |",
        "| M = 4096 | 1.100, worst 1.100 | 1.100, worst 1.100 | - | 2.000, worst 2.000 |",
        "| 16 | 2112x7168 | 10.0 | 12.0 | **5.0** | 8.0 | - |",
    ],
    "grouped": [
        "| case | goal | 4096x7168 | 7168x2048 | 1536x2048 |",
        "| contiguous 4 x 8192 | 1.05 | 1.200 | 1.000 |  |",
        "| contiguous 128 x 8..64 | 1.30 |  |  | 1.300 |",
        "| masked 1 x 1024 | 1.15 | 2.000 |  |  |",
        f"| contiguous 128 x 8..64 | 4414 | 1536x2048 | 10.0 | {_SPEED} | 12.0 | 13.0 | - |",
    ],
    "moe": [
        "| model | tokens | floor, us | moefp8, us | goal",
        "| Qwen3-30B-A3B | 1 | 5.0 | 10.0 | 2.00 | 2.00 | 4.00 | 3.00 |",
        "| Mixtral 8x7B | 16 | 5.0 | 10.0 |  | - | 1.50 | - |",
        "| Mixtral 8x7B | 16 | 8 | 10.0 / 60.0 / 11.0 | - | 15.0 / 65.0 / 16.0 | - |",
    ],
}


@pytest.mark.parametrize("name", LINES)
def test_tables(name):
    """Those of real results are on the pages, where `tests/test_examples.py` compares them."""
    text = report.TABLES[name](RESULTS[name]())
    assert [line for line in LINES[name] if line not in text] == []
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):  # all lines have as many cells
        assert len({line.count("|") for line in table.splitlines()}) == 1


@pytest.mark.parametrize("name", report.PLOTS)
def test_the_plot_is_a_picture(name, tmp_path):
    report.draw_plots(tmp_path)
    assert not list(tmp_path.iterdir())
    pytest.importorskip("matplotlib")
    (tmp_path / f"{name}.json").write_text(json.dumps(RESULTS[name]()))
    report.draw_plots(tmp_path)
    data = (tmp_path / f"{name}.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 10_000


@pytest.mark.parametrize(
    ("benchmark", "arguments"),
    [
        ("benchmarks.gemm", "--m 64 --shapes 4096x7168"),
        ("benchmarks.grouped", "--cases masked-64x4"),
        ("benchmarks.moe", "--models qwen3_30b_a3b"),
    ],
)
def test_without_a_gpu_one_sentence(benchmark, arguments):
    done = subprocess.run(
        [sys.executable, "-m", benchmark, *arguments.split()],
        cwd=report.ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert done.returncode == 1
    assert f"{benchmark} times GPU kernels, and torch finds no CUDA GPU" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
