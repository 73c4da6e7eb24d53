"""What the tests of the GEMMs on a GPU share: operands there, and what is a right result."""

import torch

from moefp8.kernels.gemm.operands import Operands
from moefp8.quant import quantize_1x128, quantize_128x128
from moefp8.testing import assert_matches_reference
from tests import naive
from tests.gpu import no_synchronisation
from tests.kernels.gemm import grouped_cases
from tests.kernels.gemm.cases import NAN, run_gemm
from tests.kernels.gemm.grouped_cases import UNTOUCHED, Routing, dense, operands_of

MULTICAST = "two buffers, multicast", "three math groups, multicast"  # families
SOME_SHAPES = (  # M, N, K
    (1, 2112, 7168), (40, 2112, 7168), (64, 4096, 7168), (128, 4096, 7168),
    (300, 1000, 2000), (4096, 2112, 7168),
)  # fmt: skip


def on_gpu(made: Operands, device: str = "cuda") -> Operands:
    """The scales keep the order that they had."""
    return Operands(*(x.to(device) for x in made))


def launch_and_compare(
    routing: Routing, made: Operands, m: int = 4, bias: torch.Tensor | None = None
) -> None:
    """Exact sums, bit by bit; the launch waits for nothing."""
    grouped_cases.launch_and_compare(routing, made, None, m, bias, no_synchronisation)


def random(routing: Routing, n: int, k: int, octaves: float = 0.0) -> Operands:
    """Normal numbers; scales spread over `octaves` powers of two; NaN in tokens of no group."""
    rows = routing.rows_of_a()
    a = quantize_1x128(torch.randn(*rows, k, device="cuda"))
    b = quantize_128x128(torch.randn(*routing.matrices_of_b(), n, k, device="cuda"))
    for scale_inv in (a.scale_inv, b.scale_inv):
        scale_inv.mul_(torch.exp2((torch.rand(scale_inv.shape, device="cuda") - 0.5) * octaves))
    of_none = ~routing.is_of_group().cuda()
    a.data.view(torch.uint8)[of_none] = 0x7F
    a.scale_inv[of_none] = torch.nan
    d = torch.full((*rows, n), UNTOUCHED, dtype=torch.bfloat16, device="cuda")
    return Operands(*a, *b, d)


def random_dense(m: int, n: int, k: int, octaves: float = 0.0) -> Operands:
    return random(dense(m), n, k, octaves)


def assert_right(routing: Routing, made: Operands, bias: torch.Tensor | None = None) -> None:
    """Rows of groups differ by one rounding to BF16, and by the tensor cores' sums in FP32.

    Where terms cancel, the error of a sum is judged by the size of its terms.
    """
    assert bool((made.d[~routing.is_of_group().to(made.d.device)] == UNTOUCHED).all())
    for segment in routing.segments:
        *pairs, d = operands_of(segment, made)
        if d.numel() == 0:
            continue
        tokens, weights = naive.values(*pairs[:2], 1), naive.values(*pairs[2:], 128)
        expected, size = tokens @ weights.T, tokens.abs() @ weights.abs().T
        if bias is not None:
            expected, size = expected + bias.double(), size + bias.double().abs()
        error = (d.double() - expected).abs()
        excess = error - expected.abs() * 2**-8 - size * 2**-11
        told = f"{segment}: off by {float((error / size).nan_to_num().max()):.2e} of the terms"
        assert bool((excess <= 0).all()), told
        if d.shape[1] >= 64:
            assert_matches_reference(d, expected)


def run_dense(made: Operands, bias: torch.Tensor | None = None) -> None:
    """Call the op by its public name; it waits for nothing."""
    made.d.fill_(NAN)
    with no_synchronisation():
        run_gemm(*made, bias)


def run_dense_and_check(made: Operands, bias: torch.Tensor | None = None) -> None:
    run_dense(made, bias)
    assert_right(dense(len(made.a)), made, bias)
