"""What the fuzz tests draw: shapes, places in memory, and numbers of every bit pattern.

A strategy draws a seed and a structure. `make` then makes the tensors: their numbers on the CPU, by
PyTorch's seeded generator, and from there to any device, where they are put into their places.
T tokens, k choices each, E experts, H hidden, I intermediate.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from hypothesis import strategies as st

from moefp8.kernels import E4M3, num_blocks
from moefp8.kernels.gemm.k_grouped import KGroupedInputs
from moefp8.kernels.gemm.operands import Operands
from tests.kernels.gemm import grouped_cases
from tests.kernels.gemm.cases import BIASES, GROUPED_PLACES, GROUPED_SCALE_PLACES, NAN, stacked
from tests.kernels.gemm.k_grouped import cases as k_grouped_cases

DTYPES = torch.bfloat16, torch.float16, torch.float32
INF = float("inf")
HAS_GPU = torch.cuda.is_available()  # without one, the references take most of the time


def size(small: int, large: int, least: int = 0) -> st.SearchStrategy[int]:
    """A size up to `small`, or with a GPU `large`: any, a multiple of a tile's size, or one off.

    It is seldom 0, since then there is little to see.
    """
    most = large if HAS_GPU else small

    def near(x: int, unit: int, step: int, exists: bool) -> int:
        return min(max((x // unit * unit or x) + step, 1), most) if exists else 0

    units, steps = st.sampled_from((1, 1, 8, 16, 64, 128)), st.sampled_from((0, 0, 1, -1))
    exists = st.sampled_from((True,) * 19 + (least > 0,))
    return st.builds(near, st.integers(1, most), units, steps, exists)


# ---- Numbers ----

FLOATS = "ordinary", "few odd", "blocks apart", "ties", "any finite", "any bits"
CODES = "ordinary", "positive", "sparse", "few NaN", "finite", "any bits"
SCALES = "ordinary", "few odd", "wide", "all magnitudes", "any bits"
_ODD = (NAN, -NAN, INF, -INF, 0.0, -0.0, 3e38, -3e38, 1e-40, -1e-45, 6e4, -1e-7, -1.0)
ORDINARY = st.just("ordinary")


def floats(kind: str, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    x = torch.randn(shape) * torch.exp2(torch.randint(-4, 5, (*shape[:-1], 1)))
    if kind == "few odd":
        x = _with_odd(x, _ODD)
    elif kind == "blocks apart":
        info = torch.finfo(dtype)
        exponents = math.log2(info.smallest_normal) - 5, math.log2(info.max)
        apart = torch.empty(*shape[:-1], num_blocks(shape[-1])).uniform_(*exponents)
        apart = apart.double().repeat_interleave(128, dim=-1)[..., : shape[-1]]
        x = torch.rand(shape).copysign(x).double() * apart.exp2()
    elif kind == "ties":  # x / scale lies halfway between codes, where the scale is 1
        x = torch.randint(-64, 65, shape) / 2.0
        x[..., ::128] = 448
    elif kind.startswith("any"):
        bits = torch.int32 if dtype == torch.float32 else torch.int16
        limits = torch.iinfo(bits)
        x = torch.randint(limits.min, limits.max + 1, shape, dtype=bits).view(dtype)
        return x.nan_to_num(1.0, 1.0, -1.0) if kind == "any finite" else x
    return x.to(dtype)


def biases(
    seed: int, kind: str, dtype: torch.dtype | None, n: int, device: str
) -> torch.Tensor | None:
    """None without a dtype. Other numbers have the same `seed`, and must not be the same."""
    torch.manual_seed(seed + 1)
    return None if dtype is None else floats(kind, dtype, n).to(device)


def codes(kind: str, *shape: int) -> torch.Tensor:
    if kind == "ordinary":
        return (torch.randn(shape) * 100).clamp(-448, 448).to(E4M3)
    bits = torch.randint(0, 256, shape, dtype=torch.uint8)
    if kind != "any bits":
        bits[bits & 0x7F == 0x7F] -= 1
    if kind == "positive":
        bits &= 0x7F
    elif kind == "sparse":
        bits *= torch.rand(shape) < 0.05
    elif kind == "few NaN":
        bits = _with_odd(bits, (0x7F, 0xFF))
    return bits.view(E4M3)


def scales(kind: str, *shape: int) -> torch.Tensor:
    if kind == "any bits":
        return torch.randint(-(2**31), 2**31, shape, dtype=torch.int32).view(torch.float32)
    low, high = {"wide": (-60, 60), "all magnitudes": (-149, 128)}.get(kind, (-12, -6))
    x = torch.empty(shape, dtype=torch.float64).uniform_(low, high).exp2()
    if kind == "all magnitudes":
        x = x.copysign(torch.randn(shape))
    return _with_odd(x.float(), _ODD) if kind == "few odd" else x.float()


def _with_odd(x: torch.Tensor, odd: tuple[float, ...]) -> torch.Tensor:
    """Up to three elements of x become odd ones; all others must not notice."""
    for at in torch.randint(max(x.numel(), 1), (int(torch.randint(4, ())),)).tolist():
        if x.numel():
            x.view(-1)[at] = odd[int(torch.randint(len(odd), ()))]
    return x


# ---- Places ----


Place = Callable[[torch.Tensor], torch.Tensor]
RESULT_PLACES: dict[str, Place] = {name: place.make for name, place in GROUPED_PLACES.items()}
RESULT_PLACES["own"] = lambda x: x
_ONE_NUMBER: dict[str, Place] = {"one number": lambda x: x[..., :1, :1].expand(x.shape)}
OPERAND_PLACES = {**RESULT_PLACES, "one row": lambda x: x[..., :1, :].expand(x.shape)}
FLOAT_PLACES = {**OPERAND_PLACES, **_ONE_NUMBER, "transposed": lambda x: x.mT.contiguous().mT}
REPEATED = {"one row", "one number"}  # strides of 0: errors are no more those of many numbers
SCALE_PLACES = {**GROUPED_SCALE_PLACES, **_ONE_NUMBER, "own": lambda x: x}


def placed(places: dict[str, Place], name: str, x: torch.Tensor) -> torch.Tensor:
    """x is [rows, columns], or [matrices, rows, columns]."""
    return stacked(places[name], x) if x.numel() else x


def place_in(places: dict[str, Place]) -> st.SearchStrategy[str]:
    """A tensor mostly stays in its own place, as most do that layers are called with."""
    return st.one_of(st.just("own"), st.sampled_from(sorted(places)))


# ---- Quantization ----


class Matrices(NamedTuple):
    seed: int
    shape: tuple[int, ...]
    kind: str
    dtype: torch.dtype
    place: str

    def make(self, device: str) -> torch.Tensor:
        torch.manual_seed(self.seed)
        x = floats(self.kind, self.dtype, *self.shape).to(device)
        return placed(FLOAT_PLACES, self.place, x)


SEEDS = st.integers(0, 2**32 - 1)


def matrices() -> st.SearchStrategy[Matrices]:
    rows, columns = size(140, 600), size(300, 1100)
    shapes = st.one_of(st.tuples(rows, columns), st.tuples(st.integers(0, 3), rows, columns))
    shapes = shapes.filter(lambda shape: math.prod(shape) <= (2**20 if HAS_GPU else 2**14))
    kinds, dtypes = st.sampled_from(FLOATS), st.sampled_from(DTYPES)
    return st.builds(Matrices, SEEDS, shapes, kinds, dtypes, place_in(FLOAT_PLACES))


# ---- GEMMs, dense and grouped ----


class Numbers(NamedTuple):
    """The kinds of numbers in a, its scales, b and its scales."""

    a: str
    a_scale_inv: str
    b: str
    b_scale_inv: str


class Places(NamedTuple):
    a: str
    a_scale_inv: str
    b: str
    b_scale_inv: str
    d: str


class Gemm(NamedTuple):
    seed: int
    n: int
    k: int
    numbers: Numbers
    places: Places
    bias: torch.dtype | None = None
    bias_kind: str = "ordinary"

    @property
    def is_ordinary(self) -> bool:
        return {*self.numbers, self.bias_kind} == {"ordinary"} and not REPEATED & {*self.places}

    def make(self, rows: tuple[int, ...], groups: tuple[int, ...], device: str) -> Operands:
        """rows, groups: the leading axes of a and of b; (M,) and () if dense."""
        torch.manual_seed(self.seed)
        n, k, kinds, places = self.n, self.k, self.numbers, self.places
        made = Operands(
            codes(kinds.a, *rows, k),
            scales(kinds.a_scale_inv, *rows, num_blocks(k)),
            codes(kinds.b, *groups, n, k),
            scales(kinds.b_scale_inv, *groups, num_blocks(n), num_blocks(k)),
            torch.full((*rows, n), NAN, dtype=torch.bfloat16),
        )
        kinds_of_place = OPERAND_PLACES, SCALE_PLACES, OPERAND_PLACES, SCALE_PLACES, RESULT_PLACES
        three = zip(kinds_of_place, places, made, strict=True)
        return Operands(*(placed(known, name, x.to(device)) for known, name, x in three))

    def make_bias(self, device: str) -> torch.Tensor | None:
        return biases(self.seed, self.bias_kind, self.bias, self.n, device)


@st.composite
def gemms(draw: st.DrawFn) -> tuple[int, Gemm]:
    """A pair of M and all else."""
    shapes = st.tuples(size(70, 600), size(300, 1000), size_of_k())
    most = 2**28 if HAS_GPU else 2**22
    m, n, k = draw(shapes.filter(lambda shape: math.prod(shape) <= most))
    of_bias = draw(st.sampled_from(BIASES)), draw(st.sampled_from(FLOATS))
    return m, Gemm(draw(SEEDS), n, k, draw(numbers()), draw(places()), *of_bias)


@st.composite
def grouped_gemms(draw: st.DrawFn) -> tuple[grouped_cases.Routing, Gemm]:
    n, k = draw(size(140, 600, 1)), draw(size(260, 800, 1))
    return draw(grouped_cases.routings()), Gemm(draw(SEEDS), n, k, draw(numbers()), draw(places()))


class WeightGradient(NamedTuple):
    """counts: tokens of each expert."""

    seed: int
    counts: list[int]
    m: int
    n: int
    numbers: Numbers
    places: Places
    output: str
    blocks_b: bool

    def make(self, device: str) -> KGroupedInputs:
        torch.manual_seed(self.seed)
        kinds, rows_b = self.numbers, num_blocks(self.n) if self.blocks_b else self.n
        contents = (
            [
                k_grouped_cases.Content(
                    codes(kind, features, count), scales(of_scales, rows, num_blocks(count))
                )
                for count in self.counts
            ]
            for features, rows, kind, of_scales in (
                (self.m, self.m, kinds.a, kinds.a_scale_inv),
                (self.n, rows_b, kinds.b, kinds.b_scale_inv),
            )
        )
        made = k_grouped_cases.inputs_of(k_grouped_cases.Sides(*contents), self.output)
        moved = (x.to(device) if torch.is_tensor(x) else x for x in made)
        return k_grouped_cases.placed(KGroupedInputs(*moved), **self.places._asdict())


@st.composite
def weight_gradients(draw: st.DrawFn) -> WeightGradient:
    count = st.sampled_from((0, 1, 31, 32, 33, 127, 128, 129, 300))
    known = GROUPED_PLACES, k_grouped_cases.SCALE_PLACES
    place, of_scales = (st.sampled_from(sorted(x)) for x in known)
    return WeightGradient(
        draw(SEEDS),
        draw(st.lists(count, min_size=1, max_size=4)),
        draw(size(70, 600, 1)),
        draw(size(140, 600, 1)),
        draw(numbers()),
        Places(draw(place), draw(of_scales), draw(place), draw(of_scales), draw(place)),
        draw(st.sampled_from(sorted(k_grouped_cases.OUTPUTS))),
        draw(st.booleans()),
    )


def size_of_k() -> st.SearchStrategy[int]:
    most = size(400, 1100)
    return st.one_of(most, most, st.just(7168)) if HAS_GPU else most


def numbers() -> st.SearchStrategy[Numbers]:
    wild = st.builds(Numbers, *(st.sampled_from(x) for x in (CODES, SCALES, CODES, SCALES)))
    codes_alone = st.builds(
        Numbers, st.sampled_from(CODES), ORDINARY, st.sampled_from(CODES[:5]), ORDINARY
    )
    return st.one_of(st.just(Numbers(*["ordinary"] * 4)), codes_alone, wild)


def places() -> st.SearchStrategy[Places]:
    scale, operand, result = map(place_in, (SCALE_PLACES, OPERAND_PLACES, RESULT_PLACES))
    return st.builds(Places, operand, scale, operand, scale, result)


def poison_padding(routing: grouped_cases.Routing, made: Operands) -> None:
    """Fill tokens of no group with NaN, unless they share memory with others."""
    of_none = ~routing.is_of_group().to(made.a.device)
    if 0 not in made.a.stride():
        made.a.view(torch.uint8)[of_none] = 0x7F
    if 0 not in made.a_scale_inv.stride():
        made.a_scale_inv[of_none] = NAN
