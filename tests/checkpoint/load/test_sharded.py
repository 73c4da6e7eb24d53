"""A rank of a sharded model loads what it would keep of the whole, and reads its own bytes."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import moefp8
from moefp8.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from moefp8.layers import FP8Linear, GroupedExperts
from tests.checkpoint.cases import (
    E,
    H,
    I,
    StackedExperts,
    Tiny,
    bytes_of,
    deepseek_tensors,
    fp8_pair,
    minimax_name,
    model_bytes,
    refuse,
    spoiled,
    write,
)

PLANS = {
    "experts": {"*.experts": "experts"},
    "intermediate": {"*.experts": "intermediate", "*.shared_experts.gate_proj": "rows"},
    "linears": {
        "*.kv_a_proj_with_mqa": "rows",
        "*.shared_experts.down_proj": "columns",
        "lm_head": "rows",
    },
}
EXPERT = "model.layers.0.mlp.experts"


def on_meta(plan: dict, rank: int, num_ranks: int, num_layers: int = 1) -> nn.Module:
    with torch.device("meta"):
        model = Tiny(num_layers)
    return moefp8.shard(model, plan, rank, num_ranks)


def kept_of_whole(path, plan: dict, rank: int, num_ranks: int) -> nn.Module:
    """A rank's part of a model that is loaded whole."""
    load_checkpoint(model := Tiny(1), path)
    return moefp8.shard(model, plan, rank, num_ranks)


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("place", ["meta", "memory"])
@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_a_rank_loads_what_it_would_keep(tmp_path, plan, num_ranks, place, scales):
    tensors = {minimax_name(k): t for k, t in deepseek_tensors(1, scales).items()}
    path = write(tmp_path / "c", tensors, num_shards=3)
    for rank in range(num_ranks):
        model = on_meta(plan, rank, num_ranks)
        load_checkpoint(model if place == "meta" else spoiled(model), path)
        assert model_bytes(model) == model_bytes(kept_of_whole(path, plan, rank, num_ranks))
        assert all(bytes_of(x) for x in model.parameters())


def test_a_model_made_in_inference_mode(tmp_path):
    path = write(tmp_path / "c", deepseek_tensors(1))
    with torch.inference_mode():
        model = spoiled(on_meta(PLANS["intermediate"], 1, 3))
        load_checkpoint(model, path)
    assert model_bytes(model) == model_bytes(kept_of_whole(path, PLANS["intermediate"], 1, 3))


@pytest.mark.parametrize("kind", ["experts", "intermediate"])
def test_fused_keys_of_a_state_dict(tmp_path, kind):
    path, plan = tmp_path / "own.safetensors", {"*.experts": kind}
    save_file(Tiny(1).state_dict(), path)
    model = on_meta(plan, 1, 3)
    report = load_checkpoint(model, path)
    assert model_bytes(model) == model_bytes(kept_of_whole(path, plan, 1, 3))
    if kind == "experts":
        assert report.num_bytes == num_bytes_of(model)


def test_experts_along_both_axes(tmp_path):
    path, plan = write(tmp_path / "c", deepseek_tensors(1)), {"*.experts": "experts"}
    wanted, model = kept_of_whole(path, plan, 1, 3), on_meta(plan, 1, 3)
    for each in (wanted, model):
        moefp8.shard(each, {"*.experts": "intermediate"}, 1, 2)
    load_checkpoint(model, path)
    assert model_bytes(model) == model_bytes(wanted)


@pytest.mark.parametrize("kind", ["experts", "intermediate", "whole"])
@pytest.mark.parametrize("stored", ["fused", "each"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_in_bf16(tmp_path, kind, stored, dtype):
    (gate, up), down = torch.randn(2, E, I, H, dtype=dtype), torch.randn(E, H, I, dtype=dtype)
    fused = {"experts.gate_up_proj": torch.cat((gate, up), 1), "experts.down_proj": down}
    each = {
        f"experts.{e}.{name}_proj.weight": tensor[e].clone()
        for name, tensor in {"gate": gate, "up": up, "down": down}.items()
        for e in range(E)
    }
    path = write(tmp_path / "c", fused if stored == "fused" else each, {})
    num_ranks = 1 if kind == "whole" else 2
    for rank in range(num_ranks):
        model = nn.ModuleDict({"experts": StackedExperts()})
        if kind != "whole":
            moefp8.shard(model, {"experts": kind}, rank, num_ranks)
        load_checkpoint(model, path)
        size = E if kind == "experts" else I
        own = slice(rank * size // num_ranks, (rank + 1) * size // num_ranks)
        rows = (own,) if kind == "experts" else (slice(None), own)
        columns = (own,) if kind == "experts" else (..., own)
        gate_up = torch.cat((gate[rows], up[rows]), 1).bfloat16()
        assert torch.equal(model["experts"].gate_up_proj, gate_up)
        assert torch.equal(model["experts"].down_proj, down[columns].bfloat16())


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, int]]:
    """(first byte, number of bytes) of every read of tensors."""
    made = []
    preadv = os.preadv

    def counted(file, buffers, begin):
        num_bytes = preadv(file, buffers, begin)
        made.append((begin, num_bytes))
        return num_bytes

    monkeypatch.setattr(os, "preadv", counted)
    return made


class Big(nn.Module):
    """Sizes of which a rank's share is far from a whole tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = GroupedExperts(8, 512, 1280)
        self.rows = FP8Linear(1024, 1152, bias=False)
        self.columns = FP8Linear(8192, 256, bias=True)


def num_bytes_of(model: nn.Module) -> int:
    return sum(x.nbytes for x in model.state_dict().values())


def big_tensors() -> dict[str, torch.Tensor]:
    tensors = {**fp8_pair("rows", 1152, 1024), **fp8_pair("columns", 256, 8192)}
    tensors["columns.bias"] = torch.randn(256).bfloat16()
    for expert in range(8):
        for name, *shape in (("gate", 1280, 512), ("up", 1280, 512), ("down", 512, 1280)):
            tensors |= fp8_pair(f"experts.{expert}.{name}_proj", *shape)
    return tensors


@pytest.mark.parametrize("num_ranks", [4, 7])
def test_a_rank_reads_its_own_bytes(tmp_path, calls, num_ranks):
    """It reads no byte of other rows, experts or columns (4 KiB apart or more), but for scales."""
    path = write(tmp_path / "c", big_tensors())
    plan = {"experts": "experts", "rows": "rows", "columns": "columns"}
    for rank in range(num_ranks):
        with torch.device("meta"):
            model = Big()
        moefp8.shard(model, plan, rank, num_ranks)
        calls.clear()
        report = load_checkpoint(model, path)
        num_read = sum(num_bytes for _, num_bytes in calls)  # scales are read twice: once to check
        assert report.num_bytes < num_read <= report.num_bytes * 1.001
        held = num_bytes_of(model)
        zeros = model.rows.rows_before * 1024 + model.columns.columns_before * 256
        scales_of_columns = 2 * 64 * 4  # their gaps are read too
        assert held - zeros <= report.num_bytes <= held - zeros + scales_of_columns
        weights = [begin for begin, num_bytes in calls if num_bytes > 10_000]
        assert len({*weights}) == len(weights)
        assert max(num_bytes for _, num_bytes in calls) < 512 * 1280 + 1


def test_short_gaps_are_read_through(tmp_path, calls):
    path = write(tmp_path / "c", big_tensors())
    with torch.device("meta"):
        model = Big()
    moefp8.shard(model, {"experts": "intermediate"}, 1, 4)
    report = load_checkpoint(model, path)
    rest = num_bytes_of(model) - num_bytes_of(model.experts)
    part = 1280 // 4
    gate_up = 2 * part * 512
    down = 511 * 1280 + part  # from the first byte of ours to the last,
    down -= 1280 - part  # but in two tasks, and what lies between is not read
    scales = 2 * 3 * 4 * 4 + (3 * 10 + 3) * 4  # 320 of 320 .. 640 touch the blocks 2, 3 and 4
    assert report.num_bytes == rest + 8 * (gate_up + down + scales)
    assert len(calls) < 100


def test_files_of_others_stay_closed(tmp_path, monkeypatch):
    tensors = deepseek_tensors(1)
    own = [key for key in tensors if ".experts.1." in key or ".experts." not in key]
    order = [*own, *(key for key in tensors if key not in own)]
    path = write(tmp_path / "c", {"x": torch.zeros(1)})
    (path / "model.safetensors").unlink()
    files = {"own": own, "others": order[len(own) :]}
    weight_map = {}
    for name, keys in files.items():
        save_file({key: tensors[key] for key in keys}, path / f"{name}.safetensors")
        weight_map |= dict.fromkeys(keys, f"{name}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    opened = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda p, *a, **k: (opened.append(str(p)), real(p, *a, **k))[1])
    load_checkpoint(on_meta(PLANS["experts"], 1, 3), path)
    times = {name: opened.count(str(path / f"{name}.safetensors")) for name in files}
    assert times == {"own": 2, "others": 1}  # once for its header


@pytest.mark.parametrize("expert", [0, 1, 2])
def test_every_rank_tells_of_a_missing_expert(tmp_path, expert):
    tensors = deepseek_tensors(1)
    key = f"{EXPERT}.{expert}.up_proj.weight"
    del tensors[key], tensors[f"{key}_scale_inv"]
    path = write(tmp_path / "c", tensors)
    refuse(path, f"{key}: missing from", model=on_meta(PLANS["experts"], 1, 3))


def test_experts_of_nobody_and_wrong_sizes_are_told(tmp_path):
    tensors = {**deepseek_tensors(1), **fp8_pair(f"{EXPERT}.{E}.gate_proj", I, H)}
    tensors |= fp8_pair(f"{EXPERT}.0.down_proj", H, I + 1)
    path = write(tmp_path / "c", tensors)
    of_nobody = f"expert {E}, but {EXPERT} has {E} experts"
    wrong_size = f"shape must be [{H}, {I}], got [{H}, {I + 1}]"
    refuse(path, of_nobody, wrong_size, model=on_meta(PLANS["experts"], 1, 3))


def test_a_bias_is_of_rank_0(tmp_path):
    path = write(tmp_path / "c", {**fp8_pair("0", 256, 256), "0.bias": torch.ones(256)})
    for rank in range(2):
        model = nn.Sequential(FP8Linear(256, 256, device="meta"))
        report = load_checkpoint(moefp8.shard(model, {"0": "columns"}, rank, 2), path)
        assert (model[0].bias is None) == (rank == 1)
        assert report.num_tensors == 3 - rank
        assert report.ignored == ()


def test_a_part_is_not_saved(tmp_path):
    model = moefp8.shard(Tiny(1), PLANS["linears"], 0, 2)
    with pytest.raises(CheckpointError, match=r"3 modules hold one rank's part alone \(model"):
        save_checkpoint(model, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("size", [320, 192])
def test_fused_scales_of_gate_and_up_as_one_are_refused(tmp_path, size):
    model, key = (
        nn.ModuleDict({"experts": GroupedExperts(2, H, size)}),
        "experts.gate_up_proj_scale_inv",
    )
    tensors = model.state_dict()
    num_blocks = -(-2 * size // 128)
    assert num_blocks != tensors[key].shape[1]
    tensors[key] = tensors[key][:, :num_blocks].contiguous()
    path = write(tmp_path / "c", tensors)
    told = f"these cut all {2 * size} rows into blocks, one of which holds rows of gate and of up"
    refuse(path, told, key, model=model)
