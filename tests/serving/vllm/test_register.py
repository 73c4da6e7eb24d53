"""When the plug-in does something: no vLLM is needed for these tests."""

import os
import subprocess
import sys

import pytest

REGISTER = """
import sys
from moefp8.serving.vllm import register
assert "vllm" not in sys.modules
register()
print("vllm" in sys.modules)
"""


def run(tmp_path, value: str | None) -> subprocess.CompletedProcess[str]:
    """In a process whose vLLM is an old one, without what the plug-in builds upon."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("__version__ = '0.19.0'")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    environment |= {} if value is None else {"MOEFP8_VLLM": value}
    return subprocess.run(
        [sys.executable, "-c", REGISTER], env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("value", [None, "0"])
def test_without_the_variable_it_does_nothing(tmp_path, value):
    assert run(tmp_path, value).stdout == "False\n"


def test_another_value_is_refused(tmp_path):
    assert "ValueError: MOEFP8_VLLM must be 0 or 1, got 'yes'" in run(tmp_path, "yes").stderr


def test_a_version_that_does_not_fit_is_refused_in_a_sentence(tmp_path):
    last = run(tmp_path, "1").stderr.strip().splitlines()[-1]
    assert last.startswith("RuntimeError: moefp8's plug-in fits vLLM 0.26 to 0.33, got 0.19.0 (")
    assert last.endswith("or unset MOEFP8_VLLM to serve without the plug-in")
