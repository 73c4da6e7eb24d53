"""Figures of the code: those of a small package that is known, and those of a call of ours."""

import json

import pytest
import torch

from benchmarks import house
from benchmarks.host_time import NullDriver
from moefp8.kernels import jit, num_blocks
from tests.benchmarks.cases import run_main

PACKAGE = {
    "__init__.py": "from .layers import experts\n",
    "layers/__init__.py": "",
    "layers/experts.py": '''"""Words told of experts."""

from ..kernels import jit, name
import moefp8.system

def f(*of_rows, **found):
    """Of."""
    from .. import late
    return g(*of_rows)(1, x(**found))
''',
    "kernels/__init__.py": "from .base import name\n",
    "kernels/base.py": "name = Workspace.of(Source(1), ConfigSource(2))\n",
    "kernels/jit.py": "from .base import name\nclass A: ...\n",
    "system.py": "class Own(Sources(NamedTuple)): ...\n",
    "late.py": "from .layers import experts\n",
    "kernels/add.cu": "// Found behind.\nint of_x = 1;  // behind, Memory( of\n",
    "notes.txt": "told told\n",
}


@pytest.fixture
def package(monkeypatch, tmp_path):
    """The package above in place of ours."""
    for name, text in PACKAGE.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(house, "PACKAGE", tmp_path)
    for x in (house.texts, house.trees):
        x.cache_clear()
    yield
    for x in (house.texts, house.trees):
        x.cache_clear()


@pytest.mark.usefixtures("package")
def test_what_sources_say():
    num_lines = sum(text.count("\n") for name, text in PACKAGE.items() if name != "notes.txt")
    assert house.lines() == {"all": num_lines, "median length": 26.0}
    assert house.docstrings() == {"share": pytest.approx(100 / 3)}  # of f, A and Own
    assert house.starred_calls() == {"share": pytest.approx(100 / 7)}
    assert house.old_idiom() == {
        "Source(": 1,
        "Sources(NamedTuple)": 1,
        "Memory(": 1,
        "needed_kernels": 0,
        "Workspace.of": 1,
    }
    counts = {"of_": 3, "told": 1, "found": 2, "trusts": 0, "anew": 0, "behind": 2}
    assert house.private_words() == {**counts, "all": 8}


@pytest.mark.usefixtures("package")
def test_chains_of_imports():
    """experts > kernels.jit > kernels.base; an import within a function is not made on import."""
    assert house.import_depth() == {"layers.experts": 3, "any": 4}


def test_a_first_call_passes_through_files_of_ours_and_a_second_through_fewer():
    passed = house.files_passed(house.experts)
    assert {"layers/experts.py", "routing/dispatch.py"} <= passed
    assert not any(path.startswith(("kernels/jit", "..", "/")) for path in passed)

    def second():
        call = house.experts()
        call()
        return call

    assert house.files_passed(second) < passed
    assert house.files_passed(house.experts) == passed  # whatever was called before


def test_a_backward_does_not_count_its_forward():
    passed = house.files_passed(house.trained_backward)
    assert "functional/training/experts_backward.py" in passed
    assert "layers/experts.py" not in passed


def test_a_repeated_call_calls_as_many_functions_each_time():
    counts, again = house.python_calls(), house.python_calls()
    linear, experts, step, adapted = counts.values()
    assert again == {**counts, "trained experts, a step": again["trained experts, a step"]}
    assert 10 < linear < experts < step
    assert adapted > experts


def test_each_call_of_ours_is_seen_once():
    seen = []
    with house.profiled(seen.append):
        num_blocks(129)  # which calls another function of that file
    assert seen == ["kernels/common/blocks.py"] * 2


@torch.no_grad()
def test_a_repeated_call_launches_a_graph_as_on_a_gpu():
    with jit.using(NullDriver()):
        call, seen = house.experts(), list[str]()
        for _ in range(3):
            call()
        with house.profiled(seen.append):
            call()
    assert seen.count("kernels/jit/graph.py") == 1


def test_one_command_prints_all(monkeypatch, capsys):
    monkeypatch.setattr(house, "ROUNDS", 2)
    monkeypatch.setattr(house, "CALLS", 10)
    monkeypatch.setattr(house, "NEW_LAYOUTS", 2)
    monkeypatch.setattr(house, "LISTED_TOKENS", 8)
    run_main(monkeypatch, house, "--json")
    measures = json.loads(capsys.readouterr().out)["measures"]
    assert measures.keys() == house.MEASURES.keys()
    assert all(figure >= 0 for figures in measures.values() for figure in figures.values())
    repeated, new = (measures[f"host us of a {x}"] for x in ("repeated call", "new layout"))
    assert all(0 < 2 * repeated[name] < new[name] for name in house.CALLED)
    monkeypatch.setattr(house, "MEASURES", {"lines": house.lines})
    run_main(monkeypatch, house)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title == "lines"
    assert dict(line.rsplit(maxsplit=1) for line in lines) == {
        "  all": str(int(house.lines()["all"])),
        "  median length": str(round(house.lines()["median length"], 1)),
    }
