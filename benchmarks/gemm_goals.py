"""What the dense GEMM is compared with, and how many times as fast as that it is to be."""

from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass

from benchmarks.figures import PAUSES, WITHOUT_REST, Row, geomean, ratio, verdict
from benchmarks.gemm_cases import LARGE_MS
from benchmarks.peers import BF16, BLOCK_SCALED, DEEP_GEMM, PER_TENSOR, Case

# What ours is compared with: the title, and the peers of which the fastest counts.
AGAINST = {
    "deep_gemm": ("DeepGEMM", (DEEP_GEMM,)),
    "best": ("the faster of DeepGEMM and cuBLASLt block-scaled", (DEEP_GEMM, BLOCK_SCALED)),
    "per_tensor": ("cuBLASLt per-tensor", (PER_TENSOR,)),
    "bf16": ("torch BF16", (BF16,)),
}
# Values of M that share goals, in each mode.
GROUPS: dict[str, tuple[tuple[int, ...], ...]] = {
    PAUSES: ((1, 16), (64, 128), (512, 777), (4096,), (8192,), (16384,)),
    WITHOUT_REST: (LARGE_MS,),
}
# mode -> (M, against) -> (geometric mean, worst): how many times as fast as these ours is to be.
GOALS: dict[str, dict[tuple[tuple[int, ...], str], tuple[float, float]]] = {
    PAUSES: {
        ((1, 16), "best"): (1.20, 1.03),
        ((64, 128), "best"): (1.15, 1.03),
        ((512, 777), "best"): (1.10, 1.00),
        ((4096,), "deep_gemm"): (1.05, 1.00),
        **{(group, "per_tensor"): (1.00, 0.0) for group in ((1, 16), (64, 128), (4096,))},
        ((512, 777), "per_tensor"): (0.97, 0.0),
    },
    WITHOUT_REST: {
        (LARGE_MS, "deep_gemm"): (1.05, 1.00),
        (LARGE_MS, "per_tensor"): (0.98, 0.0),
    },
}


@dataclass(frozen=True)
class Comparison:
    """Ratios of times, theirs to ours, over the `cases` in which both ran."""

    geomean: float
    worst: float
    worst_case: Case
    num_cases: int

    def meets(self, goal: tuple[float, float]) -> bool:
        return self.geomean >= goal[0] and self.worst >= goal[1]


def case_of(row: Row) -> Case:
    return Case(row["m"], row["n"], row["k"])


def compare(
    rows: Iterable[Row], ms: Container[int], against: str, mode: str = PAUSES
) -> Comparison | None:
    """The comparison of rows whose M is one of `ms`; None where nothing can be compared."""
    names = AGAINST[against][1]
    found = [(ratio(row, names, mode), case_of(row)) for row in rows if row["m"] in ms]
    ratios = [(value, case) for value, case in found if value is not None]
    if not ratios:
        return None
    return Comparison(geomean(value for value, _ in ratios), *min(ratios), len(ratios))


def groups_of(rows: Iterable[Row], mode: str = PAUSES) -> list[tuple[int, ...]]:
    """The groups of M that have goals, and every other M of `rows` by itself."""
    ms = {row["m"] for row in rows}
    known = [group for group in GROUPS[mode] if ms & set(group)]
    others = ms - {m for group in known for m in group}
    return sorted(known + [(m,) for m in others])


def lines_of_comparisons(rows: list[Row]) -> Iterator[str]:
    """One line for each mode, group and comparison of which there is anything."""
    for mode, goals in GOALS.items():
        for group in groups_of(rows, mode):
            for against, (title, _) in AGAINST.items():
                found, goal = compare(rows, group, against, mode), goals.get((group, against))
                if found is None:
                    continue
                line = f"{mode}, M = {', '.join(map(str, group)):17} times as fast as {title:50} "
                line += f"geomean {found.geomean:.3f}  worst {found.worst:.3f} at "
                yield f"{line}{found.worst_case}{goal_and_verdict(found, goal)}"


def goal_and_verdict(found: Comparison, goal: tuple[float, float] | None) -> str:
    if goal is None:
        return ""
    least = f"{goal[0]:.2f}" + (f", worst {goal[1]:.2f}" if goal[1] else "")
    return f"  goal {least}: {verdict(found.meets(goal))}"
