"""What the heuristics choose, and what follows from a configuration: pure functions."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefp8 import kernels
from moefp8.kernels.gemm.sm90 import heuristic
from moefp8.kernels.gemm.sm90.config import GemmConfig, is_possible, num_whole_tiles
from moefp8.kernels.gemm.sm90.expert_configs import choose_experts_configs
from moefp8.testing import sizes
from tests.functional.cases import DOWN_FAMILIES, GATE_UP_FAMILIES
from tests.gpu import NUM_SMS
from tests.kernels.gemm.cases import filled
from tests.kernels.gemm.sm90.chosen import experts_configs


def assert_fits(config: GemmConfig, most_ctas: int) -> None:
    """most_ctas: of a cluster."""
    assert config.stages >= 2
    assert config.shared_bytes <= 227 * 1024
    assert config.ctas_per_sm * (config.shared_bytes + 1024) <= 228 * 1024
    assert config.wgmma_n % config.store_n == 0
    assert config.cluster <= most_ctas


@given(
    tokens=sizes(100_000, 1),
    num_groups=st.integers(1, 300),
    h=sizes(20_000, 1),
    i=sizes(20_000, 1),
    num_sms=st.integers(1, 200),
    exact=st.booleans(),
)
def test_every_configuration_of_experts_fits_an_sm(tokens, num_groups, h, i, num_sms, exact):
    both = choose_experts_configs(tokens, num_groups, h, i, num_sms, exact=exact)
    assert [config.gate_up for config in both] == [True, False]
    for config in both:
        assert_fits(config, min(2, num_sms))
        assert (config.grouped, config.split_k) == (True, 1)
        assert config in experts_configs()
    gate_up, _ = both
    assert gate_up.cluster * gate_up.outputs == 128  # of each token, what has one scale


def test_families_hold_every_configuration_of_experts():
    chosen = set(experts_configs())
    assert {*GATE_UP_FAMILIES.values(), *DOWN_FAMILIES.values()} >= chosen
    assert set(DOWN_FAMILIES.values()) <= chosen


@given(m=sizes(5000, 1), n=sizes(40_000, 1), k=sizes(20_000, 1), num_sms=st.integers(1, 200))
def test_every_configuration_fits_an_sm(m, n, k, num_sms):
    config = heuristic.choose_config(m, n, k, num_sms)
    assert_fits(config, 8)
    assert config.split_k <= kernels.ceil_div(kernels.num_blocks(k), config.k_blocks_per_stage)
    assert config.multicast == 1  # multicast was nowhere faster
    assert config == heuristic.choose_config(m, n, k, num_sms)
    assert config.split_k == 1 or m <= 512  # docs/linear.md says so


@given(sizes(16384, 1))
def test_what_decides_for_m_takes_as_many_tiles(m):
    decides = heuristic.deciding_size(m)
    assert m <= decides == heuristic.deciding_size(decides)
    for tokens in (128,) if m > 8192 else (64, 128, 192):
        assert kernels.ceil_div(decides, tokens) == kernels.ceil_div(m, tokens)


@given(
    tokens=sizes(5000, 1),
    limit=sizes(5000, 1),
    num_groups=st.integers(1, 300),
    n=sizes(40_000, 1),
    k=sizes(20_000, 1),
    num_sms=st.integers(1, 200),
)
def test_every_grouped_configuration_fits_an_sm(tokens, limit, num_groups, n, k, num_sms):
    shape = tokens, max(tokens, limit), num_groups, n, k, num_sms
    config = heuristic.choose_grouped_config(*shape)
    assert_fits(config, num_sms)
    assert (config.grouped, config.split_k) == (True, 1)
    assert config == heuristic.choose_grouped_config(*shape)


@given(weights=st.integers(1, 32).map(lambda i: 8 * i), num_tiles=st.integers(1, 20))
def test_the_pieces_of_tiles_cover_all_weights_and_have_one_scale(weights, num_tiles):
    pieces = GemmConfig(128, weights, 2).weight_pieces
    assert pieces == sorted(set(pieces), reverse=True)
    assert all(size.bit_count() == 1 for size in pieces if size < 128)
    covered, first = [], 0
    for size in pieces:
        for tile in range(num_tiles):  # as `TileCoord` in schedule.cuh
            begin = first * num_tiles + tile * size
            covered += range(begin, begin + size)
            assert begin // 128 + kernels.ceil_div(size, 128) == kernels.ceil_div(begin + size, 128)
        first += size
    assert covered == list(range(weights * num_tiles))


def test_what_there_is_no_kernel_for_is_not_possible():
    dense = GemmConfig(128, 64, 4)
    assert is_possible(dense, 4096)
    for options in (
        {"multicast": 2},
        {"split_k": 2, "parts": 2},
        {"num_product_buffers": 2, "swap_ab": True},
        {"wgmma_m": 256},
        {"halves_tiles": True},
    ):
        assert not is_possible(replace(dense, **options), 4096), options


@pytest.mark.parametrize(
    ("num_tiles", "whole"),
    [(132 * 19 + 66, 132 * 19), (132 * 19 + 67, 132 * 19 + 67), (2641, 2641)],
)
def test_tiles_are_halved_behind_few_waves_if_there_is_room(num_tiles, whole):
    config = filled(128, 256, parts=2, halves_tiles=True)
    assert num_whole_tiles(config, num_tiles, 132) == whole


@pytest.mark.parametrize("shape", [(512, 4096, 7168), (777, 7168, 2048), (3383, 4096, 8192)])
def test_a_kernel_that_halves_tiles_is_chosen_only_where_it_does(shape):
    m, n, k = shape
    for rows in range(m, m + 500, 50):
        config = heuristic.choose_config(rows, n, k, NUM_SMS)
        tiles = kernels.ceil_div(rows, config.tile[0]) * config.weight_tiles(n)
        assert (num_whole_tiles(config, tiles, NUM_SMS) < tiles) == config.halves_tiles
