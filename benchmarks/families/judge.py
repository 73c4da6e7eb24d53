"""Whether an FP8 model is the model it was made of: the judge of `benchmarks.families`.

Three questions, none of which asks moefp8: is what was not swapped bit-equal, are the weights that
codes stand for near those that were, and does each swapped module give on the inputs that it had in
the original what the original gives when it quantizes weights and activations (W8A8)?
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from moefp8 import FP8Linear, GroupedExperts

BLOCK, LARGEST = 128, 448.0
# What rounding to E4M3 allows in the worst row, of codes and of products of two.
MOST_OF_WEIGHTS = 0.05
MOST_OF_W8A8 = 0.06  # transformers rounds to BF16 in between, which tips some codes
MOST_OF_BF16 = 0.25  # where a forward multiplies by other means than F.linear


class Wrong(Exception):
    """What is not as it was, in one sentence."""


Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class Original:
    """A model in BF16, what it gives, and the first call of each of its modules."""

    model: nn.Module
    logits: torch.Tensor
    calls: dict[str, Call]


@torch.no_grad()
def original(model: nn.Module, inputs: dict[str, torch.Tensor]) -> Original:
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # one expert at a time, by F.linear
    calls: dict[str, Call] = {}
    handles = []
    for name, module in model.named_modules():

        def keep(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
            calls.setdefault(name, _copied((args, kwargs)))

        if _may_be_swapped(module):
            handles.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    logits = logits_of(model, inputs)
    for handle in handles:
        handle.remove()
    return Original(model, logits, calls)


def _may_be_swapped(module: nn.Module) -> bool:
    is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    return is_linear or "Experts" in type(module).__name__ or hasattr(module, "gate_up_proj")


def _copied(call: Any) -> Any:
    if isinstance(call, torch.Tensor):
        return call.detach().clone()
    if isinstance(call, tuple | list):
        return type(call)(map(_copied, call))
    return {k: _copied(v) for k, v in call.items()} if isinstance(call, dict) else call


@torch.no_grad()
def logits_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(0)  # some draw
    output = model(**inputs)
    found = getattr(output, "logits", None)
    result: torch.Tensor = output[0] if found is None else found
    return result.float()


def judge(ours: nn.Module, first: Original, inputs: dict[str, torch.Tensor]) -> dict[str, float]:
    """The worst errors: of "weights", "modules" and "logits" (median row). Raises Wrong."""
    swapped = {n: m for n, m in ours.named_modules() if isinstance(m, FP8Linear | GroupedExperts)}
    _check_unswapped(ours, first.model, swapped)
    _check_routers(ours)
    worst = {"weights": 0.0, "modules": 0.0}
    for name, module in swapped.items():
        was = first.model.get_submodule(name)
        worst["weights"] = max(worst["weights"], _weights_error(name, module, was))
        if name in first.calls:
            worst["modules"] = max(worst["modules"], _module_error(name, module, was, first))
    logits = logits_of(ours, inputs)
    if not logits.isfinite().all() and first.logits.isfinite().all():
        raise Wrong("logits are not finite")
    worst["logits"] = float(_row_errors(logits, first.logits).median())
    with in_w8a8(_storages(first.model, swapped)):
        emulated = logits_of(first.model, inputs)
    most = float(_row_errors(emulated, first.logits).median())
    worst["logits in W8A8"] = most
    if worst["logits"] > 1.5 * most + 0.05:
        error = f"{worst['logits']:.2f} off, and in W8A8 {most:.2f}"
        raise Wrong(f"logits of the median row are {error}")
    return worst


def _storages(model: nn.Module, names: Iterable[str]) -> set[int]:
    """Where the weights of these modules lie: F.linear may be given one expert's rows."""
    modules = (model.get_submodule(name) for name in names)
    return {x.untyped_storage().data_ptr() for module in modules for x in module.parameters()}


def _check_unswapped(ours: nn.Module, was: nn.Module, swapped: dict[str, nn.Module]) -> None:
    """Check that each tensor is bit-equal."""
    inside = tuple(f"{name}." for name in swapped)
    found, wanted = (
        {n: x for n, x in _tensors(model) if not f"{n}.".startswith(inside)}
        for model in (ours, was)
    )
    if found.keys() != wanted.keys():
        raise Wrong(f"other tensors: {sorted(found.keys() ^ wanted.keys())[:3]}")
    for name, x in wanted.items():
        if not torch.equal(found[name].to(x.dtype), x):
            raise Wrong(f"{name} was not swapped, and is another")


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _check_routers(model: nn.Module) -> None:
    """A router in FP8 chooses other experts."""
    for name, module in model.named_modules():
        config = getattr(model, "config", None)
        texts = (config, getattr(config, "text_config", None))
        names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
        counts = {getattr(text, x, None) for text in texts for x in names}
        if isinstance(module, FP8Linear) and module.out_features in counts - {None}:
            raise Wrong(f"{name} is a router, and FP8")


# ---- Codes against weights, without moefp8 ----


def _weights_error(name: str, module: nn.Module, was: nn.Module) -> float:
    if isinstance(module, FP8Linear):
        wanted = was.get_parameter("weight")
        wanted = wanted if isinstance(was, nn.Linear) else wanted.T
        pairs = [(_values(module.weight, module.weight_scale_inv), wanted)]
    else:
        gate_up, down = _stacks(was)
        scales = module.get_parameter("gate_up_proj_scale_inv").chunk(2, dim=1)
        halves = module.get_parameter("gate_up_proj").view(torch.uint8).chunk(2, dim=1)
        codes = [x.view(torch.float8_e4m3fn) for x in halves]
        each = zip(codes, scales, gate_up.chunk(2, dim=1), strict=True)
        pairs = [(_values(code, scale), half) for code, scale, half in each]
        scales_of_down = module.get_parameter("down_proj_scale_inv")
        pairs.append((_values(module.get_parameter("down_proj"), scales_of_down), down))
    error = max(float(_row_errors(got, wanted).max()) for got, wanted in pairs)
    if not error <= MOST_OF_WEIGHTS:
        raise Wrong(f"{name}: the weights that codes stand for are {error:.2f} off")
    return error


def _stacks(was: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """[E, 2I, H], gate first, and [E, H, I] of transformers' stacks, or of DBRX's."""
    if hasattr(was, "gate_up_proj"):
        gate_up, down = was.get_parameter("gate_up_proj"), was.get_parameter("down_proj")
        if getattr(was, "is_transposed", False):
            gate_up, down = gate_up.mT, down.mT
        if not getattr(was, "is_concatenated", True):
            gate_up = torch.cat((gate_up[:, ::2], gate_up[:, 1::2]), dim=1)
        return gate_up, down
    mlp: Any = was.get_submodule("mlp")
    shape = (mlp.moe_num_experts, mlp.ffn_hidden_size, mlp.hidden_size)
    gate, up, down = (x.view(shape) for x in (mlp.w1, mlp.v1, mlp.w2))
    return torch.cat((gate, up), dim=1), down.transpose(1, 2)


def _values(codes: torch.Tensor, scale_inv: torch.Tensor) -> torch.Tensor:
    rows, columns = codes.shape[-2:]
    scale = scale_inv.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
    return codes.float() * scale[..., :rows, :columns]


def _row_errors(got: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    got, wanted = (x.detach().double().reshape(-1, x.shape[-1]) for x in (got, wanted))
    sizes = wanted.norm(dim=1)
    typical = sizes.median()  # a row that is nearly nothing is judged by the others
    return (got - wanted).norm(dim=1) / torch.maximum(sizes, 0.1 * typical).clamp(min=1e-12)


# ---- Modules against themselves in W8A8 ----


def _module_error(name: str, module: nn.Module, was: nn.Module, first: Original) -> float:
    args, kwargs = first.calls[name]
    with torch.no_grad():
        got = module(*_copied(args), **_copied(kwargs))
        with in_w8a8(_storages(first.model, [name])) as mode:
            wanted = was(*_copied(args), **_copied(kwargs))
    most = MOST_OF_W8A8 if mode.num_calls else MOST_OF_BF16
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        raise Wrong(f"{name}: gives {got.dtype} {list(got.shape)}")
    if not wanted.numel():
        return 0.0
    error = float(_row_errors(got, wanted).max())
    if not error <= most:
        raise Wrong(f"{name}: {error:.2f} off what W8A8 gives")
    return error


class _W8A8(TorchFunctionMode):
    """F.linear of quantized weights (128x128) and activations (1x128), with sums in FP32."""

    def __init__(self, storages: set[int]) -> None:
        super().__init__()
        self.storages, self.num_calls = storages, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.linear:
            return func(*args, **(kwargs or {}))
        x, weight, bias = _of_linear(*args, **(kwargs or {}))
        if weight.untyped_storage().data_ptr() not in self.storages:
            return func(x, weight, bias)
        self.num_calls += 1
        y = fake_quantized(x, 1) @ fake_quantized(weight, BLOCK).T
        y = y.bfloat16() if bias is None else (y + bias.float()).bfloat16()
        return y.to(x.dtype)


def _of_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    return x, weight, bias


@contextmanager
def in_w8a8(storages: set[int]) -> Iterator[_W8A8]:
    """storages: of the weights that are quantized."""
    with _W8A8(storages) as mode:
        yield mode


def fake_quantized(x: torch.Tensor, rows: int) -> torch.Tensor:
    """x [.., M, K] in FP32, of codes with one scale for each block of rows x 128."""
    shape = x.shape
    x = x.detach().float().reshape(-1, shape[-1])
    more = (0, -x.shape[1] % BLOCK, 0, -x.shape[0] % rows)
    padded = F.pad(x, more)
    blocks = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, rows))
    largest = blocks.abs().amax(dim=(1, 3), keepdim=True)
    scale = torch.where(largest > 0, largest / LARGEST, 1.0)
    codes = (blocks / scale).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    values = (codes.float() * scale).flatten(0, 1).flatten(1, 2)
    return values[: x.shape[0], : x.shape[1]].reshape(shape)
