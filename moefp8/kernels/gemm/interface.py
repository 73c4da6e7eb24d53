"""What a GPU's GEMMs have to provide, and the values that they take.

M tokens, N weights, K; G groups. The rest of the house asks `Target.gemms`, an object of `Gemms`;
`kernels/targets.py` has the class for each architecture.
"""

from enum import Enum
from typing import Any, NamedTuple, Protocol

from ..common.activation import Activation
from ..program import Codes, Place, Record, Tensor
from .sizes import Sizes

Config = Any  # chosen by an object of `Gemms`, for itself; nobody else looks into it


class GroupLayout(str, Enum):
    """The tensor that says each token's group: `GroupLayout` of a kernel without kDense.

    ROWS and SEGMENTS both come from `grouped_layout`: with SEGMENTS, a kernel reads it before the
    GEMM does.
    """

    OFFSETS = "kOffsets"
    MASKED = "kMasked"
    ROWS = "kRows"
    SEGMENTS = "kSegments"


class GroupsOfTokens(NamedTuple):
    """The groups of a grouped GEMM, as far as the host knows them.

    layout: what says which group a token belongs to. bounds: the int32 tensor that says it.
    num_groups: G. num_segments: the most runs of tokens that may have one group each.
    expected_tokens: how many tokens a group has, if a kernel may guess its first tiles from that;
        else 0.
    bounds_ready: whether the bounds are older than the step before the GEMM.
    tile_counter: an int, zero at first, from which CTAs take tiles; None: each has its own.
    """

    layout: GroupLayout
    bounds: Place | None
    num_groups: int
    num_segments: int
    expected_tokens: int = 0
    bounds_ready: bool = False
    tile_counter: Place | None = None


class GateUp(NamedTuple):
    """The other half of the weights, and what follows a GEMM of gate and up.

    up: codes and scales with the layouts of gate's, which are b.
    d_scale_inv: the scales of d, fp32 [..., M, ceil(N/128)], M innermost.
    saved: bf16 [M, 2, N], gate and up of each token, with a row pitch of round_up(N, 8), for a
        config that saves them; else None.
    """

    up: Codes
    activation: Activation
    d_scale_inv: Tensor
    saved: Place | None = None


class Gemms(Protocol):
    """The GEMMs of a GPU: how they are cut, and their steps in a record.

    An object is hashable. Equal ones make the same choices, which depend on sizes alone: a record
    that lists kernels (`Record.span`) is told by `Record.hold` up to which number of tokens each
    choice stays the same. Numerics are those of `gemm.dense.block_scaled_matmul`.

    All operands but d of `k_grouped` can be addressed by TMA (`Tensor.fits`); rows of d [M, N]
    have room up to the next multiple of 16 bytes.
    """

    @classmethod
    def on(cls, device_index: int) -> "Gemms":
        """For a GPU of this machine, with what holds for it now: `set_num_sms`, what was tuned."""

    @classmethod
    def of(cls, num_sms: int) -> "Gemms":
        """For a GPU with that many SMs, which need not be here."""

    # ---- Single GEMMs ----

    def dense(
        self,
        r: Record,
        a: Codes,
        b: Codes,
        d: Tensor,
        *,
        bias: Tensor | None = None,
        batch_invariant: bool = False,
        programmatic: bool = True,
    ) -> None:
        """Steps that write bf16 d [M, N], of a [M, K], b [N, K] and bias [N].

        They may read b and the bias early, but if not programmatic.
        batch_invariant: a row of d has the same bits whatever M is.
        """

    def grouped(
        self,
        r: Record,
        a: Codes,
        b: Codes,
        d: Tensor,
        layout: GroupLayout,
        bounds: Place,
        *,
        bias: Tensor | None = None,
        expected_m: int | None = None,
        programmatic: bool = False,
    ) -> None:
        """Steps that write the rows of groups of bf16 d [., M, N], of a [., M, K] and b [G, N, K].

        bounds: as `layout` says. bias: [G, N], contiguous, or None.
        expected_m: about how many tokens a group has; None: the mean.
        """

    def k_grouped(
        self,
        r: Record,
        a: Codes,
        b: Codes,
        d: Tensor,
        num_tokens: int,
        *,
        accumulates: bool = False,
        expert_offsets: Place | None = None,
        programmatic: bool = True,
    ) -> None:
        """Steps that write d [E, M, N], the sum over tokens, or add to it.

        Args:
            a, b: codes [B, M, 128] and [B, N, 128], scales [B, M] and [B, N] or [B, ceil(N/128)].
            d: bf16 or fp32, at any address. B blocks of 128 tokens.
            num_tokens: of the only expert; with offsets, no expert's rows end after it.
            accumulates: whether the product is added to what d holds, which is fp32 then.
            expert_offsets: int32 [E + 1]; None: there is one expert.
        """

    # ---- GEMMs of a layer, whose configs are chosen together ----

    def experts(self, r: Record, sizes: Sizes, *, saves: bool) -> tuple[Config, Config]:
        """Choose the configs of gate and up, and of down; saves: gate and up, for a backward."""

    def experts_backward(self, r: Record, sizes: Sizes) -> tuple[Config, Config]:
        """Choose the configs of the GEMMs with W_down^T and with W_gate_up^T."""

    def shared_gate_up(self, r: Record, tokens: int, h: int, i: int, *, saves: bool) -> Config:
        """Choose the config of gate and up [I, H] for a single group of all tokens."""

    def takes_tiles(
        self, config: Config, sizes: Sizes, shape: tuple[int, int], groups: GroupsOfTokens
    ) -> bool:
        """Whether `describe` wants a counter from which CTAs take tiles; shape: [M, N] of d."""

    def describe(
        self,
        r: Record,
        config: Config,
        a: Codes,
        b: Codes,
        d: Tensor,
        tokens: int,
        *,
        bias: Tensor | None = None,
        groups: GroupsOfTokens,
        gate_up: GateUp | None = None,
        programmatic: bool = True,
    ) -> None:
        """Steps with a chosen config, of a [., M, K] and b [G, N, K], with three dimensions.

        d: bf16 [., M, N]; with gate_up, the E4M3 codes of the activated values. They may read
        weights, biases, and bounds that are ready, early.
        tokens: about how many a group has.
        bias: [G, N]; with gate_up [G, 2N], gate first; contiguous; or None.
        """
