"""W^T that is kept of a weight, without a GPU: it is that of what the weight is now."""

from types import SimpleNamespace

import pytest
import torch

from moefp8.functional.transposed import refresh_transposed, transposed
from moefp8.quant.transpose import transpose_codes
from tests.gpu import same_bits
from tests.quant.transpose_cases import codes


class OnGpu(torch.Tensor):
    """A tensor of the CPU that passes for one of a GPU."""

    is_cuda = True


@pytest.fixture(autouse=True)
def _one_stream(gpu, monkeypatch):
    """On which everything happens in order."""
    stream = SimpleNamespace(cuda_stream=gpu.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))


@pytest.mark.parametrize("parts", [1, 2])
def test_it_is_made_once_and_again_in_its_memory_after_a_change(parts):
    weight = codes(2, 96, 48).as_subclass(OnGpu)
    first = transposed(weight, True, parts)
    assert same_bits(first, transpose_codes(weight, parts))
    assert transposed(weight, True, parts) is first
    weight.copy_(codes(2, 96, 48))
    second = transposed(weight, True, parts)
    assert second.data_ptr() == first.data_ptr()
    assert same_bits(second, transpose_codes(weight, parts))


def test_it_is_refreshed_for_graphs_which_ask_for_none():
    weight = codes(96, 48).as_subclass(OnGpu)
    kept = transposed(weight, True)
    weight.copy_(codes(96, 48))
    assert not same_bits(kept, transpose_codes(weight))
    refresh_transposed([weight])
    assert same_bits(kept, transpose_codes(weight))


def test_what_is_not_kept_is_made_each_time():
    weight = codes(96, 48).as_subclass(OnGpu)
    first, second = (transposed(weight, False) for _ in range(2))
    assert first.data_ptr() != second.data_ptr()
    assert same_bits(first, second)
