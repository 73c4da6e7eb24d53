"""The goals of the benchmarks beside what was measured: the tables of docs/design/goals.md."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

from benchmarks import convergence, gemm_goals, grouped, model, moe, moe_layers, session, updating
from benchmarks.convergence.figures import curves, spread, trained_in_fp8
from benchmarks.expert_parallel import table as expert_parallel
from benchmarks.expert_parallel.worker import COMBINE, DISPATCH
from benchmarks.figures import PAUSES, WITHOUT_REST, beside_goal, is_met, told_ratio
from benchmarks.gradient_parts import comparisons
from benchmarks.grouped_peers import PADDED
from benchmarks.markdown import number, table
from benchmarks.model import table as model_table
from benchmarks.moe_cases import MODELS
from benchmarks.moe_peers import MEGA
from benchmarks.pages import Results
from benchmarks.peers import OURS
from benchmarks.serving import goals as serving_goals
from benchmarks.training import goals as training
from benchmarks.training.parts import PARTS


class Verdict(NamedTuple):
    """A goal at one case: `measured` has to be `asked` at least, or at most.

    mode: how it was timed, where a case was timed in both modes.
    """

    goal: str
    case: str
    asked: float
    measured: float
    at_most: bool = False
    digits: int = 2
    mode: str = ""

    @property
    def is_met(self) -> bool:
        return is_met(self.measured, self.asked, self.at_most)

    @property
    def measured_text(self) -> str:
        text = beside_goal(self.measured, self.asked, self.digits, self.at_most)
        return f"{text} {self.mode}".rstrip()

    @property
    def asked_text(self) -> str:
        return number(self.asked, self.digits)


def goals_table(verdicts: Callable[[Results], Iterable[Verdict]], results: Results) -> str:
    """A line for each goal: what is asked, how many times it is met, and where it is not."""
    by_goal: dict[str, list[Verdict]] = {}
    for verdict in verdicts(results):
        by_goal.setdefault(verdict.goal, []).append(verdict)
    lines = []
    for goal, cases in by_goal.items():
        least, *others = dict.fromkeys(x.asked_text for x in sorted(cases, key=_asked))
        asked = f"{least} to {others[-1]}" if others else least
        met = f"{sum(x.is_met for x in cases)} of {len(cases)}"
        missed: dict[str, list[str]] = {}
        for x in cases:
            if not x.is_met:
                case = f"{x.case}, of {x.asked_text}" if others else x.case
                missed.setdefault(case, []).append(x.measured_text)
        where = "; ".join(f"{case}: {', '.join(values)}" for case, values in missed.items())
        bound = "at most" if cases[0].at_most else "at least"
        lines.append([goal, f"{bound} {asked}", met, where])
    return f"{table(['goal', 'asked', 'met', 'missed'], lines)}\n\n{_where(results)}"


def _asked(verdict: Verdict) -> float:
    return verdict.asked


def _where(results: Results) -> str:
    """Results of several runs have a GPU, a date and a commit for each."""
    runs = results.get("runs", [results])
    commits = dict.fromkeys(f"{run['date'][:10]}, commit {run['commit']}" for run in runs)
    return f"{runs[0].get('gpu', runs[0]['cpu'])}; {'; '.join(commits)}."


def gemm_verdicts(results: Results, mode: str) -> Iterator[Verdict]:
    for (ms, against), asked in gemm_goals.GOALS[mode].items():
        measured = gemm_goals.compare(results["rows"], ms, against, mode)
        if measured is None:
            continue
        goal = f"times as fast as {gemm_goals.AGAINST[against][0]}, {mode}"
        case = f"M = {', '.join(map(str, ms))}"
        yield Verdict(f"{goal}: geometric mean", case, asked[0], measured.geomean)
        if asked[1]:
            yield Verdict(f"{goal}: worst shape", case, asked[1], measured.worst)


def grouped_verdicts(results: Results) -> Iterator[Verdict]:
    goals = "times as fast as DeepGEMM", "times as fast as DeepGEMM, by `grouped_layout`"
    for goal, name in zip(goals, (OURS, PADDED), strict=True):
        for setting, rows in grouped.by_setting(results["rows"]).items():
            asked = grouped.GOALS.get(setting) if name == OURS else grouped.PADDED_GOAL
            if asked is not None:
                for shape, ratio in grouped.against_deep_gemm(rows, name).items():
                    yield Verdict(goal, f"{setting} {shape}", asked, ratio)


def moe_verdicts(results: Results) -> Iterator[Verdict]:
    rows, goal = results["rows"], f"times as fast as {moe.PEERS[MEGA].title}"
    for row in rows:
        asked, ratio = moe.goal_of(row), told_ratio(row, (MEGA,))
        if asked and ratio:
            yield Verdict(goal, moe.case_of(row), asked, ratio)
    if mean := moe.against_mega_kernel(rows):
        yield Verdict(f"{goal}: geometric mean", "all of these", moe.GEOMEAN_GOAL, mean)


def layers_verdicts(results: Results) -> Iterator[Verdict]:
    for row in results["rows"]:
        if goal := moe_layers.goal_of(row):
            figure, most = goal
            what = f"{row['what']}, us, {moe_layers.FIGURES[figure]}"
            case = f"{MODELS[row['model']].title}, {row['tokens']} tokens"
            if figure in row["peers"][OURS]:
                us = row["peers"][OURS][figure]
                yield Verdict(what, case, most, us, at_most=True, digits=0)


def gradients_verdicts(results: Results) -> Iterator[Verdict]:
    for each in comparisons(results["rows"]):
        for case, ratio in each.ratios.items():
            goal = f"{each.part.title}: times as fast as {each.title}"
            yield Verdict(goal, case, each.goal, ratio)


def training_verdicts(results: Results) -> Iterator[Verdict]:
    for each in training.judged(results["rows"]):
        title = f"{each.goal.title}: {each.goal.what}"
        peers, how = PARTS[each.goal.part].peers, (each.goal.at_most, each.goal.digits)
        for name, by_mode in each.found.items():
            case = each.case if len(each.goal.ours) == 1 else f"{each.case}, {peers[name].title}"
            for mode, value in by_mode.items():
                mode = mode if len(by_mode) > 1 else ""
                yield Verdict(title, case, each.least, value, *how, mode)


def expert_parallel_verdicts(results: Results) -> Iterator[Verdict]:
    for row in results["rows"]:
        case = f"{row['layer']}, {row['tokens']} tokens"
        for goal in expert_parallel.GOALS:
            ratio = expert_parallel.speedup(row, goal.against)
            if goal.tokens == row["tokens"] and ratio is not None:
                yield Verdict(expert_parallel.title_of(goal.against), case, goal.least, ratio)
        if row["tokens"] >= expert_parallel.TOKENS_OF_MOVES:
            for move in (DISPATCH, COMBINE):
                share = row["moves"][move]["share"]
                what = f"{move} alone: share of a copy's speed"
                yield Verdict(what, case, expert_parallel.LEAST_SHARE, share)


def model_verdicts(results: Results) -> Iterator[Verdict]:
    yield from _decoding_verdicts(results["rows"][0])
    for row in results["rows"]:
        for phase in model_table.phases_of(row):
            case = f"{row['title']}, {phase}"
            for mode, asked in model.GOALS.items():
                goal = f"times as fast as {model.TITLES[model.HF_FP8]}, {model.MODES[mode]}"
                if ratio := model_table.speedup(row, model.HF_FP8, phase, mode):
                    yield Verdict(goal, case, asked, ratio)
            if ratio := model_table.moe_ratio(row, OURS, phase):
                goal = "MoE blocks in the model: times as long as alone"
                yield Verdict(goal, case, model.MOE_GOAL, ratio, at_most=True)


def _decoding_verdicts(row: session.Row) -> Iterator[Verdict]:
    """Each in its fastest mode, and at a batch of 1 also beside BF16 as it is called."""
    bf16 = model.TITLES[model.HF_BF16]
    for phase in (x for x in model_table.phases_of(row) if x != model.PREFILL):
        case = f"{row['title']}, {phase}"
        ours, theirs = (
            model_table.fastest_ms(row, provider, phase) for provider in (OURS, model.HF_BF16)
        )
        if ours and theirs:
            goal = f"times as fast as {bf16}, each in its fastest mode"
            yield Verdict(goal, case, model.DECODE_GOAL, theirs / ours)
        as_called = model_table.figures_of(row, model.HF_BF16, phase).get("eager_ms")
        if ours and as_called and phase == model.decode_name(1):
            goal = f"times as fast as {bf16} as it is called"
            yield Verdict(goal, case, model.AS_CALLED_GOAL, as_called / ours)


def serving_verdicts(results: Results) -> Iterator[Verdict]:
    for x in serving_goals.judged(results["rows"]):
        yield Verdict(x.goal, x.case, x.asked, x.measured, x.at_most)


def updating_verdicts(results: Results) -> Iterator[Verdict]:
    for name, row in results["rows"].items():
        goal = "new weights: times as long as a copy of the BF16 bytes"
        asked = updating.GOALS.get(name, updating.GOAL_WITH_TRANSPOSED)
        yield Verdict(goal, name, asked, row["share_of_copy"], at_most=True)


def convergence_verdicts(results: Results) -> Iterator[Verdict]:
    between = spread(results)
    for variant in trained_in_fp8(results):
        for seed, curve in curves(results, variant).items():
            case, off = f"{variant}, seed {seed}", abs(curve.end)
            goal = "percent from BF16 of the same seed, loss at the end"
            yield Verdict(goal, case, convergence.GOAL_PERCENT, off, at_most=True)
            if between:
                goal = "the same, beside how far apart BF16 runs of other seeds end"
                yield Verdict(goal, case, between.end, off, at_most=True)


# By the names of results, in the order of the page.
VERDICTS: dict[str, Callable[[Results], Iterable[Verdict]]] = {
    "gemm": partial(gemm_verdicts, mode=PAUSES),
    "gemm_large": partial(gemm_verdicts, mode=WITHOUT_REST),
    "grouped": grouped_verdicts,
    "moe": moe_verdicts,
    "moe_layers": layers_verdicts,
    "gradients": gradients_verdicts,
    "training": training_verdicts,
    "expert_parallel": expert_parallel_verdicts,
    "model": model_verdicts,
    "serving": serving_verdicts,
    "updating": updating_verdicts,
    "convergence": convergence_verdicts,
}
