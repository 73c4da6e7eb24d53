"""Whole models of which each rank holds some experts; each function runs on one rank."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import moefp8
from moefp8 import MoE
from moefp8.distributed import expert_parallel
from tests.distributed.expert_parallel.error_cases import told

RANKS, E, H, I = 2, 5, 144, 72


class Model(nn.Module):
    """Two layers of experts behind a linear."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.Linear(H, H)
        self.layers = nn.ModuleList(
            MoE(H, I, E, 2, shared_intermediate_size=40, **options) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


def whole(seed: int = 0, **options: Any) -> Model:
    torch.manual_seed(seed)
    return moefp8.convert(Model(**options).bfloat16())


def batch(rank: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(2, 3 + rank, H, generator=generator).to(dtype)


def grad_of(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return batch(rank, dtype).flip(-1)


def on_meta() -> Model:
    """As a server makes it."""
    with torch.device("meta"):
        model = Model().bfloat16()
    moefp8.convert(model)
    return expert_parallel(model, dist.group.WORLD)


def loaded(rank: int, path: Path, adapters: Path | None) -> Any:
    """Bytes that were read, the model's state and what it gives."""
    model = on_meta()
    report = moefp8.load_checkpoint(model, path)
    if adapters is not None:
        moefp8.adapters.load_lora(model, adapters)
    with torch.no_grad():
        y = model(batch(rank))
    return report.num_bytes, model.state_dict(), y


def of_a_moe(rank: int, dtype: torch.dtype) -> Any:
    """`MoE` with a mesh: what it gives, gradients of tokens and of the gate of shared experts."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"shared_intermediate_size": 40, "shared_expert_gate": True}
    moe = MoE(H, I, E, 2, expert_mesh=dist.group.WORLD, **options)
    x = batch(rank, dtype).requires_grad_()
    y = moe(x)
    y.backward(grad_of(rank, dtype))
    return y.detach(), x.grad, moe.shared_expert_gate.weight.grad


def refused(rank: int, folder: Path) -> dict[str, Any]:
    """What cannot be done with a part, and what can."""
    frozen = expert_parallel(whole(), dist.group.WORLD)
    trained = expert_parallel(whole(trainable=True), dist.group.WORLD)
    adapted = expert_parallel(whole(), dist.group.WORLD)
    moefp8.adapters.add_lora(adapted, rank=2, targets=["experts"])
    before = {name: x.data_ptr() for name, x in frozen.named_parameters()}
    found = {
        "save": told(lambda: moefp8.save_checkpoint(frozen, folder / f"{rank}")),
        "save_lora": told(lambda: moefp8.adapters.save_lora(adapted, folder / f"lora-{rank}")),
        "freeze": told(lambda: moefp8.freeze(trained)),
        "unfreeze": told(lambda: moefp8.unfreeze(frozen)),
        "dequantize": told(lambda: moefp8.dequantize(frozen)),
        "dequantize, trained": told(lambda: moefp8.dequantize(trained)),
        "to_plain": told(lambda: frozen.layers[0].experts.to_plain()),
        "shard": told(lambda: moefp8.shard(frozen, {"*.experts": "experts"}, rank, RANKS)),
        "reference": told(lambda: moefp8.testing.reference_model(frozen)),
        "prepare_ddp": told(lambda: moefp8.prepare_ddp(frozen)),
        "again": told(lambda: expert_parallel(frozen, dist.group.WORLD)),
    }
    found["changed"] = before != {name: x.data_ptr() for name, x in frozen.named_parameters()}
    found["convert"] = moefp8.convert(frozen) is frozen
    found["is parallel"] = frozen.layers[0].experts.parallel is not None
    return found


def changed_later(rank: int) -> Any:
    """`convert` after `expert_parallel`."""
    torch.manual_seed(0)
    model = expert_parallel(Model().bfloat16(), dist.group.WORLD)
    moefp8.convert(model)
    with torch.no_grad():
        return type(model.first).__name__, model(batch(rank))


def states(rank: int) -> dict[str, torch.Tensor]:
    """A state goes to another model, and that gives the same."""
    model, other = (expert_parallel(whole(seed), dist.group.WORLD) for seed in (0, 1))
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(model(batch(rank)), other(batch(rank)))
    return model.state_dict()


def num_kernels(rank: int) -> list[int]:
    return [moefp8.precompile(on_meta(), n, top_k=2).num_kernels for n in (1, 64)]
