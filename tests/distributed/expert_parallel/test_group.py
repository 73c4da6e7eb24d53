"""What a group keeps and chooses, without a GPU.

Which exchanges of a GPU wait for which, what becomes of memory that grows, and which transport a
call takes.
"""

from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from typing import Any
from weakref import ref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from moefp8.distributed.expert_parallel.agreement import Call
from moefp8.distributed.expert_parallel.group import TRANSPORTS, ExpertGroup
from moefp8.distributed.expert_parallel.peers import PeerTransport
from moefp8.kernels import jit
from tests.distributed.expert_parallel.local_ranks import Alone, LocalAgreement, group_of_one
from tests.distributed.expert_parallel.transport_cases import LoopBack
from tests.fakes.emulator import FakeDriver

DEVICE, MANY = torch.device("cpu"), 3 << 20  # bytes
CAPTURES = count(1)  # no two have one number


class Stream:
    """A stream that knows for which others it has waited."""

    def __init__(self) -> None:
        self.waited: list[Stream] = []

    def wait_stream(self, other: "Stream") -> None:
        self.waited.append(other)


class Gpu:
    """A GPU on the CPU, and what exchanges on its streams wait for."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver, self.stream, self.num_waits = driver, Stream(), 0

    def wait(self, device: torch.device) -> None:
        self.num_waits += 1

    def exchange(self, group: Any, stream: Stream, capture: int | None = None) -> list[Stream]:
        """For which streams one waits, in a capture or eagerly."""
        self.stream, self.driver.capture, stream.waited = stream, capture, []
        group.peers.memory_for(DEVICE, 1, 1)
        self.driver.capture = None
        return stream.waited


@pytest.fixture
def gpu(monkeypatch) -> Iterator[Gpu]:
    with jit.using(FakeDriver()) as driver:
        made = Gpu(driver)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: made.stream)
        monkeypatch.setattr(torch.cuda, "synchronize", made.wait)
        monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: x)
        yield made


def test_eager_exchanges_of_a_gpu_follow_one_another(gpu):
    """Whatever their groups."""
    one, other, a, b = group_of_one(), group_of_one(), Stream(), Stream()
    gpu.exchange(one, a)
    assert gpu.exchange(one, a) == []
    assert gpu.exchange(other, b) == [a]
    assert gpu.exchange(other, b) == []
    assert gpu.exchange(one, a) == [b]


def test_exchanges_of_one_captured_graph_follow_one_another(gpu):
    group, a, b = group_of_one(), Stream(), Stream()
    capture = next(CAPTURES)
    gpu.exchange(group, a)  # which makes memory
    gpu.exchange(group, a, capture)
    assert gpu.exchange(group, a, capture) == []
    assert gpu.exchange(group, b, capture) == [a]
    assert gpu.exchange(group, a, capture) == [b]


def test_what_is_captured_waits_for_nothing_else(gpu):
    """Nor does anything wait for it, as it has not run."""
    group, a, b, c = group_of_one(), Stream(), Stream(), Stream()
    gpu.exchange(group, a)
    assert gpu.exchange(group, b, next(CAPTURES)) == []
    assert gpu.exchange(group, c, next(CAPTURES)) == []
    assert gpu.exchange(group, b) == [a]


@pytest.mark.parametrize("is_captured", [False, True])
def test_memory_that_a_graph_may_write_is_kept_when_it_grows(gpu, is_captured):
    group = group_of_one()
    gpu.exchange(group, Stream())
    gpu.exchange(group, Stream(), next(CAPTURES) if is_captured else None)
    old = ref(group.peers.memory.tensor)
    group.peers.memory_for(DEVICE, MANY, 1)
    group.peers.memory_for(DEVICE, 2 * MANY, 1)
    assert (old() is not None) == is_captured
    assert group.peers.memory.receiving >= 2 * MANY


def test_memory_grows_when_the_gpu_has_read_it(gpu):
    group = group_of_one()
    for num_waits, receiving in enumerate((1, MANY, 2 * MANY), start=1):
        group.peers.memory_for(DEVICE, receiving, 1)
        group.peers.memory_for(DEVICE, receiving, 1)
        assert gpu.num_waits == num_waits


def test_memory_does_not_grow_in_a_capture(gpu):
    group = group_of_one()
    gpu.exchange(group, Stream())
    gpu.driver.capture = next(CAPTURES)
    with pytest.raises(RuntimeError, match="cannot grow while a CUDA graph is captured; run the"):
        group.peers.memory_for(DEVICE, MANY, 1)
    gpu.exchange(group, Stream(), next(CAPTURES))  # what fits is right


# ---- Which transport a group takes ----

CALLS = [Call(0, 0, num_experts=4, hidden_size=8, top_k=2, num_tokens=1)]


class Tried(Alone):
    """GPUs that have a problem, or none, and how often they were asked."""

    def __init__(self, problem: str | None) -> None:
        super().__init__(None)
        self.problem, self.num_tries = problem, 0

    def why_not(self, device: torch.device) -> str | None:
        self.num_tries += 1
        return self.problem


def group_with(problem: str | None, transport: Any) -> tuple[ExpertGroup, Tried]:
    agreement: Any = LocalAgreement(1, timedelta(seconds=1))
    peers = Tried(problem)
    return ExpertGroup(0, 1, agreement, peers, transport=transport), peers


def ids_on(device: str) -> torch.Tensor:
    with FakeTensorMode():
        return torch.zeros(1, 2, dtype=torch.int64, device=device)


@pytest.fixture
def _auto_ends_with_loop_back(monkeypatch):
    monkeypatch.setitem(TRANSPORTS, "auto", (PeerTransport, LoopBack))


@pytest.mark.usefixtures("_auto_ends_with_loop_back")
@pytest.mark.parametrize("transport", ["auto", "peers"])
def test_gpus_that_write_each_others_memory_are_tried_once(transport):
    group, peers = group_with(None, transport)
    for _ in range(2):
        assert type(group.transport_for(CALLS, ids_on("cuda"))) is PeerTransport
    assert (group.candidates, peers.num_tries) == ((PeerTransport,), 1)


@pytest.mark.usefixtures("_auto_ends_with_loop_back")
def test_the_next_transport_is_taken_where_gpus_cannot():
    group, peers = group_with("they are far", "auto")
    assert type(group.transport_for(CALLS, ids_on("cpu"))) is LoopBack
    assert peers.num_tries == 0
    with pytest.warns(UserWarning, match="all_to_all_single, which is slower .*they are far"):
        assert type(group.transport_for(CALLS, ids_on("cuda"))) is LoopBack
    assert type(group.transport_for(CALLS, ids_on("cuda"))) is LoopBack
    assert (group.candidates, peers.num_tries) == ((LoopBack,), 1)


def test_peers_that_cannot_are_an_error():
    group, _ = group_with("they are far", "peers")
    with pytest.raises(RuntimeError, match=r"needs GPUs of one host .*, but they are far; take"):
        group.transport_for(CALLS, ids_on("cuda"))


def test_a_class_of_ones_own_is_taken_on_every_device():
    group, peers = group_with("they are far", LoopBack)
    for device in ("cpu", "cuda"):
        assert type(group.transport_for(CALLS, ids_on(device))) is LoopBack
    assert peers.num_tries == 0
