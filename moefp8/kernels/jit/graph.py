"""Launches in a row as one call of the driver: a CUDA graph whose kernels get new arguments."""

import ctypes
import os
from collections.abc import Sequence
from ctypes import Structure, c_size_t, c_uint, c_void_p

import torch

from .cubin import JitError
from .driver import Driver, current_driver
from .fields import fields
from .launch import Launch

_NON_BLOCKING = 1
_CAPTURE_MODE_RELAXED = 2


class NodeParams(Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2"""

    _fields_ = fields(
        (c_void_p, "function"),
        (c_uint, "grid_x grid_y grid_z block_x block_y block_z shared_bytes"),
        (c_void_p, "parameters extra kernel context"),
    )


class _Node:
    """A kernel of a graph; `picked` are the addresses in its arguments now."""

    __slots__ = ("_params", "launch", "node", "params", "picked")

    def __init__(self, launch: Launch, node: c_void_p, params: NodeParams) -> None:
        self.launch, self.node, self.picked = launch, node, None
        self._params, self.params = params, ctypes.byref(params)


class LaunchGraph:
    """The launches, captured once: a call sets their arguments, and launches them together.

    It belongs to a thread, as launches do. If the driver cannot capture, `make` returns None. Two
    calls never run at the same time, so on two streams one waits for the other.
    """

    def __init__(self, launches: Sequence[Launch], graph: c_void_p, executable: c_void_p) -> None:
        self._driver, self._process, self._has_failed = current_driver(), os.getpid(), False
        self._library = self._driver.library
        self._launches, self._graph, self._executable = launches, graph, executable
        self._nodes: list[_Node] = []
        self._addresses: tuple[int, ...] = ()

    @classmethod
    def make(cls, launches: Sequence[Launch], addresses: tuple[int, ...]) -> "LaunchGraph | None":
        """Capture the launches without running them; addresses: the last call's."""
        driver, made = current_driver(), None
        try:
            with driver.outside_capture():
                graph, executable = _capture(driver, launches, addresses), c_void_p()
                if graph:
                    driver.library.cuGraphInstantiateWithFlags(ctypes.byref(executable), graph, 0)
                    made = cls(launches, graph, executable)
        except (JitError, torch.cuda.OutOfMemoryError):  # the launches are done without it
            return None
        return made if made is not None and executable and made._find_nodes() else None

    def _find_nodes(self) -> bool:
        """Whether each launch has a node of its own.

        The driver lists the nodes in any order. Arguments distinguish launches of one kernel and
        shape. If the arguments are equal, too, a later call's may differ: then there is no graph.
        """
        lib, count = self._library, c_size_t(len(self._launches) + 1)
        nodes = (c_void_p * count.value)()
        if lib.cuGraphGetNodes(self._graph, nodes, ctypes.byref(count)):
            return False
        if count.value != len(self._launches):
            return False
        for node in map(c_void_p, nodes[: count.value]):
            params = NodeParams()
            if lib.cuGraphKernelNodeGetParams_v2(node, ctypes.byref(params)):
                return False
            shape = params.grid_x, params.block_x, params.shared_bytes
            handles = params.function, params.kernel
            matches = [x for x in self._launches if x.shape == shape and x.handle in handles]
            if len(matches) > 1:
                matches = [x for x in matches if x.has_arguments(params.parameters)]
            if len(matches) != 1:
                return False
            params.parameters, params.extra = matches[0].parameters, None
            self._nodes.append(_Node(matches[0], node, params))
        return len({at.launch for at in self._nodes}) == count.value

    def __call__(self, stream: int, addresses: tuple[int, ...]) -> bool:
        """Launch it. False if that failed: then nothing runs, and single launches say why."""
        if addresses != self._addresses:
            self._addresses = ()  # until all kernels have theirs
            set_params = self._library.cuGraphExecKernelNodeSetParams_v2
            for at in self._nodes:
                picked = at.launch.pick(addresses)
                if picked != at.picked:
                    at.picked = None
                    at.launch.write(addresses)
                    if set_params(self._executable, at.node, at.params):
                        self._has_failed = True
                        return False
                    at.picked = picked
            self._addresses = addresses
        self._has_failed = self._library.cuGraphLaunch(self._executable, stream) != 0
        return not self._has_failed

    def __del__(self) -> None:
        """Destroy the graph, unless it failed, lost its context, or belongs to a parent process."""
        if os.getpid() != self._process or self._has_failed:
            return
        if self._driver.is_lost(self._launches[0].function):
            return
        if self._executable:
            self._library.cuGraphExecDestroy(self._executable)
        self._library.cuGraphDestroy(self._graph)


def _capture(driver: Driver, launches: Sequence[Launch], addresses: tuple[int, ...]) -> c_void_p:
    """A CUgraph of the launches; null, if the driver cannot capture them."""
    lib, stream, graph = driver.library, c_void_p(), c_void_p()
    if lib.cuStreamCreate(ctypes.byref(stream), _NON_BLOCKING):
        return graph
    try:
        if not lib.cuStreamBeginCapture_v2(stream, _CAPTURE_MODE_RELAXED):
            try:
                for launch in launches:
                    launch(stream.value or 0, addresses)
            except BaseException:
                lib.cuStreamEndCapture(stream, ctypes.byref(graph))
                if graph:
                    lib.cuGraphDestroy(graph)
                raise
            lib.cuStreamEndCapture(stream, ctypes.byref(graph))
    finally:
        lib.cuStreamDestroy_v2(stream)
    return graph
