"""The page of goals: which case of which goal is met, and how a miss is told."""

import json

import pytest

from benchmarks import goals, report
from benchmarks.figures import beside_goal, is_met
from benchmarks.goals import Verdict, goals_table

ABOUT = {"gpu": "a GPU", "cpu": "a CPU", "date": "2026-11-27T06", "commit": "abc"}


def lines_of(*verdicts: Verdict) -> list[str]:
    page = goals_table(lambda results: verdicts, ABOUT)
    assert page.endswith("\n\na GPU; 2026-11-27, commit abc.")
    return page.splitlines()[2:-2]


def test_a_line_for_each_goal():
    lines = lines_of(
        Verdict("fast", "1 token", 1.1, 1.2),
        Verdict("small", "all", 48.0, 47.2, at_most=True, digits=0),
        Verdict("fast", "16 tokens", 1.1, 1.05),
    )
    assert lines == [
        "| fast | at least 1.10 | 1 of 2 | 16 tokens: 1.05 |",
        "| small | at most 48 | 1 of 1 |  |",
    ]


def test_a_case_that_asks_for_another_value_says_which():
    cases = (("a", 1.3, 1.25), ("b", 1.1, 1.2))
    (line,) = lines_of(*(Verdict("fast", *case) for case in cases))
    assert line == "| fast | at least 1.10 to 1.30 | 1 of 2 | a, of 1.30: 1.25 |"


def test_both_modes_of_a_case_are_told_together():
    modes = ("without rest", 1.0), ("with pauses", 1.05)
    (line,) = lines_of(*(Verdict("fast", "a", 1.1, x, mode=mode) for mode, x in modes))
    assert line.endswith("| 0 of 2 | a: 1.00 without rest, 1.05 with pauses |")


@pytest.mark.parametrize(
    ("value", "asked", "at_most", "text"),
    [
        (1.3496, 1.35, False, "1.3496"),
        (1.3449, 1.35, False, "1.34"),
        (1.35, 1.35, False, "1.35"),
        (48.004, 48.0, True, "48.004"),
        (47.996, 48.0, True, "48.00"),
    ],
)
def test_a_miss_never_looks_like_the_goal(value, asked, at_most, text):
    assert beside_goal(value, asked, 2, at_most) == text
    assert is_met(float(text), asked, at_most) == is_met(value, asked, at_most)


@pytest.mark.parametrize("name", goals.VERDICTS)
def test_every_goal_of_results_is_judged_by_its_value(name):
    results = json.loads((report.RESULTS / f"{name}.json").read_text())
    verdicts = [*goals.VERDICTS[name](results)]
    assert verdicts
    assert len({(x.goal, x.case, x.mode) for x in verdicts}) == len(verdicts)
    assert all(0 < x.measured < 100 * x.asked for x in verdicts)
