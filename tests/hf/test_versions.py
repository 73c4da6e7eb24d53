"""`import moefp8.hf` with a transformers that is too old, or with none."""

import subprocess
import sys

import pytest

VERSIONS = "4.57.1", "5.9.0", "5.9.0.dev0"
# Each import is that of a process of its own, all of which have imported torch and moefp8.
IMPORTS = """
import os, sys
sys.path.insert(0, sys.argv[1])
import moefp8
assert "transformers" not in sys.modules
for folder in (*sys.argv[1:], None):
    if os.fork() == 0:
        sys.path[0] = folder
        if folder is None:
            sys.modules["transformers"] = None
        try:
            import moefp8.hf
        except ImportError as error:
            print(repr(str(error)), flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def errors(tmp_path_factory) -> list[str]:
    """A line for each of VERSIONS, and one for none."""
    folders = [tmp_path_factory.mktemp("old") for _ in VERSIONS]
    for folder, version in zip(folders, VERSIONS, strict=True):
        (folder / "transformers.py").write_text(f"__version__ = {version!r}")
    command = [sys.executable, "-c", IMPORTS, *folders]
    return subprocess.check_output(command, text=True).splitlines()


@pytest.mark.parametrize("version", VERSIONS)
def test_an_older_transformers_is_refused_with_both_versions(errors, version):
    told = errors[VERSIONS.index(version)]
    assert f"moefp8.hf needs transformers >= 5.10, got {version}" in told
    assert ": pip install '.[hf]' in a clone" in told


def test_a_missing_transformers_is_told(errors):
    assert len(errors) == len(VERSIONS) + 1
    assert "moefp8.hf needs transformers >= 5.10: pip install" in errors[-1]
