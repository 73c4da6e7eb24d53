"""examples/hopper_gemm: what is compiled, launched and computed there, without a GPU."""

import json
import re
import runpy
import sys
from dataclasses import replace

import pytest
import torch
from hopper_gemm.levels import FOLDER, LEVELS, Level
from hopper_gemm.run import ARCH, MOST_ERROR, VARIANTS, compiled, nvdisasm, with_wrong_scale

from benchmarks import hopper_gemm, report
from moefp8.kernels import jit
from moefp8.quant import BlockScaled, quantize_1x128, quantize_128x128
from moefp8.testing import relative_error
from tests import naive
from tests.fakes import hopper_on_cpu
from tests.fakes.emulator import FakeDriver
from tests.fakes.hopper_on_cpu import HopperOnCpu
from tests.kernels import nvdisasm as disassembler
from tests.kernels.gemm.sm90.test_compile import releases_before_reads

EVERY = LEVELS + VARIANTS
# On a CPU levels run in low bands, and by few CTAs, so that each has several tiles.
IN_LOW_BANDS = tuple(replace(x, band_rows=256) for x in LEVELS)
NUM_SMS = 4
SHAPE = 264, 392, 1024  # M, N, K: tiles end beyond both edges; stages are filled again


def ids(levels: tuple[Level, ...]) -> list[str]:
    return [level.title for level in levels]


def operands(m: int, n: int, k: int) -> tuple[BlockScaled, BlockScaled]:
    """Normal numbers; scales spread over four powers of two."""
    a, b = quantize_1x128(torch.randn(m, k)), quantize_128x128(torch.randn(n, k))
    for scales in (a.scale_inv, b.scale_inv):
        scales.mul_(torch.exp2(4 * torch.rand(scales.shape)))
    return a, b


def result(
    level: Level, a: BlockScaled, b: BlockScaled, seed: int = 0, change: tuple[str, str] = ("", "")
) -> torch.Tensor:
    """What a level computes on a CPU; what it does not write is NaN. change: of its sources."""
    if not hopper_on_cpu.is_possible():
        pytest.skip("needs g++")
    d = torch.full((len(a.data), len(b.data)), torch.nan, dtype=torch.bfloat16)
    plain = replace(level, interleaving="")
    with jit.using(FakeDriver(num_sms=NUM_SMS, library=HopperOnCpu(change, seed))):
        plain.prepare(a, b, d)()
    return d


# ---- Sources ----


def test_levels_are_short_and_heads_have_five_lines():
    lines = {path.name: path.read_text().count("\n") for path in FOLDER.glob("*.cu*")}
    *sources, last = [level.source for level in LEVELS]
    assert max(lines[source] for source in sources) <= 150
    assert lines[last] + lines["parts.cuh"] <= 300
    assert {*lines} == {*sources, last, "parts.cuh"}
    for source in (*sources, last):
        words = re.findall(r"^// ([A-Z][a-z]+) {2,}?\S", (FOLDER / source).read_text(), re.M)
        words += re.findall(r"^// (Alignment) \S", (FOLDER / source).read_text(), re.M)
        assert words == ["Formula", "Grid", "Shared", "Barriers", "Alignment"], source


@pytest.mark.slow
@pytest.mark.usefixtures("own_cache")
def test_all_compile_and_spill_nothing():
    for row in compiled(EVERY):
        assert row["problems"] == [], row["title"]
        assert row["spills"] == 0, row["title"]


@pytest.fixture(scope="module")
def codes(tmp_path_factory) -> dict[str, str]:
    """The machine code of all that have stages, by title."""
    if not disassembler.is_installed():
        pytest.skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    kernels = {level.title: level.kernel for level in EVERY if level.uses_tma}
    images = [cubin.image for cubin in jit.compile_kernels(kernels.values(), ARCH)]
    texts = disassembler.texts_of(images, tmp_path_factory.mktemp("cubins"))
    return dict(zip(kernels, texts, strict=True))


def test_no_stage_is_released_while_its_scales_are_read(codes):
    for title, code in codes.items():
        if title[0] > "2":  # level 2 releases by __syncthreads
            assert releases_before_reads(code) == 0, title


def test_between_two_products_of_the_last_level_is_a_promotion(codes):
    """In its loop along K, which has a turn for each part, there are no reads, waits or jumps."""
    turns = re.findall(
        r"WARPGROUP\.DEPBAR((?:(?!WARPGROUP).)*?)WARPGROUP\.ARRIVE", codes["5 overlap"], re.S
    )
    assert len(turns) == 3  # the first part of a tile, and both parts in the loop
    for turn in turns:
        assert turn.count("FFMA") == 64
        assert not re.search(r"\bLD[GS]|PHASECHK|BRA|BAR\.|MEMBAR|STSM", turn)


# ---- Results ----


@pytest.mark.slow
@pytest.mark.parametrize("level", IN_LOW_BANDS, ids=ids(LEVELS))
def test_results_are_right_in_any_order_of_events(level):
    a, b = operands(*SHAPE)
    exact = naive.gemm(a, b)
    results = [result(level, a, b, seed) for seed in range(2)]
    assert relative_error(results[0], exact) <= MOST_ERROR
    assert all(torch.equal(results[0], x) for x in results)
    for wrong in ((with_wrong_scale(a), b), (a, with_wrong_scale(b))):
        assert relative_error(result(level, *wrong), exact) > MOST_ERROR


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 8, 128), (128, 256, 256), (65, 392, 640)])
def test_levels_with_wgmma_have_the_same_bits(shape):
    a, b = operands(*shape)
    plain, *others = [result(level, a, b) for level in LEVELS]
    assert relative_error(plain, naive.gemm(a, b)) <= MOST_ERROR
    assert relative_error(others[0], naive.gemm(a, b)) <= MOST_ERROR
    assert all(torch.equal(others[0], x) for x in others)


FAULTS = [  # level, a text of its sources, what stands there instead
    (2, "__syncthreads();  // both warpgroups have read the stage", ""),
    (3, "if (++stage == kStages) stage = 0, parity ^= 1;", "if (++stage == kStages) stage = 0;"),
    (3, "(product);\n    shared.empty[ring.stage].arrive();", "(product);"),
    (4, "if (signals) shared", "if (false) shared"),
    (4, "i < kStages; ++i, ring.next()) shared", "i < 0; ++i) shared"),
    (5, "if (index == 0) tma_store_wait_read();  // what was there before has left", ""),
    (5, "finish(part - 1), begin(part)", "begin(part), finish(part - 1)"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "text", "instead"), FAULTS)
def test_a_fault_is_seen(number, text, instead):
    a, b = operands(*SHAPE)
    exact = naive.gemm(a, b)

    def is_seen(seed: int) -> bool:
        try:
            d = result(LEVELS[number - 1], a, b, seed, (text, instead))
        except AssertionError:  # it waits for ever, or breaks a rule of the hardware
            return True
        return relative_error(d, exact) > MOST_ERROR

    assert any(is_seen(seed) for seed in range(0, 60, 10))


# ---- Operands that levels do not take ----


@pytest.mark.parametrize("shape", [(0, 8, 128), (8, 12, 128), (8, 8, 100), (8, 8, 0)])
def test_other_shapes_are_refused(shape):
    m, n, k = shape
    a = BlockScaled(torch.empty(m, k).to(torch.float8_e4m3fn), torch.empty(m, 1))
    b = BlockScaled(torch.empty(n, k).to(torch.float8_e4m3fn), torch.empty(1, 1))
    d = torch.empty(m, n).bfloat16()
    with pytest.raises(ValueError, match=f"got {m} x {n} x {k}; moefp8.kernels.fp8_gemm_nt takes"):
        LEVELS[0].prepare(a, b, d)


def test_other_layouts_are_refused():
    a, b = operands(6, 16, 256)
    d = torch.empty(6, 16).bfloat16()
    wrong = a._replace(scale_inv=a.scale_inv.contiguous())
    for args in ((wrong, b, d), (a, b, torch.empty(16, 6).bfloat16().T)):
        with pytest.raises(ValueError, match="quantize_1x128 gives them"):
            LEVELS[4].prepare(*args)
    with pytest.raises(ValueError, match=r"must agree, got \[\[6, 256\], \[16, 256\], \[7, 16\]\]"):
        LEVELS[4].prepare(a, b, torch.empty(7, 16).bfloat16())


# ---- The command, and what is made of its results ----


def run(monkeypatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    runpy.run_path(str(FOLDER / "run.py"), run_name="__main__")


def test_without_a_gpu_it_says_what_was_compiled(monkeypatch, capsys, tmp_path):
    run(monkeypatch, "--json", str(tmp_path / "results.json"))
    output = capsys.readouterr().out
    assert "nothing ran: torch finds no Hopper GPU" in output
    kernels = json.loads((tmp_path / "results.json").read_text())["kernels"]
    assert [row["title"] for row in kernels] == ids(LEVELS)
    for row in kernels:
        assert re.search(rf"^{row['title']} +{row['lines']} +{row['registers']} +0 ", output, re.M)
    if nvdisasm():
        assert kernels[4]["instructions"]["QGMMA"] == 16


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--k", "100"], "K a multiple of 128, got"), (["--levels", "6"], "must be 1 to 5, got 6")],
)
def test_wrong_arguments_are_named(arguments, message, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run(monkeypatch, *arguments)
    assert message in capsys.readouterr().err


def results_of_a_run() -> dict:
    """As `run.py --try --json` keeps them."""
    peers = ("moefp8", "moefp8"), ("deep_gemm", "DeepGEMM")
    rows = [{"kind": "level", "name": x.title, "title": x.title} for x in LEVELS]
    rows += [{"kind": "peer", "name": name, "title": title} for name, title in peers]
    rows += [{"kind": "variant", "name": x.title, "title": x.title} for x in VARIANTS]
    for i, row in enumerate(rows):
        row |= {"us": 1000.0 / (1 + i), "tflops": 100.0 * (1 + i), "error": 1.7e-3}
    about = {"m": 4096, "n": 4096, "k": 7168, "gpu": "a GPU", "driver": "1", "torch": "2"}
    about |= {"compiler": "nvrtc", "deep_gemm": "3", "date": "2026-01-01T00:00", "commit": "abc"}
    return {**about, "turns": {"rounds": 5, "seconds": 1.0}, "rows": rows}


def test_the_table_compares_each_level_with_the_one_before_and_with_peers(tmp_path):
    (tmp_path / "hopper_gemm.json").write_text(json.dumps(results_of_a_run()))
    text = report.with_tables("<!-- hopper_gemm -->\nnone\n<!-- /hopper_gemm -->\n", tmp_path)
    lines = text.splitlines()
    assert lines[1].startswith(
        "| 4096 x 4096 x 7168, a GPU | us | TFLOP/s | times the level before"
    )
    assert "| 1 plain FMAs | 1000.0 | 100 | - | 0.17 | 0.14 | - | 1.7e-03 |" in lines
    assert "| 2 TMA, WGMMA | 500.0 | 200 | 2.00 | 0.33 | 0.29 | - | 1.7e-03 |" in lines
    assert "| DeepGEMM | 142.9 | 700 | - | 1.17 | 1.00 | - | 1.7e-03 |" in lines
    assert any(
        "5 rounds of 1 s each, medians. a GPU, driver 1, torch 2, nvrtc, 3;" in x for x in lines
    )


def test_the_plot_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    hopper_gemm.draw(results_of_a_run(), tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
