"""A fault, and a copy of the checkout in which its test runs with and without it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
_COPIED = "moefp8", "tests", "examples", "pyproject.toml"
_LIMIT_S = 300  # a test that takes longer than this hangs
_FAILED = 1  # pytest's exit code where tests ran and some failed


@dataclass(frozen=True)
class Fault:
    """A wrong edit of the library.

    file: the edited file, from `moefp8/` on.
    old, new: the text that is replaced, which the file has once, and what replaces it.
    caught_by: the pytest node id of a test, or of one of its cases, that fails because of it.
    why: what the fault would do to a user.
    """

    file: str
    old: str
    new: str
    caught_by: str
    why: str

    @property
    def path(self) -> str:
        return f"moefp8/{self.file}"

    def num_places(self, repository: Path = REPOSITORY) -> int:
        """How often the file has the old text."""
        return (repository / self.path).read_text().count(self.old)


class Copy:
    """A copy of the checkout in a folder, whose kernels are compiled into a cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ignore = shutil.ignore_patterns("__pycache__")
        for name in _COPIED:
            source, target = REPOSITORY / name, folder / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=ignore)
            else:
                shutil.copyfile(source, target)

    @contextmanager
    def having(self, fault: Fault) -> Iterator[None]:
        path = self.folder / fault.path
        text = path.read_text()
        path.write_text(text.replace(fault.old, fault.new))
        try:
            yield
        finally:
            path.write_text(text)

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        """Run pytest with these arguments on the copy."""
        environment = {
            **os.environ,
            "MOEFP8_CACHE_DIR": str(self.folder / "cache"),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": str(self.folder),
        }
        environment.pop("PYTEST_ADDOPTS", None)
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
        )

    def verdict(self, fault: Fault) -> str:
        """ "caught", or why the fault was not."""
        num_places = fault.num_places(self.folder)
        if num_places != 1:
            return f"the old text is there {num_places} times, not once"
        try:
            with self.having(fault):
                result = self.run("-x", fault.caught_by)
        except subprocess.TimeoutExpired:
            return f"NOT CAUGHT: the test takes more than {_LIMIT_S} s"
        if result.returncode == 0:
            return "NOT CAUGHT"
        if result.returncode != _FAILED:
            return f"NOT CAUGHT: no test could run\n{result.stdout}"
        return "caught"

    def problems_without_faults(self, faults: Sequence[Fault], jobs: int) -> str:
        """What pytest says where a test of the faults fails without any; else nothing."""
        tests = sorted({fault.caught_by for fault in faults})
        workers = ["-n", str(jobs)] if jobs > 1 and len(tests) > 1 else []
        result = self.run(*workers, *tests)
        return result.stdout if result.returncode else ""
