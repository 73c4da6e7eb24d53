"""`Transport`: how the tokens of a call travel to the ranks of their experts, and results back.

T tokens of this rank, R tokens that it receives, k choices each, P ranks, E experts of the whole
model, H hidden.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...functional.experts import ExpertsInputs, experts, experts_saving
from ...functional.experts_backward import ExpertsBackwardInputs, experts_backward
from ...kernels.jit import Kernel
from ...kernels.program import Target
from ...quant.quantize import quantize_1x128, quantize_gradient_1x128, quantize_kernels
from .agreement import Call

if TYPE_CHECKING:
    from .group import ExpertGroup


class Traffic(NamedTuple):
    """What ranks send each other in the calls that kernels are listed for.

    num_ranks: P. hidden_size: H. max_tokens: the most tokens of a rank in one call. dtypes: those
    of tokens and of gradients. are_codes: whether they travel as FP8 codes.
    """

    num_ranks: int
    hidden_size: int
    max_tokens: int
    dtypes: Collection[torch.dtype]
    are_codes: bool


class Transport(ABC):
    """Takes the tokens of one call to the ranks of their experts, and sums what the experts return.

    A group of ranks chooses a class for all of its layers (`ExpertParallel(..., transport=)`), and
    each forward makes an instance, which serves that forward and its backward. A transport of your
    own derives from this class and writes `dispatch` and `combine`; all else has a default. What
    calls share, such as buffers, the class keeps.

    Rank r of P holds the experts [r E // P, (r + 1) E // P), and an id outside of [0, E) is of no
    expert.

    What a transport promises:

    - A token's row comes once to each rank that holds one of its experts. It may come to other
      ranks as well: they compute nothing for it, whatever its row holds, and their result is 0.
    - R and the order of the received rows are the transport's own choice, but the same in all
      dispatches of an instance. Results have the same order.
    - Sums are computed in FP32 and in the order of the ranks, so that no bit depends on timing.
    - On a GPU, all work runs on the current stream.
    - What it received stays until the instance combines or another instance of the group
      dispatches; layers copy what they need for longer. What it combined stays for ever: a layer
      returns it. Both may be the argument itself.
    - Arguments are not written, and are read before the method returns (on a GPU: by work that is
      on the stream by then).

    What a layer promises:

    - All ranks have agreed on the call and make the same calls of the same methods in the same
      order, so that a method may wait for other ranks, for `group.timeout` at most.
    - A forward calls `dispatch_tokens`, then `combine`, and its backward `dispatch` with the
      gradient of the result, then `combine_gradients`. Frozen experts, which compute with FP8
      codes, call `dispatch_codes`, then `run_experts`, and in the backward
      `dispatch_gradient_codes`, then `run_experts_backward`.
    - Autograd may leave out the second method of each pair, let other calls of the group come
      between the two, run a backward in another thread, and run it again. It records nothing of
      what a method does.

    Attributes:
        group: the ranks: `rank`, `size` (P), `process_group` and `timeout`.
        calls: the calls of all ranks, by rank. `num_tokens` is each rank's own; `num_experts` (E),
            `hidden_size`, `top_k` and `is_captured`, whether a CUDA graph is captured, are the same
            in all.
        own_ids: int32 or int64 [T, k], the choices of this rank's tokens.
        received_ids: int32 or int64 [R, k], the choices of the received tokens; only
            `dispatch_tokens` and `dispatch_codes` set them.
    """

    def __init__(self, group: "ExpertGroup", calls: Sequence[Call], ids: torch.Tensor) -> None:
        """group, calls: the attributes. ids: `own_ids`. A subclass takes the same arguments."""
        self.group, self.calls, self.own_ids, self.received_ids = group, calls, ids, ids

    # ---- What each transport writes ----

    @abstractmethod
    def dispatch(self, rows: torch.Tensor) -> torch.Tensor:
        """Send a row of each token to the ranks of its experts: [T, C] -> [R, C], same dtype.

        A layer calls it with gradients of results, bf16 [T, H]. The defaults below call it, two to
        four times in a row, with tokens [T, H] bf16, fp16 or fp32, their codes as uint8, scales
        [T, ceil(H/128)] fp32, scores [T, k] fp32, and ids. Rows may have any strides.
        """

    @abstractmethod
    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the received tokens' results to their ranks, and sum them: [R, C] -> [T, C].

        rows: bf16 [R, H]; `combine_gradients` also gives fp32 [R, k]. A sum is rounded to the dtype
        of the rows; it is 0 for a token of no expert.
        """

    # ---- What has a default ----

    def dispatch_tokens(
        self, x: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Dispatch tokens [T, H] with their fp32 scores [T, k], and set `received_ids`."""
        self.received_ids = self.dispatch(self.own_ids)
        return self.dispatch(x), self.dispatch(scores)

    def dispatch_codes(
        self, x: torch.Tensor, scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Quantize tokens to 1x128, and dispatch codes, scales [T, ceil(H/128)] and scores."""
        codes, scale_inv = quantize_1x128(x, False)
        received, scores = self.dispatch_tokens(codes.view(torch.uint8), scores)
        return received.view(codes.dtype), self.dispatch(scale_inv), scores

    def dispatch_gradient_codes(self, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize gradients as `quantize_gradient_1x128`, and dispatch codes and scales."""
        codes, scale_inv = quantize_gradient_1x128(grad)
        received = self.dispatch(codes.view(torch.uint8))
        return received.view(codes.dtype), self.dispatch(scale_inv)

    def run_experts(
        self, inputs: ExpertsInputs, *, saves: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run frozen experts on what `dispatch_codes` returned, and combine their results.

        Returns [T, H] bf16, and with `saves` what `experts_saving` saves for a backward, else None.
        """
        if not saves:
            return self.combine(experts(*inputs)), None
        y, gate_up = experts_saving(*inputs)
        return self.combine(y), gate_up

    def run_experts_backward(
        self, inputs: ExpertsBackwardInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run the backward of frozen experts on gradients' codes, and combine its gradients."""
        return self.combine_gradients(*experts_backward(*inputs))

    def combine_gradients(
        self, rows: torch.Tensor, grad_scores: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Combine the gradients of received tokens, bf16 [R, H], and of scores, fp32 [R, k].

        A choice has a gradient other than 0 on the rank of its expert alone.
        """
        return self.combine(rows), self.combine(grad_scores)

    def keep_choices(self) -> None:
        """Copy `received_ids`, which a later dispatch may overwrite."""
        self.received_ids = self.received_ids.clone()

    def check_turn(self) -> None:
        """Raise an error if another call has overwritten what the layer has just copied.

        Only where CUDA graphs that run at once share memory can one do so.
        """
        return

    @classmethod
    def list_kernels(cls, target: Target, traffic: Traffic) -> Iterator[Kernel]:
        """List the kernels of moefp8 that this transport may launch, for `precompile`."""
        for dtype in traffic.dtypes if traffic.are_codes else ():
            yield from quantize_kernels(target, dtype, traffic.max_tokens, traffic.hidden_size)
