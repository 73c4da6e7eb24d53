"""The launch contract: how every kernel of ours is prepared, kept and launched.

1. A key holds all that a launch depends on but addresses: op, shapes, strides, dtypes, device,
   options, and which addresses are aligned. It holds no address, so one prepared launch serves all
   layers of one layout.
2. A prepared launch is kept by the thread that prepared it, and no other thread sees it, because
   a launch writes the addresses of its call into its arguments.
3. A call then looks up its key, writes its addresses if one is new, and calls the driver on the
   GPU's current stream: once for each kernel, or once for several (`Launches`).
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch

from ..jit import Driver, Launch, LaunchGraph, current_driver

P = TypeVar("P")

_CALLS_BEFORE_GRAPH = 2
_MAX_GRAPHS = 4  # one for each stream; each takes memory of the GPU


def prepared(key: Hashable, prepare: Callable[[], P]) -> P:
    """The prepared launch that this thread has kept for a key, else what `prepare` returns."""
    driver = current_driver()
    launch = driver.prepared().get(key)
    return driver.keep(key, prepare()) if launch is None else launch


def layout_of(x: torch.Tensor) -> tuple[Any, ...]:
    """Everything about a tensor that a launch may depend on, except its address."""
    return x.shape, x.stride(), x.dtype, x.get_device()


class Launches:
    """Kernels that run in a row and share memory that lives as long as a call.

    The third call on a stream and all later ones are one call of the driver, unless a graph is
    being captured: docs/design/jit.md. Launches that are called only once or twice, as when every
    call has another number of tokens, make no graph. Each stream has a graph of its own, since no
    graph runs twice at once: of calls on two streams, one would wait for the other.

    workspace_bytes: the size of that memory; its address follows those of a call.
    """

    def __init__(self, launches: Sequence[Launch], workspace_bytes: int) -> None:
        self.launches, self.workspace_bytes = launches, workspace_bytes
        self._graphs: dict[int, LaunchGraph] = {}  # keyed by stream
        self._num_calls: dict[int, int] = {}  # keyed by stream: calls without a graph
        self._num_losses = current_driver().num_losses

    def __call__(self, device_index: int, addresses: tuple[int, ...]) -> None:
        """Run on the GPU's current stream; the thread's current GPU may be another one."""
        driver = current_driver()
        if device_index != driver.current_device():
            with driver.on_device(device_index):
                self._call(driver, driver.current_stream(device_index), addresses)
        else:
            self._call(driver, driver.current_stream(device_index), addresses)

    def _call(self, driver: Driver, stream: int, addresses: tuple[int, ...]) -> None:
        workspace = driver.allocate(self.workspace_bytes, stream)
        try:
            self._run(driver, stream, (*addresses, workspace))
        finally:
            driver.free(workspace)

    def _run(self, driver: Driver, stream: int, addresses: tuple[int, ...]) -> None:
        is_capturing = driver.is_capturing()
        if driver.num_losses != self._num_losses:  # the graphs are lost, and are made again
            self._num_losses = driver.num_losses
            self._graphs, self._num_calls = {}, {}
        if not is_capturing and stream in self._graphs:
            if self._graphs[stream](stream, addresses):
                return
            del self._graphs[stream]
        for launch in self.launches:
            launch(stream, addresses)
        if not is_capturing:
            num_calls = self._num_calls[stream] = self._num_calls.get(stream, 0) + 1
            if num_calls == _CALLS_BEFORE_GRAPH and len(self._graphs) < _MAX_GRAPHS:
                graph = LaunchGraph.make(self.launches, addresses)
                if graph is not None:
                    self._graphs[stream] = graph
