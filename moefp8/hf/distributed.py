"""What transformers may distribute of an FP8 checkpoint: whole experts, among which we exchange.

E experts of the whole model, of which a rank holds [begin, end).
"""

import re
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ..layers import FP8Linear, GroupedExperts
from ..layers.parts import Part, note_parts
from .merge import SCALE

NAME = "moefp8"
_WHOLE = "replicate"  # transformers' word for a module that each rank has
_STACKS = "grouped_gemm"  # and for a stack of experts that is cut along E


def check_distributed(model: Any, pre_quantized: bool) -> None:
    """Raise ValueError, before weights are read, if transformers is to cut FP8 blocks."""
    config = getattr(model.config, "distributed_config", None)
    if config is None:
        return
    tp_size, ep_size = (getattr(config, name, None) or 1 for name in ("tp_size", "ep_size"))
    kind = type(model).__name__
    if max(tp_size, ep_size) > 1 and not pre_quantized:
        raise ValueError(
            f"{kind}: FP8Config quantizes no model that transformers distributes (tp_size = "
            f"{tp_size}, ep_size = {ep_size}); quantize the files before (python -m moefp8 "
            'quantize), or run the experts alone in FP8: experts_implementation="moefp8"'
        )
    if pre_quantized and (getattr(config, "dp_size", None) or 1) > 1:
        refuse_parallel(f"{kind}: FSDP over {config.dp_size} ranks")
    if tp_size > 1:
        _check_linears(model, config)
    if ep_size > 1 and getattr(config, "ep_implementation", None) != NAME:
        raise ValueError(
            f"{kind}: ep_implementation of an FP8 checkpoint must be {NAME!r}, got "
            f"{getattr(config, 'ep_implementation', None)!r}; it needs transformers >= 5.23"
        )


def refuse_parallel(what: str, ways: str = "") -> NoReturn:
    raise ValueError(
        f"{what}, but transformers' tensor parallelism and FSDP cannot cut FP8 blocks; use "
        f"moefp8.shard and moefp8.load_checkpoint{ways}; experts can lie on ranks, by ep_size and "
        f"ep_implementation={NAME!r}, or by moefp8.distributed.expert_parallel"
    )


def _check_linears(model: Any, config: Any) -> None:
    own_plan = config.tp_plan if isinstance(config.tp_plan, dict) else {}
    plan = {} if own_plan == {} and config.tp_plan is not None else {**model.tp_plan, **own_plan}
    cut: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear):
            rule = _generic(name)
            keys = [rule, *(f"{rule}.{leaf}" for leaf, _ in module.named_parameters())]
            cut.update((key, name) for key in keys if plan.get(key, _WHOLE) != _WHOLE)
    if cut:
        rules = ", ".join(f"{rule!r}: {_WHOLE!r}" for rule in cut)
        rule, name = next(iter(cut.items()))
        ways = f", or leave linears whole on each rank: DistributedConfig(tp_plan={{{rules}}})"
        refuse_parallel(f"{name}: {plan[rule]!r} in tp_size = {config.tp_size} parts", ways)


def _generic(name: str) -> str:
    """A name as plans have it, with stars for numbers of layers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def add_scales(model: nn.Module, plan: dict[str, str]) -> None:
    """Let a plan of expert parallelism cut scales as their stacks."""
    names = {_generic(name) for name, _ in model.named_parameters() if name.endswith(SCALE)}
    plan |= {name: _STACKS for name in names if plan.get(name.removesuffix(SCALE)) == _STACKS}


def held_experts(model: Any, num_experts: int) -> range:
    """Those of E that this rank will hold."""
    config = getattr(model.config, "distributed_config", None)
    size = getattr(config, "ep_size", None) or 1
    if size == 1 or not dist.is_initialized():
        return range(num_experts)
    rank = dist.get_rank() % size  # the mesh's last dimension
    return range(rank * num_experts // size, (rank + 1) * num_experts // size)


def keep_parts(model: nn.Module) -> None:
    """Make plain parameters of a rank's experts, which from then on exchange tokens themselves."""
    for name, module in model.named_modules():
        if isinstance(module, FP8Linear) and _is_distributed(model):
            module.__dict__.pop("forward", None)  # transformers' for "replicate" does nothing
        elif isinstance(module, GroupedExperts) and module.parallel is not None:
            _keep_part(name, module)


def _is_distributed(model: Any) -> bool:
    return getattr(model.config, "distributed_config", None) is not None


def _keep_part(name: str, experts: GroupedExperts) -> None:
    rank, total = experts.parallel.group.rank, experts.parallel.num_experts
    begin = rank * experts.num_experts
    part = Part(begin, begin + experts.num_experts, total)
    for leaf, parameter in list(experts.named_parameters()):
        local = getattr(parameter, "_local_tensor", parameter)
        if len(local) != experts.num_experts or tuple(local.shape[1:]) != parameter.shape[1:]:
            refuse_parallel(f"{name}.{leaf}: cut to {list(local.shape)}")
        own = nn.Parameter(local, parameter.requires_grad)
        own.__dict__.update(_marks_of(parameter))
        experts._parameters[leaf] = own
        note_parts(experts, {leaf: {0: part}})
    experts.expert_offset, experts.num_global_experts = begin, total
    del experts.__dict__["forward"]  # transformers' way to `parallel`


def _marks_of(parameter: torch.Tensor) -> dict[str, Any]:
    name = "_is_hf_initialized"
    return {name: getattr(parameter, name)} if hasattr(parameter, name) else {}
