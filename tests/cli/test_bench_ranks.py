"""`python -m moefp8 bench --ranks`: experts that processes share."""

import re

import pytest
import torch
import torch.distributed as dist

from moefp8.cli.main import main
from moefp8.tuning.ranks import tokens_to_time

EXPERTS = "--experts", "4", "2", "64", "32"
pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo")
ROW = re.compile(r"^ +(\d+) +([\d.]+) +([\d,]+) +([\d.]+) +([\d.]+)$", re.MULTILINE)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="processes would be on GPUs")
def test_it_times_each_layer_beside_one_process(capsys):
    layers = [*EXPERTS, "--experts", "5", "3", "136", "72"]
    assert main(["bench", *layers, "--ranks", "2", "--max-tokens", "9"]) == 0
    first, *tables = capsys.readouterr().out.split("\nrouted experts: ")
    assert first.startswith("2 ranks on CPUs that they share, ")
    assert [table.partition(",")[0] for table in tables] == ["4", "5"]
    for table in tables:
        rows = ROW.findall(table)
        assert [int(tokens) for tokens, *_ in rows] == [1, 8, 9]
        for tokens, ms, tokens_per_s, alone_ms, ratio in rows:
            speed = 2 * int(tokens) / float(ms) * 1e3
            assert float(tokens_per_s.replace(",", "")) == pytest.approx(speed, rel=0.01, abs=1)
            assert float(ratio) == pytest.approx(float(alone_ms) / float(ms), rel=0.05, abs=0.01)


def test_numbers_of_tokens_are_powers_of_8_and_the_most():
    assert tokens_to_time(1) == [1]
    assert tokens_to_time(8) == [1, 8]
    assert tokens_to_time(600) == [1, 8, 64, 512, 600]


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--ranks", "0", *EXPERTS], "--ranks must be at least 1, got 0"),
        (["--ranks", "5", *EXPERTS], "must hold an expert, and a token can choose each expert"),
        (["--ranks", "2", *EXPERTS[:2], "9", *EXPERTS[3:]], "got 4 experts, 9 of them a token"),
        (["--ranks", "2", "--linear", "8", "8"], "--ranks times experts, of at least 1 token"),
        (["--ranks", "2", *EXPERTS, "--max-tokens", "0"], "of at least 1 token"),
        (["--ranks", "2", *EXPERTS, "--tune"], "--ranks goes with neither --tune nor"),
        (["--ranks", "2", *EXPERTS, "--expert-parallel-size", "2"], "goes with neither"),
        (["--ranks", "2"], "nothing to time"),
    ],
)
def test_it_refuses_what_it_cannot_time(argv, told, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert main(["bench", *argv]) == 1
    assert told in capsys.readouterr().err


def test_each_process_needs_a_gpu_where_there_are_any(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert main(["bench", *EXPERTS, "--ranks", "2"]) == 1
    told = capsys.readouterr().err
    assert (
        "--ranks 2 needs as many GPUs, one for each process, got 1; CUDA_VISIBLE_DEVICES=" in told
    )
