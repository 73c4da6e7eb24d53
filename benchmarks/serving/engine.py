"""One engine and one checkpoint in a process: `python -m benchmarks.serving.engine SETTINGS`.

What is measured is written after each phase, so that it outlives a process that dies.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


class Engine:
    """vLLM as `LLM` makes it, with prompts of random tokens."""

    def __init__(self, settings: Settings) -> None:
        from vllm import LLM

        lengths = [_PROMPT + _NEW + 2, *(tokens + 1 for _, tokens in settings.prefills)]
        self.llm = LLM(
            settings.checkpoint,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            dtype="bfloat16",
            max_model_len=max(lengths),
            gpu_memory_utilization=0.85,
            disable_log_stats=True,
            **ENGINES[settings.engine][1],
        )
        self.vocabulary = settings.vocabulary
        self.generator = torch.Generator().manual_seed(0)  # the same prompts for each engine

    def prompts(self, num_prompts: int, length: int) -> list[dict[str, list[int]]]:
        ids = torch.randint(self.vocabulary, (num_prompts, length), generator=self.generator)
        return [{"prompt_token_ids": row} for row in ids.tolist()]

    def seconds(self, num_prompts: int, length: int, num_new: int) -> float:
        """How long it takes to generate `num_new` tokens of each of new prompts."""
        from vllm import SamplingParams

        prompts = self.prompts(num_prompts, length)
        sampling = SamplingParams(
            max_tokens=num_new, temperature=0, ignore_eos=True, detokenize=False
        )
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, sampling, use_tqdm=False)
        taken = time.perf_counter() - started
        if any(len(x.outputs[0].token_ids) != num_new or x.num_cached_tokens for x in outputs):
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


def measure(settings: Settings) -> Any:
    """Yield what is measured so far, after each phase."""
    import vllm

    started = time.perf_counter()
    engine = Engine(settings)
    started_s = time.perf_counter() - started
    results: dict[str, Any] = {"vllm": vllm.__version__, "start_s": started_s, "phases": {}}
    engine.seconds(1, _PROMPT, 1)
    results["first_token_s"] = time.perf_counter() - started
    yield results
    is_gpu = torch.cuda.is_available()
    for num_prompts, tokens in settings.prefills:
        seconds = [engine.seconds(num_prompts, tokens, 1) for _ in range(1 + settings.rounds)]
        num_tokens = num_prompts * tokens
        phase = {
            "tokens": num_tokens,
            "first_ms": seconds[0] * 1e3,
            "ms": statistics.median(seconds[1:]) * 1e3,
        }
        if settings.shares and is_gpu:
            phase["experts_share"] = engine.share(num_prompts, tokens, 1)
        results["phases"][prefill_name(num_prompts, tokens)] = phase
        yield results
    for batch in settings.batches:
        ms = [engine.decode_ms(batch) for _ in range(1 + settings.rounds)]
        phase = {"tokens": batch, "first_ms": ms[0], "ms": statistics.median(ms[1:])}
        if settings.shares and is_gpu:
            phase["experts_share"] = engine.share(batch, _PROMPT, 6)
        results["phases"][decode_name(batch)] = phase
        yield results
    if is_gpu:
        free, total = torch.cuda.mem_get_info()
        results["gpu_gib"] = (total - free) / 2**30
        results["allocator_gib"] = torch.cuda.memory_reserved() / 2**30
        yield results


def main() -> None:
    given = json.loads(sys.argv[1])
    given["prefills"] = tuple(map(tuple, given["prefills"]))
    settings = Settings(**given)
    for results in measure(settings):
        Path(settings.result).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
