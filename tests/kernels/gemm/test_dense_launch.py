"""The dense GEMM as it is launched, beyond what `test_launch.py` says of all GEMMs."""

import pytest
import torch

from moefp8.kernels.gemm import launch as gemm_launch
from moefp8.kernels.gemm.config import GemmConfig, with_most_stages
from tests.fakes.emulator import emulated
from tests.kernels.gemm.cases import flat, run_gemm
from tests.kernels.gemm.grouped_cases import bias_of, dense, launch_and_compare, operands


@pytest.mark.parametrize(("m", "n"), [(320, 96), (290, 200), (513, 31)])
@pytest.mark.parametrize("band", [1, 3, 5])
def test_bands_of_tiles_are_walked_whole_also_the_last(m, n, band, monkeypatch):
    monkeypatch.setattr(gemm_launch, "band", lambda *shape: band)
    with emulated(with_most_stages(GemmConfig(64, 32, 0))) as gpu:
        launch_and_compare(dense(m), operands(dense(m), n, 48))
        assert gpu.launched[0].arguments.band == band


@pytest.mark.parametrize(
    ("config", "m", "k", "band"),
    [
        ({"wgmma_m": 128, "wgmma_n": 128}, 4096, 6144, 32),  # 24 MiB of tokens
        ({"wgmma_m": 128, "wgmma_n": 128}, 4096, 6145, 4),
        ({"wgmma_m": 192, "wgmma_n": 128}, 4096, 6145, 2),
        ({"wgmma_m": 128, "wgmma_n": 128}, 65536, 128, 128),
        ({"wgmma_m": 64, "wgmma_n": 8, "swap_ab": True}, 8, 512, 1),
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
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
        run_gemm(*made[:4], made.d[:1].expand(9, 40))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a": lambda x: x.view(torch.uint8)}, "a must be float8_e4m3fn, got uint8"),
        ({"b": lambda x: x.view(torch.float8_e5m2)}, "b must be float8_e4m3fn, got float8_e5m2"),
        ({"d": lambda x: x.view(torch.float16)}, "d must be bfloat16, got float16"),
        ({"a_scale_inv": lambda x: x.view(torch.int32)}, "a_scale_inv must be float32"),
        ({"b_scale_inv": lambda x: x.view(torch.int32)}, "b_scale_inv must be float32"),
        ({"bias": lambda x: x.view(torch.int32)}, "bias must be bfloat16 or float16 or float32"),
        ({"d": lambda x: x.view(48, 6)}, r"d must be \[M, N\] = \[6, 48\], got \[48, 6\]"),
        ({"a": lambda x: x.as_strided((6, 256), (1, 6))}, "last dimension of a must be contig"),
        ({"bias": lambda x: x[:47]}, r"bias must be \[N\] = \[48\], got \[47\]"),
    ],
)
def test_what_was_checked_once_is_no_excuse(gpu, change, message):
    made = operands(dense(6), 48, 256)._asdict()
    arguments = {**made, "bias": bias_of(torch.float32, 48)}
    run_gemm(**arguments)
    ((name, view),) = change.items()
    with pytest.raises((TypeError, ValueError), match=f"^fp8_gemm_nt: .*{message}"):
        run_gemm(**{**arguments, name: view(arguments[name])})
    assert len(gpu.launched) == 1
