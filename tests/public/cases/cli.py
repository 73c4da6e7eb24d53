"""`python -m moefp8`, and what environment variables change of it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.public.surface import COMMANDS, run_command

from . import case, cpu_case, gpu_case, long_case
from ._small import write_checkpoint

_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


SUMS = """
import sys, torch, moefp8
from moefp8.routing import softmax_topk
torch.manual_seed(0)
x = torch.randn(700, 1024).bfloat16().cuda()
y = moefp8.FP8Linear(1024, 512, device="cuda")(x)
torch.save(y, sys.argv[-1])
softmax_topk(torch.zeros(3, 600, device="cuda"), 2, True)
"""


def _process(*argv: str, **variables: str) -> tuple[int, str, str]:
    """Run a command in a process of its own, with these environment variables besides."""
    return _python("-m", "moefp8", *argv, **variables)


def _python(*argv: str, **variables: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, *argv],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@case
def help_and_version(device: str) -> Any:
    commands = [run_command(x, "--help") for x in COMMANDS]
    return [run_command("--help"), run_command("--version"), run_command(), *commands]


@case
def info(device: str) -> Any:
    status, text, _ = run_command("info")
    facts = json.loads(run_command("info", "--json")[1])
    topics = [line.split()[0] for line in text.splitlines()]
    return status, topics, [*facts], {x: facts[x] for x in ("moefp8", "driver", "GPU", "CPU", "so")}


@long_case
def settings(device: str) -> Any:
    return [
        _process(
            "info",
            MOEFP8_CACHE_DIR="kernels",
            MOEFP8_CACHE_MAX_BYTES="1048576",
            MOEFP8_STRICT="1",
            MOEFP8_COMPILER="nvrtc",
            MOEFP8_INTERLEAVE="0",
        ),
        _process(
            "info",
            MOEFP8_CACHE_DIR="kernels",
            MOEFP8_CACHE_MAX_BYTES="many",
            MOEFP8_NVRTC="/nowhere/libnvrtc.so",
        ),
    ]


@gpu_case
def kernel_settings(device: str) -> Any:
    """More than 512 experts have no kernel, which is an error if it is asked for."""
    own = {"MOEFP8_CACHE_DIR": "kernels"}
    interleaved = _python("-c", SUMS, "0.pt", MOEFP8_STRICT="1", MOEFP8_INTERLEAVE="1", **own)
    plain = _python("-c", SUMS, "1.pt", MOEFP8_STRICT="0", MOEFP8_INTERLEAVE="0", **own)
    last = [err.strip().rpartition("\n")[2] for _, _, err in (interleaved, plain)]
    return interleaved[0], plain[0], last, [torch.load(f"{i}.pt") for i in range(2)]


@long_case
def plug_ins(device: str) -> Any:
    """Those of engines, without an engine."""
    return [
        _python("-c", f"from moefp8.serving.{engine} import register; register()", **{name: value})
        for engine, name in (("sglang", "MOEFP8_SGLANG"), ("vllm", "MOEFP8_VLLM"))
        for value in ("0", "2")
    ]


@case
def quantize_and_inspect(device: str) -> Any:
    write_checkpoint("qwen3_moe")
    outcomes = [
        run_command(
            "quantize",
            "ORIGINAL",
            "QUANTIZED",
            "--skip",
            "layers.0",
            "--skip",
            "*.1.self_attn.*",
            "--device",
            device,
            "--max-shard-bytes",
            "3000000",
            "--json",
            "errors.json",
        ),
        run_command("inspect", "QUANTIZED"),
        run_command("inspect", "CHECKPOINT", "--json", "--weights"),
        run_command("inspect", "ORIGINAL"),
    ]
    errors = json.loads(Path("errors.json").read_text())
    del errors["seconds"]
    return outcomes, errors, Path("QUANTIZED")


@case
def compare(device: str) -> Any:
    """The figures of quantizing as it is loaded, and beside a directory in FP8; no picture."""
    write_checkpoint("qwen3_moe")
    Path("text.txt").write_text("Each layer of experts has a router. " * 8)
    outcomes = [
        run_command(
            "compare",
            "ORIGINAL",
            "--text",
            "text.txt",
            "--tokens",
            "128",
            "--length",
            "64",
            "--skip",
            "layers.0",
            "--device",
            device,
            "--json",
            "figures.json",
            "--plot",
            "layers.svg",
        ),
        run_command(
            *("compare", "ORIGINAL", "CHECKPOINT", "--text", "text.txt", "--length", "32"),
            *("--device", device),
        ),
    ]
    is_drawn = Path("layers.svg").exists()
    shown = [(status, out) for status, out, _ in outcomes]  # loading draws bars on stderr
    return shown, json.loads(Path("figures.json").read_text()), is_drawn


@case
def precompile(device: str) -> Any:
    write_checkpoint("qwen3_moe")
    return [
        run_command("precompile", "CHECKPOINT", "--max-tokens", "1", "--num-sms", "132")[:1],
        run_command(
            "precompile",
            "CHECKPOINT",
            "--max-tokens",
            "1",
            "--top-k",
            "2",
            "--expert-parallel-size",
            "2",
            "--dtype",
            "bfloat16",
            "--backward",
            "--unfreeze",
            "float32",
            "--num-threads",
            "2",
            "--batch-invariant",
        ),
    ]


@case
def precompile_for_new_weights(device: str) -> Any:
    write_checkpoint("qwen3_moe")
    sizes = "--max-tokens", "1", "--num-sms", "132"
    return run_command("precompile", "CHECKPOINT", *sizes, "--updating", "bfloat16")[:1]


@case
def serve(device: str) -> Any:
    """What it refuses before transformers' server starts."""
    write_checkpoint("qwen3_moe")
    return [
        run_command("serve", "nowhere"),
        run_command("serve", "--batch-invariant", "ORIGINAL"),
        run_command("serve", "--no-graphs", "--compile", "CHECKPOINT", "--port", "8000"),
    ]


@cpu_case
def bench_ranks(device: str) -> Any:
    """Two processes share experts; times are left out."""
    status, out, err = run_command(
        "bench", "--experts", "4", "2", "128", "64", "--ranks", "2", "--max-tokens", "4"
    )
    return status, [_NUMBER.sub("#", x).split() for x in out.splitlines()], err


@case
def errors(device: str) -> Any:
    write_checkpoint("qwen3_moe")
    outcomes = [
        run_command("bench"),
        run_command("bench", "CHECKPOINT", "--top-k", "0"),
        run_command("bench", "--linear", "0", "128"),
        run_command("bench", "CHECKPOINT", "--expert-parallel-size", "0"),
        run_command("inspect", "nowhere"),
        run_command("precompile", "ORIGINAL"),
        run_command("quantize", "CHECKPOINT", "target"),
        run_command("quantize", "ORIGINAL", "ORIGINAL"),
        run_command("compare", "CHECKPOINT", "--text", "nowhere"),
        run_command("no-such-command"),
    ]
    if not torch.cuda.is_available():
        outcomes.append(run_command("bench", "--linear", "256", "128"))
    return outcomes


@gpu_case
def bench(device: str) -> Any:
    """The lines without times: which layers, in which order."""
    write_checkpoint("qwen3_moe")
    own = {"MOEFP8_CACHE_DIR": "kernels"}  # what is tuned is kept there
    done = [
        _process("bench", "--linear", "128", "128", "--max-tokens", "1", "--tune", **own),
        _process("bench", "CHECKPOINT", "--top-k", "2", "--max-tokens", "4"),
        _process("bench", "CHECKPOINT", "--expert-parallel-size", "2", "--max-tokens", "1"),
    ]
    titles = [[x for x in out.splitlines() if x[:1].isalpha()] for _, out, _ in done]
    return [status for status, *_ in done], [_NUMBER.sub("#", str(x)) for x in titles]
