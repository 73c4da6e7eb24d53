"""Host time of one eager call: `python -m benchmarks.host_time` (`--json` stores it).

A call costs the host the same whatever the GPU does meanwhile. Beside a repeated call stand calls
with new addresses (of tokens, and of another layer of the same layout), with numbers of tokens that
were seen before, and with new ones within a config that was seen. All layers of one layout share
the prepared launches, so a new number of tokens costs a model what "a model's layer" says.

Without a GPU, launches go to a driver that does nothing, and BF16 is left out. As on a GPU, later
calls of kernels in a row are one launch of a graph.
"""

import argparse
import ctypes
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.circumstances import circumstances
from moefp8 import FP8Linear, GroupedExperts
from moefp8.kernels import jit

RESULTS = Path(__file__).parent / "results" / "host_time.json"
NUM_LAYERS = 61  # DeepSeek-V3 has so many
TOKENS = 16
KNOWN_TOKENS = range(TOKENS, TOKENS + 8)
NEW_TOKENS = range(4097, 4353)  # all have one config
CALLS, ROUNDS = 100, 25


class NullDriver(jit.Driver):
    """A Hopper GPU whose driver does nothing, on tensors of the CPU: `jit.using(NullDriver())`."""

    def __init__(self) -> None:
        super().__init__(_NullLibrary())
        self._handles = itertools.count(1)

    def load(self, kernel: jit.Kernel, device_index: int) -> jit.Function:
        handle = ctypes.c_void_p(next(self._handles))
        return jit.Function(kernel, device_index, handle, 232448)

    def num_sms(self, device_index: int) -> int:
        return 132

    def current_stream(self, device_index: int) -> int:
        return 7

    def current_device(self) -> int:
        return -1

    def is_capturing(self) -> bool:
        return False

    def is_lost(self, function: jit.Function) -> bool:
        return False

    def allocate(self, num_bytes: int, stream: int) -> int:
        return 1 << 20

    def free(self, address: int) -> None:
        pass

    def on_device(self, device_index: int) -> AbstractContextManager[object]:
        return nullcontext()

    def arch(self, device_index: int) -> str:
        return "sm_90a"


class _NullLibrary:
    """libcuda, as far as launches need it: each call succeeds, and nothing runs."""

    def __init__(self) -> None:
        self._captured: list[tuple[Any, Any, Any]] = []  # of the last capture; its stream is null

    def _succeed(self, *arguments: object) -> int:
        return 0

    cuThreadExchangeStreamCaptureMode = cuStreamCreate = cuStreamDestroy_v2 = _succeed
    cuGraphExecKernelNodeSetParams_v2 = cuGraphLaunch = _succeed
    cuGraphExecDestroy = cuGraphDestroy = _succeed

    def cuStreamBeginCapture_v2(self, stream: Any, mode: int) -> int:
        self._captured = []
        return 0

    def cuStreamEndCapture(self, stream: Any, graph: Any) -> int:
        graph._obj.value = 1
        return 0

    def cuGraphInstantiateWithFlags(self, executable: Any, graph: Any, flags: int) -> int:
        executable._obj.value = 1
        return 0

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:
        count._obj.value = num_nodes = len(self._captured)
        nodes[:num_nodes] = range(1, num_nodes + 1)
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, params: Any) -> int:
        config, function, parameters = self._captured[node.value - 1]
        at = params._obj
        at.function, at.parameters = function.value, ctypes.addressof(parameters)
        for name in ("grid_x", "block_x", "shared_bytes"):
            setattr(at, name, getattr(config, name))
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, parameters: Any, extra: object) -> int:
        if not config._obj.stream:
            self._captured.append((config._obj, function, parameters))
        return 0

    def cuTensorMapEncodeTiled(
        self, at: int, dtype: int, rank: int, address: int, *_: object
    ) -> int:
        ctypes.c_uint64.from_address(at).value = address
        return 0

    def cuTensorMapReplaceAddress(self, at: int, address: int) -> int:
        ctypes.c_uint64.from_address(at).value = address
        return 0


Call = Callable[[Any, int], object]  # a layer and a number of tokens


def linear_calls(device: str) -> tuple[list[Any], Call]:
    layers = [FP8Linear(2048, 2048, bias=False, device=device) for _ in range(8)]
    tokens = _slices(torch.randn(NEW_TOKENS[-1], 2048, device=device).bfloat16())
    return layers, lambda layer, n: layer(tokens[n])


def bf16_calls(device: str) -> tuple[list[Any], Call]:
    """`F.linear`, a function: ours pays in addition what a module costs."""
    layers, _ = bf16_module_calls(device)
    tokens = _slices(torch.randn(NEW_TOKENS[-1], 2048, device=device).bfloat16())
    return [layer.weight for layer in layers], lambda weight, n: F.linear(tokens[n], weight)


def bf16_module_calls(device: str) -> tuple[list[Any], Call]:
    layers = [
        nn.Linear(2048, 2048, bias=False, dtype=torch.bfloat16, device=device) for _ in range(8)
    ]
    tokens = _slices(torch.randn(NEW_TOKENS[-1], 2048, device=device).bfloat16())
    return layers, lambda layer, n: layer(tokens[n])


def experts_calls(device: str) -> tuple[list[Any], Call]:
    layers = [GroupedExperts(16, 1024, 512, device=device) for _ in range(8)]
    most = NEW_TOKENS[-1]
    tokens = _slices(torch.randn(most, 1024, device=device).bfloat16())
    scores, index = map(_slices, torch.rand(most, 16, device=device).topk(4))
    return layers, lambda layer, n: layer(tokens[n], index[n], scores[n])


def _slices(x: torch.Tensor) -> dict[int, torch.Tensor]:
    """The first n rows, for each n that is asked for."""
    return {n: x[:n] for n in (*KNOWN_TOKENS, *NEW_TOKENS)}


def us_of(calls: Iterator[Callable[[], object]], num_calls: int, warmup: int = 20) -> float:
    """Host microseconds of a call, without waiting for the GPU within."""
    for call in itertools.islice(calls, warmup):
        call()
    before = time.perf_counter_ns()
    for call in itertools.islice(calls, num_calls):
        call()
    passed = time.perf_counter_ns() - before
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return passed / num_calls / 1e3


def kinds_of(layers: list[Any], call: Call) -> dict[str, Callable[[], float]]:
    """What is measured of one provider: each gives the microseconds of a call."""
    first, fresh = layers[0], iter(NEW_TOKENS)
    for n in KNOWN_TOKENS:
        call(first, n)
    call(first, next(fresh))  # it prepares the config and its kernels
    return {
        "repeated": lambda: us_of(itertools.repeat(lambda: call(first, TOKENS)), CALLS),
        "new addresses": lambda: us_of(
            (lambda layer=layer: call(layer, TOKENS) for layer in itertools.cycle(layers)), CALLS
        ),
        "known tokens": lambda: us_of(
            (lambda n=n: call(first, n) for n in itertools.cycle(KNOWN_TOKENS)), CALLS
        ),
        "new tokens": lambda: us_of((lambda n=n: call(first, n) for n in fresh), 10, 0),
    }


def measure(cases: dict[str, tuple[list[Any], Call]]) -> dict[str, dict[str, float]]:
    """Medians over rounds in which the providers, and the kinds of calls, take turns."""
    kinds = {name: kinds_of(*case) for name, case in cases.items()}
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(ROUNDS):
        for name, runs in kinds.items():
            for kind, run in runs.items():
                found.setdefault((name, kind), []).append(run())
    rows: dict[str, dict[str, float]] = {name: {} for name in cases}
    for (name, kind), some in found.items():
        rows[name][kind] = statistics.median(some)
    for us in rows.values():
        rest = (NUM_LAYERS - 1) * us["new addresses"]
        us["new tokens, a model's layer"] = (us["new tokens"] + rest) / NUM_LAYERS
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help=f"store it in {RESULTS.name}")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    device = "cuda" if has_gpu else "cpu"
    makers = {"FP8Linear": linear_calls, "GroupedExperts": experts_calls}
    if has_gpu:
        makers |= {"F.linear, BF16": bf16_calls, "nn.Linear, BF16": bf16_module_calls}
    with torch.no_grad(), nullcontext() if has_gpu else jit.using(NullDriver()):
        rows = measure({name: make(device) for name, make in makers.items()})
    for name, row in rows.items():
        told = (f"{kind} {us:.1f} us ({us / row['repeated']:.2f}x)" for kind, us in row.items())
        print(f"{name}: {', '.join(told)}")
    for bf16 in list(makers)[2:]:
        for name in ("FP8Linear", "GroupedExperts"):
            print(f"{name}: {rows[name]['repeated'] / rows[bf16]['repeated']:.2f}x of {bf16}")
    if options.json:
        RESULTS.write_text(json.dumps({**circumstances(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
