"""What the tests of the GEMMs share: operands, where they lie in memory, and shapes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from moefp8 import kernels
from moefp8.kernels import fp8_gemm_nt, round_up
from moefp8.kernels.common import fp8

NAN = float("nan")
BIAS_NAMES = "kNone", "kFloat", "kBFloat16", "kHalf"
BIASES = None, torch.float32, torch.bfloat16, torch.float16
# Of weights, [N, K], and numbers of tokens, over which configurations are chosen.
SHAPES = (
    *((2112, 7168), (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168), (7168, 2048)),
    *((1, 1), (8, 128), (72, 200), (136, 144), (576, 7168), (1536, 1536), (129280, 7168)),
)
MS = (
    *(1, 2, 8, 9, 16, 17, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 300, 512, 700, 1024, 4096),
    10**6,
)


# ---- Matrices in memory of many kinds ----


def flat(size: int, like: torch.Tensor) -> torch.Tensor:
    """Poisoned memory: 0xff is NaN in every float of ours."""
    memory = torch.full((size * like.element_size(),), 0xFF, dtype=torch.uint8, device=like.device)
    return memory.view(like.dtype)


class Place(NamedTuple):
    """`make(x)` gives x's numbers elsewhere; `fits` says whether TMA can address that."""

    make: Callable[[torch.Tensor], torch.Tensor]
    fits: bool


def within(pad_left: int, pitch_unit: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Columns `pad_left` and on of wider rows, whose pitch is a multiple of `pitch_unit`."""

    def make(x: torch.Tensor) -> torch.Tensor:
        m, n = x.shape
        width = round_up(pad_left + n + 1, pitch_unit)
        return flat((m + 2) * width, x).view(m + 2, width)[1:-1, pad_left : pad_left + n].copy_(x)

    return make


def at_odd_address(x: torch.Tensor) -> torch.Tensor:
    pitch = round_up(x.shape[1], 16)
    rows = flat(x.shape[0] * pitch + 1, x)[1:].view(x.shape[0], pitch)
    return rows[:, : x.shape[1]].copy_(x)


def every_other_row(x: torch.Tensor) -> torch.Tensor:
    return (
        flat(x.shape[0] * 2 * round_up(x.shape[1], 16), x)
        .view(2 * x.shape[0], round_up(x.shape[1], 16))[::2, : x.shape[1]]
        .copy_(x)
    )


def with_void_strides(x: torch.Tensor) -> torch.Tensor:
    """Dimensions of size 1 say anything of their strides."""
    x = within(16, 16)(x) if x.ndim == 2 else halves(x)
    strides = [7 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides)


PLACES = {
    "aligned columns": Place(within(16, 16), True),
    "every other row": Place(every_other_row, True),
    "void strides": Place(with_void_strides, True),
    "odd columns": Place(within(3, 1), False),
    "odd pitch": Place(within(16, 17), False),
    "odd address": Place(at_odd_address, False),
}
SCALE_PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as quantized": kernels.tma_aligned,
    "K innermost": lambda s: s.clone(memory_format=torch.contiguous_format),
    "wider": lambda s: within(8, 4)(s.T).T,
    "odd": lambda s: within(3, 1)(s.T).T,
    "steps of 2": lambda s: within(0, 2)(s.repeat_interleave(2, 1))[:, ::2],
}


# ---- The same for equal matrices, [matrices, rows, columns] ----


def one_below_another(make: Callable[[torch.Tensor], torch.Tensor]):
    """As `make` places the matrix of all their rows."""
    return lambda x: make(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def halves(x: torch.Tensor) -> torch.Tensor:
    """The first rows of larger matrices."""
    groups, m, n = x.shape
    memory = flat(groups * (2 * m + 1) * round_up(n, 16), x)
    return memory.view(groups, 2 * m + 1, -1)[:, :m, :n].copy_(x)


def rows_in_turn(x: torch.Tensor) -> torch.Tensor:
    """First row 0 of all matrices, then row 1."""
    groups, m, n = x.shape
    memory = flat(groups * m * round_up(n, 16), x).view(m, groups, round_up(n, 16))
    return memory.transpose(0, 1)[..., :n].copy_(x)


def at_odd_steps(x: torch.Tensor) -> torch.Tensor:
    groups, m, n = x.shape
    step, pitch = m * round_up(n, 16) + 1, round_up(n, 16)
    return flat(groups * step, x).as_strided(x.shape, (step, pitch, 1)).copy_(x)


GROUPED_PLACES = {
    **{name: Place(one_below_another(place.make), place.fits) for name, place in PLACES.items()},
    "void strides": Place(with_void_strides, True),
    "halves": Place(halves, True),
    "rows in turn": Place(rows_in_turn, True),
    "odd steps": Place(at_odd_steps, False),  # if there are two
}
GROUPED_SCALE_PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as quantized": kernels.tma_aligned,
    "K innermost": lambda s: s.clone(memory_format=torch.contiguous_format),
    "wider": lambda s: one_below_another(within(8, 4))(s.mT).mT,
    "odd": lambda s: one_below_another(within(3, 1))(s.mT).mT,
    "steps of 2": lambda s: one_below_another(within(0, 2))(s.repeat_interleave(2, 2))[..., ::2],
    "halves": lambda s: halves(s.mT).mT,
    "rows in turn": lambda s: rows_in_turn(s.mT).mT,
    "odd steps": lambda s: at_odd_steps(s.mT).mT,
}


def stacked(make: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """As `make` places matrices, also a single one."""
    return make(x) if x.ndim == 3 else make(x[None])[0]


def operands(m: int, n: int, k: int, bias: torch.dtype | None = None) -> list[torch.Tensor | None]:
    """a, a_scale_inv, b, b_scale_inv, d filled with NaN, bias."""
    a = fp8.quantize_1x128(torch.randn(m, k), False)  # without a launch
    b = fp8.quantize_128x128(torch.randn(n, k), False)
    d = torch.full((m, n), NAN, dtype=torch.bfloat16)
    return [*a, *b, d, None if bias is None else torch.randn(n).to(bias)]


def expected_of(a, a_scale_inv, b, b_scale_inv, d, bias) -> torch.Tensor:
    """What the CPU's body computes."""
    expected = torch.empty_like(d, memory_format=torch.contiguous_format)
    torch.ops.moefp8.fp8_gemm_nt(a, a_scale_inv, b, b_scale_inv, expected, bias)
    return expected


def run_gemm(a, a_scale_inv, b, b_scale_inv, d, bias=None) -> torch.Tensor:
    """By the public name; returns d."""
    fp8_gemm_nt((a, a_scale_inv), (b, b_scale_inv), d, bias=bias)
    return d


@contextmanager
def nothing_around_is_written(d: torch.Tensor) -> Iterator[None]:
    """Of the memory that d is a part of; d itself starts as NaN."""
    around = d.as_strided((d.untyped_storage().nbytes() // 2,), (1,), 0)
    d.fill_(0)
    before = around.clone()
    d.fill_(NAN)
    yield
    d.fill_(0)
    assert torch.equal(around.view(torch.uint8), before.view(torch.uint8))
