"""Transposed weights that are kept on a GPU, where memory moves as FSDP moves it."""

import pytest
import torch

from moefp8 import FP8Linear
from tests.gpu import NEEDS_GPU

pytestmark = NEEDS_GPU


def gradient(linear: FP8Linear) -> torch.Tensor:
    x = torch.ones(16, linear.in_features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    linear(x).backward(torch.ones(16, linear.out_features, device="cuda", dtype=torch.bfloat16))
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize("keep_transposed", [True, None])
def test_memory_that_moves_has_one_transpose(keep_transposed):
    linear = FP8Linear(512, 256, keep_transposed=keep_transposed).cuda()
    expected, codes = gradient(linear), linear.weight.detach().view(torch.uint8).clone()
    storage, taken, addresses = linear.weight.untyped_storage(), [], set()
    for _ in range(3):
        size = storage.nbytes()
        storage.resize_(0)
        taken.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        storage.resize_(size)
        with torch.autograd._unsafe_preserve_version_counter(linear.weight):
            linear.weight.detach().view(torch.uint8).copy_(codes)
        addresses.add(storage.data_ptr())
        assert torch.equal(gradient(linear), expected)
        assert len(storage.__dict__["_moefp8_transposed"]) == 1
    assert len(addresses) > 1
