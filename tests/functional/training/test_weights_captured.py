"""Codes of master weights in CUDA graphs, as a stand-in for a GPU captures and replays them."""

import pytest
import torch

from moefp8.functional.training.weights import codes_of, codes_stay, requantize
from tests.fakes.emulator import FakeDriver
from tests.functional.training.weights_cases import (
    ThroughData,
    assert_right,
    bits,
    change,
    expected_of,
    make_weight,
    num_made,
)


class Graph:
    """What is launched while a stream is captured, to be launched again."""

    def __init__(self, gpu: FakeDriver, number: int) -> None:
        self.gpu, self.number = gpu, number

    def __enter__(self) -> "Graph":
        self.gpu.capture = self.number
        self.launches = self.gpu.library.captured[self.gpu.stream] = []
        return self

    def __exit__(self, *_: object) -> None:
        self.gpu.capture = None
        del self.gpu.library.captured[self.gpu.stream]

    def replay(self) -> None:
        for config, function, parameters in self.launches:
            self.gpu.library.launch(config, function, parameters)


def test_a_captured_step_quantizes_once_whatever_its_replay_finds(gpu):
    weight = make_weight()
    codes = codes_of(weight)
    with Graph(gpu, 1) as graph:
        for _ in range(4):
            assert codes_of(weight).data is codes.data
    assert len(graph.launches) == 1
    for _ in range(2):
        change(weight)
        graph.replay()
        assert torch.equal(bits(codes.transposed), bits(expected_of(weight).transposed))


def test_a_captured_step_of_an_optimizer_is_seen_in_the_capture(gpu):
    weight = make_weight()
    weight.grad = torch.ones_like(weight)
    optimizer = ThroughData([weight])
    with Graph(gpu, 1) as graph:
        codes_of(weight), codes_of(weight)
        optimizer.step()
        codes_of(weight), codes_of(weight)
    assert len(graph.launches) == 2


def test_what_a_capture_made_is_trusted_nowhere_else(gpu):
    """Captures may follow each other without a call in between."""
    weight = make_weight()
    for number in (1, 2, 3):
        with Graph(gpu, number) as graph:
            codes_of(weight)
        assert len(graph.launches) == 1
    for _ in range(2):
        num_before = num_made(gpu)
        assert_right(weight)
        assert num_made(gpu) > num_before
        change(weight)  # as a replay does


def test_a_weight_that_a_graph_steps_with_is_not_trusted(gpu):
    """Nothing counts what its replay writes."""
    weight = make_weight()
    weight.grad = torch.ones_like(weight)
    codes_of(weight)
    optimizer = torch.optim.SGD([weight], lr=0.5)
    with Graph(gpu, 1):
        optimizer.step()
    for _ in range(2):
        assert_right(weight)
        change(weight)


def test_eval_makes_them_anew_in_a_capture_too(gpu):
    weight = make_weight()
    with Graph(gpu, 1) as graph:
        codes_of(weight, reuse_codes=False), codes_of(weight, reuse_codes=False)
    assert len(graph.launches) == 2


def test_codes_that_stay_are_made_outside_of_a_graph(gpu):
    weight = make_weight()
    with codes_stay():
        codes = codes_of(weight)  # outside of a capture, as ever
    with codes_stay(), Graph(gpu, 1) as graph:
        for reuse_codes in (True, False):
            assert codes_of(weight, reuse_codes=reuse_codes).data is codes.data
    assert graph.launches == []
    change(weight)
    requantize(weight)
    assert torch.equal(bits(codes.data), bits(expected_of(weight).data))
    num_before = num_made(gpu)
    codes_of(weight)  # no graph writes them
    assert num_made(gpu) == num_before


def test_codes_that_stay_have_to_be_there_and_right(gpu):
    weight = make_weight()

    def capture() -> None:
        with codes_stay(), Graph(gpu, 1):
            codes_of(weight)

    def is_refused() -> bool:
        with pytest.raises(RuntimeError, match=r"codes_stay: a weight of shape \[140, 72\] has no"):
            capture()
        gpu.library.captured.clear()
        return True

    assert is_refused()
    codes_of(weight)
    capture()
    weight.grad = torch.ones_like(weight)
    ThroughData([weight]).step()
    assert is_refused()
    requantize(weight)
    capture()
    with Graph(gpu, 2):
        codes_of(weight)
    assert is_refused()
    requantize(weight)
    capture()
