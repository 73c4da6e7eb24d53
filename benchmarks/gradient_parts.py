"""The parts of `benchmarks.gradients`: who is timed at what, goals, and how rows fare by them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from benchmarks import figures, gradient_cases
from benchmarks import gradient_peers as peers
from benchmarks.figures import PAUSES, Row, told_ratio
from benchmarks.gradient_cases import (
    MODELS,
    RANK,
    AdaptedStep,
    ExpertsCase,
    ExpertsStep,
    LinearStep,
)
from benchmarks.gradient_gemms import FORWARD, GEMMS, WEIGHTS, Codes, GemmPair
from benchmarks.gradient_peers import COPY, DEQUANTIZING
from benchmarks.gradient_swiglu import SWIGLU_CASES, SwigluOfExperts
from benchmarks.peers import BF16, Peer

UNITS = {"us": "us", "tflops": "TFLOP/s", "gbps": "GB/s"}
LINEARS, EXPERTS, ADAPTED = "linears", "experts", "adapted"
DGRAD, TRANSPOSE, SWIGLU_COLUMNS = "dgrad", "transpose", "activation_columns"
OF_EXPERTS = EXPERTS, ADAPTED


@dataclass(frozen=True)
class Part:
    """What is timed alike.

    Attributes:
        unit: in which it is told, a key of `UNITS`.
        goals: how many times as fast as these ours is to be, at least.
        cases: empty if they depend on what is asked for.
        operands: makes those of a case.
        is_step: whether it is forward and backward, of which eager time and memory count, too.
    """

    title: str
    unit: str
    peers: Mapping[str, Peer]
    goals: Mapping[str, float]
    operands: Callable[[Any], Any]
    cases: tuple[Any, ...] = ()
    is_step: bool = False


PARTS = {
    LINEARS: Part(
        "linears, forward + dX",
        "us",
        peers.LINEARS,
        {BF16: 1.45},
        LinearStep.random,
        gradient_cases.LINEARS,
        is_step=True,
    ),
    EXPERTS: Part(
        "frozen experts, forward + backward",
        "us",
        peers.EXPERTS,
        {DEQUANTIZING: 1.8, BF16: 1.5},
        ExpertsStep.random,
        is_step=True,
    ),
    ADAPTED: Part(
        f"experts with LoRA of rank {RANK}, forward + backward",
        "us",
        peers.ADAPTED,
        {BF16: 1.5},
        AdaptedStep.random,
        is_step=True,
    ),
    DGRAD: Part(
        "GEMMs of dX",
        "tflops",
        peers.GEMMS,
        {FORWARD: 0.95},
        GemmPair.random,
        GEMMS,
    ),
    TRANSPOSE: Part(
        "transposition of weights",
        "gbps",
        peers.TRANSPOSITIONS,
        {COPY: 0.80},
        Codes.random,
        WEIGHTS,
    ),
    SWIGLU_COLUMNS: Part(
        "gradient of SwiGLU, codes of rows and of columns",
        "gbps",
        peers.SWIGLUS,
        {COPY: 0.80},
        SwigluOfExperts.random,
        SWIGLU_CASES,
    ),
}


def cases_of(part: str, models: Iterable[str], tokens: Iterable[int]) -> list[Any]:
    if part not in OF_EXPERTS:
        return list(PARTS[part].cases)
    return [ExpertsCase(MODELS[name], num) for name in models for num in tokens]


# ---- Figures ----


def speed(row: Row, name: str, mode: str = PAUSES) -> float | None:
    """What a peer came to in the unit of the part; None where it did not run in this mode."""
    return figures.speed(row, name, PARTS[row["part"]].unit, mode)


def gib_of(found: Row) -> str:
    """Weights, what a step takes beside them, and both."""
    weights, step = found.get("weights_bytes", 0) / 2**30, found["step_bytes"] / 2**30
    return f"{weights:.2f} + {step:.2f} = {weights + step:.2f}" if weights else f"{step:.2f}"


class Comparison(NamedTuple):
    """How many times as fast as `peer` ours is, in each case of a part in which both ran."""

    part: Part
    peer: str
    goal: float
    ratios: dict[str, float]

    @property
    def title(self) -> str:
        return self.part.peers[self.peer].title

    @property
    def worst_case(self) -> str:
        return min(self.ratios, key=self.ratios.__getitem__)

    @property
    def num_met(self) -> int:
        return sum(ratio >= self.goal for ratio in self.ratios.values())


def comparisons(rows: Iterable[Row]) -> Iterator[Comparison]:
    """One for each goal of which there is anything."""
    rows = list(rows)
    for name, part in PARTS.items():
        for peer, goal in part.goals.items():
            found = {row["case"]: told_ratio(row, (peer,)) for row in rows if row["part"] == name}
            ratios = {case: ratio for case, ratio in found.items() if ratio is not None}
            if ratios:
                yield Comparison(part, peer, goal, ratios)
