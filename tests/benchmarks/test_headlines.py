"""The numbers of the README: taken from the results, and only where something was measured."""

import copy
import json
import re
from typing import Any

import pytest

from benchmarks import headlines, report

TEXT = "before\n<!-- headlines -->\nnot yet\n<!-- /headlines -->\nafter\n"


def times(**us: float) -> dict[str, Any]:
    return {name: {"us": x} for name, x in us.items()}


@pytest.fixture
def results() -> dict[str, Any]:
    errors = [{"worst": x} for x in (0.001, 0.02, 0.003, 0.04)]
    loads = {
        name: {"gib_per_s": speed, "extra_percent": extra}
        for name, speed, extra in (("moefp8", 7.0, 0.4), ("safetensors", 0.5, 90.0))
    }
    return {
        "moe": {
            "gpu": "GPU X",
            "rows": [
                {
                    "model": "deepseek_v3",
                    "tokens": 128,
                    "peers": times(moefp8=10, sgl_megamoe=12, hf_bf16=30),
                },
                {"model": "mixtral_8x7b", "tokens": 1, "peers": times(moefp8=10, hf_bf16=25)},
            ],
        },
        "gemm": {
            "rows": [
                {"m": 1, "n": 2, "k": 3, "peers": times(moefp8=1, deep_gemm=2)},
                {"m": 1, "n": 4, "k": 3, "peers": times(moefp8=1, deep_gemm=8)},
            ]
        },
        "accuracy": {"relative_error_of_rows": dict(zip("abcd", errors, strict=True))},
        "load": {"cpu": "CPU Y", **loads},
        "cpu": {"cpu": "CPU Z", "ms": [{"fp8": 20, "bf16": 2}, {"fp8": 48, "bf16": 4}]},
    }


def test_each_line_is_what_was_measured(results):
    lines = headlines.headlines(**results).splitlines()
    assert lines == [
        "| on one GPU X | times as fast as | 1 token | 128 tokens | 4096 tokens |",
        "|---|---|---|---|---|",
        "| experts of DeepSeek-V3 | SGLang mega-kernel | - | 1.20 | - |",
        "| experts of DeepSeek-V3 | transformers, BF16 | - | 3.00 | - |",
        "| experts of Mixtral 8x7B | transformers, BF16 | 2.50 | - | - |",
        "| `fp8_gemm_nt`, mean of 2 shapes | DeepGEMM | 4.00 | - | - |",
        "",
        "- Off BF16 in the worst row: `FP8Linear` 2.0 %, `GroupedExperts` 4.0 %. Off FP32 and FP64 "
        "sums of the same FP8 operands: 0.10 % and 0.30 %, which is BF16's rounding.",
        "- `load_checkpoint` takes 0.4 % of memory beside the model, at 7.0 GiB/s from a warm page "
        "cache; to stack what safetensors' `load_file` gives, 90.0 % at 0.5 GiB/s (CPU Y).",
        "- On a CPU, `FP8Linear` takes 10 to 12 times as long as BF16 (CPU Z): it is there for "
        "development and tests.",
    ]


def test_the_report_writes_them_when_all_results_are_there(results, tmp_path):
    for name in headlines.SOURCES:
        assert report.with_tables(TEXT, tmp_path) == TEXT
        (tmp_path / f"{name}.json").write_text(json.dumps(results[name]))
    text = report.with_tables(TEXT, tmp_path)
    assert text.startswith("before\n<!-- headlines -->\n| on one GPU X |")
    assert text.endswith("development and tests.\n<!-- /headlines -->\nafter\n")
    assert report.with_tables(text, tmp_path) == text
    changed = copy.deepcopy(results["moe"])
    changed["rows"][0]["peers"]["sgl_megamoe"]["us"] = 20
    (tmp_path / "moe.json").write_text(json.dumps(changed))
    assert "| SGLang mega-kernel | - | 2.00 | - |" in report.with_tables(text, tmp_path)


def ratios_of(page: str, peer: str) -> list[float]:
    """Of the two models that the README's first claim names: each cell against `peer`."""
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
