"""Files of adapters: what is written comes back, and nothing else is taken for it."""

import copy
import json
import os
import re
import resource
import time
from itertools import count
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

import moefp8
from moefp8.adapters import add_lora, load_lora, lora_state_dict, remove_lora, save_lora
from tests.adapters.cases import E, H, I, Net, tokens, trained

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
INNER, OUTER = (f"base_model.model.moe.experts.{x}lora_A.weight" for x in ("base_layer.", ""))


@pytest.fixture
def model():
    made = Net()
    add_lora(made, 4, 8, targets=["first", "experts", "head"])
    return trained(made)


@pytest.fixture
def saved(model, tmp_path) -> Path:
    save_lora(model, tmp_path / "adapter")
    return tmp_path / "adapter"


def bare(model):
    """The model without its adapters."""
    return remove_lora(copy.deepcopy(model))


def change(path: Path, **settings) -> None:
    file = path / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def states(model) -> list[tuple[str, torch.Tensor]]:
    return [(name, x.clone()) for name, x in model.state_dict().items() if "lora_" in name]


def unchanged(model, before) -> bool:
    after = states(model)
    return [n for n, _ in before] == [n for n, _ in after] and all(
        torch.equal(a, b) for (_, a), (_, b) in zip(before, after, strict=True)
    )


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


def test_a_model_without_adapters_has_nothing_to_save(tmp_path):
    assert lora_state_dict(Net()) == {}
    with pytest.raises(ValueError, match="has no adapters"):
        save_lora(Net(), tmp_path)


def test_files_are_replaced(model, saved):
    trained(model)
    save_lora(model, saved)
    x, other = tokens(), bare(model)
    load_lora(other, saved)
    assert torch.equal(other(x), model(x))


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def pair(folder: Path) -> tuple[bytes, bytes]:
    return (folder / WEIGHTS).read_bytes(), (folder / CONFIG).read_bytes()


class Killed(BaseException):
    """A process ends; what it would do in `finally` is left out, too."""


def killed_before(monkeypatch, number: int, run) -> bool:
    """Whether `run` came to the call of that number among those that rename, remove and sync."""
    left = [number]

    def counted(real):
        def call(*args, **options):
            left[0] -= 1
            if left[0] <= 0:
                raise Killed
            return real(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for name in ("replace", "rename", "unlink", "remove", "link", "fsync"):
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            run()
        except Killed:
            return True
    return False


@pytest.mark.parametrize("alpha", [8, 32])
def test_a_killed_save_pairs_no_weights_with_settings_of_others(
    model, saved, tmp_path, monkeypatch, alpha
):
    new, old = remove_lora(copy.deepcopy(model)), pair(saved)
    add_lora(new, 4, alpha, targets=["first", "experts", "head"])
    save_lora(trained(new), tmp_path / "new")
    outcomes, is_killed = [], True
    while is_killed:
        save_lora(model, saved)
        assert pair(saved) == old
        number = len(outcomes) + 1
        is_killed = killed_before(monkeypatch, number, lambda: save_lora(new, saved))
        if (saved / CONFIG).exists():
            outcomes.append({old: "old", pair(tmp_path / "new"): "new"}[pair(saved)])
        else:
            outcomes.append("refused")
            with pytest.raises(FileNotFoundError, match=r"adapter_config\.json is missing.*killed"):
                load_lora(bare(model), saved)
    assert outcomes == sorted(outcomes, key=["old", "refused", "new"].index)
    assert {outcomes[0], outcomes[-1]} == {"old", "new"}
    assert ("refused" in outcomes) == (alpha == 32)  # the same settings stay where they are


@pytest.mark.parametrize("fails", ["replace", "fsync"])
@pytest.mark.parametrize("has_old", [True, False])
def test_a_save_that_fails_changes_nothing(model, saved, monkeypatch, has_old, fails):
    before = contents(saved)
    add_lora(other := bare(model), 2, 4)
    if not has_old:
        before = {"notes.txt": b"kept"}
        for file in saved.iterdir():
            file.unlink()
        (saved / "notes.txt").write_bytes(b"kept")
    real = getattr(os, fails)

    def call(*args, **options):
        if fails == "fsync" or Path(args[1]).name == WEIGHTS:
            raise OSError(5, "Input/output error")
        return real(*args, **options)

    monkeypatch.setattr(os, fails, call)
    with pytest.raises(OSError, match=r"save_lora: .*adapter.* \(Input/output error\)"):
        save_lora(other, saved)
    assert contents(saved) == before


def test_a_full_disk_is_an_error_that_names_the_directory(model, saved):
    before, limits = contents(saved), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large") as raised:
            save_lora(trained(model), saved)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(saved) in str(raised.value)
    assert contents(saved) == before


def test_a_save_while_files_are_read_is_seen(model, saved, monkeypatch):
    add_lora(new := bare(model), 4, 32, targets=["first", "experts", "head"])
    read, saves = json.loads, [lambda: save_lora(new, saved)]

    def loads(text, **options):
        settings = read(text, **options)
        if saves:
            saves.pop()()
        return settings

    monkeypatch.setattr(json, "loads", loads)
    other = bare(model)
    with pytest.raises(ValueError, match=r"load_lora: .* was written while it was read; load"):
        load_lora(other, saved)
    assert states(other) == []
    load_lora(other, saved)
    assert other.first.lora_weight.alpha == 32


def saved_linear(name: str, folder: Path, **settings) -> torch.nn.ModuleDict:
    """A model of one linear, whose adapter was saved to the folder with these settings."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(8, 8).bfloat16()})
    add_lora(model, 4, 8, targets=[name])
    save_lora(model, folder)
    change(folder, **settings)
    return remove_lora(model)


HOSTILE = "(a+)+x", "(a|a)*x", "(?:a|aa)+", "a?" * 30 + "a" * 30, ".*" * 50, r"(a)\1", "(?i)a"


@pytest.mark.parametrize("pattern", HOSTILE)
@pytest.mark.parametrize("key", ["rank_pattern", "alpha_pattern"])
def test_patterns_that_could_take_long_are_refused(key, pattern, tmp_path):
    """Some have 2**25 ways to try. CPU time counts, since other processes run beside this one."""
    model = saved_linear("a" * 25, tmp_path, **{key: {"q_proj": 2, pattern: 4}})
    started = time.process_time()
    with pytest.raises(ValueError, match=rf"{key} in adapter_config.json has .*names of modules"):
        load_lora(model, tmp_path)
    assert time.process_time() - started < 2
    assert states(model) == []


@pytest.mark.parametrize(
    ("num_patterns", "problem"), [(40, "to match them up to .* took too long"), (60, "too many")]
)
def test_many_patterns_of_a_file_have_one_deadline(num_patterns, problem, tmp_path, monkeypatch):
    """They are compiled, then matched; the clock goes 0.1 s on from look to look, up to 5 s."""
    monkeypatch.setattr(time, "thread_time", count(step=0.1).__next__)
    simple = {f"b{i}": 1 for i in range(num_patterns)}
    model = saved_linear("a", tmp_path, alpha_pattern=simple)
    with pytest.raises(ValueError, match=f"must be simple, but .*{problem}"):
        load_lora(model, tmp_path)
    assert states(model) == []


def test_patterns_are_not_matched_with_names_that_are_too_long(tmp_path):
    model = saved_linear("a" * 129, tmp_path, alpha_pattern={"a": 1})
    with pytest.raises(ValueError, match="has more than 128 characters"):
        load_lora(model, tmp_path)


def test_patterns_mean_what_they_mean_to_peft(tmp_path):
    """PEFT puts `(.*\\.)?` before a pattern, and `$` after it; the first that matches counts."""
    names = ["layers.0.q", "layers.1.q", "layers.1.k", "layers.2.up", "layers.3.up", "b.layers.0.q"]
    listed = "|".join(map(str, range(2, 40)))
    patterns = ["b.layers.0.q", r"(?:model\.)?layers\.0\.(?:q|k)_?", r"^layers\.1\.q", r".*\.\d\.k"]
    patterns += [rf"layers\.({listed})\.(?:up)", ".*"]
    alphas = {pattern: 2**i for i, pattern in enumerate(patterns)}
    model = torch.nn.Module()
    for name in names:
        path, _, last = name.rpartition(".")
        parent = model
        for part in path.split("."):
            if not hasattr(parent, part):
                parent.add_module(part, torch.nn.Module())
            parent = getattr(parent, part)
        parent.add_module(last, torch.nn.Linear(8, 8).bfloat16())
    add_lora(model, 1, 1, targets=names)
    save_lora(model, tmp_path)
    change(tmp_path, alpha_pattern=alphas)
    load_lora(remove_lora(model), tmp_path)
    for name in names:
        expected = next(x for p, x in alphas.items() if re.match(rf"(.*\.)?({p})$", name))
        assert model.get_submodule(name).lora_weight.scaling == expected, name


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
