"""Patterns in the settings of adapters, which strangers may have written."""

import re
import time
from itertools import count
from pathlib import Path

import pytest
import torch

from moefp8.adapters import add_lora, load_lora, remove_lora, save_lora
from tests.adapters.files_cases import change, states


def saved_linear(name: str, folder: Path, **settings) -> torch.nn.ModuleDict:
    """A model of one linear, whose adapter was saved to the folder with these settings."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8).bfloat16()})
    add_lora(model, 4, 8, targets=[name])
    save_lora(model, folder)
    change(folder, **settings)
    return remove_lora(model)


HOSTILE = "(a+)+x", "(a|a)*x", "(?:a|aa)+", "a?" * 30 + "a" * 30, ".*" * 50, r"(a)\1", "(?i)a"


@pytest.mark.parametrize("pattern", HOSTILE)
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_could_take_long_are_refused(key, pattern, tmp_path):
    """Some have 2**25 ways to try. CPU time counts, since other processes run beside this one."""
    model = saved_linear("a" * 25, tmp_path, **{key: {"q_proj": 2, pattern: 4}})
    started = time.process_time()
    with pytest.raises(ValueError, match=rf"{key} in adapter_config.json has .*names of modules"):
        load_lora(model, tmp_path)
    assert time.process_time() - started < 2
    assert states(model) == []


@pytest.mark.parametrize(
    ("num_patterns", "problem"), [(40, "to match them up to .* took too long"), (60, "too many")]
)
def test_many_patterns_of_a_file_have_one_deadline(num_patterns, problem, tmp_path, monkeypatch):
    """They are compiled, then matched; the clock goes 0.1 s on from look to look, up to 5 s."""
    monkeypatch.setattr(time, "thread_time", count(step=0.1).__next__)
    simple = {f"b{i}": 1 for i in range(num_patterns)}
    model = saved_linear("a", tmp_path, alpha_pattern=simple)
    with pytest.raises(ValueError, match=f"must be simple, but .*{problem}"):
        load_lora(model, tmp_path)
    assert states(model) == []


def test_patterns_are_not_matched_with_names_that_are_too_long(tmp_path):
    model = saved_linear("a" * 129, tmp_path, alpha_pattern={"a": 1})
    with pytest.raises(ValueError, match="names of at most 128 characters, got 'aaa"):
        load_lora(model, tmp_path)


def test_patterns_mean_what_they_mean_to_peft(tmp_path):
    """PEFT puts `(.*\\.)?` before a pattern, and `$` after it; the first that matches counts."""
    names = ["layers.0.q", "layers.1.q", "layers.1.k", "layers.2.up", "layers.3.up", "b.layers.0.q"]
    listed = "|".join(map(str, range(2, 40)))
    patterns = ["b.layers.0.q", r"(?:model\.)?layers\.0\.(?:q|k)_?", r"^layers\.1\.q", r".*\.\d\.k"]
    patterns += [rf"layers\.({listed})\.(?:up)", ".*"]
    alphas = {pattern: 2**i for i, pattern in enumerate(patterns)}
    model = torch.nn.Module()
    for name in names:
        path, _, last = name.rpartition(".")
        parent = model
        for part in path.split("."):
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, torch.nn.Linear(8, 8).bfloat16())
    add_lora(model, 1, 1, targets=names)
    save_lora(model, tmp_path)
    change(tmp_path, alpha_pattern=alphas)
    load_lora(remove_lora(model), tmp_path)
    for name in names:
        expected = next(x for p, x in alphas.items() if re.match(rf"(.*\.)?({p})$", name))
        assert model.get_submodule(name).lora_weight.scaling == expected, name
