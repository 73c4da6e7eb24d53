"""What the launcher of the grouped GEMMs keeps from call to call, without a GPU."""

from itertools import pairwise

import pytest
import torch

from moefp8 import kernels
from moefp8.kernels.gemm import grouped_launch as room
from moefp8.kernels.gemm import launch as gemm_plan
from moefp8.kernels.gemm.config import GroupLayout
from tests.kernels.gemm.cases import GROUPED_PLACES, GROUPED_SCALE_PLACES, flat, stacked
from tests.kernels.gemm.grouped_cases import (
    UNTOUCHED,
    by_offsets,
    by_rows,
    launch,
    launch_and_compare,
    operands,
    routing_of,
)

LAYOUTS = tuple(GroupLayout)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_second_call_is_one_call_of_the_driver(gpu, layout):
    routing = routing_of(layout, (5, 0, 9))
    made, bounds = operands(routing, 48, 256), routing.bounds_on()
    launch_and_compare(routing, made, bounds)
    num_maps, (prepared,) = len(gpu.maps), room._launches.prepared.values()
    launch_and_compare(routing, made, bounds)
    assert len(gpu.launched) == 2
    assert len(gpu.maps) == num_maps
    assert list(room._launches.prepared.values()) == [prepared]
    assert len(gpu.chosen) == len(gpu.kernels) == 1


def test_new_addresses_cost_their_own_maps_only(gpu):
    routing = by_offsets((5, 0, 129))  # its boxes differ
    made = operands(routing, 48, 256)
    alive = [(made.a.clone(), made.d.clone(), routing.bounds_on()) for _ in range(3)]
    maps_before = []
    for a, d, bounds in alive:
        launch_and_compare(routing, made._replace(a=a, d=d), bounds)
        maps_before.append(len(gpu.maps))
    assert len(gpu.chosen) == len(gpu.kernels) == 1
    of_a_and_d = len(gpu.launched[0].a_maps) + 1
    assert [y - x for x, y in pairwise(maps_before)] == [of_a_and_d] * 2
    assert {x.arguments.groups.bounds for x in gpu.launched} == {x[2].data_ptr() for x in alive}


def test_addresses_are_looked_at_in_each_call(gpu):
    routing = by_offsets((5, 0, 9))
    made = operands(routing, 48, 256)
    rows = flat(made.a.numel() + 16, made.a)
    for start in (0, 3, 16):
        moved = rows[start : start + made.a.numel()].view(made.a.shape).copy_(made.a)
        launch_and_compare(routing, made._replace(a=moved))
    assert len(gpu.chosen) == 1


def test_whatever_decides_a_launch_is_in_its_key(gpu, monkeypatch):
    routing = by_offsets((2, 0, 4))
    made, bounds = operands(routing, 48, 256), routing.bounds_on()
    wide = stacked(GROUPED_PLACES["aligned columns"].make, made.a)
    apart = GROUPED_PLACES["halves"].make(made.b)
    scales = GROUPED_SCALE_PLACES["halves"](made.b_scale_inv)
    fewer = made._replace(a=made.a[:5], a_scale_inv=made.a_scale_inv[:5], d=made.d[:5])
    fewer_bounds = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    rows = torch.zeros(6, dtype=torch.int32)

    def call(made=made, bounds=bounds, layout=GroupLayout.OFFSETS, expected_m=4, **options):
        return lambda: room.launch_grouped_gemm("op", layout, made, bounds, expected_m, **options)

    calls = [
        call(),
        call(expected_m=5),
        call(layout=GroupLayout.ROWS, bounds=rows),
        call(bounds=bounds.clone()),
        call(d_is_padded=True),
        call(made._replace(a=wide)),
        call(made._replace(b=apart)),
        call(made._replace(b_scale_inv=scales)),
        call(made._replace(a_scale_inv=made.a_scale_inv.clone())),
        call(made._replace(d=made.d.clone())),
        call(fewer, fewer_bounds),
    ]
    for number, each in enumerate(calls, 1):
        each()
        assert len(room._launches.prepared) == number
    monkeypatch.setattr(gemm_plan, "current_stream", lambda device_index: 8)
    calls[0]()
    assert gpu.launched[-1].stream == 8
    calls.append(call(programmatic=True))
    calls[-1]()
    assert gpu.launched[-1].programmatic
    kernels.set_num_sms(3)
    calls[0]()
    assert gpu.launched[-1].grid <= max(3, gpu.launched[-1].cluster)
    assert gpu.chosen[-1][-1] == 3
    assert len(room._launches.prepared) == len(calls) + 2
    launched = len(gpu.launched)
    for each in calls:
        each()
        each()
    assert len(gpu.launched) == launched + 2 * len(calls)


def test_the_same_memory_may_be_of_another_kind(gpu):
    """[G + 1] offsets and [M] rows look alike where M = G + 1."""
    made = operands(by_offsets((1, 2)), 8, 16)
    bounds = torch.tensor([0, 1, 3], dtype=torch.int32)
    launch_and_compare(by_offsets((1, 2)), made, bounds)
    bounds.copy_(torch.tensor([1, 1, -1]))
    routing = by_rows([(1, 2)], 2, 1)
    launch_and_compare(routing, made, bounds)
    assert len(gpu.chosen) == 2


def test_what_is_kept_does_not_grow_for_ever(gpu, monkeypatch):
    monkeypatch.setattr(gemm_plan.Launches, "max_kept", 3)
    for m in range(1, 9):
        routing = by_offsets((m, 1))
        launch_and_compare(routing, operands(routing, 8, 16))
        assert max(len(room._launches.prepared), len(room._launches.plans)) <= 3
    assert len(gpu.launched) == 8


def test_without_a_kernel_there_is_an_error(gpu, monkeypatch):
    def fail(kernel, device_index):
        raise kernels.jit.JitError("no usable NVRTC")

    routing = by_offsets((3, 0, 9))
    made = operands(routing, 8, 16)
    with monkeypatch.context() as patch:
        patch.setattr(gemm_plan, "load", fail)
        with pytest.raises(kernels.jit.JitError, match="no usable NVRTC"):
            launch(routing, made)
    assert bool((made.d == UNTOUCHED).all())
    launch_and_compare(routing, made)  # once the cause is gone
