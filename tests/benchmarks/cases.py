"""What the tests of benchmarks share: rows of results, fakes, and a run from the command line."""

import json
import sys
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from benchmarks import headlines, report
from benchmarks.figures import figures
from benchmarks.peers import OURS
from moefp8 import deep_gemm


def found(known: Mapping[str, Any], case: Any, us: dict[str, float], **more: object) -> dict:
    """What each peer came to: moefp8 takes 10 us; the others what `us` says, or refuse."""
    result: dict = {name: {"refused": "it does"} for name in known}
    for name, taken in {OURS: 10.0, **us}.items():
        num_bytes = case.num_bytes(known[name].operands)
        result[name] = figures(taken, case.flops, num_bytes, 1.7e-3) | more
    result[OURS]["repeatable"] = True
    return result


def run_main(monkeypatch, benchmark: ModuleType, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", [benchmark.__name__, *arguments])
    benchmark.main()


def headline_of(**results: dict) -> str:
    """The line that these results, which need not be there, add to the headlines."""
    others = [json.loads((report.RESULTS / f"{x}.json").read_text()) for x in headlines.SOURCES]
    before = {*headlines.headlines(*others).splitlines()}
    (line,) = {*headlines.headlines(*others, **results).splitlines()} - before
    return line


def failing(error: Exception) -> Callable[..., None]:
    def fail(*arguments: object, **options: object) -> None:
        raise error

    return fail


def fake_deep_gemm(monkeypatch, **names: object) -> SimpleNamespace:
    """What `import deep_gemm` gives: `names`, or our drop-in, which runs on the CPU."""
    ours = {name: getattr(deep_gemm, name) for name in deep_gemm.__all__}
    module = SimpleNamespace(**{**ours, "__version__": "1.0", **names})
    monkeypatch.setitem(sys.modules, "deep_gemm", module)
    return module
