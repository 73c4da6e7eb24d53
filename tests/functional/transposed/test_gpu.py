"""Transposed weights that a GPU keeps: when they are made, seen to be old, and freed."""

import copy
import io
import pickle

import pytest
import torch

from moefp8.functional import transposed as room
from moefp8.functional.transposed import transposed, transposed_side_by_side
from moefp8.quant.transpose import transpose_codes
from tests.functional.gpu_cases import poison
from tests.functional.layer_cases import KINDS, change, codes_of, make_layer, pass_of
from tests.gpu import NEEDS_GPU, allocated, no_synchronisation
from tests.quant.transpose_cases import codes

pytestmark = [*NEEDS_GPU, pytest.mark.filterwarnings("error:.*portable PyTorch body")]


@pytest.fixture
def calls(monkeypatch) -> list[str]:
    """Names of what is called to transpose."""
    made: list[str] = []
    transpose = room.transpose_codes_into

    def run(*arguments):
        made.append("transpose_codes_into")
        return transpose(*arguments)

    monkeypatch.setattr(room, "transpose_codes_into", run)
    return made


def bytes_of(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.uint8)


# ---- Layers ----


@pytest.mark.parametrize("kind", KINDS)
def test_a_kept_one_is_made_once(kind, calls):
    layer, given = make_layer(kind, True), pass_of(kind)
    first = given.gradient(layer)
    num_calls, before = len(calls), allocated()
    assert num_calls > 0
    for _ in range(4):
        poison()
        with no_synchronisation():
            again = given.gradient(layer)
        assert torch.equal(again, first)
    del again
    assert (len(calls), allocated()) == (num_calls, before)
    other = copy.deepcopy(layer)
    set_keeping(other, False)
    assert torch.equal(given.gradient(other), first)


def set_keeping(layer: torch.nn.Module, keeps: bool | None) -> None:
    for module in layer.modules():
        if hasattr(module, "keep_transposed"):
            module.keep_transposed = keeps


@pytest.mark.parametrize("kind", KINDS)
def test_false_keeps_nothing(kind, calls):
    layer, given = make_layer(kind, False), pass_of(kind)
    given.gradient(layer)
    num_calls, before = len(calls), allocated()
    for i in range(3):
        given.gradient(layer)
        assert len(calls) == (i + 2) * num_calls
    assert allocated() == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("free", "is_kept"), [(1.0, True), (0.26, True), (0.24, False)])
def test_none_keeps_while_a_quarter_is_free(kind, free, is_kept, calls, monkeypatch):
    def memory(device=None) -> tuple[int, int]:
        return int(free * 2**50), 2**50

    layer, given = make_layer(kind, None), pass_of(kind)
    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    expected = given.gradient(layer)
    num_calls = len(calls)
    assert torch.equal(given.gradient(layer), expected)
    assert len(calls) == num_calls * (1 if is_kept else 2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_in_place_is_seen(kind):
    layer, given = make_layer(kind, True), pass_of(kind)
    before = given.gradient(layer)
    memory = allocated()
    for weight in codes_of(layer):
        change(weight)
        other = copy.deepcopy(layer)
        set_keeping(other, False)
        expected = given.gradient(other)
        found = given.gradient(layer)
        assert torch.equal(found, expected)
        assert not torch.equal(found, before)
        before = found
        del other, expected, found
        assert allocated() == memory


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_freed_with_the_layer(kind):
    given = pass_of(kind)
    given.gradient(make_layer(kind, True))  # whatever is allocated once
    before, layer = allocated(), make_layer(kind, True)
    of_layer = allocated() - before
    given.gradient(layer)
    assert allocated() - before > 1.9 * of_layer
    del layer
    assert allocated() == before


@pytest.mark.parametrize("kind", KINDS)
def test_a_copy_has_none(kind, calls):
    """Nor does it see the one of the layer that it was copied from."""
    layer, given, before = make_layer(kind, True), pass_of(kind), allocated()
    expected = given.gradient(layer)
    kept = allocated() - before - expected.nbytes
    twin, before, num_calls = copy.deepcopy(layer), allocated(), len(calls)
    assert torch.equal(given.gradient(twin), expected)
    assert len(calls) == 2 * num_calls
    assert allocated() - before == kept
    for weight in codes_of(twin):
        change(weight)
    assert not torch.equal(given.gradient(twin), expected)
    assert torch.equal(given.gradient(layer), expected)


@pytest.mark.parametrize("kind", ["linear", "experts"])
def test_it_is_not_saved(kind):
    layer, given = make_layer(kind, True), pass_of(kind)
    sizes = []
    for _ in range(2):
        buffer = io.BytesIO()
        torch.save(layer.state_dict(), buffer)
        sizes += [len(pickle.dumps(layer)), len(buffer.getvalue())]
        given.gradient(layer)
    assert all(after < 1.1 * before for before, after in zip(sizes[:2], sizes[2:], strict=True))


# ---- Graphs and streams ----


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_kept_before", [False, True])
def test_a_captured_backward_stays_right(kind, is_kept_before):
    """What is kept before is made anew in the same memory; else the graph itself transposes."""
    layer, given = make_layer(kind, is_kept_before), pass_of(kind)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        expected = [given.gradient(layer) for _ in range(2)][-1]
    torch.cuda.current_stream().wait_stream(side)
    set_keeping(layer, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = given.gradient(layer)
    for _ in range(3):
        found.fill_(torch.nan)
        graph.replay()
        assert torch.equal(found, expected)
        for weight in codes_of(layer):
            change(weight)
        if is_kept_before:
            expected = given.gradient(layer)  # the eager call is what refreshes
        else:
            other = copy.deepcopy(layer)
            set_keeping(other, False)
            expected = given.gradient(other)


@pytest.mark.parametrize("is_changed", [False, True])
def test_another_stream_waits_until_it_is_made(is_changed):
    w, side, here = (
        codes(3, 2000, 1600, device="cuda"),
        torch.cuda.Stream(),
        torch.cuda.current_stream(),
    )
    if is_changed:
        transposed(w, True)
        change(w)
    expected = bytes_of(transpose_codes(w))
    torch.cuda.synchronize()
    poison()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        kept = transposed(w, True)
    found = bytes_of(transposed(w, True)).clone()
    assert torch.equal(found, expected)
    assert transposed(w, True).data_ptr() == kept.data_ptr()
    here.wait_stream(side)


# ---- Weights ----


@pytest.mark.parametrize("parts", [1, 2])
def test_each_view_and_each_number_of_parts_has_its_own(parts):
    whole = codes(6, 96, 80, device="cuda")
    views = whole[:2], whole[2:], whole[1::2], whole[..., 16:48]
    kept = [transposed(w, True, parts) for w in views]
    for w, found in zip(views, kept, strict=True):
        assert torch.equal(bytes_of(found), bytes_of(transpose_codes(w, parts)))
        assert transposed(w, True, parts).data_ptr() == found.data_ptr()
    assert len({x.data_ptr() for x in kept}) == len(views)
    change(whole[2])  # views of one tensor change together
    for w in views:
        found = transposed(w, True, parts)
        assert torch.equal(bytes_of(found), bytes_of(transpose_codes(w, parts)))


def test_side_by_side_sees_both():
    gate, up = codes(200, 144, device="cuda"), codes(200, 144, device="cuda")
    kept = transposed_side_by_side(gate, up, True)
    for weight in (gate, up):
        change(weight)
        found = transposed_side_by_side(gate, up, True)
        both = torch.cat([bytes_of(gate), bytes_of(up)]).view(gate.dtype)
        assert torch.equal(bytes_of(found), bytes_of(transpose_codes(both, 2)))
        assert found.data_ptr() == kept.data_ptr()
    other = codes(200, 144, device="cuda")
    found = transposed_side_by_side(gate, other, True)
    assert found.data_ptr() != kept.data_ptr()


def test_weights_of_inference_mode_keep_nothing():
    """They count no versions."""
    with torch.inference_mode():
        w = codes(200, 144, device="cuda")
    before = allocated()
    for keeps in (True, None):
        found = transposed(w, keeps)
        assert torch.equal(bytes_of(found), bytes_of(w).T)
        with torch.inference_mode():
            change(w)
    del found
    assert allocated() == before
