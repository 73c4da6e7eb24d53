"""What is asked of an engine with moefp8 beside the same engine without, and how it fares."""

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.figures import geomean
from benchmarks.serving import (
    BATCHES,
    DEFAULT,
    ENGINES,
    OURS,
    PREFILLS,
    VLLM,
    decode_name,
    prefill_name,
)
from benchmarks.serving.table import gib_of, ms_of, speedup, start_of
from benchmarks.session import Row

QWEN3, GLM = "qwen3_30b_a3b", "glm_4_5_air"
OF_PREFILL = dict(zip(PREFILLS, (1.7, 1.5), strict=True))  # times as fast as vLLM's default
OF_FIRST_PREFILL = 1.4
OVER_DEEP_GEMM = 1.25
OF_DECODING = dict(zip(BATCHES, (1.33, 1.22, 1.18), strict=True))  # as the better of two
GLM_MEAN, GLM_LEAST = 1.06, 1.0
_FASTEST = DEFAULT, "triton"


class Judged(NamedTuple):
    """A goal of a row, and what was measured."""

    goal: str
    case: str
    asked: float
    measured: float
    at_most: bool = False


def judged(rows: list[Row]) -> Iterator[Judged]:
    for row in rows:
        if row["model"] == QWEN3:
            yield from _prefills(row)
        yield from _decoding(row)
        yield from _starts(row)


def _prefills(row: Row) -> Iterator[Judged]:
    for size, asked in OF_PREFILL.items():
        phase = prefill_name(*size)
        case = f"{row['title']}, {phase}"
        for goal, engine, key, least in (
            ("times as fast as vLLM's default", DEFAULT, "ms", asked),
            (
                "first request: times as fast as vLLM's default",
                DEFAULT,
                "first_ms",
                OF_FIRST_PREFILL,
            ),
            ("times as fast as experts of DeepGEMM", "deep_gemm", "ms", OVER_DEEP_GEMM),
        ):
            if ratio := speedup(row, engine, phase, key):
                yield Judged(f"prefill, {goal}", case, least, ratio)


def _decoding(row: Row) -> Iterator[Judged]:
    """Beside the faster of vLLM's default and vLLM without DeepGEMM, as far as these ran."""
    ran = [ENGINES[x].title for x in _FASTEST if row["engines"].get(x, {}).get("runs")]
    goal = f"decoding, times as fast as {'the faster of ' * (len(ran) > 1)}{' and '.join(ran)}"
    ratios = {}
    for batch in BATCHES:
        phase = decode_name(batch)
        ours = ms_of(row, OURS[VLLM], phase)
        others = [ms for x in _FASTEST if (ms := ms_of(row, x, phase))]
        if ours and others:
            ratios[batch] = min(others) / ours
    for batch, ratio in ratios.items():
        asked = OF_DECODING[batch] if row["model"] == QWEN3 else GLM_LEAST
        yield Judged(goal, f"{row['title']}, batch {batch}", asked, ratio)
    if row["model"] == GLM and ratios:
        yield Judged(f"{goal}: mean", row["title"], GLM_MEAN, geomean(ratios.values()))


def _starts(row: Row) -> Iterator[Judged]:
    for is_cold, what in ((True, "nothing compiled"), (False, "all compiled")):
        ours, theirs = (start_of(row, x, is_cold) for x in (OURS[VLLM], DEFAULT))
        if ours and theirs:
            goal = "time to the first token: share of vLLM's default"
            yield Judged(goal, f"{row['title']}, {what}", 1.0, ours / theirs, at_most=True)
    ours, theirs = (gib_of(row, x) for x in (OURS[VLLM], DEFAULT))
    if ours and theirs:
        goal = "memory in use: share of vLLM's default"
        yield Judged(goal, row["title"], 1.0, ours / theirs, at_most=True)
