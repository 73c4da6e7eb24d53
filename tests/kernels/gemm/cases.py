"""What the tests of the GEMMs share: shapes, places in memory, and which configuration is chosen.

It imports no more than `sanitizer` may need.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NamedTuple
from unittest import mock

import torch

from moefp8 import kernels
from moefp8.kernels import fp8_gemm_nt, jit, round_up
from moefp8.kernels.gemm.operands import Operands
from moefp8.kernels.gemm.sm90 import expert_configs, heuristic
from moefp8.kernels.gemm.sm90.config import GemmConfig, with_most_stages

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

NAN = float("nan")
BIASES = None, torch.float32, torch.bfloat16, torch.float16

# ---- Matrices in memory of many kinds ----


def flat(size: int, like: torch.Tensor) -> torch.Tensor:
    """Poisoned memory: 0xff is NaN in every float of ours."""
    memory = torch.full((size * like.element_size(),), 0xFF, dtype=torch.uint8, device=like.device)
    return memory.view(like.dtype)


class Place(NamedTuple):
    """`make(x)` gives x's numbers elsewhere; `fits` says whether TMA can address that.

    x: equal matrices, [matrices, rows, columns].
    """

    make: Callable[[torch.Tensor], torch.Tensor]
    fits: bool


def one_below_another(make: Callable[[torch.Tensor], torch.Tensor]):
    """Places matrices so that the matrix of all their rows lies as `make` places it."""
    return lambda x: make(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def within(pad_left: int, pitch_unit: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Columns `pad_left` and on of wider rows, whose pitch is a multiple of `pitch_unit`."""

    def make(x: torch.Tensor) -> torch.Tensor:
        m, n = x.shape
        width = round_up(pad_left + n + 1, pitch_unit)
        return flat((m + 2) * width, x).view(m + 2, width)[1:-1, pad_left : pad_left + n].copy_(x)

    return one_below_another(make)


def at_odd_address(x: torch.Tensor) -> torch.Tensor:
    pitch = round_up(x.shape[1], 16)
    rows = flat(x.shape[0] * pitch + 1, x)[1:].view(x.shape[0], pitch)
    return rows[:, : x.shape[1]].copy_(x)


def every_other_row(x: torch.Tensor) -> torch.Tensor:
    m, n = x.shape
    rows = flat(2 * m * round_up(n, 16), x).view(2 * m, round_up(n, 16))
    return rows[::2, :n].copy_(x)


def with_void_strides(x: torch.Tensor) -> torch.Tensor:
    """Dimensions of size 1 have any stride, which means nothing."""
    x = halves(x)
    strides = [7 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True)]
    return x.as_strided(x.shape, strides)


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
    "aligned columns": Place(within(16, 16), True),
    "every other row": Place(one_below_another(every_other_row), True),
    "void strides": Place(with_void_strides, True),
    "odd columns": Place(within(3, 1), False),
    "odd pitch": Place(within(16, 17), False),
    "odd address": Place(one_below_another(at_odd_address), False),
    "halves": Place(halves, True),
    "rows in turn": Place(rows_in_turn, True),
    "odd steps": Place(at_odd_steps, False),  # a single matrix fits
}
GROUPED_SCALE_PLACES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as quantized": kernels.tma_aligned,
    "K innermost": lambda s: s.clone(memory_format=torch.contiguous_format),
    "wider": lambda s: within(8, 4)(s.mT).mT,
    "odd": lambda s: within(3, 1)(s.mT).mT,
    "steps of 2": lambda s: within(0, 2)(s.repeat_interleave(2, 2))[..., ::2],
    "halves": lambda s: halves(s.mT).mT,
    "rows in turn": lambda s: rows_in_turn(s.mT).mT,
    "odd steps": lambda s: at_odd_steps(s.mT).mT,
}


def stacked(make: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """`make(x)`, where x may also be a single matrix, [rows, columns]."""
    return make(x) if x.ndim == 3 else make(x[None])[0]


class Placement(NamedTuple):
    """The places of the operands of a GEMM, by name."""

    a: str
    a_scale_inv: str
    b: str
    b_scale_inv: str
    d: str

    def of(self, operands: Operands) -> Operands:
        makes = (
            GROUPED_SCALE_PLACES[place] if "scale" in name else GROUPED_PLACES[place].make
            for name, place in self._asdict().items()
        )
        return Operands(*map(stacked, makes, operands))


def placements() -> "SearchStrategy[Placement]":
    from hypothesis import strategies as st

    place, of_scales = (st.sampled_from(sorted(x)) for x in (GROUPED_PLACES, GROUPED_SCALE_PLACES))
    return st.builds(Placement, place, of_scales, place, of_scales, place)


def run_gemm(a, a_scale_inv, b, b_scale_inv, d, bias=None) -> torch.Tensor:
    """Call the op by its public name; return d."""
    fp8_gemm_nt((a, a_scale_inv), (b, b_scale_inv), d, bias=bias)
    return d


@contextmanager
def nothing_around_is_written(d: torch.Tensor) -> Iterator[None]:
    """No more than d is written of the memory that it is a part of; d itself starts as NaN."""
    around = d.as_strided((d.untyped_storage().nbytes() // 2,), (1,), 0)
    d.fill_(0)
    before = around.clone()
    d.fill_(NAN)
    yield
    d.fill_(0)
    assert torch.equal(around.view(torch.uint8), before.view(torch.uint8))


def filled(wgmma_m: int, wgmma_n: int, **options: int) -> GemmConfig:
    """A configuration with as many stages as shared memory holds."""
    return with_most_stages(GemmConfig(wgmma_m, wgmma_n, 0, **options))


@contextmanager
def choosing(config: GemmConfig | None = None, gate_up: GemmConfig | None = None) -> Iterator[None]:
    """Gate and up have the configuration `gate_up`, and all other GEMMs `config`.

    None: they have those that the heuristic chooses. What this thread has prepared is forgotten,
    before and after.
    """
    choose_both = expert_configs.choose_experts_configs

    def choose_others(*shape: int, exact: bool = False) -> tuple[GemmConfig, GemmConfig]:
        chosen = choose_both(*shape, exact=exact)
        return gate_up or chosen[0], config or chosen[1]

    prepared = jit.current_driver().prepared()
    prepared.clear()
    try:
        with ExitStack() as stack:
            stack.enter_context(
                mock.patch.object(expert_configs, "choose_experts_configs", choose_others)
            )
            if config is not None:
                names = "choose_config", "choose_grouped_config"
                instead = dict.fromkeys(names, lambda *shape: config)
                stack.enter_context(mock.patch.multiple(heuristic, **instead))
            yield
    finally:
        prepared.clear()
