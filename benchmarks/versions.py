"""Two checkouts of this project in turns on one GPU: `python -m benchmarks.versions OTHER`.

OTHER is the folder of another checkout. Each runs in a process of its own, with its own kernels;
one works while the other waits. Each call is timed back to back, without rest: as a replay of a
CUDA graph, and eagerly, where the host may be what takes long. A ratio above 1 says that this
checkout is faster than the other. `--only PATTERN` times the cases that a regular expression
matches; `--json` stores the result.

The host is slow for seconds at a time, which hits one of the two: of eager calls the fastest round
counts, of replays the median.

Forward and backward are timed together, since a CUDA graph has both. No optimizer steps: a trained
layer quantizes its weights in each replay of a graph, and once for all eager calls. "Ranks" are a
group of one rank: its tokens take all steps of an exchange, and travel to itself.

Only names that every version has are used: `FP8Linear`, `GroupedExperts`, `TopKRouter`, `MoE` and
its `shared_experts`, `adapters.add_lora`, `distributed.ExpertParallel`, `kernels.fp8_gemm_nt` and
the `quantize` functions.
"""

import argparse
import gc
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results" / "versions.json"
DEVICE = "cuda"
SECONDS = 0.15  # each measurement lasts so long, without rest
ROUNDS = 5
NUM_WORST = 5  # cases that are printed at the end
LINEARS = ((7168, 2048), (2048, 7168), (4096, 4096))  # (K, N)
TOKENS = (1, 16, 128, 1024, 4096)
STEP_TOKENS = (16, 1024, 4096)
MODES = ("graph", "eager")


class Model(NamedTuple):
    """E experts, k choices of a token, H hidden, I intermediate; I of the shared experts, or 0."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    shared_intermediate_size: int = 0
    router: Mapping[str, Any] = {}


MODELS = {
    "Qwen3-30B-A3B": Model(128, 8, 2048, 768),
    "DeepSeek-V3": Model(
        *(256, 8, 7168, 2048, 2048),
        {
            "scoring": "sigmoid",
            "num_groups": 8,
            "topk_groups": 4,
            "scaling_factor": 2.5,
            "correction_bias": True,
        },
    ),
}

# ---- Cases ----

Call = Callable[[], object]


class Variant(NamedTuple):
    """How a layer is made and called."""

    title: str = "{}"
    is_step: bool = False  # forward and backward
    trainable: bool = False
    has_lora: bool = False


FORWARD = Variant()
STEP = Variant("{}, forward and backward", is_step=True)
TRAINED = Variant("{}, trained, forward and backward", is_step=True, trainable=True)
LORA = Variant("{}, LoRA", has_lora=True)
LORA_STEP = Variant("{}, LoRA, forward and backward", is_step=True, has_lora=True)
OF_WEIGHTS = STEP, TRAINED, LORA, LORA_STEP


def cases_of(
    linears: Sequence[tuple[int, int]] = LINEARS,
    models: Mapping[str, Model] = MODELS,
    tokens: Sequence[int] = TOKENS,
    step_tokens: Sequence[int] = STEP_TOKENS,
) -> dict[str, Callable[[], Call]]:
    """What makes the call of each case, by its name.

    Steps are timed of the last linear and of the first model's experts, which have room for two
    processes with master weights, gradients and codes; of the last model's shared experts.
    """
    cases: dict[str, Callable[[], Call]] = {}

    def add(title: str, make: "Make", *variants: Variant) -> None:
        for variant in variants:
            for m in step_tokens if variant.is_step else tokens:
                name = f"{variant.title.format(title)}, {m} tokens"
                cases[name] = partial(_call_of_layer, make, variant, m)

    for k, n in linears:
        add(f"FP8Linear {k} -> {n}", partial(_linear, k, n), FORWARD)
    for k, n in linears:
        for m in tokens:
            cases[f"fp8_gemm_nt {m} x {n} x {k}"] = partial(_gemm, m, n, k)
    for name, model in models.items():
        add(f"experts of {name}", partial(_experts, model), FORWARD)
    k, n = linears[-1]
    add(f"FP8Linear {k} -> {n}", partial(_linear, k, n), *OF_WEIGHTS)
    first, last = next(iter(models)), [*models][-1]
    add(f"experts of {first}", partial(_experts, models[first]), *OF_WEIGHTS)
    for name, model in models.items():
        add(f"router of {name}", partial(_router, model), FORWARD, STEP)
    add(f"shared experts of {last}", partial(_shared, models[last]), FORWARD, STEP, TRAINED)
    for name, model in models.items():
        add(f"MoE of {name}", partial(_moe, model), FORWARD)
    add(f"MoE of {first}", partial(_moe, models[first]), STEP, TRAINED)
    add(f"ranks, experts of {first}", partial(_ranks, models[first]), FORWARD, STEP, TRAINED)
    return cases


# ---- In a process of each checkout ----


class Layer(NamedTuple):
    """module: takes tokens [T, hidden_size], and if `choices` are (E, k) also ids and scores."""

    module: Any
    hidden_size: int
    choices: tuple[int, int] | None = None


Make = Callable[..., Layer]  # its options are those of the module


def _linear(k: int, n: int, **options: Any) -> Layer:
    from moefp8 import FP8Linear

    return Layer(FP8Linear(k, n, bias=False, **options), k)


def _experts(model: Model, **options: Any) -> Layer:
    from moefp8 import GroupedExperts

    e, k, h, i = model[:4]
    return Layer(GroupedExperts(e, h, i, **options), h, (e, k))


def _router(model: Model, **options: Any) -> Layer:
    from moefp8 import TopKRouter

    e, k, h = model[:3]
    return Layer(TopKRouter(h, e, k, **model.router, **options), h)


def _shared(model: Model, **options: Any) -> Layer:
    from moefp8 import MoE

    h, i = model.hidden_size, model.shared_intermediate_size
    moe = MoE(h, 128, 1, 1, shared_intermediate_size=i, **options)
    return Layer(moe.shared_experts, h)


def _moe(model: Model, **options: Any) -> Layer:
    from moefp8 import MoE

    e, k, h, i, shared, router = model
    return Layer(MoE(h, i, e, k, shared_intermediate_size=shared, **router, **options), h)


def _ranks(model: Model, **options: Any) -> Layer:
    from moefp8.distributed import ExpertParallel

    experts = _experts(model, **options)
    return experts._replace(module=ExpertParallel(experts.module, _group_of_one_rank()))


def _group_of_one_rank() -> Any:
    import torch
    from torch import distributed

    if not distributed.is_initialized():
        store = distributed.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
        options: dict[str, Any] = {"store": store, "rank": 0, "world_size": 1}
        if DEVICE == "cuda":
            options["device_id"] = torch.device(DEVICE, torch.cuda.current_device())
        distributed.init_process_group("nccl" if DEVICE == "cuda" else "gloo", **options)
    return distributed.group.WORLD


@lru_cache(maxsize=1)  # the next case may be of the same layer
def _made(make: Make, trainable: bool, has_lora: bool) -> Layer:
    from torch import nn

    from moefp8.adapters import add_lora

    options: dict[str, Any] = {"device": DEVICE, **({"trainable": True} if trainable else {})}
    layer = make(**options)
    if has_lora:
        model = nn.ModuleList([layer.module])
        add_lora(model, rank=16)
        layer = layer._replace(module=model[0])
    return layer


def _call_of_layer(make: Make, variant: Variant, num_tokens: int) -> Call:
    import torch

    torch.manual_seed(0)
    module, hidden_size, choices = _made(make, variant.trainable, variant.has_lora)
    inputs: list[torch.Tensor] = [torch.randn(num_tokens, hidden_size, device=DEVICE).bfloat16()]
    if choices is not None:
        num_experts, top_k = choices
        scores, ids = torch.rand(num_tokens, num_experts, device=DEVICE).topk(top_k)
        inputs += ids, scores

    def forward() -> torch.Tensor:
        y = module(*inputs)
        return y[1] if isinstance(y, tuple) else y  # the scores of a router

    if not variant.is_step:
        return forward
    leaves = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    leaves += [x for x in module.parameters() if x.requires_grad]
    grad = torch.randn_like(forward())

    def step() -> list[torch.Tensor | None]:
        for leaf in leaves:
            leaf.grad = None
        with torch.enable_grad():
            forward().backward(grad)
        return [leaf.grad for leaf in leaves]

    return step


def _gemm(m: int, n: int, k: int) -> Call:
    import torch

    from moefp8 import kernels, quant

    torch.manual_seed(0)
    a = quant.quantize_1x128(torch.randn(m, k, device=DEVICE).bfloat16())
    b = quant.quantize_128x128(torch.randn(n, k, device=DEVICE).bfloat16())
    d = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16)
    return lambda: kernels.fp8_gemm_nt(a, b, d)


def work() -> None:
    """Answer each line `case<TAB>mode` of stdin by the microseconds of a call, or why not."""
    import torch

    cases, calls, last = cases_of(), dict[str, Call](), ""
    with torch.no_grad():
        for line in sys.stdin:
            case, mode = line.rstrip("\n").split("\t")
            if case != last:
                calls.clear()
                gc.collect()
                torch.cuda.empty_cache()  # the other process has the same GPU
                last = case
            try:
                if mode not in calls:
                    call = cases[case]()
                    calls[mode] = _captured(call) if mode == "graph" else call
                answer = str(_us_without_rest(calls[mode]))
            except Exception as error:
                answer = f"{type(error).__name__}: {error}".splitlines()[0]
            print(answer, flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _captured(call: Call) -> Call:
    import torch

    side = torch.cuda.Stream()  # PyTorch asks for this before a backward is captured
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def _us_without_rest(call: Call) -> float:
    import torch

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start, num_calls = time.perf_counter(), 0
    begin.record()
    while time.perf_counter() - start < SECONDS:
        for _ in range(10):
            call()
        num_calls += 10
        if num_calls % 200 == 0:  # so that no more is queued than time is left for
            torch.cuda.synchronize()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / num_calls * 1e3


# ---- In turns ----


class Worker:
    """This file in a process of its own, with the moefp8 of a checkout."""

    def __init__(self, checkout: Path) -> None:
        self._checkout = checkout
        paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--work"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def us(self, case: str, mode: str) -> float:
        """Microseconds of a call; raises CannotRun."""
        print(case, mode, sep="\t", file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline() if self._process.stdout else ""
        if not answer:
            sys.exit(f"benchmarks.versions: the process of {self._checkout} has ended")
        try:
            return float(answer)
        except ValueError:
            raise CannotRun(f"{self._checkout} cannot run it: {answer.rstrip()}") from None


class CannotRun(Exception):
    """A checkout cannot run a case in that mode, and says why."""


def measure(this: Worker, other: Worker, cases: Sequence[str]) -> list[dict[str, Any]]:
    rows = []
    for case in cases:
        for mode in MODES:
            try:
                row = _row(this, other, case, mode)
            except CannotRun as error:
                print(f"{case}, {mode}: left out, {error}", flush=True)
                continue
            line = "{case}, {mode}: {us:.1f} us, {other_us:.1f} us, {ratio:.3f}".format(**row)
            print(line, flush=True)
            rows.append(row)
    return rows


def _row(this: Worker, other: Worker, case: str, mode: str) -> dict[str, Any]:
    pairs = []
    for turn in range(ROUNDS):
        in_order = (this, other) if turn % 2 else (other, this)
        us = {worker: worker.us(case, mode) for worker in in_order}
        pairs.append((us[this], us[other]))
    ratios = sorted(y / x for x, y in pairs)
    figure = min if mode == "eager" else statistics.median
    this_us, other_us = (figure(some) for some in zip(*pairs, strict=True))
    return {
        "case": case,
        "mode": mode,
        "us": this_us,
        "other_us": other_us,
        "ratio": other_us / this_us if mode == "eager" else statistics.median(ratios),
        "ratio_spread": [ratios[1], ratios[-2]],
    }


def lines_of_modes(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Of each mode the geometric mean of its ratios, and its worst cases."""
    lines = []
    for mode in MODES:
        measured = sorted(
            (row for row in rows if row["mode"] == mode), key=lambda row: row["ratio"]
        )
        if not measured:
            continue
        ratios = [row["ratio"] for row in measured]
        mean = math.exp(statistics.mean(map(math.log, ratios)))
        about = f"{len(ratios)} cases, {ratios[0]:.3f} to {ratios[-1]:.3f}"
        lines.append(f"{mode}: {mean:.3f} ({about})")
        lines += [f"  {row['ratio']:.3f} {row['case']}" for row in measured[:NUM_WORST]]
    return lines


def main() -> None:
    if sys.argv[1:] == ["--work"]:
        work()
        return
    from benchmarks.circumstances import circumstances, require_gpu

    require_gpu("benchmarks.versions")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path)
    parser.add_argument("--only", default="", help="a regular expression that a case's name has")
    parser.add_argument("--json", action="store_true", help=f"store it in {RESULTS.name}")
    options = parser.parse_args()
    cases = [case for case in cases_of() if re.search(options.only, case)]
    if not cases:
        parser.error(f"--only: no case matches {options.only!r}")
    rows = measure(Worker(ROOT), Worker(options.other.resolve()), cases)
    print(*lines_of_modes(rows), sep="\n")
    if options.json:
        other = os.environ.get("MOEFP8_OTHER_COMMIT") or options.other.name
        results = {**circumstances(), "other": other, "rows": rows}
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
