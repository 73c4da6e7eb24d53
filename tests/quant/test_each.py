"""Weights of anywhere quantized into a stack, on the CPU and on a GPU: every byte of it."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moefp8.quant.each import quantize_128x128_each_into
from moefp8.testing import sizes
from tests.gpu import no_synchronisation, on_cpu_and_gpu, on_gpu
from tests.quant.both_cases import DTYPES, weights
from tests.quant.each_cases import SHAPES, assert_right, untouched

pytestmark = pytest.mark.filterwarnings("error:.*portable PyTorch body")


@pytest.mark.parametrize("shape", SHAPES)
@on_cpu_and_gpu
def test_each_matrix_becomes_its_place_and_others_stay(device, shape):
    for dtype in DTYPES:
        for places, parts in (([4, 1], 2), ([0, 1, 2, 3, 4, 5], 1), ([5], 3)):
            for with_transposed in (False, True):
                options = {"with_transposed": with_transposed, "device": device}
                assert_right(*shape, places=places, parts=parts, dtype=dtype, **options)
        assert_right(*shape, places=[3, 0], dtype=dtype, shift=3, device=device)


@given(
    n=sizes(150),
    k=sizes(150),
    places=st.lists(st.integers(0, 5), max_size=6, unique=True),
    parts=st.sampled_from([1, 2, 3]),
    dtype=st.sampled_from(DTYPES),
)
def test_any_size(n, k, places, parts, dtype):
    assert_right(max(n, 1), max(k, 1), places=places, parts=parts, dtype=dtype)


@on_gpu
def test_more_matrices_than_one_launch_takes():
    places = torch.randperm(700)[:515].tolist()
    assert_right(8, 32, places=places, stack=700, device="cuda")
    assert_right(200, 136, places=places[:300], stack=700, device="cuda", repeats=3)


@on_gpu
def test_nothing_waits_for_the_gpu():
    made = untouched(4, 2, 128, 256, "cuda")
    matrices = list(weights(4, 128, 256, device="cuda"))
    quantize_128x128_each_into(*made, 2, matrices, [0, 1, 2, 3])  # compiles
    with no_synchronisation():
        quantize_128x128_each_into(*made, 2, matrices, [3, 2, 1, 0])


@pytest.mark.parametrize("with_transposed", [False, True])
@on_cpu_and_gpu
def test_matrices_may_come_as_stacks(device, with_transposed):
    options = {"places": [5, 0, 3, 2], "with_transposed": with_transposed, "device": device}
    for shape in ((16, 48), (129, 131)):
        assert_right(*shape, stacked=[1, 3], **options)
        assert_right(*shape, stacked=[4], **options)
        assert_right(*shape, stacked=[0, 4, 0], **options)


def test_a_write_counts_versions_up():
    made = untouched(2, 1, 16, 16)
    before = [x._version for x in made]
    quantize_128x128_each_into(*made, 1, [weights(16, 16)], [1])
    assert all(x._version > y for x, y in zip(made, before, strict=True))


def test_the_op_keeps_the_rules_of_torch():
    checks = "test_autograd_registration", "test_faketensor"
    arguments = *untouched(4, 2, 6, 5), 2, [weights(6, 5), weights(6, 5)], [3, 0]
    torch.library.opcheck(quantize_128x128_each_into.overload, arguments, test_utils=checks)


@pytest.mark.parametrize("launched", [False, True])
def test_what_does_not_fit_is_named(request, launched):
    if launched:
        request.getfixturevalue("gpu")
    w, good = weights(6, 5), untouched(4, 2, 6, 5)

    def run(matrices=None, places=(0, 1), parts=2, **other):
        quantize_128x128_each_into(
            *good._replace(**other), parts, [w, w] if matrices is None else matrices, [*places]
        )

    run()
    for bad, error, message in (
        ({"matrices": [w, w.mT]}, ValueError, r"with \[N, K\] = \[6, 5\], .* got \[5, 6\]"),
        ({"matrices": [w, w.float()]}, TypeError, "one dtype, got torch.bfloat16 and torch.float"),
        ({"matrices": [w, w.double()]}, TypeError, "matrices must be bfloat16 or float16"),
        ({"matrices": [w, weights(6, 10)[:, ::2]]}, ValueError, "matrices must be contiguous"),
        ({"places": (0,)}, ValueError, "2 matrices and 1 places"),
        ({"places": (0, 4)}, ValueError, r"places must be in \[0, 4\), got 0 to 4"),
        ({"places": (-1, 0)}, ValueError, r"places must be in \[0, 4\), got -1 to 0"),
        ({"parts": 3}, ValueError, "divide S = 4, got 3"),
        ({"data": w[None]}, TypeError, "data must be float8_e4m3fn, got bfloat16"),
        ({"scale_inv": good.scale_inv[:2]}, ValueError, r"scale_inv must be .* got \[2, 1, 1\]"),
        ({"transposed": good.transposed[..., :3]}, ValueError, r"from 12 to 256, got \[2, 5, 3\]"),
        ({"transposed": good.transposed.mT}, ValueError, "dimension of transposed must be contig"),
    ):
        with pytest.raises(error, match=message):
            run(**bad)
