"""The launch contract of the routed experts, beyond `tests/kernels/common/test_prepared.py`."""

import weakref

import pytest
import torch

from moefp8 import kernels
from moefp8.functional import experts
from moefp8.kernels.common.activation import SWIGLU, Activation
from tests.fakes.emulator import Emulator, emulated
from tests.functional.cases import assert_right, inputs, run, weights_of

E, H, I = 3, 144, 272


def test_whatever_decides_a_launch_is_prepared_for_once(gpu):
    (x, ids, top_k_weights), weights = inputs(9, H), weights_of(E, H, I)
    scales = weights.down_proj_scale_inv
    unaligned = torch.empty(9 * H + 1, dtype=x.dtype)[1:].view(9, H).copy_(x)
    in_wide_rows = torch.empty(9, 152, dtype=x.dtype)[:, :H].copy_(x)
    variants = [
        (x, ids, top_k_weights, weights),
        (x[:8], ids[:8], top_k_weights[:8], weights),
        (x, ids.int(), top_k_weights, weights),
        (x.float(), ids, top_k_weights, weights),
        (unaligned, ids, top_k_weights, weights),
        (in_wide_rows, ids, top_k_weights, weights),
        (x, ids.T.contiguous().T, top_k_weights, weights),
        (x, ids, top_k_weights.T.contiguous().T, weights),
        (x, ids, top_k_weights.half(), weights),
        (x, ids, top_k_weights, weights, SWIGLU, True),
        (x, ids, top_k_weights, weights, Activation(limit=1e30)),
        (x, ids, top_k_weights, weights, SWIGLU, False, (2, 10)),
        (x, ids, top_k_weights, weights, SWIGLU, False, (3, 10)),
        (x, ids, top_k_weights, weights, SWIGLU, False, (3, 90)),
        (x, ids, top_k_weights, weights._replace(down_proj_scale_inv=scales.mT.contiguous().mT)),
        (x, ids, top_k_weights, weights, SWIGLU, False, (0, None), x),
        (x, ids, top_k_weights, weights, SWIGLU, False, (0, None), unaligned),
    ]
    for _ in range(2):
        for arguments in variants:
            assert_right(*arguments)
        assert len(gpu.prepared()) == len(variants)
    for _ in range(2):
        kernels.set_num_sms(3)
        assert_right(*variants[0])
        kernels.set_num_sms(None)
        assert_right(*variants[0])
        assert len(gpu.prepared()) == len(variants) + 1


# ---- Weights that TMA cannot address ----


@pytest.mark.parametrize(("h", "i"), [(100, 128), (128, 100), (3, 5), (1, 1), (129, 257)])
@pytest.mark.parametrize("masked", [False, True])
def test_they_are_copied_in_every_call(gpu, h, i, masked):
    weights = weights_of(E, h, i)
    for _ in range(3):
        assert_right(*inputs(20, h), weights, SWIGLU, masked)
        for old, new in zip(weights, weights_of(E, h, i), strict=True):
            old.copy_(new)
    assert len(gpu.prepared()) == 1
    _, first, second, _ = gpu.launched[-4:]
    assert (first.b_maps[0].address != weights.gate_up_proj.data_ptr()) == (h % 16 != 0)
    assert (second.b_maps[0].address != weights.down_proj.data_ptr()) == (i % 16 != 0)


@pytest.mark.parametrize("h", [8, 24])
def test_up_lies_as_gate_does(gpu, h):
    """Rows of gate that TMA can address, though those of up are not aligned: a copy of up alone."""
    weights = weights_of(E, h, 1)
    for _ in range(2):
        assert_right(*inputs(20, h), weights)
    assert len(gpu.prepared()) == 1


def test_copies_live_until_all_is_launched(monkeypatch):
    """Otherwise another thread might be given their memory meanwhile."""
    copies, alive, make = [], [], experts.fitting_weights

    def remember(weights):
        fitting = make(weights)
        copies[:] = [weakref.ref(x) for x, y in zip(fitting, weights, strict=True) if x is not y]
        return fitting

    class Watching(Emulator):
        def compute(self, made, parameters):
            super().compute(made, parameters)
            alive.append([x() is not None for x in copies])

    monkeypatch.setattr(experts, "fitting_weights", remember)
    weights = weights_of(E, 100, 100)
    with emulated(library=Watching()):
        for _ in range(2):
            run(*inputs(20, 100), weights)
    assert alive[-4:] == [[True] * 3] * 4
    assert all(x() is None for x in copies)
