"""The dense GEMM as it is launched, beyond what `test_launch.py` says of all GEMMs."""

import pytest

from moefp8 import kernels
from moefp8.kernels.gemm.sm90 import launch as gemm_launch
from moefp8.kernels.gemm.sm90.config import GemmConfig
from tests.fakes.emulator import emulated
from tests.kernels.gemm.cases import filled, flat, run_gemm
from tests.kernels.gemm.grouped_cases import dense, launch_and_compare, operands


@pytest.mark.parametrize(("m", "n"), [(320, 96), (290, 200), (513, 31)])
@pytest.mark.parametrize("band", [1, 3, 5])
def test_bands_of_tiles_are_walked_whole_also_the_last(m, n, band, monkeypatch):
    monkeypatch.setattr(gemm_launch, "band", lambda *shape: band)
    with emulated(filled(64, 32)) as gpu:
        launch_and_compare(dense(m), operands(dense(m), n, 48))
        assert gpu.launched[0].arguments.band == band


@pytest.mark.parametrize(
    ("num_sms", "whole"), [(1, 6), (2, 6), (3, 6), (4, 4), (5, 5), (6, 6), (7, 6), (132, 6)]
)
@pytest.mark.parametrize(
    ("config", "is_halved"),
    [
        (filled(128, 256, parts=2, halves_tiles=True), True),
        (filled(128, 192, parts=2, num_product_buffers=2, halves_tiles=True), True),
        (filled(128, 256, parts=2), False),
    ],
)
def test_tiles_of_the_last_wave_are_halved_if_it_has_room(num_sms, whole, config, is_halved):
    """The emulator checks that each tile, or each half of it, is walked once."""
    with emulated(config) as gpu:
        kernels.set_num_sms(num_sms)
        launch_and_compare(dense(300), operands(dense(300), 2 * config.tile_weights - 9, 48))
    (launched,) = gpu.gemms
    assert launched.arguments.num_whole_tiles == (whole if is_halved else 6)


@pytest.mark.parametrize(
    ("config", "m", "k", "band"),
    [
        ({"wgmma_m": 128, "wgmma_n": 128}, 4096, 6144, 32),  # 24 MiB of tokens
        ({"wgmma_m": 128, "wgmma_n": 128}, 4096, 6145, 4),
        ({"wgmma_m": 192, "wgmma_n": 128}, 4096, 6145, 2),
        ({"wgmma_m": 128, "wgmma_n": 128}, 65536, 128, 128),
        ({"wgmma_m": 64, "wgmma_n": 8, "swap_ab": True}, 8, 512, 1),
        ({"wgmma_m": 192, "wgmma_n": 128, "grouped": True}, 4096, 2048, 16),
        ({"wgmma_m": 192, "wgmma_n": 128, "grouped": True}, 4096, 14336, 9),
        ({"wgmma_m": 192, "wgmma_n": 128, "grouped": True}, 4096, 1 << 17, 2),
    ],
)
def test_how_many_tokens_are_walked_together(config, m, k, band):
    assert gemm_launch.band(GemmConfig(stages=4, **config), m, k) == band


@pytest.mark.usefixtures("gpu")
def test_rows_that_overlap_are_copied():
    made = operands(dense(9), 40, 160)
    overlapping = flat(400, made.a).copy_(made.a.flatten()[:400]).as_strided((9, 160), (16, 1))
    for a in (made.a[:1].expand(9, 160), overlapping):
        launch_and_compare(dense(9), made._replace(a=a))
    for d in (made.d[:1].expand(9, 40), made.d.as_strided((9, 40), (1, 1))):
        with pytest.raises(ValueError, match="d must not be expanded"):
            run_gemm(*made[:4], d)
