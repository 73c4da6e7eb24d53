"""What a rank does with a model whose experts lie on all ranks, and what one process does."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

import moefp8.hf
from moefp8.checkpoint import fp8_modules

OWN = {"fsdp_size": 2, "ep_size": 2}  # each rank has a batch of its own


def shared(path: Path) -> dict[str, Any]:
    """Two ranks that have one batch, and whole linears."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path))
    plan = dict.fromkeys(model.tp_plan, "replicate")
    return {"tp_size": 2, "ep_size": 2, "tp_plan": plan}


def load(path: Path, *, is_fp8: bool = False, **options: Any) -> PreTrainedModel:
    """distributed: keywords of `DistributedConfig`; without them the model is whole."""
    if "distributed" in options:
        from transformers.distributed import DistributedConfig

        given = {"ep_implementation": "moefp8", **options.pop("distributed")}
        options["distributed_config"] = DistributedConfig(**given)
    if is_fp8:
        options["quantization_config"] = moefp8.hf.FP8Config()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **options)


def logits(path: Path, ids: torch.Tensor, options: dict[str, Any]) -> torch.Tensor:
    model = load(path, **options)
    with torch.no_grad():
        return model(ids).logits


def logits_of_5_10(rank: int, path: Path, ids: torch.Tensor, name: str) -> torch.Tensor:
    """As transformers before 5.23 distributes experts: their ids are those of a rank, or none."""
    from transformers.distributed import DistributedConfig

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    config: Any = DistributedConfig(enable_expert_parallel=True)
    options = {"tp_plan": "auto", "distributed_config": config, "experts_implementation": name}
    return logits(path, ids, options)


def trained(path: Path, ids: torch.Tensor, options: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Logits, and the gradients of the weights before, in and beside the experts."""
    model = load(path, **options)
    y = model(ids).logits
    y.float().square().mean().backward()
    found = {"logits": y.detach()}
    for name, parameter in model.named_parameters():
        if name.endswith(("embed_tokens.weight", "mlp.gate.weight", "experts.down_proj")):
            grad: Any = parameter.grad
            found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    return found


def experts_gradients_and_cache(path: Path, ids: torch.Tensor) -> tuple[str, bool, bool]:
    """What a backward says where FP8 experts were made of weights that ask for gradients.

    Then whether weights were quantized once for all calls, and anew after they had changed.
    """
    model = load(path, distributed=shared(path), experts_implementation="moefp8")
    try:
        model(ids).logits.sum().backward()
        said = ""
    except NotImplementedError as error:
        said = str(error)
    experts: Any = next(x for name, x in model.named_modules() if name.endswith("mlp.experts"))
    kept = experts.__dict__["_moefp8_experts"]
    with torch.no_grad():
        model(ids)
        is_kept = experts.__dict__["_moefp8_experts"] is kept
        scales = kept.weights[1].scale_inv
        wanted = 2 * scales
        experts.down_proj.to_local().mul_(2)
        model(ids)
    return said, is_kept, torch.equal(scales, wanted)  # in the same memory


@contextmanager
def counting() -> Iterator[list[int]]:
    """How many bytes transformers takes of each tensor of safetensors."""
    found: list[int] = []
    modeling: Any = transformers.modeling_utils
    whole = modeling.safe_open

    class Slice:
        def __init__(self, held: Any) -> None:
            self.held = held

        def __getattr__(self, name: str) -> Any:
            return getattr(self.held, name)

        def __getitem__(self, index: Any) -> torch.Tensor:
            taken = self.held[index]
            found.append(taken.nbytes)
            return taken

    class File:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = whole(*args, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def get_slice(self, key: str) -> Slice:
            return Slice(self.file.get_slice(key))

    modeling.safe_open = File
    try:
        yield found
    finally:
        modeling.safe_open = whole


def read_by(path: Path, options: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes read, and those of the model's parameters and buffers in experts and elsewhere."""
    with counting() as found:
        model = load(path, is_fp8=True, **options)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    sizes = {name: x.nbytes for name, x in tensors.items()}
    of_experts = sum(size for name, size in sizes.items() if ".experts." in name)
    return sum(found), of_experts, sum(sizes.values()) - of_experts


def saved(path: Path, target: Path, options: dict[str, Any]) -> None:
    load(path, is_fp8=True, **options).save_pretrained(target)


def own_model(path: Path, seconds: float | None = None) -> tuple[PreTrainedModel, int]:
    """The documented way: this rank's experts alone are read; and how many bytes that were."""
    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    moefp8.convert(model, only=fp8_modules(path, model=model))
    if dist.is_initialized():
        group = dist.group.WORLD if seconds is None else dist.new_group([0, 1])
        timeout = None if seconds is None else timedelta(seconds=seconds)
        moefp8.distributed.expert_parallel(model, group, timeout=timeout)
    rotary = model.model.rotary_emb  # computed from the config, stored in no checkpoint
    model.model.rotary_emb = type(rotary)(config)
    return model, moefp8.load_checkpoint(model, path).num_bytes


@torch.no_grad()
def own_logits(path: Path, ids: torch.Tensor) -> tuple[torch.Tensor, int]:
    model, num_bytes = own_model(path)
    return model(ids).logits, num_bytes


def generated(
    path: Path, ids: torch.Tensor, length: int, seconds: float | None = None, **options: Any
) -> torch.Tensor:
    """Greedy, of so many new tokens whatever they are."""
    model, _ = own_model(path, seconds)
    given = {"do_sample": False, "min_new_tokens": length, "max_new_tokens": length}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **given, **options)
