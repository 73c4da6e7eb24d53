"""The GEMMs of Hopper GPUs, as `Gemms` of `kernels/gemm/interface.py`: WGMMA, TMA and clusters."""

from dataclasses import dataclass

from ...jit import Launch
from ...program import Codes, Place, Record, Target, Tensor, prepare_launch
from ..interface import GateUp, GroupLayout, GroupsOfTokens
from ..operands import Operands
from ..sizes import Sizes
from ..sms import busy_sms
from . import tuned
from .config import GemmConfig
from .expert_configs import (
    describe_backward_configs,
    describe_configs,
    describe_gate_up_config,
    takes_tiles,
)
from .grouped_launch import describe_grouped
from .k_grouped.launch import describe_k_grouped
from .launch import describe_gemm
from .tuned import ConfigSource, Pair, dense_config


@dataclass(frozen=True)
class Sm90:
    """configs: chooses a config for each GEMM."""

    configs: ConfigSource

    @classmethod
    def on(cls, device_index: int) -> "Sm90":
        sms = busy_sms(device_index)
        if sms.busy < sms.all:  # what was measured holds for all SMs
            return cls(ConfigSource(*sms))
        return cls(ConfigSource(*sms, tuned.measured(device_index)))

    @classmethod
    def of(cls, num_sms: int) -> "Sm90":
        return cls(ConfigSource(num_sms, num_sms))

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
        (m, k), n = a.data.shape, b.data.shape[0]
        config = dense_config(r, self.configs, m, n, k, batch_invariant)
        describe_gemm(r, self.configs.sms, config, a, b, d, m, bias=bias, programmatic=programmatic)

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
        describe_grouped(
            r,
            self.configs.sms,
            a,
            b,
            d,
            layout,
            bounds,
            bias=bias,
            expected_m=expected_m,
            programmatic=programmatic,
        )

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
        describe_k_grouped(
            r,
            self.configs.sms,
            a,
            b,
            d,
            num_tokens,
            accumulates=accumulates,
            expert_offsets=expert_offsets,
            programmatic=programmatic,
        )

    def experts(self, r: Record, sizes: Sizes, *, saves: bool) -> Pair:
        return describe_configs(r, self.configs, sizes, saves=saves)

    def experts_backward(self, r: Record, sizes: Sizes) -> Pair:
        return describe_backward_configs(r, self.configs, sizes)

    def shared_gate_up(self, r: Record, tokens: int, h: int, i: int, *, saves: bool) -> GemmConfig:
        return describe_gate_up_config(r, self.configs.sms.busy, tokens, h, i, saves=saves)

    def takes_tiles(
        self, config: GemmConfig, sizes: Sizes, shape: tuple[int, int], groups: GroupsOfTokens
    ) -> bool:
        return takes_tiles(config, sizes, shape, groups, self.configs.sms)

    def describe(
        self,
        r: Record,
        config: GemmConfig,
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
        describe_gemm(
            r,
            self.configs.sms,
            config,
            a,
            b,
            d,
            tokens,
            bias=bias,
            groups=groups,
            gate_up=gate_up,
            programmatic=programmatic,
        )


def prepare_dense(config: GemmConfig, operands: Operands, configs: ConfigSource) -> Launch:
    """A launch of a dense GEMM with that config, for operands that TMA takes, in their order."""
    inputs, older = ("a", "a_scales", "b", "b_scales", "d"), frozenset({"b", "b_scales"})
    r = Record(Target("sm_90a", configs.all_sms, Sm90(configs)), inputs, older=older)
    a = Codes.of(operands.a, operands.a_scale_inv, "a")
    b = Codes.of(operands.b, operands.b_scale_inv, "b")
    d = Tensor.of(operands.d, "d")
    describe_gemm(r, configs.sms, config, a, b, d, len(operands.a), programmatic=False)
    return prepare_launch(r, operands.d.get_device())
