"""What plug-ins for serving engines share.

T tokens, k choices each, E experts of a rank.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import nn

from ..kernels.targets import runs_kernels
from ..layers import FP8Linear, GroupedExperts
from ..precompile import precompile
from ..system.progress import Progress

LINEARS, EXPERTS = "linears", "MoE layers"  # kinds of layers, as a log names them


def why_not_on(device: torch.device) -> str | None:
    """Why a layer on that device stays with the engine; None on Hopper GPUs and CPUs."""
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"{device.type} is no CUDA device"
    index = torch.cuda.current_device() if device.index is None else device.index
    if runs_kernels(index):
        return None
    return f"{torch.cuda.get_device_name(index)} is no Hopper GPU"


def line(model: str, engine: str, decisions: Iterable[tuple[str, str | None]]) -> str:
    """What a log says of a model: which layers run on moefp8, which on the engine, and why.

    decisions: of each FP8 layer, what it is, in the plural, and why it stays with the engine; None:
        it runs on moefp8.
    """
    counts = Counter(decisions)
    ours = [f"{count} {kind}" for (kind, reason), count in counts.items() if reason is None]
    left = [f"{count} {kind} ({reason})" for (kind, reason), count in counts.items() if reason]
    text = f"moefp8 runs {', '.join(ours) or 'no layer'} of {model}"
    return f"{text}; {engine} runs {', '.join(left)}" if left else text


def local_choices(top_k_index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Mark the choices of experts elsewhere as moefp8 does, where engines give them negative ids.

    top_k_index: int32 or int64 [T, k], in [0, E) or negative. On a GPU it is returned as it is,
    since the kernels take any id outside [0, E) for an expert elsewhere.
    """
    if top_k_index.device.type == "cuda":
        return top_k_index
    return torch.where(top_k_index < 0, num_experts, top_k_index)


class CompileAhead:
    """Compiles what layers need in a thread, while weights load; a job for each shape of a layer.

    max_tokens: of one call of a layer. dtype: of activations. batch_invariant: as in `FP8Linear`.
    """

    def __init__(
        self, max_tokens: int, dtype: torch.dtype, *, batch_invariant: bool = False
    ) -> None:
        self.max_tokens, self.dtype = max_tokens, dtype
        self.batch_invariant = batch_invariant
        self._jobs: dict[Hashable, Future[int]] = {}
        self._thread = ThreadPoolExecutor(1, "moefp8-precompile")

    def linear(self, n: int, k: int, bias: torch.dtype | None) -> None:
        """Begin with a linear, weight [N, K]. bias: the dtype of its bias, or None."""
        has_bias, dtype = bias is not None, bias or torch.bfloat16

        def make() -> nn.Module:
            return FP8Linear(k, n, has_bias, "meta", dtype, batch_invariant=self.batch_invariant)

        self._begin((n, k, bias), make)

    def experts(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        top_k: int,
        num_global_experts: int,
    ) -> None:
        """Begin with a layer of experts. num_global_experts: those of all ranks."""
        sizes = num_experts, hidden_size, intermediate_size

        def make() -> nn.Module:
            experts = GroupedExperts(*sizes, device="meta")
            experts.num_global_experts = num_global_experts
            return experts

        self._begin((*sizes, top_k, num_global_experts), make, top_k)

    def wait(self) -> int:
        """Wait for all that began, and return how many kernels these are.

        A terminal shows a line of progress. Raises JitError if there is no compiler, or a kernel
        does not compile.
        """
        num_kernels = 0
        with Progress("compiling kernels", len(self._jobs), "layer shapes") as bar:
            for job in self._jobs.values():
                num_kernels += job.result()
                bar.advance()
        return num_kernels

    def _begin(
        self, key: Hashable, make: Callable[[], nn.Module], top_k: int | None = None
    ) -> None:
        def compile_one() -> int:
            layer = make()
            done = precompile(layer, self.max_tokens, dtype=self.dtype, top_k=top_k, progress=False)
            return done.num_kernels

        if key not in self._jobs:
            self._jobs[key] = self._thread.submit(compile_one)
