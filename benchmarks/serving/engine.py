"""One engine and one checkpoint in a process: `python -m benchmarks.serving.engine SETTINGS`.

What is measured is written after each phase, so that it outlives a process that dies.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

from benchmarks.serving import ENGINES, decode_name, prefill_name
from benchmarks.serving.shares import experts_share

_NEW = 64  # tokens by which the longer of two calls of decoding is longer
_PROMPT = 32  # tokens of a prompt whose decoding is timed


@dataclass(frozen=True)
class Settings:
    """checkpoint: a directory. result: a file to write. rounds: warm ones, after the first.

    vocabulary: how many words prompts are drawn of. shares: whether to profile a step.
    """

    engine: str
    checkpoint: str
    result: str
    rounds: int
    prefills: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    vocabulary: int
    shares: bool


class Served(Protocol):
    """A checkpoint that an engine serves.

    version: the engine's. is_here: whether this process does the work on the GPU, so that it can be
    profiled, and its allocator asked.
    """

    version: str
    is_here: bool

    def __init__(self, checkpoint: str, max_length: int, arguments: dict[str, Any]) -> None:
        """max_length: of a prompt and what is generated, in tokens. arguments: the engine's."""

    def generate(self, prompts: list[list[int]], num_new: int) -> list[tuple[int, int]]:
        """Generate `num_new` tokens of each prompt, together and greedily.

        Returns, for each: (tokens that it generated, tokens of the prompt from a cache).
        """
        ...


class Timed:
    """An engine with prompts of random tokens, the same for each engine."""

    def __init__(self, served: Served, vocabulary: int) -> None:
        self.served, self.vocabulary = served, vocabulary
        self.generator = torch.Generator().manual_seed(0)

    def seconds(self, num_prompts: int, length: int, num_new: int) -> float:
        """How long it takes to generate `num_new` tokens of each of new prompts."""
        shape = num_prompts, length
        prompts = torch.randint(self.vocabulary, shape, generator=self.generator).tolist()
        started = time.perf_counter()
        outputs = self.served.generate(prompts, num_new)
        taken = time.perf_counter() - started
        if outputs != [(num_new, 0)] * num_prompts:
            raise RuntimeError("the engine has generated less, or taken a prompt from its cache")
        return taken

    def decode_ms(self, batch: int) -> float:
        """What a token of each of `batch` sequences takes: a longer call less a shorter one."""
        short, long = (self.seconds(batch, _PROMPT, n) for n in (2, 2 + _NEW))
        return (long - short) / _NEW * 1e3

    def share(self, num_prompts: int, length: int, num_new: int) -> float | None:
        """The part of the GPU's busy time that experts take."""
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self.seconds(num_prompts, length, num_new)
        return experts_share(profile)


def memory(is_here: bool) -> dict[str, Any]:
    """GiB of the GPU in use by all processes; and those of the allocator that is here, by pool."""
    if not is_here:  # to ask CUDA would take memory for this process, too
        gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
        ask = ["nvidia-smi", f"--id={gpu}", "--query-gpu=memory.used"]
        ask.append("--format=csv,noheader,nounits")
        used_mib = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
        return {"gpu_gib": float(used_mib) / 1024}
    free, total = torch.cuda.mem_get_info()
    return {
        "gpu_gib": (total - free) / 2**30,
        "allocator_gib": torch.cuda.memory_reserved() / 2**30,
        "pools": pools(),
    }


def pools() -> dict[str, dict[str, float]]:
    """GiB of the allocator's segments, and of what lives in them, by pool.

    "0,0" is the pool of what no CUDA graph and no `MemPool` has allocated.
    """
    gib: dict[str, dict[str, float]] = {}
    for segment in torch.cuda.memory_snapshot():
        name = ",".join(map(str, segment["segment_pool_id"]))
        pool = gib.setdefault(name, {"segments_gib": 0.0, "live_gib": 0.0})
        pool["segments_gib"] += segment["total_size"] / 2**30
        pool["live_gib"] += segment["allocated_size"] / 2**30
    return gib


def measure(settings: Settings) -> Iterator[dict[str, Any]]:
    """Yield what is measured so far, after each phase."""
    about = ENGINES[settings.engine]
    lengths = [_PROMPT + _NEW + 2, *(tokens + 1 for _, tokens in settings.prefills)]
    started = time.perf_counter()
    made: type[Served] = import_module(f"benchmarks.serving.{about.package}").Served
    served = made(settings.checkpoint, max(lengths), about.arguments)
    started_s = time.perf_counter() - started
    engine = Timed(served, settings.vocabulary)
    results: dict[str, Any] = {about.package: served.version, "start_s": started_s, "phases": {}}
    engine.seconds(1, _PROMPT, 1)
    results["first_token_s"] = time.perf_counter() - started
    yield results
    is_gpu = torch.cuda.is_available()
    is_profiled = settings.shares and is_gpu and served.is_here
    for num_prompts, tokens in settings.prefills:
        seconds = [engine.seconds(num_prompts, tokens, 1) for _ in range(1 + settings.rounds)]
        num_tokens = num_prompts * tokens
        phase = {
            "tokens": num_tokens,
            "first_ms": seconds[0] * 1e3,
            "ms": statistics.median(seconds[1:]) * 1e3,
        }
        if is_profiled:
            phase["experts_share"] = engine.share(num_prompts, tokens, 1)
        results["phases"][prefill_name(num_prompts, tokens)] = phase
        yield results
    for batch in settings.batches:
        ms = [engine.decode_ms(batch) for _ in range(1 + settings.rounds)]
        phase = {"tokens": batch, "first_ms": ms[0], "ms": statistics.median(ms[1:])}
        if is_profiled:
            phase["experts_share"] = engine.share(batch, _PROMPT, 6)
        results["phases"][decode_name(batch)] = phase
        yield results
    if is_gpu:
        yield results | memory(served.is_here)


def main() -> None:
    given = json.loads(sys.argv[1])
    given["prefills"] = tuple(map(tuple, given["prefills"]))
    settings = Settings(**given)
    for results in measure(settings):
        Path(settings.result).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
