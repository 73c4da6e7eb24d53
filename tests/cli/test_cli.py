"""`python -m moefp8`: every command as a user runs it; what needs a GPU carries the marker."""

import argparse
import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from small_checkpoint import write_small_checkpoint

import moefp8
from moefp8 import FP8Linear, GroupedExperts
from moefp8.checkpoint import CheckpointError, fp8_layers
from moefp8.checkpoint.inspect.fp8 import Layers
from moefp8.cli import bench, compare, info, inspect, precompile, quantize, serve
from moefp8.cli.main import main, script
from moefp8.kernels import jit
from moefp8.kernels.gemm.sm90 import tuned
from moefp8.kernels.jit import cache
from moefp8.precompile import layers as ahead
from moefp8.system.progress import Progress
from tests.checkpoint.inspect.cases import E4M3, EXPERT, LINEAR, headers_only
from tests.gpu import on_gpu
from tests.kernels.jit.cases import CUBIN

FAMILIES = "deepseek_v3", "qwen3_moe"


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request, tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp(request.param) / "fp8"
    write_small_checkpoint(directory, request.param)
    return directory


def test_it_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "moefp8", "info"]
    environment = {**os.environ, "MOEFP8_CACHE_DIR": str(tmp_path / "none")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    topics = [line.split()[0] for line in done.stdout.splitlines()]
    for topic in ("moefp8", "driver", "GPU", "CPU", "compiler", "cache", "setting", "so"):
        assert topic in topics
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("prog", ["moefp8", "python -m moefp8"])
def test_without_a_command_it_tells_which_there_are(prog, capsys):
    assert main([], prog) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"usage: {prog} ")
    assert f"{prog} COMMAND --help" in told.err
    for command in (info, inspect, precompile, quantize, compare, serve, bench):
        assert command.__doc__.partition("\n")[0][:40] in told.err


def test_both_ways_to_call_it_name_themselves_and_the_version(monkeypatch, capsys):
    for call, prog in ((script, "moefp8"), (main, "python -m moefp8")):
        for option, wanted in (("--version", f"moefp8 {moefp8.__version__}\n"), ("-h", prog)):
            monkeypatch.setattr(sys, "argv", ["of no matter", option])
            with pytest.raises(SystemExit) as ended:
                call()
            assert ended.value.code == 0
            assert capsys.readouterr().out.removeprefix("usage: ").startswith(wanted)


@pytest.mark.parametrize("argv", [["nothing"], ["precompile"], ["quantize", "x"]])
def test_wrong_usage_ends_with_status_2(argv, capsys):
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    assert "usage: python -m moefp8" in capsys.readouterr().err


@pytest.mark.parametrize("command", [info, inspect, precompile, quantize, compare, bench])
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([command.__name__.rpartition(".")[2], "--help"])
    assert ended.value.code == 0
    words = " ".join(capsys.readouterr().out.split())
    assert command.__doc__.partition("\n")[0] in words


@pytest.mark.parametrize("argv", [["info"], ["precompile", "nowhere"]])
def test_it_runs_without_stdout_and_stderr(argv, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", None)
    assert main(argv) == (argv != ["info"])


def test_there_is_no_bar_without_a_stderr(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    for shown in (None, True):
        with Progress("loading", 1, shown=shown) as bar:
            bar.advance()


# info


@pytest.mark.usefixtures("fresh_jit")
def test_info_as_json_tells_what_the_cache_holds(tmp_path, capsys):
    moefp8.precompile(FP8Linear(128, 128, bias=False), 1)
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    num_kernels = len(list((tmp_path / "cache").glob("*.cubin")))
    assert facts["cache"][0].startswith(f"{tmp_path}/cache: {num_kernels} kernels, ")
    assert facts["compiler"][0].startswith("nvrtc CL-")
    if not torch.cuda.is_available():
        assert facts["so"] == [
            "everything runs on PyTorch's operations: there is no Hopper GPU that torch can use"
        ]


ODD_CACHES = [
    ("", "no MOEFP8_CACHE_DIR, and no ~/.cache: Could not determine home directory."),
    ("~nouser/x", "MOEFP8_CACHE_DIR=~nouser/x: Could not determine home directory."),
    ("/etc/passwd", "/etc/passwd is no directory"),
    ("/etc/passwd/x", "Not a directory: '/etc/passwd/x'"),
    (f"/{'x' * 300}", "File name too long"),
    ("/private/x", "Permission denied"),
    ("{}/open", "others may write to "),
]


@pytest.mark.parametrize(("chosen", "told"), ODD_CACHES)
@pytest.mark.usefixtures("fresh_jit")
def test_a_cache_that_cannot_be_is_told_and_done_without(
    tmp_path, monkeypatch, capsys, chosen, told
):
    stat = Path.stat

    def refusing(path: Path, **options) -> os.stat_result:
        if path.is_relative_to("/private"):
            raise PermissionError(13, "Permission denied")
        return stat(path, **options)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "stat", refusing)
    monkeypatch.setattr(Path, "home", no_home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    monkeypatch.setenv("MOEFP8_CACHE_DIR", chosen.format(tmp_path))
    checkpoint = headers_only(tmp_path / "x.safetensors", LINEAR)
    monkeypatch.setattr(ahead, "kernels_of", lambda *_, **__: [])
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "0 kernels, 0.0 MiB" in out
    assert "cannot be used, so every process compiles anew: " in out
    assert told in out
    assert out.splitlines()[-1].startswith("so ")
    assert main(["precompile", str(checkpoint)]) == 1
    assert told in capsys.readouterr().err
    assert jit.read_beside_kernels("x") is None
    with pytest.warns(UserWarning, match="compiled kernels cannot be kept on disk"):
        assert cache.cached("key", lambda: CUBIN) is CUBIN


def test_info_tells_that_a_folder_cannot_be_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MOEFP8_CACHE_DIR", str(tmp_path / "a" / "cache"))
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    assert main(["info"]) == 0
    why = f"cannot be used, so every process compiles anew: {tmp_path} cannot be written"
    assert why in capsys.readouterr().out


@pytest.mark.usefixtures("fresh_jit")
def test_info_tells_that_a_bound_is_none(monkeypatch, capsys):
    monkeypatch.setenv("MOEFP8_CACHE_MAX_BYTES", "9" * 5000)
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "MOEFP8_CACHE_MAX_BYTES must be a number of bytes, got '99999999999999999999...'" in out
    assert out.splitlines()[-1].startswith("so ")
    assert max(map(len, out.splitlines())) < 1100


def test_info_tells_that_there_is_no_compiler(monkeypatch, capsys):
    def none():
        raise jit.JitError("no usable NVRTC")

    monkeypatch.setattr("moefp8.cli.info.compiler_description", none)
    assert main(["info"]) == 0
    assert "compiler no usable NVRTC" in capsys.readouterr().out


# precompile


@pytest.mark.usefixtures("fresh_jit")
def test_a_checkpoint_s_kernels_are_compiled(checkpoint, tmp_path, capsys):
    arguments = ["precompile", str(checkpoint), "--max-tokens", "8"]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    num_kernels = int(re.match(r"(\d+) kernels in [\d.]+ s, in ", out)[1])
    assert out.strip().endswith(str(tmp_path / "cache"))
    assert len(list((tmp_path / "cache").glob("*.cubin"))) == num_kernels
    expected = ahead.kernels_of(fp8_layers(checkpoint), 8, dtype=torch.bfloat16)
    assert num_kernels == len(expected)


@pytest.fixture
def named(monkeypatch) -> list[jit.Kernel]:
    """The kernels that are to be compiled, which are not."""
    kernels = []
    monkeypatch.setattr(ahead, "compile_kernels", lambda each, *_: kernels.extend(each))
    monkeypatch.setattr(ahead, "keep_kernels", lambda each: None)
    return kernels


def test_the_kernels_of_ranks_are_compiled(monkeypatch, named):
    """Some of three ranks hold one expert more than others. Large layers take other tiles."""
    whole = GroupedExperts(256, 7168, 2048, device="meta")
    layers = Layers({FP8Linear(512, 256, device="meta"): "linear", whole: "experts"}, top_k=8)
    monkeypatch.setattr(precompile, "fp8_layers", lambda *_: layers)
    options = ["--max-tokens", "20000", "--expert-parallel-size", "3"]
    assert main(["precompile", "anywhere", *options]) == 0
    expected = set()
    for rank in range(3):
        part = moefp8.shard(copy.deepcopy(layers), {"1": "experts"}, rank, 3)
        expected |= {*ahead.kernels_of(part, 20000)}
    assert set(named) == expected
    assert expected - {*ahead.kernels_of(layers, 20000)}


def test_the_kernels_of_gradients_are_compiled_if_asked_for(checkpoint, named):
    assert main(["precompile", str(checkpoint), "--max-tokens", "8", "--backward"]) == 0
    layers, options = fp8_layers(checkpoint), {"dtype": torch.bfloat16}
    assert set(named) == {*ahead.kernels_of(layers, 8, backward=True, **options)}
    assert set(named) > {*ahead.kernels_of(layers, 8, **options)}


def test_the_kernels_of_batch_invariant_layers_are_compiled_if_asked_for(checkpoint, named):
    assert main(["precompile", str(checkpoint), "--max-tokens", "64", "--batch-invariant"]) == 0
    options = {"dtype": torch.bfloat16}
    layers = fp8_layers(checkpoint)
    divided = {*ahead.kernels_of(layers, 64, **options)}
    moefp8.set_batch_invariant(layers)
    assert set(named) == {*ahead.kernels_of(layers, 64, **options)}
    names = {x.name for x in named if x.source.name == "gemm.cu"}
    assert all(".split_k = 1" in name for name in names)
    is_divided = any(".split_k = 2" in x.name for x in divided)
    assert is_divided == ("deepseek_v3" in str(checkpoint))  # the other one has a short K


@pytest.mark.parametrize("master", ["bfloat16", "float32"])
def test_the_kernels_of_master_weights_are_compiled_if_asked_for(checkpoint, named, master):
    options = ["--max-tokens", "8", "--backward", "--unfreeze", master]
    assert main(["precompile", str(checkpoint), *options]) == 0
    layers = moefp8.unfreeze(fp8_layers(checkpoint), getattr(torch, master))
    options = {"dtype": torch.bfloat16, "backward": True}
    assert set(named) == {*ahead.kernels_of(layers, 8, **options)}
    assert any(kernel.source.name == "k_grouped.cu" for kernel in named)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--max-tokens", "0"], "--max-tokens must be at least 1, got 0"),
        (["--num-sms", "-4"], "--num-sms must be at least 1, got -4"),
        (["--num-threads", "0"], "--num-threads must be at least 1, got 0"),
        (["--num-threads", "-3"], "--num-threads must be at least 1, got -3"),
        (["--expert-parallel-size", "0"], "--expert-parallel-size must be at least 1, got 0"),
        (
            ["--expert-parallel-size", "999"],
            "--expert-parallel-size must be at most the ",
        ),
        (["--top-k", "0"], "--top-k must be at least 1, got 0"),
        (["--top-k", "999"], "--top-k must be at most the number of experts, which is "),
    ],
)
def test_wrong_sizes_are_one_sentence(checkpoint, capsys, options, told):
    assert main(["precompile", str(checkpoint), *options]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("command", ["precompile", "bench"])
def test_experts_of_which_nothing_tells_how_many_are_taken(tmp_path, capsys, command):
    tensors = LINEAR | {EXPERT: (E4M3, [8, 8]), f"{EXPERT}_scale_inv": ("F32", [1, 1])}
    assert main([command, str(headers_only(tmp_path / "x.safetensors", tensors))]) == 1
    told = f"{EXPERT}: config.json does not say how many experts a token goes to: --top-k\n"
    assert capsys.readouterr().err == f"moefp8 {command}: {told}"


def test_a_checkpoint_without_fp8_is_refused(tmp_path, capsys):
    save_file({"a.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="nothing in FP8"):
        fp8_layers(tmp_path)
    assert main(["precompile", str(tmp_path)]) == 1
    assert main(["precompile", str(tmp_path / "nowhere")]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 2
    assert all(error.startswith("moefp8 precompile: ") for error in errors)
    assert "`python -m moefp8 quantize` makes an FP8 checkpoint" in errors[0]


# quantize


def test_the_report_of_a_model_that_transformers_knows_is_json(checkpoint, tmp_path):
    """The report may lie in the target, which appears when all is done."""
    original, report = checkpoint.with_name("fp8-bf16"), tmp_path / "q" / "x.json"
    assert main(["quantize", str(original), str(tmp_path / "q"), "--json", str(report)]) == 0
    told = json.loads(report.read_text())
    assert told["weights"]
    assert all(isinstance(x, str) for x in told["conversion"]["experts"])


# bench


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ([], "nothing to time"),
        (["--linear", "0", "8"], "all sizes must be at least 1"),
        (["nowhere"], "there is no such file or directory"),
    ],
)
def test_bench_refuses_what_it_cannot_time(argv, told, capsys):
    assert main(["bench", *argv]) == 1
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("num_ranks", "held"), [("1", [(8, None)]), ("2", [(4, 8)]), ("3", [(2, 8), (3, 8)])]
)
def test_bench_times_what_ranks_hold(checkpoint, num_ranks, held):
    parser = argparse.ArgumentParser()
    bench.add_to(parser)
    (stored,) = (x for x in fp8_layers(checkpoint) if isinstance(x, GroupedExperts))
    options = ["--experts", "8", "2", "64", "32", "--expert-parallel-size", num_ranks]
    found = dict.fromkeys(bench._layers(parser.parse_args([str(checkpoint), *options])))
    experts = [x for x in found if isinstance(x, tuned.Experts)]
    of_arguments = [x for x in experts if x.hidden_size == 64]
    assert of_arguments == [tuned.Experts(e, 2, 64, 32, num_global) for e, num_global in held]
    of_checkpoint = {x.num_global_experts for x in experts} - {8}
    assert of_checkpoint == {None if num_ranks == "1" else stored.num_experts} - {8}
    told = ["8"] if num_ranks == "1" else [f"{e} of 8" for e, _ in held]
    for layer, of in zip(of_arguments, told, strict=True):
        assert bench._title(layer).startswith(f"routed experts: {of}, of which 2 a token, ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_bench_needs_a_gpu(checkpoint, capsys):
    assert main(["bench", str(checkpoint), "--tune"]) == 1
    assert "needs a Hopper GPU" in capsys.readouterr().err


@on_gpu
@pytest.mark.slow
@pytest.mark.usefixtures("fresh_jit")
def test_bench_times_and_tunes(tmp_path, capsys):
    tuned.measured.cache_clear()
    layers = ["--linear", "512", "1024", "--experts", "8", "2", "256", "128", "--max-tokens", "96"]
    assert main(["bench", *layers]) == 0
    out = capsys.readouterr().out
    assert out.count("tokens") == 2  # a table for each
    assert not list((tmp_path / "cache").glob("tuned-*"))
    assert main(["bench", "--tune", *layers]) == 0
    out = capsys.readouterr().out
    ratios = [float(x) for x in re.findall(r"^ +\d+ +[\d.]+ +[\d.]+ +([\d.]+)", out, re.MULTILINE)]
    assert len(ratios) == 12 + 8
    assert min(ratios) >= 1  # by default, nothing is faster than what was chosen
    (path,) = (tmp_path / "cache").glob("tuned-nvidia-h*.txt")
    assert str(path) in out
    assert set(map(type, tuned.measured(0).configs)) == {tuned.Dense, tuned.Experts}
    of_ranks = ["--experts", "8", "2", "256", "128", "--expert-parallel-size", "4"]
    assert main(["bench", "--tune", *of_ranks, "--max-tokens", "16"]) == 0
    assert "2 of 8, of which 2 a token" in capsys.readouterr().out
    assert tuned.Experts(2, 2, 256, 128, 8) in tuned.measured(0).configs
    tuned.measured.cache_clear()
