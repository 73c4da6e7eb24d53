"""Transposed weights that are kept on a GPU, where memory is freed and filled as FSDP does it."""

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from moefp8 import FP8Linear
from tests.functional.layer_cases import KINDS, change, codes_of, make_layer, pass_of
from tests.gpu import NEEDS_GPU, allocated

pytestmark = NEEDS_GPU


def gradient(linear: FP8Linear) -> torch.Tensor:
    x = torch.ones(16, linear.in_features, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    linear(x).backward(torch.ones(16, linear.out_features, device="cuda", dtype=torch.bfloat16))
    assert x.grad is not None
    return x.grad


def gather_anew(
    weight: torch.Tensor, codes: torch.Tensor, pool: torch.cuda.MemPool | None = None
) -> None:
    """As FSDP2 frees and fills what it gathers: versions stay as they are.

    pool: an allocation gets its old address again if nothing else is in it.
    """
    storage = weight.untyped_storage()
    size = storage.nbytes()
    storage.resize_(0)
    with torch.cuda.use_mem_pool(pool) if pool else nullcontext():
        storage.resize_(size)
    with torch.autograd._unsafe_preserve_version_counter(weight):
        weight.detach().view(torch.uint8).copy_(codes)


@pytest.mark.parametrize("keep_transposed", [True, None])
def test_memory_that_is_gathered_anew_has_its_own_transpose(keep_transposed):
    linear = FP8Linear(512, 256, keep_transposed=keep_transposed).cuda()
    codes, pool = linear.weight.detach().view(torch.uint8).clone(), torch.cuda.MemPool()
    gather_anew(linear.weight, codes, pool)
    memory, address = allocated(), linear.weight.data_ptr()
    first = gradient(linear)
    for _ in range(3):
        codes ^= 0x80  # of the other sign
        gather_anew(linear.weight, codes, pool)
        assert linear.weight.data_ptr() == address
        first = -first
        assert torch.equal(gradient(linear), first)
    linear.weight.untyped_storage().resize_(0)
    assert allocated() - first.nbytes == memory - codes.numel()


def test_one_of_two_weights_side_by_side_is_gathered_anew():
    kind = "shared experts"
    layer, given = make_layer(kind, True), pass_of(kind)
    given.gradient(layer)
    for weight in codes_of(layer):
        other = weight.detach().clone()
        change(other)
        gather_anew(weight, other.view(torch.uint8))
        twin = make_layer(kind, False)
        twin.load_state_dict(layer.state_dict())
        assert torch.equal(given.gradient(layer), given.gradient(twin))


@pytest.fixture
def mesh(tmp_path) -> Iterator[dist.DeviceMesh]:
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reshards", [True, False])
def test_fsdp_gathers_shares_that_have_changed(kind, reshards, mesh):
    layer, given = make_layer(kind, True), pass_of(kind)
    fully_shard(layer, mesh=mesh, reshard_after_forward=reshards)
    given.gradient(layer)
    for _ in range(2):
        before = given.gradient(layer)
        for weight in codes_of(layer):
            assert isinstance(weight, DTensor)
            change(weight.to_local())
        twin = make_layer(kind, False)
        for name, x in layer.state_dict().items():
            whole = x.full_tensor() if isinstance(x, DTensor) else x
            twin.state_dict()[name].copy_(whole)
        found = given.gradient(layer)
        assert torch.equal(found, given.gradient(twin))
        assert not torch.equal(found, before)
