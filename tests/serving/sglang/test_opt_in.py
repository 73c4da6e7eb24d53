"""What the plug-in for SGLang does without SGLang, or without being asked."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from moefp8.serving.sglang import register
from tests.serving.sglang import engine

OFF = """
import sys
import moefp8
assert "moefp8.serving" not in sys.modules
from moefp8.serving.sglang import register
register()
assert not [name for name in sys.modules if name.partition(".")[0] == "sglang"]
"""
OLD = """
import os
import sys
os.environ["MOEFP8_SGLANG"] = "1"
sys.path.insert(0, sys.argv[1])
register()
"""


def test_without_the_variable_sglang_is_not_imported_and_an_old_one_is_refused_in_a_sentence(
    tmp_path, monkeypatch
):
    monkeypatch.delenv("MOEFP8_SGLANG", raising=False)
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("__version__ = '0.4.1'\n")
    command = [sys.executable, "-c", OFF + OLD, tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        "moefp8's plug-in fits SGLang 0.5.17 to 0.5.23, got 0.4.1 (No module named 'sglang.srt'); "
        "install one of these, or unset MOEFP8_SGLANG to serve without the plug-in\n"
    )


def test_another_value_is_refused(monkeypatch):
    monkeypatch.setenv("MOEFP8_SGLANG", "yes")
    with pytest.raises(SystemExit, match=r"^MOEFP8_SGLANG must be 0 or 1, got 'yes'$"):
        register()


def test_zero_does_nothing(monkeypatch):
    monkeypatch.setenv("MOEFP8_SGLANG", "0")
    register()


def test_the_entry_point_is_the_plug_in():
    group, line = engine.entry_point().splitlines()
    point = EntryPoint(*line.split(" = "), group.strip("[]"))
    assert (point.name, point.group, point.load()) == ("moefp8", "sglang.srt.plugins", register)
