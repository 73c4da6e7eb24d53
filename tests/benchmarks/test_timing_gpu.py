"""Captures of calls on a GPU: those that fail leave the process as it was."""

import gc

import pytest
import torch

from benchmarks.timing import captured
from tests.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU


def random_after(call) -> torch.Tensor:
    torch.manual_seed(0)
    return call()


def test_a_capture_that_fails_hinders_no_random_numbers_and_no_other_capture():
    x = torch.ones(64, device="cuda")
    expected = random_after(lambda: torch.randn(64, device="cuda"))
    with pytest.raises(RuntimeError, match=r"captur|CUDA"):
        captured(lambda: (torch.randn_like(x), x.sum().item()))
    assert torch.equal(random_after(lambda: torch.randn(64, device="cuda")), expected)
    y = torch.zeros(64, device="cuda")
    replay = captured(lambda: y.add_(x))
    y.zero_()
    replay()
    assert torch.equal(y, x)


def test_what_keeps_a_leafs_place_on_a_stream_decides_whether_a_step_is_captured():
    """Any stream can take part in a capture but the default one."""
    leaf = torch.ones(64, device="cuda", requires_grad=True)

    def step() -> torch.Tensor:
        leaf.grad = None
        (leaf * 3).sum().backward()
        return leaf.grad

    def assert_it_is_captured() -> None:
        replay = captured(step)
        gc.collect()
        leaf.grad.zero_()
        replay()
        assert leaf.grad.tolist() == [3.0] * 64

    with torch.cuda.stream(torch.cuda.Stream()):
        alive = (leaf * 2).sum()  # it keeps the place where gradients of the leaf are added up
    assert_it_is_captured()
    del alive
    alive = (leaf * 2).sum()
    with pytest.raises(RuntimeError, match=r"captur|CUDA"):
        captured(step)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    del alive
    gc.collect()
    assert_it_is_captured()
