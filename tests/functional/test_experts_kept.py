"""What the launcher of the routed experts keeps between calls; `Emulator` stands for libcuda."""

import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moefp8 import kernels
from moefp8.functional import experts as op_room
from moefp8.functional import experts_launch as room
from moefp8.functional import experts_prepare
from tests.functional.cases import Weights, tokens_of, weights_of
from tests.functional.launched import body, launch, names_of
from tests.layers.cases import assert_matches_up_to_codes
from tests.routing.cases import ids_of


def prepared() -> list:
    """The keys of all that is."""
    return list(room._prepared)


@pytest.fixture
def preparations(monkeypatch):
    """The arguments of every preparation."""
    made, prepare = [], room._prepare

    def count(*arguments):
        made.append(arguments)
        return prepare(*arguments)

    monkeypatch.setattr(room, "_prepare", count)
    return made


@pytest.mark.usefixtures("workspaces")
@pytest.mark.parametrize("masked", [False, True])
def test_a_second_call_prepares_nothing(gpu, preparations, masked):
    weights = weights_of(3, 144, 272)
    for i in range(4):
        x, ids = tokens_of(9, 144), ids_of("distinct", 9, 2, 3)
        arguments = x, ids, torch.rand(9, 2), weights, None, masked
        y = launch(*arguments)
        assert_matches_up_to_codes(y, body(*arguments))
        dispatch, *_, combine = gpu.launched[-4:]
        assert dispatch.arguments.x == x.data_ptr()
        assert dispatch.arguments.routing.ids == ids.data_ptr()
        assert combine.arguments.weights == arguments[2].data_ptr()
        assert combine.arguments.out == y.data_ptr()
        assert len(preparations) == 1
        assert len(gpu.launched) == 4 * (i + 1)


@pytest.mark.usefixtures("workspaces", "gpu")
def test_whatever_decides_a_launch_is_prepared_for():
    weights = weights_of(3, 144, 272)
    x, ids, top_k_weights = tokens_of(9, 144), ids_of("distinct", 9, 2, 3), torch.rand(9, 2)
    odd = torch.empty(9 * 144 + 1, dtype=x.dtype)[1:].view(9, 144).copy_(x)
    assert x.data_ptr() % 16 == 0
    wide = torch.empty(9, 152, dtype=x.dtype)[:, :144].copy_(x)
    others = Weights(*(z.clone() for z in weights))
    expected = body(x, ids, top_k_weights, weights)
    variants = [
        (x, ids, top_k_weights, weights),
        (x, ids.int(), top_k_weights, weights),
        (x.float(), ids, top_k_weights, weights),
        (odd, ids, top_k_weights, weights),
        (wide, ids, top_k_weights, weights),
        (x, ids.T.contiguous().T, top_k_weights, weights),
        (x, ids, top_k_weights.double().float().T.contiguous().T, weights),
        (x, ids, top_k_weights, weights, None, True),
        (x, ids, top_k_weights, weights, 1e30),
        (x, ids, top_k_weights, others),
        (x, ids, top_k_weights, weights._replace(down_proj_scale_inv=others.down_proj_scale_inv)),
    ]
    for _ in range(2):
        for arguments in variants:
            assert_matches_up_to_codes(launch(*arguments), expected)
        assert len(prepared()) == len(variants)
    kernels.set_num_sms(3)
    assert_matches_up_to_codes(launch(*variants[0]), expected)
    assert len(prepared()) == len(variants) + 1


@pytest.mark.usefixtures("workspaces", "gpu")
def test_what_is_prepared_does_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(room, "_MAX_KEPT", 3)
    weights = weights_of(3, 144, 272)
    for num_tokens in (*range(1, 9), 1, 2):
        ids = ids_of("distinct", num_tokens, 2, 3)
        arguments = tokens_of(num_tokens, 144), ids, torch.rand(num_tokens, 2), weights
        for limit in (None, 1.0, 2.0, 3.0, None):
            assert_matches_up_to_codes(launch(*arguments, limit), body(*arguments, limit))
            assert 1 <= len(room._layers) <= 3
            assert 1 <= len(room._prepared) <= 3


@pytest.mark.usefixtures("workspaces", "gpu")
def test_only_new_layouts_are_checked(monkeypatch):
    checked, check = [], op_room._allocate
    monkeypatch.setattr(op_room, "_allocate", lambda *given: checked.append(given) or check(*given))
    weights, ids = weights_of(3, 144, 272), ids_of("distinct", 9, 2, 3)
    for calls, x in enumerate((tokens_of(9, 144), tokens_of(9, 144), tokens_of(9, 144).float())):
        launch(x, ids, torch.rand(9, 2), weights)
        assert len(checked) == (1, 1, 2)[calls]
    errors, message = (TypeError, ValueError), r"^experts: (hidden_states|top_k_index) must be"
    for wrong in (tokens_of(9, 140), tokens_of(8, 144), tokens_of(9, 144).double()):
        for _ in range(2):
            with pytest.raises(errors, match=message):
                launch(wrong, ids, torch.rand(9, 2), weights)
    assert len(room._layers) == 2


@pytest.mark.usefixtures("workspaces", "gpu")
@pytest.mark.parametrize("limit", [-1.0, float("nan")])
def test_a_wrong_limit_is_refused_also_for_known_layouts(limit):
    arguments = tokens_of(9, 144), ids_of("distinct", 9, 2, 3), torch.rand(9, 2)
    weights = weights_of(3, 144, 272)
    launch(*arguments, weights, 1.0)
    with pytest.raises(ValueError, match=r"^experts: swiglu_limit must be"):
        launch(*arguments, weights, limit)


@pytest.mark.usefixtures("workspaces", "gpu")
def test_threads_prepare_for_themselves(preparations):
    """The addresses of tokens are written into what is prepared."""
    weights = weights_of(3, 144, 272)

    def work(_) -> None:
        arguments = tokens_of(9, 144), ids_of("distinct", 9, 2, 3), torch.rand(9, 2), weights
        for _ in range(2):
            assert_matches_up_to_codes(launch(*arguments), body(*arguments))

    work(0)
    # One works after the other, for they have one workspace here, but both live until the end.
    with ThreadPoolExecutor(1) as first, ThreadPoolExecutor(1) as second:
        for i in range(4):
            (first, second)[i % 2].submit(work, i).result()
    assert len(preparations) == 3


@pytest.mark.usefixtures("workspaces")
@pytest.mark.parametrize(("h", "i"), [(100, 128), (128, 100), (3, 5), (1, 1), (129, 257)])
@pytest.mark.parametrize("masked", [False, True])
def test_weights_that_tma_cannot_address_are_copied_each_time(gpu, preparations, h, i, masked):
    weights = weights_of(3, h, i)
    arguments = tokens_of(20, h), ids_of("distinct", 20, 2, 3), torch.rand(20, 2), weights
    for calls in (1, 2):
        y = launch(*arguments, None, masked)
        assert_matches_up_to_codes(y, body(*arguments))
        assert len(preparations) == calls
        weights.gate_up_proj.copy_(weights_of(3, h, i).gate_up_proj)  # and are new each time
    assert prepared() == []
    _, first, second, _ = gpu.launched[-4:]
    assert (first.b_maps[0].address != weights.gate_up_proj.data_ptr()) == (h % 16 != 0)
    assert (second.b_maps[0].address != weights.down_proj.data_ptr()) == (i % 16 != 0)


@pytest.mark.usefixtures("gpu", "workspaces")
@pytest.mark.parametrize("h", [8, 24])
def test_up_lies_as_gate_does(h):
    """Rows of gate that TMA can address, though those of up are not aligned: a copy of up alone."""
    arguments = (
        tokens_of(20, h),
        ids_of("distinct", 20, 2, 3),
        torch.rand(20, 2),
        weights_of(3, h, 1),
    )
    for _ in range(2):
        assert_matches_up_to_codes(launch(*arguments, None, False), body(*arguments))
    assert prepared() == []


def test_copies_of_weights_live_until_all_is_launched(gpu, monkeypatch):
    """Else another thread may be given their memory meanwhile."""
    copies, combine = [], gpu.combine

    def recording(make):
        def copy(*arguments) -> torch.Tensor:
            fits = make(*arguments)
            copies.append(weakref.ref(fits))
            return fits

        return copy

    def check(*arguments) -> None:
        assert len(copies) == 3
        assert all(x() is not None for x in copies)
        combine(*arguments)

    for name in ("fitting", "lying_as"):  # gate and down; up
        monkeypatch.setattr(experts_prepare, name, recording(getattr(experts_prepare, name)))
    monkeypatch.setattr(gpu, "combine", check)
    ids = ids_of("distinct", 20, 2, 3)
    launch(tokens_of(20, 100), ids, torch.rand(20, 2), weights_of(3, 100, 100))
    assert names_of(gpu.launched)[-1] == "combine"
    assert all(x() is None for x in copies)
