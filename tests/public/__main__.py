"""Compare two checkouts: `python -m tests.public --against OTHER_CHECKOUT`.

Each case is the same or differs; what differs is listed, with the first difference. The status is 1
if anything differs that no line of `exceptions.txt` allows, or if a case raises what it does not
expect.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import torch

from tests.public.child import REPOSITORY
from tests.public.outcome import RAISED, Leaf, difference

EXCEPTIONS = Path(__file__).with_name("exceptions.txt")
_MAX_LISTED = 5
Outcomes = Mapping[str, Mapping[str, Leaf]]


class Finding(NamedTuple):
    """A leaf that differs, and the reason why it may, if there is one."""

    name: str
    how: str
    reason: str | None


def read_exceptions(text: str) -> dict[str, str]:
    """Return pattern -> reason of lines `PATTERN: reason`."""
    lines = (x.strip() for x in text.splitlines())
    pairs = [x.partition(": ") for x in lines if x and not x.startswith("#")]
    if bad := [pattern for pattern, _, reason in pairs if not reason.strip()]:
        raise ValueError(f"exceptions.txt: each line must be 'PATTERN: reason', got {bad[0]!r}")
    return {pattern: reason.strip() for pattern, _, reason in pairs}


def compare(here: Outcomes, there: Outcomes, exceptions: Mapping[str, str]) -> list[Finding]:
    """List the leaves that differ, and errors that a case does not expect, also if both raise."""
    findings = []
    for case in dict.fromkeys([*there, *here]):
        ours, theirs = here.get(case, {}), there.get(case, {})
        raised = [RAISED] if RAISED in ours or RAISED in theirs else []
        for leaf in raised or dict.fromkeys([*theirs, *ours]):
            how = difference(ours.get(leaf), theirs.get(leaf))
            if leaf == RAISED:
                how = f"{ours.get(leaf, 'nothing')} here, {theirs.get(leaf, 'nothing')} there"
            if how is not None:
                name = f"{case}{leaf}"
                reasons = (reason for x, reason in exceptions.items() if fnmatch(name, x))
                findings.append(Finding(name, how, next(reasons, None)))
    return findings


class Run:
    """The cases on one checkout's library, in a process of its own; quick: without long ones."""

    def __init__(
        self, checkout: Path, out: Path, device: str, only: Sequence[str], quick: bool = False
    ) -> None:
        if not (checkout / "moefp8" / "__init__.py").exists():
            raise ValueError(f"a checkout must hold moefp8/__init__.py, got {checkout}")
        out.mkdir()
        self.out, self.log = out, out / "log.txt"
        command = [sys.executable, str(Path(__file__).with_name("child.py")), str(out)]
        command += ["--quick"] if quick else []
        environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
        if device == "cpu":
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command, "--device", device, "--only", *only],
                env=environment | {"HF_HUB_OFFLINE": "1", "COLUMNS": "100"},
                stdout=log,
                stderr=log,
                cwd=out,
            )

    def outcomes(self) -> Outcomes:
        if self.process.wait():
            raise RuntimeError(f"the cases did not run:\n{self.log.read_text()}")
        return torch.load(self.out / "outcomes.pt")

    def seconds(self) -> dict[str, float]:
        return json.loads((self.out / "seconds.json").read_text())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m tests.public", description=__doc__)
    parser.add_argument("--against", type=Path, required=True, help="the other checkout")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="of cases")
    parser.add_argument("--here", type=Path, default=REPOSITORY, help="default: this checkout")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        checkouts = arguments.here.resolve(), arguments.against.resolve()
        runs = [
            Run(checkout, Path(folder).resolve() / name, arguments.device, arguments.only)
            for name, checkout in zip(("here", "there"), checkouts, strict=True)
        ]
        here, there = (run.outcomes() for run in runs)
        seconds = [run.seconds() for run in runs]
    findings = compare(here, there, read_exceptions(EXCEPTIONS.read_text()))
    show(here, there, findings, seconds)
    return int(any(x.reason is None for x in findings))


def show(
    here: Outcomes,
    there: Outcomes,
    findings: Sequence[Finding],
    seconds: Sequence[dict[str, float]],
) -> None:
    cases = dict.fromkeys([*there, *here])
    print(f"{'case':<40}{'outputs':>8}{'CPU s':>8}{'there':>8}")
    for case in cases:
        differing = [x for x in findings if x.name.partition("/")[0] == case]
        outputs = {*here.get(case, {}), *there.get(case, {})}
        verdict = f"{len(differing)} differ" if differing else "same"
        times = "".join(f"{x.get(case, 0):8.2f}" for x in seconds)
        print(f"{case:<40}{len(outputs):>8}{times}  {verdict}")
        for x in differing[:_MAX_LISTED]:
            print(f"    {x.name}: {x.how}" + (f" [{x.reason}]" if x.reason else ""))
        if len(differing) > _MAX_LISTED:
            print(f"    ... and {len(differing) - _MAX_LISTED} more")
    total = " and ".join(f"{sum(x.values()):.0f} s" for x in seconds)
    num_outputs = sum(len({*here.get(x, {}), *there.get(x, {})}) for x in cases)
    allowed = sum(x.reason is not None for x in findings)
    verdict = (
        f"{len(findings) - allowed} differ, {allowed} more may" if findings else "all the same"
    )
    print(f"\n{len(cases)} cases with {num_outputs} outputs in {total} of CPU: {verdict}")


if __name__ == "__main__":
    sys.exit(main())
