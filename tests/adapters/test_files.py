"""Files of adapters: what is written comes back, and nothing else is taken for it."""

import copy
import json

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import moefp8
from moefp8.adapters import add_lora, load_lora, lora_state_dict, remove_lora, save_lora
from tests.adapters.cases import E, H, I, Net, tokens, trained
from tests.adapters.files_cases import CONFIG, WEIGHTS, bare, change, states, unchanged

INNER, OUTER = (f"base_model.model.moe.experts.{x}lora_A.weight" for x in ("base_layer.", ""))


def test_files_bring_adapters_to_a_model_that_has_none(model, saved):
    other, x = bare(model), tokens()
    wanted = ["first", "moe.experts.gate_up_proj", "moe.experts.down_proj", "head"]
    assert load_lora(other, saved) == wanted
    assert torch.equal(other(x), model(x))
    assert [x.requires_grad for x in other.parameters()] == [
        x.requires_grad for x in model.parameters()
    ]
    assert sorted(file.name for file in saved.iterdir()) == [CONFIG, WEIGHTS]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_files_fill_the_same_adapters_of_any_dtype(model, saved, dtype):
    other = bare(model)
    add_lora(other, 4, 8, ["first", "experts", "head"], dtype=dtype)
    load_lora(other, saved)
    assert other.first.lora_weight.A.dtype == dtype
    wanted = [x.to(dtype) for x in lora_state_dict(model).values()]
    assert all(map(torch.equal, lora_state_dict(other).values(), wanted))


def wrapped(model):
    """The model in what puts names of its own between those of modules."""
    model = copy.deepcopy(model)
    model.moe = torch.compile(checkpoint_wrapper(model.moe), backend="eager")
    return torch.compile(model, backend="eager")


def test_wrappers_are_not_seen_in_files(model, saved):
    tensors, settings = load_file(saved / WEIGHTS), json.loads((saved / CONFIG).read_text())
    other = wrapped(model)
    save_lora(other, saved, state_dict=other.state_dict())
    again = load_file(saved / WEIGHTS)
    assert again.keys() == tensors.keys()
    assert all(torch.equal(x, tensors[key]) for key, x in again.items())
    assert json.loads((saved / CONFIG).read_text()) == settings
    other, x = wrapped(bare(model)), tokens()
    assert load_lora(other, saved) == load_lora(model, saved)
    assert torch.equal(other(x), model(x))
    remove_lora(other)
    assert add_lora(other, targets=["moe.experts.down_proj"]) == ["moe.experts.down_proj"]


def test_a_model_in_ddp_has_the_names_of_the_model(model):
    wanted = lora_state_dict(model)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp = DistributedDataParallel(moefp8.prepare_ddp(model))
        for outer in (ddp, torch.compile(ddp, backend="eager")):
            assert lora_state_dict(outer).keys() == wanted.keys()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("stack", ["gate_up_proj", "down_proj"])
def test_one_weight_of_experts_is_told_by_the_config(stack, tmp_path):
    model = Net()
    add_lora(trained(model), 3, 6, [f"experts.{stack}"], use_rslora=True)
    save_lora(model, tmp_path)
    assert list(load_file(tmp_path / WEIGHTS)) == [OUTER, OUTER.replace("A", "B")]
    other = Net()
    assert load_lora(other, tmp_path) == [f"moe.experts.{stack}"]
    assert other.moe.experts.get_submodule(f"lora_{stack}").scaling == 6 / 3**0.5
    change(tmp_path, target_parameters=None)
    with pytest.raises(ValueError, match=r"must name one weight of the experts moe\.experts"):
        load_lora(Net(), tmp_path)


def test_experts_lie_as_peft_lays_them(model):
    """As `ParamWrapper.get_delta_weight` of PEFT reads them."""
    state = lora_state_dict(model)
    for key, name in ((INNER, "gate_up_proj"), (OUTER, "down_proj")):
        lora = model.moe.experts.get_submodule(f"lora_{name}")
        a, b = state[key], state[key.replace("lora_A", "lora_B")]
        assert a.shape == (4 * E, lora.A.shape[2])
        assert b.shape == (lora.B.shape[1], 4 * E)
        deltas = torch.einsum("ore,eri->eoi", b.reshape(-1, 4, E), a.reshape(E, 4, -1))
        assert torch.equal(deltas, torch.einsum("eor,eri->eoi", lora.B, lora.A))


@pytest.mark.parametrize(
    ("add", "message"),
    [
        ({"rank": 2, "alpha": 8}, "rank=2, alpha=8.*rank=4, alpha=8.*remove_lora"),
        ({"rank": 4, "alpha": 16}, "alpha=16"),
        ({"rank": 4, "alpha": 8, "use_rslora": True}, "use_rslora=True"),
        ({"rank": 4, "alpha": 8, "targets": ["first", "head"]}, "no such adapter.*experts.*3 more"),
        ({"rank": 4, "alpha": 8}, "missing in the file.*shared_experts.*no such adapter.*head"),
    ],
)
def test_another_adapter_is_refused_and_nothing_changes(saved, add, message):
    other = Net()
    add_lora(other, **add)
    before = states(other)
    with pytest.raises(ValueError, match=message):
        load_lora(other, saved)
    assert unchanged(other, before)


def drop(tensors):
    del tensors["base_model.model.head.lora_B.weight"]


def cut(tensors):
    tensors[OUTER] = tensors[OUTER][1:].clone()


def rename(tensors):
    tensors["base_model.model.tail.lora_A.weight"] = tensors.pop(OUTER)


def add_bias(tensors):
    tensors["base_model.model.head.lora_B.bias"] = torch.zeros(4)


def as_fp8(tensors):
    tensors[OUTER] = tensors[OUTER].to(torch.float8_e4m3fn)


def unfused(tensors):
    tensors["base_model.model.moe.experts.0.up_proj.lora_A.weight"] = tensors.pop(OUTER)


@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (drop, "missing in the file: base_model.model.head.lora_B.weight"),
        (cut, r"experts.lora_A.weight must be \[16, 72\] for rank 4, got \[15, 72\]"),
        (rename, "tail"),
        (add_bias, "lora_B.bias"),
        (as_fp8, "must be bf16, fp16 or fp32"),
        (unfused, "experts.0.up_proj"),
        (dict.clear, "holds no tensors"),
    ],
)
def test_spoilt_files_are_refused_and_nothing_changes(model, saved, spoil, message, has_adapters):
    tensors = load_file(saved / WEIGHTS)
    spoil(tensors)
    save_file(tensors, saved / WEIGHTS)
    other = trained(model) if has_adapters else bare(model)
    before = states(other), [x.requires_grad for x in other.parameters()]
    with pytest.raises(ValueError, match=message):
        load_lora(other, saved)
    assert unchanged(other, before[0])
    assert [x.requires_grad for x in other.parameters()] == before[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'LORA'"),
        ({"use_dora": True}, "use_dora=True is not supported"),
        ({"bias": "all"}, "bias='all'"),
        ({"modules_to_save": ["head"]}, "modules_to_save"),
        ({"rank_pattern": {"first": 2}}, r"first.lora_A.weight must be \[2, 128\] for rank 2"),
        ({"rank_pattern": {"first": 0}}, "first must be an integer of at least 1"),
        ({"rank_pattern": {"(": 2}}, r"rank_pattern in .* has '\('.*missing \)"),
        ({"rank_pattern": {"a" * 2_000_001: 2}}, "rank_pattern.* must have at most 200 characters"),
        ({"rank_pattern": [2]}, "rank_pattern must be an object"),
        ({"alpha_pattern": {"first": "2"}}, "first must be a number above 0"),
        ({"something_new": {"x": 1}}, "something_new"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' changed the weights"),
        ({"r": 0}, "r must be"),
        ({"lora_alpha": "8"}, "lora_alpha must be"),
    ],
)
def test_what_is_no_plain_lora_is_refused_by_name(model, saved, settings, message):
    change(saved, **settings)
    with pytest.raises(ValueError, match=message):
        load_lora(bare(model), saved)


@pytest.mark.parametrize(
    "settings",
    [{"lora_dropout": 0.1}, {"init_lora_weights": "gaussian"}, {"use_dora": False}, {"bias": None}],
)
def test_what_does_not_count_is_passed_over(model, saved, settings):
    change(saved, **settings)
    assert len(load_lora(bare(model), saved)) == 4


@pytest.mark.parametrize("version", [None, "0.18.1", "0.18.2.dev0@abc"])
def test_old_files_are_refused_where_shapes_do_not_tell(version, tmp_path):
    """PEFT before 0.19 had A of experts on the side of their outputs."""
    experts = moefp8.GroupedExperts(2, 64, 64)
    add_lora(experts, targets="down_proj")
    save_lora(experts, tmp_path)
    load_lora(remove_lora(experts), tmp_path)
    change(tmp_path, peft_version=version)
    with pytest.raises(ValueError, match=r"must be of PEFT 0\.19\.0 or later.*down_proj"):
        load_lora(remove_lora(experts), tmp_path)
    change(tmp_path, peft_version="0.21.2")
    assert load_lora(experts, tmp_path) == ["down_proj"]


def test_files_that_are_missing_or_broken(model, saved):
    (saved / WEIGHTS).write_bytes(b"not a header")
    with pytest.raises(ValueError, match="cannot be read"):
        load_lora(bare(model), saved)
    (saved / WEIGHTS).unlink()
    with pytest.raises(FileNotFoundError, match="safe_serialization"):
        load_lora(bare(model), saved)
    for text in ("{", "[" * 100_000):
        (saved / CONFIG).write_text(text)
        with pytest.raises(ValueError, match="must be JSON"):
            load_lora(bare(model), saved)
    with pytest.raises(FileNotFoundError, match=r"load_lora: .*elsewhere.*snapshot_download"):
        load_lora(bare(model), saved / "elsewhere")


def test_a_rank_takes_its_own_experts(tmp_path):
    experts = moefp8.GroupedExperts(E, H, I)
    parts = [moefp8.shard(copy.deepcopy(experts), {"": "experts"}, rank, 2) for rank in range(2)]
    add_lora(experts)
    save_lora(trained(experts), tmp_path)
    for rank, part in enumerate(parts):
        assert load_lora(part, tmp_path) == ["gate_up_proj", "down_proj"]
        mine = experts.lora_down_proj.B[2 * rank : 2 * rank + 2]
        assert torch.equal(part.lora_down_proj.B, mine)
        with pytest.raises(ValueError, match="one rank's part"):
            save_lora(part, tmp_path)
