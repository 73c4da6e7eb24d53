"""16-bit checkpoints to quantize, in the namings of many families, and what should become of them.

What is expected here is not computed by moefp8.checkpoint.
"""

import json
from pathlib import Path

import pytest
import torch

from moefp8.checkpoint import QuantizeReport, quantize_checkpoint
from moefp8.checkpoint.quantize import stream
from tests.checkpoint.cases import minimax_name, write

H, I, E = 256, 192, 2  # I / 128 is not whole
LAYER = "model.layers.0"
LINEAR, EXPERTS = f"{LAYER}.q_proj.weight", f"{LAYER}.mlp.experts"
PLAIN = {"model_type": "tiny", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
OTHERS = ("tokenizer.json", "chat_template.jinja", "modeling_own.py", "templates/tool.jinja")


def bf16(*shape: int) -> torch.Tensor:
    return torch.randn(shape).bfloat16()


def expert_tensors(module: str = EXPERTS) -> dict:
    shapes = {"gate": (I, H), "up": (I, H), "down": (H, I)}
    return {
        f"{module}.{expert}.{name}_proj.weight": bf16(*shape)
        for expert in range(E)
        for name, shape in shapes.items()
    }


def stacked_tensors(module: str = EXPERTS) -> dict:
    """Stack experts as transformers holds them in memory."""
    return {
        f"{module}.gate_up_proj": bf16(E, 2 * I, H),
        f"{module}.down_proj": bf16(E, H, I),
    }


Family = tuple[dict, list[str]]  # its tensors, modules that stay; the other matrices become FP8


def family(others: dict, stay: dict[str, torch.Tensor]) -> Family:
    """Join others, key -> tensor, with the weights that stay, module -> weight."""
    return others | {f"{module}.weight": weight for module, weight in stay.items()}, list(stay)


def deepseek_v3() -> Family:
    """Make a layer of DeepSeek-V3.2 and its MTP layer."""
    last = "model.layers.1"
    stay = {"lm_head": bf16(16, H), f"{last}.eh_proj": bf16(H, 2 * H)}
    stay |= {f"{last}.shared_head.head": bf16(16, H)}
    others = {
        "model.embed_tokens.weight": bf16(16, H),
        "model.norm.weight": bf16(H),
        f"{last}.embed_tokens.weight": bf16(16, H),
        f"{last}.shared_head.norm.weight": bf16(H),
    }
    for layer in (LAYER, last):
        stay |= {f"{layer}.self_attn.indexer.weights_proj": bf16(8, H)}
        stay |= {f"{layer}.mlp.gate": bf16(E, H)}
        others |= {
            f"{layer}.self_attn.kv_a_proj_with_mqa.weight": bf16(200, H),
            f"{layer}.self_attn.kv_a_layernorm.weight": bf16(72),
            f"{layer}.self_attn.indexer.wk.weight": bf16(128, H),
            f"{layer}.mlp.gate.e_score_correction_bias": torch.randn(E),
            f"{layer}.mlp.shared_experts.gate_proj.weight": bf16(I, H),
            **expert_tensors(f"{layer}.mlp.experts"),
        }
    return family(others, stay)


def qwen3_next() -> Family:
    stay = {
        f"{LAYER}.linear_attn.in_proj_ba": bf16(8, H),
        f"{LAYER}.mlp.gate": bf16(E, H),
        f"{LAYER}.mlp.shared_expert_gate": bf16(1, H),
        "mtp.fc": bf16(H, 2 * H),
    }
    others = {
        "model.embed_tokens.weight": bf16(16, H),
        f"{LAYER}.linear_attn.in_proj_qkvz.weight": bf16(300, H),
        f"{LAYER}.linear_attn.conv1d.weight": bf16(300, 1, 4),
        f"{LAYER}.linear_attn.A_log": torch.randn(4),
        f"{LAYER}.self_attn.q_proj.weight": bf16(H, H),
        f"{LAYER}.self_attn.q_proj.bias": bf16(H),
        f"{LAYER}.mlp.shared_expert.up_proj.weight": bf16(I, H),
        **expert_tensors(),
        "mtp.layers.0.self_attn.q_proj.weight": bf16(H, H),
    }
    tensors, kept = family(others, stay)
    return tensors, [*kept, "lm_head"]  # the head is tied


def minimax_m2() -> Family:
    """Mixtral has the same names, but no bias."""
    bias = {f"{LAYER}.mlp.gate.e_score_correction_bias": torch.randn(E)}
    stay = {f"{LAYER}.mlp.gate": bf16(E, H), "lm_head": bf16(16, H)}
    tensors, kept = family(bias | expert_tensors(), stay)
    named = {minimax_name(key): tensor for key, tensor in tensors.items()}
    return named, [*map(minimax_name, kept)]


def qwen3_5() -> Family:
    """Make a layer with stacked experts, nested in a model that sees."""
    layer, seen = "model.language_model.layers.0", "model.visual.blocks.0"
    stay = {
        f"{seen}.attn.qkv": bf16(H, H),
        f"{layer}.linear_attn.in_proj_a": bf16(4, H),
        f"{layer}.mlp.gate": bf16(E, H),
        "lm_head": bf16(16, H),
    }
    others = {
        f"{seen}.mlp.experts.gate_up_proj": bf16(2, 3, 4),
        "model.visual.pos_embed.weight": bf16(16, H),
        "model.visual.patch_embed.proj.weight": bf16(8, 3, 2, 4, 4),
        "model.language_model.embed_tokens.weight": bf16(16, H),
        f"{layer}.linear_attn.in_proj_qkv.weight": bf16(H, H),
        **stacked_tensors(f"{layer}.mlp.experts"),
    }
    tensors, kept = family(others, stay)
    return tensors, [*kept, f"{seen}.mlp.experts"]


def kimi_k25() -> Family:
    layer = "language_model.model.layers.0"
    stay = {
        "vision_tower.encoder.layers.0.q_proj": bf16(H, H),
        "mm_projector.linear_1": bf16(H, H),
        f"{layer}.mlp.gate": bf16(E, H),
        "language_model.lm_head": bf16(16, H),
    }
    linear = {f"{layer}.self_attn.o_proj.weight": bf16(H, 130)}
    return family(linear | expert_tensors(f"{layer}.mlp.experts"), stay)


FAMILIES = {
    make.__name__: make for make in (deepseek_v3, qwen3_next, minimax_m2, qwen3_5, kimi_k25)
}


def write_source(directory: Path, tensors: dict, config: dict | None = None, num_shards: int = 1):
    """Write a checkpoint, files that a model needs, and files that must not come along."""
    write(directory, tensors, PLAIN if config is None else config, num_shards)
    second = ("pytorch_model.bin", "pytorch_model.bin.index.json", "x.gguf", "original/params.json")
    for name in (*OTHERS, *second, ".git/config"):
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(f"this is {name}")
    return directory


def quantized(folder: Path, tensors: dict, num_shards: int = 1, **options) -> QuantizeReport:
    """Write tensors to `folder/s`, and quantize them to `folder/t`."""
    source = write_source(folder / "s", tensors, num_shards=num_shards)
    return quantize_checkpoint(source, folder / "t", **options)


def files_of(directory: Path) -> dict[str, bytes]:
    """Return name -> content of all that is below."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }


def quantization_of(directory: Path) -> dict:
    return json.loads((directory / "config.json").read_text())["quantization_config"]


def partial_of(target: Path) -> Path:
    return target.with_name(f".{target.name}.partial")


def finished(target: Path) -> dict[str, tuple[int, int]]:
    """Return shard -> inode and time, of those that bear their names."""
    found = {path.name: path.stat() for path in partial_of(target).rglob("*.safetensors")}
    return {name: (status.st_ino, status.st_mtime_ns) for name, status in found.items()}


def interrupt(source: Path, target: Path, after: int = 3, **options) -> dict:
    """Run until so many shards are done, and return what is finished then."""
    real, left = stream.run_all, [after]

    def stop(*arguments, **options):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "run_all", stop)
        with pytest.raises(KeyboardInterrupt):
            quantize_checkpoint(source, target, **options)
    found = finished(target)
    assert len(found) == after
    assert not list(partial_of(target).rglob("*.tmp"))
    return found
