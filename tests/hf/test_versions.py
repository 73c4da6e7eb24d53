"""`import moefp8.hf` with a transformers that is too old, or with none."""

import subprocess
import sys

import pytest


def import_of(before: str) -> subprocess.CompletedProcess:
    code = f"import sys\n{before}\nimport moefp8\nprint('without')\nimport moefp8.hf"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


@pytest.mark.parametrize("version", ["4.57.1", "5.9.0", "5.9.0.dev0"])
def test_an_older_transformers_is_refused_with_both_versions(tmp_path, version):
    (tmp_path / "transformers.py").write_text(f"__version__ = {version!r}")
    ran = import_of(f"sys.path.insert(0, {str(tmp_path)!r})")
    assert ran.stdout == "without\n"  # the rest of moefp8 needs no transformers
    assert f"ImportError: moefp8.hf needs transformers >= 5.10, got {version}" in ran.stderr
    assert 'pip install --upgrade "moefp8[hf]"' in ran.stderr


def test_a_missing_transformers_is_told():
    ran = import_of("sys.modules['transformers'] = None")
    assert ran.stdout == "without\n"
    assert "ImportError: moefp8.hf needs transformers >= 5.10: pip install" in ran.stderr
