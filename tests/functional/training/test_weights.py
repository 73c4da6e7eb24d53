"""Codes of master weights: when they are made, seen to be old, and freed. Without a GPU.

A stand-in for a GPU launches the kernel, so each launch is a time that codes are made.
"""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from moefp8.functional.training.weights import codes_of, requantize
from tests.functional.training.weights_cases import (
    OfCopies,
    ThroughData,
    assert_right,
    bits,
    change,
    expected_of,
    make_weight,
    num_made,
)

OPTIMIZERS = {
    "SGD": lambda x: torch.optim.SGD(x, lr=0.5),
    "AdamW, foreach": lambda x: torch.optim.AdamW(x, lr=0.5, foreach=True),
    "AdamW, one by one": lambda x: torch.optim.AdamW(x, lr=0.5, foreach=False),
    "AdamW, fused": lambda x: torch.optim.AdamW(x, lr=0.5, fused=True),
    "through data": lambda x: ThroughData(x),
}
DTYPES = torch.bfloat16, torch.float16, torch.float32


# ---- Once for each value ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [1, 2])
def test_they_are_made_once(gpu, dtype, parts):
    weight = make_weight(2, 140, 72, dtype=dtype)
    first = codes_of(weight, parts)
    for _ in range(3):
        again = codes_of(weight, parts)
        assert all(x is y for x, y in zip(again, first, strict=True))
    assert num_made(gpu) == 1
    assert_right(weight, parts)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_makes_them_anew_once_and_in_the_same_memory(gpu, name):
    weight, other = make_weight(dtype=torch.float32), make_weight(dtype=torch.float32)
    optimizer = OPTIMIZERS[name]([weight, other])
    places = [x.data_ptr() for x in codes_of(weight)]
    before, num_before = bits(codes_of(weight).data), num_made(gpu)
    for _ in range(3):
        weight.grad, other.grad = torch.randn_like(weight), torch.randn_like(weight)
        optimizer.step()
        for _ in range(4):  # micro-batches, forward and backward
            codes = codes_of(weight)
        num_before += 1
        assert num_made(gpu) == num_before
        assert [x.data_ptr() for x in codes] == places
        assert not torch.equal(bits(codes.data), before)
        before = bits(codes.data)
    assert_right(weight)


def test_an_optimizer_of_others_changes_nothing(gpu):
    weight, other = make_weight(), make_weight()
    codes_of(weight), codes_of(other)
    other.grad = torch.ones_like(other)
    ThroughData([other]).step()
    codes_of(weight)
    assert num_made(gpu) == 2
    assert_right(other)


def test_an_optimizer_of_copies_makes_all_old_but_frozen_ones(gpu):
    weight, frozen = make_weight(), make_weight().requires_grad_(False)
    codes_of(weight), codes_of(frozen)
    copies = weight.detach().float()
    copies.grad = torch.ones_like(copies)
    OfCopies([copies], lr=0.5).step()
    weight.data.copy_(copies)
    assert_right(weight)
    num_before = num_made(gpu)
    codes_of(weight), codes_of(frozen)
    assert num_made(gpu) == num_before


def test_clipping_of_gradients_changes_no_codes_and_that_of_weights_does(gpu):
    weight = make_weight()
    codes_of(weight)
    weight.grad = torch.ones_like(weight)
    nn.utils.clip_grad_norm_([weight], 0.1)
    codes_of(weight)
    assert num_made(gpu) == 1
    with torch.no_grad():
        weight.clamp_(-0.5, 0.5)
    assert_right(weight)


def test_a_loaded_state_is_seen(gpu):
    for assign in (False, True):
        layer, other = nn.Linear(72, 140, bias=False), nn.Linear(72, 140, bias=False)
        codes_of(layer.weight)
        layer.load_state_dict(other.state_dict(), assign=assign)
        assert torch.equal(layer.weight, other.weight)
        assert_right(layer.weight)


def test_a_moving_average_is_seen(gpu):
    """Through the weight always, through `.data` if not trusted, as in eval mode."""
    weight, average = make_weight(), make_weight()
    codes_of(weight)
    with torch.no_grad():
        weight.lerp_(average, 0.5)
    assert_right(weight)
    places = [x.data_ptr() for x in codes_of(weight)]
    trained = weight.detach().clone()
    weight.data.copy_(average)
    for _ in range(2):
        num_before = num_made(gpu)
        codes = codes_of(weight, reuse_codes=False)
        assert num_made(gpu) == num_before + 1
        assert [x.data_ptr() for x in codes] == places
        assert torch.equal(bits(codes.data), bits(expected_of(weight).data))
    weight.data.copy_(trained)
    assert_right(weight)
    num_before = num_made(gpu)
    codes_of(weight)  # trusted again
    assert num_made(gpu) == num_before


def test_other_data_have_other_codes(gpu):
    weight, other = make_weight(), make_weight().data
    before = weight.data
    place = codes_of(weight).data.data_ptr()
    weight.data = other
    assert_right(weight)
    weight.data = make_weight(72, 140).data.T.contiguous()
    assert_right(weight)
    weight.data = before
    assert codes_of(weight).data.data_ptr() == place
    assert_right(weight)


def test_each_view_and_each_number_of_parts_has_its_own(gpu):
    whole = make_weight(6, 96, 80)
    views = whole[:2], whole[2:], whole[1::2], whole[..., 16:48]
    for parts in (1, 2):
        kept = [codes_of(x, parts) for x in views]
        for x, found in zip(views, kept, strict=True):
            assert_right(x, parts)
            assert codes_of(x, parts).data is found.data
    with torch.no_grad():
        whole[2].mul_(-3)
    for x in views:
        assert_right(x, 1)


def test_a_resized_storage_has_none(gpu):
    """FSDP2 frees what it gathered so, and writes another into it without a version."""
    weight = make_weight()
    codes_of(weight)
    storage = weight.untyped_storage()
    num_bytes = storage.nbytes()
    with torch.autograd._unsafe_preserve_version_counter(weight), torch.no_grad():
        storage.resize_(0)
        storage.resize_(num_bytes)
        weight.copy_(torch.randn(weight.shape))
    assert_right(weight)


def test_inference_tensors_keep_nothing(gpu):
    with torch.inference_mode():
        weight = torch.randn(140, 72)
        for _ in range(2):
            assert_right(weight)
            weight.mul_(-3)
        codes_of(weight)
        assert codes_of(weight).data is not codes_of(weight).data


def test_what_cannot_be_quantized_is_named_and_not_kept(gpu):
    with pytest.raises(ValueError, match="parts must be at least 1 and divide N = 140, got 3"):
        codes_of(make_weight(), 3)
    with pytest.raises(TypeError, match="w must be bfloat16 or float16 or float32, got float64"):
        codes_of(make_weight(dtype=torch.float64))


def test_a_failed_launch_leaves_nothing_to_trust(gpu, monkeypatch):
    weight = make_weight()
    codes_of(weight)
    with torch.no_grad():
        weight.mul_(-3)
    with monkeypatch.context() as patch:
        patch.setattr(gpu.library, "launch", lambda *_: 1)
        patch.setattr(gpu, "check", raise_error)
        for reuse_codes in (True, False):
            with pytest.raises(RuntimeError, match="no luck"):
                codes_of(weight, reuse_codes=reuse_codes)
    assert_right(weight)
    with monkeypatch.context() as patch:
        patch.setattr(gpu.library, "launch", lambda *_: 1)
        patch.setattr(gpu, "check", raise_error)
        with pytest.raises(RuntimeError, match="no luck"):
            codes_of(weight, reuse_codes=False)  # no version says that these are old
    num_before = num_made(gpu)
    codes_of(weight)
    assert num_made(gpu) == num_before + 1


def raise_error(*_):
    raise RuntimeError("no luck")


# ---- Whose they are ----


def test_they_are_freed_with_the_weight(gpu):
    weight = make_weight()
    kept = [weakref.ref(x) for x in codes_of(weight)]
    assert all(x() is not None for x in kept)
    del weight
    gc.collect()
    assert all(x() is None for x in kept)


def test_copies_have_none(gpu):
    weight = make_weight()
    codes_of(weight)
    unpickled = pickle.loads(pickle.dumps(weight))
    saved = io.BytesIO()
    torch.save(weight, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(weight), unpickled, torch.load(saved), copy.copy(weight).clone()):
        num_before = num_made(gpu)
        assert codes_of(twin).data.data_ptr() != codes_of(weight).data.data_ptr()
        assert num_made(gpu) == num_before + 1
        change(twin)
        assert_right(weight)


def test_nothing_more_is_saved(gpu):
    def size_of(weight: torch.Tensor) -> tuple[int, int]:
        saved = io.BytesIO()
        torch.save(weight, saved)
        return len(saved.getvalue()), len(pickle.dumps(weight))

    weight = make_weight()
    before = size_of(weight)
    codes_of(weight)
    assert size_of(weight) == before


def test_a_cpu_keeps_them_too():
    """Without a GPU there is the PyTorch body."""
    weight = make_weight()
    assert codes_of(weight).data is codes_of(weight).data
    assert_right(weight)
    weight.grad = torch.ones_like(weight)
    ThroughData([weight]).step()
    assert_right(weight)


# ---- Requantize ----


def test_requantize_is_for_writes_that_nothing_counts(gpu):
    layer = nn.Sequential(nn.Linear(72, 140), nn.Linear(140, 36), nn.Linear(36, 8))
    weights = [x.weight for x in layer]
    weights[1].requires_grad_(False)
    kept = [codes_of(x) for x in weights[:2]]
    for x in weights:
        change(x)
    requantize(layer)
    assert num_made(gpu) == 4  # the last one had none
    for codes, weight in zip(kept, weights[:2], strict=True):
        assert torch.equal(bits(codes.data), bits(expected_of(weight).data))
    num_before = num_made(gpu)
    codes_of(weights[0])
    assert num_made(gpu) == num_before
    requantize(weights[1])
    assert_right(weights[1])
    requantize(iter(weights[:2]))
    assert torch.equal(bits(kept[0].data), bits(expected_of(weights[0]).data))


def test_requantize_takes_views_along_and_no_neighbours(gpu):
    flat = torch.randn(2, 4, 40, 24)
    one, other = nn.Parameter(flat[0]), nn.Parameter(flat[1])
    view = codes_of(one[1:3])
    codes_of(other)
    change(flat)
    num_before = num_made(gpu)
    requantize(one)
    assert num_made(gpu) == num_before + 1
    assert torch.equal(bits(view.data), bits(expected_of(one[1:3]).data))
    with torch.no_grad():
        one.mul_(-3)
    assert_right(one[1:3])


@pytest.mark.parametrize(("given", "named"), [(3, "int"), (["weight"], "str"), ("a", "str")])
def test_requantize_names_what_it_cannot_take(given, named):
    with pytest.raises(TypeError, match=f"a module, a tensor or several, got {named}"):
        requantize(given)
