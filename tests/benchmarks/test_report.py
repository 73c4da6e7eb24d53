"""What the report makes of results; `tests/test_examples.py` compares its tables with the pages."""

import json
import re
import shutil

import pytest

from benchmarks import gemm, grouped, headlines, moe, report
from benchmarks.moe_peers import HF_FP8, MEGA
from benchmarks.peers import DEEP_GEMM

TEXT = "before\n<!-- headlines -->\nnot yet\n<!-- /headlines -->\nafter\n"


def results_of(name: str) -> dict:
    return json.loads((report.RESULTS / f"{name}.json").read_text())


def test_a_table_is_written_when_all_its_results_are_there(tmp_path):
    for name in headlines.SOURCES:
        assert report.with_tables(TEXT, tmp_path) == TEXT
        shutil.copy(report.RESULTS / f"{name}.json", tmp_path)
    text = report.with_tables(TEXT, tmp_path)
    assert text.startswith("before\n<!-- headlines -->\n| on one ")
    assert text.endswith("development and tests.\n<!-- /headlines -->\nafter\n")
    assert report.with_tables(text, tmp_path) == text
    less = results_of("moe")
    less["rows"] = [row for row in less["rows"] if row["tokens"] != 128]
    (tmp_path / "moe.json").write_text(json.dumps(less))
    changed = report.with_tables(text, tmp_path)
    layers = [line.split(" | ") for line in changed.splitlines() if "| experts of" in line]
    assert {cells[3] for cells in layers} == {"-"}


@pytest.mark.parametrize(
    "name", [name for name in report.PLOTS if (report.RESULTS / f"{name}.json").exists()]
)
def test_the_plot_is_a_picture(name, tmp_path):
    report.draw_plots(tmp_path)
    assert not list(tmp_path.iterdir())
    pytest.importorskip("matplotlib")
    shutil.copy(report.RESULTS / f"{name}.json", tmp_path)
    report.draw_plots(tmp_path)
    data = (tmp_path / f"{name}.png").read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert len(data) > 10_000


@pytest.mark.parametrize("benchmark", [gemm, grouped, moe])
def test_everything_prints_without_deep_gemm(benchmark):
    name = benchmark.RESULTS.stem
    results = results_of(name)
    for found in (*(row["peers"] for row in results["rows"]), results.get("host_us", {})):
        for peer in (DEEP_GEMM, HF_FP8, MEGA):
            found.pop(peer, None)
    told = "\n".join(benchmark.lines_of_the_rest(results))
    assert not re.search("goal [0-9]|DeepGEMM|SGLang", told)
    assert report.TABLES[name](results)


def ratios_of(page: str, peer: str) -> list[float]:
    """Each cell against `peer`, for the two models that the README's first claim names."""
    rows = re.findall(
        r"^\| experts of (?:DeepSeek-V3|Qwen3-30B-A3B) \| (.*)\|$", page, re.MULTILINE
    )
    cells = [row.split(" | ") for row in rows]
    return [float(x) for title, *values in cells if title == peer for x in values]


def test_the_first_claim_of_the_readme_is_that_of_its_table():
    page = (report.ROOT / "README.md").read_text()
    claim = re.search(r"run (\S+) to (\S+) times.*?and (\S+) to (\S+) times", page, re.DOTALL)
    assert claim
    mega_kernel, bf16 = (
        ratios_of(page, name) for name in ("SGLang mega-kernel", "transformers, BF16")
    )
    assert len(mega_kernel) == len(bf16) == 6
    found = [f"{x:.1f}" for values in (mega_kernel, bf16) for x in (min(values), max(values))]
    assert found == [*claim.groups()]
