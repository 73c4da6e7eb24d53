"""Experts copied once into their stacks: what transformers' own steps give, and back again."""

import pytest
import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

from moefp8.hf.merge import copying_once, is_target

GATE, UP, DOWN = (f"mlp.experts.*.{name}_proj.weight" for name in ("gate", "up", "down"))


def gate_up(operations=None) -> WeightConverter:
    operations = operations or [MergeModulelist(dim=0), Concatenate(dim=1)]
    return WeightConverter([GATE, UP], "mlp.experts.gate_up_proj", operations)


def down() -> WeightConverter:
    return WeightConverter([DOWN], "mlp.experts.down_proj", [MergeModulelist(dim=0)])


def merged(converter: WeightConverter, tensors: dict[str, list[torch.Tensor]]) -> torch.Tensor:
    found = {name: list(each) for name, each in tensors.items()}
    for step in converter.operations:
        found = step.convert(
            found,
            source_patterns=converter.source_patterns,
            target_patterns=converter.target_patterns,
        )
    (result,) = found.values()
    return result


def drawn(dtype: torch.dtype, rows: int, columns: int) -> list[torch.Tensor]:
    size = rows * columns * dtype.itemsize
    return [
        torch.randint(0, 100, (size,), dtype=torch.uint8).view(dtype).view(rows, columns)
        for _ in range(5)
    ]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_stacks_are_those_of_transformers(dtype, mode):
    tensors = {GATE: drawn(dtype, 6, 4), UP: drawn(dtype, 6, 4)}
    with mode():
        ours, theirs = merged(copying_once(gate_up()), tensors), merged(gate_up(), tensors)
        assert ours.shape == (5, 12, 4)
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        tensors = {DOWN: drawn(dtype, 4, 6)}
        ours, theirs = merged(copying_once(down()), tensors), merged(down(), tensors)
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_other_conversions_and_those_of_the_registry_stay():
    original = gate_up()
    changed = copying_once(original)
    assert changed is not original
    assert [type(step) for step in original.operations] == [MergeModulelist, Concatenate]
    for ours, theirs in zip(changed.operations, original.operations, strict=True):
        assert isinstance(ours.reverse_op, type(theirs.reverse_op))
    other = gate_up([MergeModulelist(dim=0), Concatenate(dim=1), Transpose(1, 2)])
    assert copying_once(other) is other
    assert copying_once("a renaming") == "a renaming"


def test_experts_of_different_sizes_are_an_error():
    tensors = {GATE: drawn(torch.float32, 6, 4), UP: drawn(torch.float32, 6, 4)[:4]}
    with pytest.raises(ValueError, match="shorter"):
        merged(copying_once(gate_up()), tensors)
    tensors[UP] = [*tensors[GATE][:4], torch.zeros(5, 4)]
    with pytest.raises(ValueError, match="of one shape"):
        merged(copying_once(gate_up()), tensors)


def test_groups_of_a_target_stand_for_anything():
    assert is_target(r"\.mlp\.\1\.gate_up_proj", "layers.0.mlp.experts.gate_up_proj")
    assert not is_target(r"\.mlp\.\1\.gate_up_proj", "layers.0.mlp.experts.gate_up_proj.weight")
    assert not is_target(r"mlp.down_proj", "mlp.up_proj")
