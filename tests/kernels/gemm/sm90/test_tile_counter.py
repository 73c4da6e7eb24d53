"""Where clusters of a grouped GEMM take tiles from a counter, and how that is launched."""

import pytest
import torch

from moefp8.kernels import jit
from moefp8.kernels.gemm import segments
from moefp8.kernels.gemm.interface import GroupLayout, GroupsOfTokens
from moefp8.kernels.gemm.sm90 import grouped_launch, heuristic, tile_counter
from moefp8.kernels.gemm.sm90.grouped_launch import takes_tiles
from moefp8.kernels.gemm.sms import Sms
from tests.gpu import ARCH, NUM_SMS
from tests.kernels.gemm.grouped_cases import (
    UNTOUCHED,
    expected_of,
    launch,
    operands,
    routing_of,
    taking_tiles,
)


@pytest.mark.parametrize(
    ("num_groups", "tokens", "n", "k", "expected"),
    [
        (32, 256, 4096, 7168, True),
        (256, 32, 7168, 2048, True),
        (63, 51, 4096, 7168, True),
        (1, 8192, 4096, 7168, False),  # all tiles but the last are equal
        (128, 36, 1536, 2048, False),  # too few products
        (2, 512, 4096, 7168, False),
        (64, 4, 4096, 7168, False),
        (2, 160, 8192, 16384, False),  # a tile for each cluster
    ],
)
@pytest.mark.parametrize("layout", [GroupLayout.OFFSETS, GroupLayout.MASKED])
def test_tiles_are_taken_where_they_are_unequal_and_many(
    num_groups, tokens, n, k, expected, layout
):
    config = heuristic.choose_grouped_config(tokens, 10 * tokens, num_groups, n, k, NUM_SMS)
    rows = (num_groups, 10 * tokens) if layout == GroupLayout.MASKED else (1, num_groups * tokens)
    groups = GroupsOfTokens(layout, None, num_groups, num_groups)
    shape, sms = (rows[1], n, k), Sms(NUM_SMS, NUM_SMS)
    assert takes_tiles(config, tokens, shape, groups, sms) == expected
    assert not takes_tiles(config, tokens, shape, groups, Sms(config.cluster, NUM_SMS))


@pytest.mark.parametrize("layout", GroupLayout)
@pytest.mark.parametrize("spare", [0, 1])
def test_launches_count_the_products_of_all_groups(gpu, monkeypatch, layout, spare):
    """Many weights, so that there are more tiles than clusters."""
    routing = routing_of(layout, (384, 512), 0)
    made, bounds = operands(routing, 9000, 128), routing.bounds_on()
    products = 896 * 9000 * 128
    monkeypatch.setattr(grouped_launch, "LEAST_PRODUCTS", products + spare)
    launch(routing, made, bounds, 448)
    assert torch.equal(made.d, expected_of(routing, made))
    assert bool(gpu.gemms[0].arguments.groups.tile_counter) == (spare == 0)


@pytest.mark.parametrize("layout", GroupLayout)
@pytest.mark.parametrize("programmatic", [False, True])
def test_the_counter_is_memory_of_each_call_and_zeroed_before(gpu, layout, programmatic):
    """The emulated GEMM checks that it is zero, and leaves another number."""
    routing = routing_of(layout, (300, 0, 77, 5))
    made, bounds = operands(routing, 264, 144), routing.bounds_on()
    with taking_tiles(True):
        for _ in range(4):  # the last ones by a graph
            made.d.fill_(UNTOUCHED)
            launch(routing, made, bounds, 100, programmatic=programmatic)
            assert torch.equal(made.d, expected_of(routing, made))
    before, size = "tile_counter", tile_counter.COUNTER_BYTES
    if layout == GroupLayout.SEGMENTS:  # their list has a zero
        before, size = "segments", segments.list_bytes(routing.num_tokens)
    assert [x.kernel.source.stem for x in gpu.launched] == [before, "gemm"] * 4
    assert [x.programmatic for x in gpu.launched] == [programmatic, True] * 4
    assert [x.numel() for x in gpu.workspaces] == [size] * 4
    assert all(x.arguments.groups.tile_counter for x in gpu.gemms)


@pytest.mark.usefixtures("own_cache")
def test_the_kernel_spills_nothing():
    assert jit.compile_kernel(tile_counter.kernel_of(), ARCH).problems() == []
