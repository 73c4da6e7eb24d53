"""The comparison of two checkouts: it uses all that is public, and it sees a difference."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.public import surface
from tests.public.__main__ import Run, compare, main, read_exceptions, show
from tests.public.child import REPOSITORY
from tests.public.outcome import RAISED, difference, leaves
from tests.sampling import ALL_KERNELS

ROOMS = "quant.*", "routing.*", "linear.forward", "kernels.errors"


def test_cases_use_all_that_is_public_and_nothing_else():
    source = surface.cases_source()
    assert surface.unused(source) == []
    assert surface.foreign(source) == []


@pytest.mark.slow
def test_no_case_raises(tmp_path):
    """Without the few long cases, which `make public` runs as well."""
    outcomes = Run(REPOSITORY, tmp_path / "here", "cpu", ["*"], quick=not ALL_KERNELS).outcomes()
    assert len(outcomes) > 100
    assert [x[RAISED] for x in outcomes.values() if RAISED in x] == []


def test_what_no_case_uses_is_named():
    source = surface.Source(
        "import moefp8\n"
        "for f in (moefp8.convert, moefp8.freeze):\n    f(model=1, skip='a')\n"
        "linear.unfreeze(dtype=1)\nrun_command('quantize', '--skip', 'MOEFP8_STRICT')\n"
        "moefp8.kernels.jit.Driver()\n"
    )
    missing = surface.unused(source)
    for name in ("moefp8.convert(only=)", "moefp8.shard", "moefp8.shard(plan=)", "quantize --json"):
        assert name in missing
    for name in (
        "MOEFP8_NVRTC",
        "moefp8.FP8Linear.unfreeze(wgrad=)",
        "moefp8.MoE.forward(hidden_states=)",
    ):
        assert name in missing
    used = "moefp8.convert", "moefp8.convert(skip=)", "moefp8.freeze", "moefp8.freeze(model=)"
    for name in (*used, "moefp8.FP8Linear.unfreeze(dtype=)", "quantize --skip", "MOEFP8_STRICT"):
        assert name not in missing
    assert surface.foreign(source) == ["moefp8.kernels.jit", "moefp8.kernels.jit.Driver"]


@pytest.mark.parametrize(
    ("here", "there", "how"),
    [
        (torch.zeros(2, 3), torch.tensor([[0.0, 0, 0], [0, -0.0, 1]]), "[1, 1] 0.0 here, -0.0"),
        (torch.tensor(float("nan")), torch.tensor(1.0), "nan here, 1.0 there (1 of 1"),
        (torch.zeros(2), torch.zeros(2).bfloat16(), "float32 [2] here, torch.bfloat16 [2] there"),
        (torch.zeros(2), torch.zeros(2, 1), "[2] here, torch.float32 [2, 1] there"),
        ("the one", "the other", "'the one' here, 'the other' there"),
        ("text", torch.zeros(1), "'text' here, torch.float32 [1] there"),
        (None, torch.zeros(0), "only there"),
        ("", None, "only here"),
    ],
)
def test_the_first_difference_is_shown(here, there, how):
    assert how in difference(here, there)
    for same in (here, there):
        assert difference(same, same) is None or same is None


def test_nan_equals_the_same_nan():
    x = torch.tensor([float("nan"), 1.0])
    assert difference(x, x.clone()) is None


def test_values_become_named_leaves(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(f'{{"in": "{tmp_path}"}}')
    Path("data").write_bytes(b"12")
    value = {
        "a": [torch.ones(1).expand(3), "took 1.25 s"],
        "b": (1, None),
        "files": Path("."),
        "none": {},
    }
    result = dict(leaves("", value))
    assert {*result} >= {"/a/0", "/a/1", "/files/data/digest"}
    assert result["/a/1"] == "took # s"
    assert (result["/b/0"], result["/b/1"]) == ("1", "None")
    assert result["/none"] == "{}"
    assert result["/files/config.json"] == '{"in": "HERE"}'


def test_exceptions_and_errors_of_cases():
    here = {"a.b": {"/x": "1", "/y": "2"}, "a.c": {RAISED: "ValueError"}}
    there = {"a.b": {"/x": "3", "/y": "2"}, "a.c": {RAISED: "ValueError"}}
    result = compare(here, there, read_exceptions("# why\na.b/*: it was wrong: see the log\n"))
    assert [(x.name, x.reason) for x in result] == [
        ("a.b/x", "it was wrong: see the log"),
        (f"a.c{RAISED}", None),
    ]
    with pytest.raises(ValueError, match="PATTERN: reason"):
        read_exceptions("a.b/*")


def test_a_case_that_returns_one_value_is_shown_as_it_is(capsys):
    here, there = {"a.b": {"": "1"}, "a.bc": {"": "1"}}, {"a.b": {"": "2"}, "a.bc": {"": "1"}}
    show(here, there, compare(here, there, {}), [{}, {}])
    lines = capsys.readouterr().out.splitlines()
    assert [x.split()[-1] for x in lines if x.startswith("a.")] == ["differ", "same"]
    assert "    a.b: '1' here, '2' there" in lines


def test_one_changed_constant_is_seen_and_nothing_else(tmp_path):
    """Of a copy with another scale, what quantizes differs, and all else is equal to the bit."""
    changed = tmp_path / "changed"
    shutil.copytree(REPOSITORY / "moefp8", changed / "moefp8")
    numerics = changed / "moefp8" / "quant" / "numerics.py"
    text = numerics.read_text()
    assert text.count("min=min_amax)") == 1
    numerics.write_text(text.replace("min=min_amax)", "min=2 * min_amax)"))
    checkouts = {"here": REPOSITORY, "there": changed}
    runs = [Run(x, tmp_path / name, "cpu", ROOMS) for name, x in checkouts.items()]
    here, there = (run.outcomes() for run in runs)
    assert {*here} == {*there}
    assert len(here) > 10
    names = {x.name.partition("/")[0] for x in compare(here, there, {})}
    assert names == {"quant.rows", "quant.blocks"}


def test_a_folder_without_the_library_is_refused(tmp_path):
    with pytest.raises(ValueError, match="must hold moefp8"):
        main(["--against", str(tmp_path)])
