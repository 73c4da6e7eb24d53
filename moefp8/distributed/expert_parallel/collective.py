"""Exchange of tokens by collectives of `torch.distributed`, on any backend.

T tokens of this rank, k choices each, P ranks, R tokens received, H hidden. A token goes once to
each rank that holds one of its experts. Python must know how much is sent, so on a GPU each call
waits for the choices.
"""

from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ...functional.experts import ExpertsInputs, experts, experts_saving
from ...functional.experts_backward import ExpertsBackwardInputs, experts_backward
from ...quant.quantize import quantize_1x128, quantize_gradient_1x128
from ...routing.combine import sum_rows
from .agreement import Call

if TYPE_CHECKING:
    from .group import ExpertGroup


class CollectiveExchange:
    """One call's exchange. A rank receives tokens in order of source rank, then of token.

    Attributes:
        ids: int32 [R, k], the choices of the received tokens.
    """

    def __init__(self, group: "ExpertGroup", calls: list[Call], ids: torch.Tensor) -> None:
        self._group, self._name, device = group, calls[0].name, ids.device
        num_experts = calls[0].num_experts
        self._gpu_group = gpu_group(group.process_group) if device.type == "cuda" else None
        own = ids.clamp(-1, num_experts).int().cpu()  # E: a choice of no expert
        everyone = self._gather(own, [call.num_tokens for call in calls])
        sent = _reached(everyone[group.rank], num_experts, group.size)  # [T, P]
        received = [_reached(x, num_experts, group.size)[:, group.rank] for x in everyone]
        self._tokens = sent.T.nonzero()[:, 1].to(device)  # the tokens that are sent, rank by rank
        self._num_sent = sent.sum(0).tolist()
        self._num_received = [int(x.sum()) for x in received]
        self.ids = torch.cat([x[y] for x, y in zip(everyone, received, strict=True)]).to(device)
        begins = torch.tensor([0, *accumulate(self._num_sent)][:-1], dtype=torch.int32)
        to_row = (sent.cumsum(0) - 1 + begins).where(sent, -1)
        self._token_to_row = to_row.int().to(device)  # [T, P]: rows of what comes back

    def dispatch(self, x: torch.Tensor, scores: torch.Tensor | None = None) -> list[torch.Tensor]:
        """[T, ...] of this rank's tokens -> [R, ...] of tokens that this rank has experts for.

        scores: fp32 [T, k], which travel with them.
        """
        return [self._send(x), *([] if scores is None else [self._send(scores)])]

    def dispatch_codes(
        self, x: torch.Tensor, scores: torch.Tensor | None = None, *, are_gradients: bool = False
    ) -> list[torch.Tensor]:
        """`dispatch` of tokens after quantization to 1x128: codes, scales, scores unless None.

        are_gradients: quantize them with `quantize_gradient_1x128`.
        """
        quantized = quantize_gradient_1x128(x) if are_gradients else quantize_1x128(x, False)
        codes, scale_inv = map(self._send, quantized)
        return [codes, scale_inv, *([] if scores is None else [self._send(scores)])]

    def experts(
        self, inputs: ExpertsInputs, *, saves: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """`combine` of the experts' results; with `saves`, also the tensor for a backward."""
        return run_experts(self, inputs, saves=saves)

    def experts_backward(self, inputs: ExpertsBackwardInputs) -> tuple[torch.Tensor, torch.Tensor]:
        """`combine_gradients` of the experts' gradients."""
        return run_experts_backward(self, inputs)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """bf16 [R, H] -> [T, H]: the FP32 sum of all ranks' results for a token, in rank order."""
        back = self._travel(rows, self._num_received, self._num_sent)
        ones = back.new_ones(self._token_to_row.shape, dtype=torch.float32)
        return sum_rows(back, self._token_to_row, ones)

    def combine_gradients(
        self, rows: torch.Tensor, grad_scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`combine`, and fp32 [R, k] -> [T, k]: only an expert's rank adds a nonzero."""
        return self.combine(rows), self.combine(grad_scores)

    def check_turn(self) -> None:
        """Do nothing: what came has memory of its own, which nothing overwrites."""

    def keep_choices(self) -> None:
        """Do nothing: `ids` are in memory of their own."""

    def _send(self, x: torch.Tensor) -> torch.Tensor:
        values = x.view(torch.uint8) if x.dtype.itemsize == 1 else x  # FP8 has few operations
        rows = values.index_select(0, self._tokens)
        return self._travel(rows, self._num_sent, self._num_received).view(x.dtype)

    def _travel(
        self, x: torch.Tensor, num_sent: list[int], num_received: list[int]
    ) -> torch.Tensor:
        data = x.contiguous().view(torch.uint8)
        came = data.new_empty((sum(num_received), *data.shape[1:]))
        agreement, on_gpu = self._group.agreement, self._gpu_group is not None
        group = self._gpu_group if on_gpu else agreement.group
        data, taken = (data, came) if on_gpu else (data.cpu(), came.cpu())
        with agreement.explaining(self._name):
            dist.all_to_all_single(taken, data, num_received, num_sent, group=group)
        return (taken if on_gpu else came.copy_(taken)).view(x.dtype)

    def _gather(self, ids: torch.Tensor, num_tokens: list[int]) -> list[torch.Tensor]:
        """The choices of all ranks, by rank."""
        most, agreement = max(num_tokens), self._group.agreement
        padded = ids.new_zeros(most, ids.shape[1])
        padded[: len(ids)] = ids
        everyone = [torch.empty_like(padded) for _ in num_tokens]
        with agreement.explaining(self._name):
            dist.all_gather(everyone, padded, agreement.group)
        return [x[:n] for x, n in zip(everyone, num_tokens, strict=True)]


def run_experts(
    exchange: Any, inputs: ExpertsInputs, *, saves: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run experts, then combine their results."""
    if not saves:
        return exchange.combine(experts(*inputs)), None
    y, gate_up = experts_saving(*inputs)
    return exchange.combine(y), gate_up


def run_experts_backward(
    exchange: Any, inputs: ExpertsBackwardInputs
) -> tuple[torch.Tensor, torch.Tensor]:
    gradients: tuple[torch.Tensor, torch.Tensor]
    gradients = exchange.combine_gradients(*experts_backward(*inputs))
    return gradients


def _reached(ids: torch.Tensor, num_experts: int, num_ranks: int) -> torch.Tensor:
    """bool [T, P]: whether a rank holds one of a token's experts; ids of no expert reach none."""
    bounds = [rank * num_experts // num_ranks for rank in range(num_ranks + 1)]
    ranks = torch.tensor(bounds)
    here = ids[:, None, :]
    return ((here >= ranks[:-1, None]) & (here < ranks[1:, None])).any(-1)


def gpu_group(group: Any) -> Any:
    """The group, if it moves tensors of GPUs; None: they travel over the hosts."""
    backend = dist.get_backend_config(group) if hasattr(dist, "get_backend_config") else ""
    return group if "nccl" in str(backend) else None
