"""What is asked of a training step, and how it fares: each goal at each of its cases, by itself."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmarks import figures
from benchmarks.figures import PAUSES, WITHOUT_REST, Row, of_peer, verdict
from benchmarks.gradient_peers import COPY
from benchmarks.peers import BF16, OURS
from benchmarks.training import cases, kernels
from benchmarks.training.parts import GROUPED, LAYERS, LINEARS, PARTS, QUANTIZERS, SWIGLU, WGRAD
from benchmarks.training.peers import (
    BLOCKS,
    EVERY,
    EVERY_BLOCKS,
    SAVED_FP8,
    SAVED_FP8_BLOCKS,
    SONIC,
    TE_ONCE,
)

# Times as fast as BF16, with weights that are quantized once, and in every step.
LINEARS_ONCE = dict(zip(map(str, cases.LINEARS), (1.45, 1.40, 1.22), strict=True))
GROUPED_ONCE = dict(zip(map(str, cases.GROUPED), (1.65, 1.50, 1.50), strict=True))
GROUPED_EVERY = dict(zip(map(str, cases.GROUPED), (1.35, 1.25, 1.15), strict=True))
# Times as fast as TransformerEngine, weights quantized once by both.
LINEARS_OVER_TE, GROUPED_OVER_TE = 1.08, 1.15
# Layers, times as fast as torch's grouped BF16 layer and as SonicMoE, and KiB that a token keeps.
DEEPSEEK_V3, QWEN3, _ = map(str, cases.LAYERS)
LAYERS_OVER_BF16 = {DEEPSEEK_V3: 2.2, QWEN3: 2.0}
LAYERS_OVER_SONIC = {DEEPSEEK_V3: 1.5, QWEN3: 1.35}
MOST_KIB_OF_TOKEN = {DEEPSEEK_V3: 48.0, QWEN3: 17.0}
WGRAD_TFLOPS = {str(kernels.DENSE_WGRAD): 1100.0, str(kernels.GROUPED_WGRAD): 1050.0}
SHARE_OF_COPY = 0.80

SPEED, SAVED = "TFLOP/s", "KiB kept for a token"


class Goal(NamedTuple):
    """What each of `ours` is asked for in a part.

    against: the peer that it is to be so many times as fast as; or `SPEED`, to be reached, or
        `SAVED`, at most.
    least: by case.
    """

    part: str
    ours: tuple[str, str] | tuple[str]
    against: str
    least: Mapping[str, float]

    @property
    def title(self) -> str:
        return f"{PARTS[self.part].title}{', every step' * (self.ours == EVERY_STEP)}"

    @property
    def what(self) -> str:
        if self.against in (SPEED, SAVED):
            return self.against
        return f"times as fast as {PARTS[self.part].peers[self.against].title}"

    @property
    def at_most(self) -> bool:
        return self.against == SAVED

    @property
    def digits(self) -> int:
        return {SPEED: 0, SAVED: 1}.get(self.against, 2)


def _all(part: str, least: float) -> dict[str, float]:
    return {str(case): least for case in PARTS[part].cases}


ONCE, EVERY_STEP = (OURS, BLOCKS), (EVERY, EVERY_BLOCKS)
GOALS = (
    Goal(LINEARS, ONCE, BF16, LINEARS_ONCE),
    Goal(LINEARS, ONCE, TE_ONCE, _all(LINEARS, LINEARS_OVER_TE)),
    Goal(GROUPED, ONCE, BF16, GROUPED_ONCE),
    Goal(GROUPED, ONCE, TE_ONCE, _all(GROUPED, GROUPED_OVER_TE)),
    Goal(GROUPED, EVERY_STEP, BF16, GROUPED_EVERY),
    Goal(LAYERS, ONCE, BF16, LAYERS_OVER_BF16),
    Goal(LAYERS, ONCE, SONIC, LAYERS_OVER_SONIC),
    Goal(LAYERS, (SAVED_FP8, SAVED_FP8_BLOCKS), SAVED, MOST_KIB_OF_TOKEN),
    Goal(WGRAD, (OURS, kernels.BLOCKS), SPEED, WGRAD_TFLOPS),
    Goal(QUANTIZERS, (OURS,), COPY, _all(QUANTIZERS, SHARE_OF_COPY)),
    Goal(SWIGLU, (OURS,), COPY, _all(SWIGLU, SHARE_OF_COPY)),
)


class Judged(NamedTuple):
    """A goal at a case: what each of ours came to by mode, in which they ran."""

    goal: Goal
    case: str
    least: float
    found: dict[str, dict[str, float]]

    @property
    def values(self) -> Iterator[float]:
        for by_mode in self.found.values():
            yield from by_mode.values()

    def is_met(self, value: float) -> bool:
        return figures.is_met(value, self.least, self.goal.at_most)

    def told(self, value: float) -> str:
        text = figures.beside_goal(value, self.least, self.goal.digits, self.goal.at_most)
        return f"{text} {verdict(self.is_met(value))}"


def judged(rows: Iterable[Row]) -> Iterator[Judged]:
    """One for each goal and case of which there is anything."""
    by_case = {(row["part"], row["case"]): row for row in rows}
    for goal in GOALS:
        for case, least in goal.least.items():
            row = by_case.get((goal.part, case))
            if row is None:
                continue
            if found := values_of(row, goal):
                yield Judged(goal, case, least, found)


def values_of(row: Row, goal: Goal) -> dict[str, dict[str, float]]:
    """What each of ours came to by mode, in which they ran."""
    values = {name: _values(row, name, goal.against) for name in goal.ours}
    return {name: by_mode for name, by_mode in values.items() if by_mode}


def _values(row: Row, ours: str, against: str) -> dict[str, float]:
    """By mode; without rest comes first, since trainers run so."""
    if against == SAVED:
        found = of_peer(row, ours).get("saved_bytes_per_token")
        return {} if found is None else {PAUSES: found / 1024}
    values: dict[str, float] = {}
    for mode in (WITHOUT_REST, PAUSES):
        if against == SPEED:
            value = figures.speed(row, ours, "tflops", mode)
        elif against == COPY:
            value = _share_of_copy(row, ours, mode)
        else:
            value = figures.ratio(row, (against,), mode, ours)
        if value is not None:
            values[mode] = value
    return values


def _share_of_copy(row: Row, ours: str, mode: str) -> float | None:
    """Of the faster mode's copy: some copies are slower without rest, and say less then."""
    share = figures.speed(row, ours, "gbps", mode)
    copies = [figures.speed(row, COPY, "gbps", each) for each in (WITHOUT_REST, PAUSES)]
    known = [x for x in copies if x is not None]
    return share / max(known) if share is not None and known else None


def num_met(all_judged: Sequence[Judged]) -> tuple[int, int]:
    """How many values of both modes meet their goals, and how many there are."""
    met = [each.is_met(value) for each in all_judged for value in each.values]
    return sum(met), len(met)
