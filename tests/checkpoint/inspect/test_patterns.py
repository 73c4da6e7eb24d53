"""Lists of modules in a config.json that somebody made to hurt: none takes long."""

import time
import warnings
from itertools import count
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moefp8.checkpoint import inspect_checkpoint
from moefp8.checkpoint.inspect.patterns import Modules
from tests.checkpoint.cases import write
from tests.checkpoint.deadline import within
from tests.checkpoint.inspect.cases import config_with
from tests.checkpoint.quantize.cases import bf16

EVIL = ["re:(a+)+$x", "re:(a|a)*x", f"re:{'a?' * 60}x", f"re:{'(a|a)' * 30}x", "re:(", "re:(?i)a"]


def test_patterns_that_take_for_ever_are_named(tmp_path):
    config = config_with(ignore=[*EVIL, "re:lm_h.*", "mlp.gate"])
    name = f"model.layers.0.{'a' * 60}"
    tensors = {f"{name}.weight": bf16(4, 4), "lm_head.weight": bf16(4, 4)}
    path = write(tmp_path / "c", {**tensors, "model.mlp.gate.weight": bf16(4, 4)}, config)
    with within(5):
        found = inspect_checkpoint(path).anomalies
    rules = [x for x in found if "not looked for" in x.rule]
    assert [x.count for x in rules] == [len(EVIL)]
    assert repr(EVIL[0]) in rules[0].examples[0]
    assert {x.severity for x in rules} == {"note"}
    assert {x.kind for x in found if "does not list it" in x.rule} == {
        f"model.layers.*.{'a' * 60}.weight"  # and neither the head nor the gate
    }


def test_a_busy_machine_finds_what_an_idle_one_does(tmp_path, monkeypatch):
    tensors = {"lm_head.weight": bf16(4, 4), "x.weight": bf16(4, 4)}
    path = write(tmp_path / "c", tensors, config_with(ignore=["re:lm_h.*", "re:x"]))
    idle = inspect_checkpoint(path)
    assert not any("not looked for" in x.rule for x in idle.anomalies)
    monkeypatch.setattr(time, "monotonic", count(step=100.0).__next__)  # 100 s between two steps
    assert inspect_checkpoint(path) == idle


@given(st.text("\\()[]{}|?*+.^$-:=!<>P1a,\n", max_size=12))
@example("\\")
@example("a\\")
def test_any_pattern_is_looked_for_or_named(pattern):
    listed = Modules([f"re:{pattern}", "mlp.gate"])
    assert "model.mlp.gate" in listed
    assert isinstance("a.b" in listed, bool)
    assert listed.bad.keys() <= {f"re:{pattern}"}


def test_no_pattern_makes_python_warn():
    random = Random(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        patterns = [f"re:{''.join(random.choices('[[]^-&|~a.(', k=9))}" for _ in range(20_000)]
        patterns += ["re:[[a]b", "re:[a--b]", "re:[a||b]", "re:[^[a]", "re:[[a"]
        bad = Modules([*patterns, r"re:\[[a]", "re:[a-b]|[c]"]).bad
    assert bad.keys() > set(patterns[-5:])
    assert r"re:\[[a]" not in bad
    assert "re:[a-b]|[c]" not in bad


@pytest.mark.parametrize(
    "listed",
    [
        ["re:a*a*a*x", *(f"re:{'(a|a|a|a|a)' * 3}a*a*a*[{c}]" for c in "bcdefghijklm" * 9)],
        [f"x.{i}" for i in range(300_000)],
        [f"re:{i}{'[āԁሀ]' * 38}" for i in range(2000)],  # each takes 2 ms to compile
    ],
)
def test_lists_without_end_are_given_up(tmp_path, monkeypatch, listed):
    """By a clock that is ten times as fast, to save time."""
    real = time.thread_time
    monkeypatch.setattr(time, "thread_time", lambda: 10 * real())
    tensors = {f"model.layers.{i}.{'a' * 100}.weight": bf16(1, 1) for i in range(60)}
    path = write(tmp_path / "c", tensors, config_with(ignore=listed))
    with within(2):
        inspect_checkpoint(path)
