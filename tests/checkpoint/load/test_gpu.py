"""Loading straight to a GPU: the bits of a load to the CPU, and little memory on the way."""

import pytest
import torch
from torch import nn

import moefp8
from moefp8.checkpoint import CheckpointError, load_checkpoint
from moefp8.checkpoint.load import load
from moefp8.checkpoint.load.tasks import CudaQueue, Staging
from moefp8.layers import GroupedExperts
from tests.checkpoint.cases import (
    Tiny,
    assert_same_tensors,
    deepseek_tensors,
    model_bytes,
    spoiled,
    write,
)
from tests.gpu import NEEDS_GPU, NEEDS_TWO_GPUS

pytestmark = NEEDS_GPU

PLANS = {
    "whole": {},
    "experts": {"*.experts": "experts"},
    "intermediate": {"*.experts": "intermediate", "*.shared_experts.down_proj": "columns"},
}


def tiny(place: str, plan: dict) -> nn.Module:
    """Make a `Tiny` on meta, or in memory of the GPU that holds anything."""
    with torch.device("meta"):
        model = Tiny(1)
    if plan:
        moefp8.shard(model, plan, 1, 3)
    return model if place == "meta" else spoiled(model, place)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("place", ["meta", "cuda"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_bits_are_those_of_a_load_to_the_cpu(tmp_path, plan, scales, place, mode):
    path = write(tmp_path / "c", deepseek_tensors(1, scales), num_shards=2)
    wanted = tiny("meta", plan)
    load_checkpoint(wanted, path)
    with mode():
        model = tiny(place, plan)
        load_checkpoint(model, path, device="cuda")
        assert all(x.is_cuda for x in model.state_dict().values())
        assert model_bytes(model) == model_bytes(wanted)


class Big(nn.Module):
    """256 MiB of experts: many tasks for each thread."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.experts = GroupedExperts(16, 2048, 2816, device=device)


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    model = Big("meta").to_empty(device="cpu")
    model.experts.gate_up_proj.data.view(torch.int32).random_()
    model.experts.down_proj.data.view(torch.int32).random_()
    for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
        getattr(model.experts, name).data.uniform_(0.5, 2.0)
    path = tmp_path_factory.mktemp("big") / "c"
    moefp8.save_checkpoint(model, path)
    return model, path


def test_memory_of_the_gpu_is_that_of_the_model(big):
    wanted, path = big
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = Big("meta")
    load_checkpoint(model, path, device="cuda")
    held = sum(x.nbytes for x in model.parameters())
    assert torch.cuda.max_memory_allocated() - before < 1.05 * held
    assert_same_tensors(model.state_dict(), wanted.state_dict())


def test_pinned_memory_is_bounded(big, monkeypatch):
    """Two buffers of 4 MiB for each of four threads, however much is loaded."""
    sizes, real = [], CudaQueue.buffer

    def counted(queue, num_bytes):
        sizes.append(num_bytes)
        made = real(queue, num_bytes)
        assert made.is_pinned()
        return made

    monkeypatch.setattr(CudaQueue, "buffer", counted)
    load_checkpoint(Big("meta"), big[1], device="cuda")
    assert 2 <= len(sizes) <= 8
    assert set(sizes) == {4 << 20}


def test_it_waits_for_what_was_written_before(big):
    """A slow kernel that fills the model on another stream does not overtake the load."""
    wanted, path = big
    model = Big("meta").to_empty(device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        for tensor in model.state_dict().values():
            tensor.view(torch.uint8).fill_(1)
        load_checkpoint(model, path)
    assert_same_tensors(model.state_dict(), wanted.state_dict())


@NEEDS_TWO_GPUS
def test_another_gpu_than_the_current_one(big):
    wanted, path = big
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(0)
    model = Big("meta")
    load_checkpoint(model, path, device="cuda:1")
    assert {x.device for x in model.parameters()} == {torch.device("cuda:1")}
    assert torch.cuda.current_device() == 0
    assert torch.cuda.memory_allocated(0) == before
    assert_same_tensors(model.state_dict(), wanted.state_dict())


def test_an_error_in_the_middle_leaves_no_copy_pending(big, monkeypatch):
    """What was begun is over when the error arrives: the model may be freed or loaded again."""
    made, num_tasks = [], iter(range(1000))

    class Watched(CudaQueue):
        def __init__(self, device):
            super().__init__(device)
            made.append(self)

    class Failing(Staging):
        def run(self, task, file):
            if next(num_tasks) == 12:
                raise OSError(5, "Input/output error")
            super().run(task, file)

    monkeypatch.setattr(load, "Staging", lambda: Failing(Watched))
    model = Big("meta")
    with pytest.raises(CheckpointError, match=r"Input/output error.*partly written"):
        load_checkpoint(model, big[1], device="cuda")
    assert made
    assert all(queue._stream.query() for queue in made)
    monkeypatch.undo()
    load_checkpoint(model, big[1])
    assert_same_tensors(model.state_dict(), big[0].state_dict())
