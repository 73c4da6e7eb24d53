"""Figures of the code itself, on any machine: `python -m benchmarks.house` (`--json` prints JSON).

How much there is to read, how far a reader has to go, what a call costs the host. Launches go to a
driver that does nothing, so no figure needs a GPU. Times are of the fastest round: compare those of
two checkouts in turns on one machine.
"""

import ast
import json
import re
import statistics
import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper, cache
from pathlib import Path
from typing import Any

import torch

import moefp8
from benchmarks.circumstances import circumstances
from benchmarks.host_time import NullDriver
from moefp8 import FP8Linear, GroupedExperts, MoE, TopKRouter
from moefp8.adapters import add_lora
from moefp8.kernels import jit
from moefp8.kernels.targets import target_with
from moefp8.precompile.layers import kernels_of

PACKAGE = Path(moefp8.__file__).parent
CALLS, ROUNDS, NEW_LAYOUTS = 50, 20, 20
NUM_TOKENS, LISTED_TOKENS, NUM_SMS = 16, 8192, 132
E, K, H, I = 16, 4, 1024, 512  # experts, choices, hidden and intermediate size of what is called
PRIVATE_WORDS = r"of_\w+", "told", "found", "trusts", "anew", "behind"
OLD_IDIOM = {  # of an op that is described in several places: a pattern for each of its words
    "Source(": r"\bSource\(",
    "Sources(NamedTuple)": r"Sources\(NamedTuple\)",
    "Memory(": r"\bMemory\(",
    "needed_kernels": r"\bneeded_kernels\b",
    "Workspace.of": r"Workspace\.of\b",
}
Figures = dict[str, float]
Call = Callable[[], object]

# ---- What the sources say ----


@cache
def texts() -> dict[Path, str]:
    """All sources of the package: Python and CUDA."""
    paths = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".cu", ".cuh"))
    return {path: path.read_text() for path in paths}


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(text) for path, text in texts().items() if path.suffix == ".py"}


def nodes() -> Iterator[ast.AST]:
    return (node for tree in trees().values() for node in ast.walk(tree))


def lines() -> Figures:
    """All lines; the median length of those that are not empty."""
    every = [line for text in texts().values() for line in text.splitlines()]
    return {"all": len(every), "median length": statistics.median(len(x) for x in every if x)}


def docstrings() -> Figures:
    """The share of functions and classes that have one, in percent."""
    kinds = ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef
    has_one = [ast.get_docstring(node) is not None for node in nodes() if isinstance(node, kinds)]
    return {"share": 100 * statistics.mean(has_one)}


def starred_calls() -> Figures:
    """The share of calls with a `*argument`, in percent."""
    calls = [node for node in nodes() if isinstance(node, ast.Call)]
    starred = [any(isinstance(x, ast.Starred) for x in call.args) for call in calls]
    return {"share": 100 * statistics.mean(starred)}


def private_words() -> Figures:
    """Words that mean something else here than elsewhere, in names, comments and texts."""
    counts = {word.removesuffix(r"\w+"): _count(rf"\b{word}\b") for word in PRIVATE_WORDS}
    return {**counts, "all": sum(counts.values())}


def old_idiom() -> Figures:
    return {word: _count(pattern) for word, pattern in OLD_IDIOM.items()}


def _count(pattern: str) -> int:
    return sum(len(re.findall(pattern, text)) for text in texts().values())


def import_depth() -> Figures:
    """How many modules the longest chain of imports has: from the experts' layer, and from any."""
    modules = {_name_of(path): path for path in trees()}
    imports = {name: _imports_of(path) & modules.keys() - {name} for name, path in modules.items()}

    @cache
    def depth(name: str) -> int:
        return 1 + max(map(depth, imports[name]), default=0)

    return {"layers.experts": depth("moefp8.layers.experts"), "any": max(map(depth, imports))}


def _name_of(path: Path) -> str:
    parts = ["moefp8", *path.relative_to(PACKAGE).with_suffix("").parts]
    return ".".join(parts).removesuffix(".__init__")


def _imports_of(path: Path) -> set[str]:
    """Dotted names that a module imports when it is imported itself; some are no modules."""
    package, names = ["moefp8", *path.relative_to(PACKAGE).parent.parts], set[str]()
    modules = {_name_of(other) for other in trees()}
    for node in trees()[path].body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            origin = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:  # a module of a package, or a name in a module
                inner = f"{origin}.{alias.name}"
                names.add(inner if inner in modules else origin)
    return names


# ---- What a call passes through ----


def forget() -> None:
    """Empty what functions of ours remember of earlier calls, as in a new process."""
    ours = [module for name, module in sys.modules.items() if name.startswith("moefp8.")]
    values = [x for module in ours for x in vars(module).values()]
    values += [y for x in values if isinstance(x, type) for y in vars(x).values()]
    for x in values:
        function = getattr(x, "__func__", x)  # of a class method
        if type(function) is _lru_cache_wrapper and function.__module__.startswith("moefp8."):
            function.cache_clear()


@contextmanager
def profiled(see: Callable[[str], object]) -> Iterator[None]:
    """Let `see` have the path in the package of each function of ours that is called."""

    def profile(frame: Any, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            see(str(path.relative_to(PACKAGE)))

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


@torch.no_grad()
def files_passed(prepare: Callable[[], Call]) -> set[str]:
    """Python files of ours, but the JIT's, that a first call passes through."""
    forget()
    with jit.using(NullDriver()):
        call, passed = prepare(), set[str]()
        with profiled(passed.add):
            call()
    return {path for path in passed if not path.startswith("kernels/jit/")}


def files() -> Figures:
    """How many files a first forward passes through, and the backward of a first trained step."""
    passed = {"GroupedExperts.forward": experts, "trained backward": trained_backward}
    return {name: len(files_passed(prepare)) for name, prepare in passed.items()}


def linear() -> Call:
    layer, x = FP8Linear(H, H, bias=False), torch.zeros(NUM_TOKENS, H).bfloat16()
    return lambda: layer(x)


def experts(**options: Any) -> Callable[[], torch.Tensor]:
    layer, x = GroupedExperts(E, H, I, **options), torch.zeros(NUM_TOKENS, H).bfloat16()
    scores, ids = torch.rand(NUM_TOKENS, E).topk(K)
    leaves = [x.requires_grad_(), *layer.parameters()]

    def forward() -> torch.Tensor:
        for leaf in leaves:
            leaf.grad = None
        y: torch.Tensor = layer(x, ids, scores)
        return y

    return forward


def adapted_experts() -> Call:
    """On the meta device, where PyTorch's operations read no results, which no kernel writes here.

    There they take several times as long, so that calls are counted, but not timed.
    """
    layers = torch.nn.ModuleList([GroupedExperts(E, H, I)])
    add_lora(layers)
    layer, x = layers.to("meta")[0], torch.zeros(NUM_TOKENS, H, device="meta").bfloat16()
    scores, ids = torch.rand(NUM_TOKENS, E, device="meta").topk(K)
    return lambda: layer(x, ids, scores)


def trained_backward() -> Call:
    with torch.enable_grad():
        x = torch.zeros(1, requires_grad=True)
        (x + 0).backward(x)  # PyTorch's first one imports, which asks a finder of ours
        y = experts(trainable=True)()
    return lambda: y.backward(y)


def trained_step() -> Call:
    forward, grad = experts(trainable=True), torch.zeros(NUM_TOKENS, H).bfloat16()

    def step() -> None:
        with torch.enable_grad():
            forward().backward(grad)

    return step


CALLED = {"FP8Linear": linear, "GroupedExperts": experts, "trained experts, a step": trained_step}
COUNTED = {**CALLED, "GroupedExperts, LoRA": adapted_experts}


@torch.no_grad()
def python_calls() -> Figures:
    """How many functions of ours a repeated call calls, where kernels are launched as one graph.

    The median of some: two or three more of a step's are of addresses that are new. An output is at
    a new address each time. Before Python 3.12, list comprehensions count, too.
    """
    counts = {}
    for name, prepare in COUNTED.items():
        with jit.using(NullDriver()):
            call, seen = prepare(), list[list[str]]()
            outputs = [call() for _ in range(5)]  # kept, so that no later one is put there
            for _ in range(15):
                seen.append([])
                with profiled(seen[-1].append):
                    outputs.append(call())
        counts[name] = statistics.median(map(len, seen))
    return counts


# ---- What a call costs the host ----


@torch.no_grad()
def us_repeated() -> Figures:
    """Microseconds of a call whose launches are prepared."""
    times = {}
    for name, prepare in CALLED.items():
        with jit.using(NullDriver()):
            call = prepare()
            for _ in range(CALLS):
                call()
            times[name] = min(_us(call, CALLS) for _ in range(ROUNDS))
    return times


@torch.no_grad()
def us_new_layout() -> Figures:
    """Microseconds of a call for which nothing is prepared, in a process that has called others."""
    times = {}
    for name, prepare in CALLED.items():
        call, us = prepare(), []
        for _ in range(NEW_LAYOUTS):
            with jit.using(NullDriver()):
                us.append(_us(call, 1))
        times[name] = min(us)
    return times


def _us(call: Call, num_calls: int) -> float:
    before = time.perf_counter_ns()
    for _ in range(num_calls):
        call()
    return (time.perf_counter_ns() - before) / num_calls / 1e3


def ms_of_listing() -> Figures:
    """Milliseconds that it takes to list what `precompile` compiles, for layers of DeepSeek-V3.

    Adapters cannot be added on the meta device: experts that have them are those of the other
    figures, which are small.
    """
    e, k, h, i = 256, 8, 7168, 2048
    meta: dict[str, Any] = {"device": "meta"}
    sizes = {"shared_intermediate_size": i, **meta}
    layers: dict[str, Any] = {
        "FP8Linear": FP8Linear(h, i, **meta),
        "FP8Linear, trained": FP8Linear(h, i, trainable=True, **meta),
        "GroupedExperts": GroupedExperts(e, h, i, **meta),
        "GroupedExperts, trained": GroupedExperts(e, h, i, trainable=True, **meta),
        "GroupedExperts, LoRA": torch.nn.ModuleList([GroupedExperts(E, H, I)]),
        "shared experts": MoE(h, i, e, k, **sizes).shared_experts,
        "shared experts, trained": MoE(h, i, e, k, trainable=True, **sizes).shared_experts,
        "TopKRouter": TopKRouter(h, e, k, **meta),
    }
    add_lora(layers["GroupedExperts, LoRA"])
    target, times = target_with("sm_90a", NUM_SMS), {}
    for name, layer in layers.items():
        for title, backward in ((name, False), (f"{name}, backward", True)):
            forget()
            before = time.perf_counter_ns()
            kernels_of(layer, LISTED_TOKENS, target, top_k=k, backward=backward)
            times[title] = (time.perf_counter_ns() - before) / 1e6
    return times


MEASURES: dict[str, Callable[[], Figures]] = {
    "lines": lines,
    "docstrings, %": docstrings,
    "files that a first call passes through": files,
    "Python calls of a repeated call": python_calls,
    "host us of a repeated call": us_repeated,
    "host us of a new layout": us_new_layout,
    f"ms of listing a layer's kernels for {LISTED_TOKENS} tokens, cold": ms_of_listing,
    "import depth": import_depth,
    "starred calls, %": starred_calls,
    "private words": private_words,
    "words of the old idiom": old_idiom,
}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object, not a table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = {name: measure() for name, measure in MEASURES.items()}
    if options.json:
        print(json.dumps({**circumstances(), "measures": measured}, indent=1))
        return
    for name, figures in measured.items():
        print(name)
        for part, figure in figures.items():
            print(f"  {part:32} {figure if isinstance(figure, int) else round(figure, 1):>10}")


if __name__ == "__main__":
    main()
