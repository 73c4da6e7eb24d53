"""What the report makes of results; `tests/test_examples.py` compares its tables with the pages."""

import json
import re
import shutil

import pytest

from benchmarks import gemm, grouped, headlines, moe, report
from benchmarks.figures import WITHOUT_REST, ratio, told_ratio
from benchmarks.model.table import fastest_ms, figures_of, phases_of
from benchmarks.moe_peers import HF_BF16, HF_FP8, MEGA
from benchmarks.peers import BF16, DEEP_GEMM, OURS
from benchmarks.training.parts import GROUPED, LAYERS, LINEARS
from benchmarks.training.peers import BLOCKS, SONIC

TEXT = "before\n<!-- headlines -->\nnot yet\n<!-- /headlines -->\nafter\n"


def results_of(name: str) -> dict:
    return json.loads((report.RESULTS / f"{name}.json").read_text())


def timed_with_pauses(name: str) -> dict:
    """The results without what was timed without rest."""
    results = results_of(name)
    for row in results["rows"]:
        for found in row["peers"].values():
            found.pop("without_rest", None)
    return results


def test_a_table_is_written_when_all_its_results_are_there(tmp_path):
    for name in headlines.SOURCES:
        assert report.with_tables(TEXT, tmp_path) == TEXT
        shutil.copy(report.RESULTS / f"{name}.json", tmp_path)
    text = report.with_tables(TEXT, tmp_path)
    assert text.startswith("before\n<!-- headlines -->\n| ")
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


def timed_without_rest(results: dict) -> dict:
    """As if all that takes 50 us had been timed without rest, a tenth slower, DeepGEMM a fifth."""
    results["turns"] = {"rounds": 4, "seconds": 2.0, "settling_seconds": 3.0}
    for row in results["rows"]:
        peers = {name: found for name, found in row["peers"].items() if "us" in found}
        if peers[OURS]["us"] < 50:
            continue
        for name, found in peers.items():
            slower = 1.2 if name in (DEEP_GEMM, MEGA) else 1.1
            figures = {"us": found["us"] * slower, "mhz": 1500, "watts": 690}
            if name != OURS:
                ratio = slower / 1.1 * found["us"] / peers[OURS]["us"]
                figures |= {"ratio": ratio, "least": ratio - 0.01, "most": ratio + 0.01}
            found["without_rest"] = figures
    return results


@pytest.mark.parametrize("name", ["gemm", "grouped", "moe"])
def test_pages_and_plots_show_both_modes(name, tmp_path):
    before = report.TABLES[name](timed_with_pauses(name))
    assert "without rest" not in before.lower()
    results = timed_without_rest(timed_with_pauses(name))
    after = report.TABLES[name](results)
    assert "calls back to back on operands that no cache holds, 4 turns of 2 s" in after
    assert "1500 MHz, 690 W" in after
    assert all(cell in after for cell in re.findall(r"^\| .*\d{4} \|$", before, re.MULTILINE))
    pytest.importorskip("matplotlib")
    (tmp_path / f"{name}.json").write_text(json.dumps(results))
    report.draw_plots(tmp_path)
    shown = (tmp_path / f"{name}.png").read_bytes()
    (tmp_path / f"{name}.json").write_text(json.dumps(timed_with_pauses(name)))
    report.draw_plots(tmp_path)
    assert shown != (tmp_path / f"{name}.png").read_bytes()


def test_headlines_are_without_rest_where_it_takes_long():
    of_moe, of_gemm = map(timed_with_pauses, headlines.SOURCES[:2])
    others = [results_of(name) for name in headlines.SOURCES[2:]]
    plain = headlines.headlines(of_moe, of_gemm, *others)
    told = headlines.headlines(timed_without_rest(of_moe), timed_without_rest(of_gemm), *others)
    assert "without rest" not in plain
    assert "without rest from 100 us on" in told
    for page_before, page_after in zip(rows_of(plain), rows_of(told), strict=True):
        (name, peer, *before), (same_name, same_peer, *after) = page_before, page_after
        assert (name, peer) == (same_name, same_peer)
        if peer in ("SGLang mega-kernel", "DeepGEMM"):
            assert float(after[-1]) == pytest.approx(float(before[-1]) * 1.2 / 1.1, abs=0.02)
        if "DeepSeek-V3" not in name:  # one token takes less than 100 us
            assert after[0] == before[0]


def test_headlines_tell_which_gpu_each_is_of():
    of_moe, of_gemm, *others = (results_of(name) for name in headlines.SOURCES)
    of_moe, of_gemm = (timed_without_rest(x | {"gpu": "a GPU"}) for x in (of_moe, of_gemm))
    head = "| on one a GPU, without rest from 100 us on | times as fast as |"
    assert headlines.headlines(of_moe, of_gemm, *others).startswith(head)
    page = headlines.headlines(of_moe, of_gemm | {"gpu": "another GPU"}, *others)
    assert page.startswith("|  | times as fast as |")
    assert "Experts: on one a GPU, without rest from 100 us on. GEMM: on one another GPU," in page


def test_headlines_are_those_of_large_m_where_it_was_timed_alone():
    """Without rest; a peer that was not timed so is marked."""
    results = [results_of(name) for name in headlines.SOURCES]
    ours = {"us": 100.0, "without_rest": {"us": 120.0}}
    theirs = {"us": 110.0, "without_rest": {"us": 150.0, "ratio": 1.25}}
    row = {"m": 4096, "n": 512, "k": 128, "peers": {OURS: ours, DEEP_GEMM: theirs}}
    large = {"gpu": results[1]["gpu"], "rows": [row]}
    before, after = (
        {tuple(cells[:2]): cells[-1] for cells in rows_of(page)}
        for page in (
            headlines.headlines(*results),
            headlines.headlines(*results, gemm_large=large),
        )
    )
    deep_gemm, bf16 = (gemm for gemm in before if gemm[0].startswith("`fp8_gemm_nt`"))
    assert after[deep_gemm] == "1.25"
    assert after[bf16] == f"{before[bf16]} with pauses"
    large["gpu"] = "another GPU"
    assert headlines.headlines(*results, gemm_large=large) == headlines.headlines(*results)


def rows_of(page: str) -> list[list[str]]:
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    return lines[1:]


def test_the_tables_of_random_shapes_and_of_power():
    rows = [
        {"m": m, "n": 512, "k": 128, "peers": {OURS: {"us": 10.0}, DEEP_GEMM: {"us": us}}}
        for m, us in ((1, 12.0), (9, 9.0), (300, 20.0))
    ]
    table = report.TABLES["gemm_sweep"]({"gpu": "a GPU", "rows": rows})
    assert "| M = 1 to 16 | 1.039, worst 0.900, slower in 1 of 2 |" in table
    assert "| M = 17 to 128 | - | - | - |" in table
    data = {"us": 100.0, "tflops": 1300.0, "mhz": 1500, "watts": 690}
    faster = {"us": 80.0, "tflops": 1600.0, "ratio": 0.8}
    row = {"m": 1, "n": 2, "k": 3, "data": {"random": data, "constant": faster, "zero": faster}}
    table = report.TABLES["power"]({"gpu": "a GPU", "rows": [row]})
    assert "| 100.0 us, 1300 TFLOP/s, 1500 MHz, 690 W | 80.0 us, 1600 TFLOP/s, 1.250 times" in table


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


def claim_of_the_readme(pattern: str) -> list[str]:
    claim = re.search(pattern, (report.ROOT / "README.md").read_text())
    assert claim
    return [*claim.groups()]


def test_the_claim_of_experts_is_that_of_their_table():
    of_experts = [
        x for x in results_of("moe")["rows"] if x["model"] in ("qwen3_30b_a3b", "deepseek_v3")
    ]
    mega_kernel = [told_ratio(row, (MEGA,)) for row in of_experts]
    assert len(mega_kernel) == 12
    ends = [f"{x:.2f}" for x in (min(mega_kernel), max(mega_kernel))]
    assert claim_of_the_readme(r"run (\S+) to (\S+) times as fast as in SGLang") == ends


def test_the_claim_of_decoding_is_that_of_the_models():
    (qwen,) = (row for row in results_of("model")["rows"] if row["model"] == "qwen3_30b_a3b")
    phases = [phase for phase in phases_of(qwen) if phase.startswith("decode")]
    ours, bf16 = ([fastest_ms(qwen, name, x) for x in phases] for name in (OURS, HF_BF16))
    ratios = [theirs / mine for mine, theirs in zip(ours, bf16, strict=True)]
    assert len(ratios) == 3
    as_called = figures_of(qwen, HF_BF16, phases[0])["eager_ms"] / ours[0]
    claim = r"decodes (\S+) to (\S+) times as fast as in BF16, (\S+) times"
    told = [f"{min(ratios):.1f}", f"{max(ratios):.1f}", f"{as_called:.0f}"]
    assert claim_of_the_readme(claim) == told


def test_what_need_not_be_there_is_taken_for_nothing_else(tmp_path):
    for name in (*headlines.SOURCES, "training"):
        (tmp_path / f"{name}.json").write_text((report.RESULTS / f"{name}.json").read_text())
    text = report.with_tables(TEXT, tmp_path)
    assert "Steps of training" in text
    assert "frozen experts" not in text


def test_pages_tell_speed_and_the_page_of_goals_tells_what_was_asked():
    pages = [report.ROOT / "README.md", *(report.ROOT / "docs").glob("*.md")]
    for page in (*pages, report.ROOT / "benchmarks" / "README.md"):
        tables = re.findall(r"^\|.*", page.read_text(), re.MULTILINE)
        told = re.compile(r"\bgoals?\b|\bmet\b|\bmissed\b", re.IGNORECASE)
        assert not any(map(told.search, tables)), page
    page = report.ROOT / "docs" / "design" / "goals.md"
    assert "| goal | asked | met | missed |" in page.read_text()


def test_the_claims_of_training_are_those_of_its_table():
    """Without rest: the least and most of each part beside BF16, and of layers beside SonicMoE."""
    rows = results_of("training")["rows"]

    def ends(part: str, against: str, ours: str) -> list[str]:
        ratios = [
            x
            for row in rows
            if row["part"] == part and (x := ratio(row, (against,), WITHOUT_REST, ours))
        ]
        return [f"{min(ratios):.2f}", f"{max(ratios):.2f}"]

    parts = LINEARS, GROUPED, LAYERS
    expected = [x for ours in (OURS, BLOCKS) for part in parts for x in ends(part, BF16, ours)]
    expected += ends(LAYERS, SONIC, OURS)
    page = (report.ROOT / "docs" / "training.md").read_text()
    claims = re.search(r"- Weights that train: beside BF16.*?times as fast\. ", page, re.DOTALL)
    assert claims
    assert re.findall(r"\d\.\d\d", claims.group()) == expected
