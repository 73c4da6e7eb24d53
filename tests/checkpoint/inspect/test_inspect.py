"""`inspect` tells what a checkpoint holds, and every fault with its file and key, and goes on."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoint import write_small_checkpoint

from moefp8.checkpoint import CheckpointError, inspect_checkpoint, load_checkpoint
from moefp8.cli.main import main
from tests.checkpoint.cases import (
    CONFIG,
    E,
    H,
    I,
    Tiny,
    deepseek_tensors,
    fp8_pair,
    minimax_name,
    write,
)
from tests.checkpoint.inspect.cases import config_with

EXPERT = "model.layers.0.mlp.experts.1"
LINEAR = "model.layers.0.kv_a_proj_with_mqa"
FOLDED = "model.layers.*.mlp.experts.*"


def told(path, rule: str, **options):
    """Return the one anomaly of this rule."""
    anomalies = inspect_checkpoint(path, **options).anomalies
    found = [anomaly for anomaly in anomalies if rule in anomaly.rule]
    assert len(found) == 1, anomalies
    return found[0]


def loads(path) -> bool:
    try:
        return bool(load_checkpoint(Tiny(), path))
    except CheckpointError:
        return False


def test_a_sound_checkpoint(tmp_path):
    path = write(tmp_path / "c", deepseek_tensors(), {**CONFIG, "num_experts": E}, num_shards=3)
    found = inspect_checkpoint(path, weights=False)
    assert found.is_loadable
    assert found.anomalies == ()
    kinds = {kind.name: kind for kind in found.kinds}
    gate = kinds[f"{FOLDED}.gate_proj.weight"]
    assert (gate.count, gate.shapes, gate.dtypes) == (2 * E, ((I, H),), ("F8_E4M3",))
    assert (gate.scale_dtypes, gate.scale_grids) == (("F32",), ((3, 2),))
    assert gate.num_bytes == 2 * E * (I * H + 4 * 3 * 2)
    num_bytes = sum(x.nbytes for x in deepseek_tensors().values())
    for amounts in (found.dtypes, found.files):
        assert sum(amount.num_bytes for amount in amounts) == num_bytes
        assert sum(amount.count for amount in amounts) == len(deepseek_tensors())
    assert sum(kind.num_bytes for kind in found.kinds) == num_bytes
    assert len(found.files) == 3
    family = found.family
    assert (family.num_layers, family.num_experts, family.moe_intermediate_size) == (2, E, I)
    assert family.naming == ("DeepSeek's",)


@pytest.mark.parametrize("odd", ["00", "\u0660", "\uff10", "01"])
@pytest.mark.parametrize("part", ["experts", "layers"])
def test_numbers_that_no_model_has(tmp_path, odd, part):
    old, new = f"{part}.{'1' if odd == '01' else '0'}.", f"{part}.{odd}."
    renamed = {key.replace(old, new): tensor for key, tensor in deepseek_tensors().items()}
    path = write(tmp_path / "c", renamed)
    found = [x for x in inspect_checkpoint(path).anomalies if "models write otherwise" in x.rule]
    assert {x.severity for x in found} == {"error"}
    assert sum(x.count for x in found) == len(renamed.keys() - deepseek_tensors().keys())
    assert not loads(path)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_moe"])
def test_families(tmp_path, name, capsys):
    write_small_checkpoint(tmp_path / "c", name)
    found = inspect_checkpoint(tmp_path / "c", weights=True)
    assert found.is_loadable
    assert found.anomalies == ()
    family = found.family
    assert (family.model_type, family.num_layers, family.hidden_size) == (name, 3, 256)
    expected = (16, 4) if name == "deepseek_v3" else (8, 2)
    assert (family.num_experts, family.top_k) == expected
    names = [amount.name for amount in found.left_out]
    assert names == (["model.layers.3.*"] if name == "deepseek_v3" else [])
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "c")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    row = ["mlp.experts.*.up_proj.weight", str(found.kinds[5].count)]
    assert any(line.split()[:2] == row for line in lines)


def test_other_names(tmp_path):
    path = write(tmp_path / "c", {minimax_name(k): x for k, x in deepseek_tensors().items()})
    found = inspect_checkpoint(path)
    assert found.family.naming == ("w1, w2, w3",)
    assert f"{FOLDED}.gate_proj.weight" in {kind.name for kind in found.kinds}
    fused = {
        "model.layers.0.mlp.experts.gate_up_proj": fp8(E, 2 * I, H),
        "model.layers.0.mlp.experts.gate_up_proj_scale_inv": torch.ones(E, 6, 2),
        "model.layers.0.mlp.experts.down_proj": fp8(E, H, I),
        "model.layers.0.mlp.experts.down_proj_scale_inv": torch.ones(E, 2, 3),
    }
    found = inspect_checkpoint(write(tmp_path / "d", fused, {}))
    assert found.anomalies == ()
    assert (found.family.naming, found.family.num_experts) == (("fused experts",), E)


def put(key: str, tensor):
    return lambda tensors: tensors.update({key: tensor})


def drop(part: str):
    return lambda tensors: [tensors.pop(key) for key in [*tensors] if part in key]


def fp8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape).to(torch.float8_e4m3fn)


ones, zeros = torch.ones, torch.zeros
UP, SCALE = f"{EXPERT}.up_proj.weight", f"{EXPERT}.up_proj.weight_scale_inv"
W3, SCALE_ALONE = f"{EXPERT}.w3.weight", "model.layers.0.x.weight_scale_inv"
MORE, NORM = f"model.layers.0.mlp.experts.{E}.up_proj", "model.layers.2.norm.weight"
ERRORS = {
    "missing scale": (drop(SCALE), "an FP8 weight without its scale", UP),
    "scale alone": (put(SCALE_ALONE, ones(1, 1)), "a scale without its weight", SCALE_ALONE),
    "bf16": (put(UP, zeros(I, H).bfloat16()), "a scale of a weight that is not FP8", SCALE),
    "grid of 64": (put(SCALE, ones(5, 4)), "but blocks of [64, 64]", SCALE),
    "per channel": (put(SCALE, ones(I, 1)), "but one for each channel", SCALE),
    "per tensor": (put(SCALE, ones(())), "but one for the tensor", SCALE),
    "odd grid": (put(SCALE, ones(7, 3)), "but no blocks at all", SCALE),
    "int scales": (put(SCALE, ones(3, 2, dtype=torch.uint8)), "scales are U8", SCALE),
    "E5M2": (put(UP, zeros(I, H).to(torch.float8_e5m2)), "E5M2, where weights must be E4M3", UP),
    "FP4": (put(UP, zeros(I, H // 2, dtype=torch.uint8)), "packed FP4", UP),
    "missing expert": (drop(UP), "experts are missing", f"{UP}: missing from"),
    "two spellings": (put(W3, fp8(I, H)), "two tensors of one meaning", W3),
    "too many": (lambda x: x.update(fp8_pair(MORE, I, H)), "more experts than", MORE[20:]),
    "no experts": (drop("layers.1.mlp.experts"), "a router without experts", "layers.1.mlp.gate"),
    "missing layer": (drop("layers.1."), "layers are missing", "layers.1.*"),
    "layer too many": (put(NORM, ones(H)), "more layers than", "layers.2.*"),
    "NaN": (lambda x: x[SCALE].view(-1)[2].fill_(torch.nan), "scales: not finite", f"{SCALE} in"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_a_load_refuses_is_an_error(tmp_path, name):
    change, rule, where = ERRORS[name]
    change(tensors := deepseek_tensors())
    path = write(tmp_path / "c", tensors, {**CONFIG, "num_experts": E})
    assert not loads(path)
    anomaly = told(path, rule)
    assert anomaly.severity == "error"
    assert where in anomaly.examples[0]
    assert str(path) in anomaly.examples[0]
    assert not inspect_checkpoint(path).is_loadable


CHANNELS = {"config_groups": {"g": {"weights": {"strategy": "channel"}}}}


@pytest.mark.parametrize("quantization", [{"weight_block_size": [64, 64]}, {}, "fp8", CHANNELS])
def test_block_sizes_that_a_load_refuses(tmp_path, quantization):
    config = {**CONFIG, "quantization_config": quantization}
    path = write(tmp_path / "c", deepseek_tensors(), config)
    assert not loads(path)
    assert told(path, "another format").severity == "error"
    rules = [x.rule for x in inspect_checkpoint(path).anomalies]
    contradicts = "scales do not fit blocks of [64, 64], but blocks of [128, 128]" in rules
    assert contradicts == (quantization == {"weight_block_size": [64, 64]})


NOTES = {
    "zero": (lambda x: x[SCALE].view(-1)[2].fill_(0), "scales: zero", (1, 6 * 2 * E)),
    "negative": (lambda x: x[SCALE].neg_(), "scales: negative", (6, 6 * 2 * E)),
    "NaN": (lambda x: x[UP].view(torch.uint8)[0, :2].fill_(0xFF), "weights: NaN", (2, 6 * I * H)),
}


@pytest.mark.parametrize("name", NOTES)
def test_what_a_load_takes_is_a_note(tmp_path, name):
    tensors = deepseek_tensors()
    for key in tensors:
        if key.endswith("weight") and tensors[key].dtype == torch.float8_e4m3fn:
            tensors[key].view(torch.uint8).bitwise_and_(0x77)
    change, rule, values = NOTES[name]
    change(tensors)
    path = write(tmp_path / "c", tensors)
    assert loads(path)
    anomaly = told(path, rule, weights=True)
    assert (anomaly.severity, anomaly.count) == ("note", 1)
    assert (anomaly.num_values, anomaly.of_values) == values
    assert inspect_checkpoint(path, weights=True).is_loadable


def test_powers_of_two_are_asked_for_only_where_they_are_promised(tmp_path):
    tensors = deepseek_tensors()
    for key in tensors:
        if key.endswith("_scale_inv"):
            tensors[key].fill_(0.75 if "kv_a" in key else 0.25)
    path = write(tmp_path / "a", tensors)
    assert inspect_checkpoint(path).anomalies == ()
    path = write(tmp_path / "b", tensors, config_with(scale_fmt="ue8m0"))
    anomaly = told(path, "scales: no power of two")
    assert (anomaly.severity, anomaly.count, anomaly.num_values) == ("note", 2, 20)
    assert anomaly.kind == "model.layers.*.kv_a_proj_with_mqa.weight_scale_inv"


def test_lists_that_drift(tmp_path):
    """These notes are found earlier than errors of values, and yet come behind them."""
    tensors = deepseek_tensors()
    tensors[SCALE].view(-1)[0] = torch.nan
    config = config_with(modules_to_not_convert=["lm_head", LINEAR])
    path = write(tmp_path / "c", tensors, config)
    assert told(path, "lists it as not quantized").examples[0].startswith(f"{LINEAR}.weight in")
    other = told(path, "does not list it")
    assert (other.kind, other.severity) == ("model.layers.*.mlp.gate.weight", "note")
    severities = [anomaly.severity for anomaly in inspect_checkpoint(path).anomalies]
    assert severities[0] == "error"
    assert set(severities[1:]) == {"note"}


def test_faults_of_what_is_left_out_are_notes(tmp_path):
    extra = fp8_pair("model.layers.2.eh_proj", 128, 128)
    extra["model.layers.2.eh_proj.weight_scale_inv"].fill_(torch.nan)
    extra |= fp8_pair("model.layers.2.x", 128, 128)
    del extra["model.layers.2.x.weight_scale_inv"]
    config = {**CONFIG, "num_nextn_predict_layers": 1}
    path = write(tmp_path / "c", deepseek_tensors() | extra, config)
    assert loads(path)
    found = inspect_checkpoint(path)
    assert found.is_loadable
    assert {x.severity for x in found.anomalies} == {"note"}
    assert len(found.anomalies) == 2
    assert [(x.name, x.count) for x in found.left_out] == [("model.layers.2.*", 3)]


def test_all_broken_files_are_told_and_the_others_read(tmp_path):
    path = write(tmp_path / "c", deepseek_tensors(), num_shards=5)
    files = sorted(path.glob("*.safetensors"))
    os.truncate(files[0], files[0].stat().st_size - 1)
    files[1].write_bytes(b"\xff" * 100)
    files[2].unlink()
    tensors = load_file(files[3])
    key = next(key for key in tensors if key.endswith("_scale_inv"))
    tensors[key].fill_(torch.inf)
    save_file(tensors, files[3])
    (path / "config.json").write_text("[]")
    index = path / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"] |= {"ghost": "../x", "lost": files[4].name}
    index.write_text(json.dumps(value))
    found = inspect_checkpoint(path)
    broken = {x.kind: x.examples[0] for x in found.anomalies if x.rule == "the file is broken"}
    assert set(broken) == {*map(str, files[:3]), str(path / "config.json"), str(index)}
    assert "truncated" in broken[str(files[0])]
    assert key in told(path, "scales: not finite").examples[0]
    rules = {x.rule for x in found.anomalies}
    assert "experts are missing" not in rules  # what the index names is not missing, but broken
    assert "an FP8 weight without its scale" not in rules


def test_an_index_that_cannot_be_read_hides_no_files(tmp_path):
    path = write(tmp_path / "c", deepseek_tensors(), num_shards=2)
    (path / "model.safetensors.index.json").write_text("{")
    found = inspect_checkpoint(path)
    assert not found.is_loadable
    assert len(found.files) == 2


def test_the_command(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    tensors = deepseek_tensors()
    drop("up_proj.weight_scale_inv")(tensors)
    path = write(tmp_path / "c", tensors)
    assert main(["inspect", str(path)]) == 1
    out = capsys.readouterr().out
    assert f"error: an FP8 weight without its scale: {FOLDED}.up_proj.weight" in out
    assert f"... and {2 * E - 3} more" in out
    assert "1 errors, 0 notes: load_checkpoint refuses it" in out
    assert main(["inspect", str(path), "--json", "--weights"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["is_loadable"]
    assert found["anomalies"][0]["count"] == 2 * E


def test_there_is_no_such_directory(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    error = capsys.readouterr().err
    assert error == f"moefp8 inspect: {tmp_path}/nowhere: there is no such file or directory\n"
    assert main(["inspect", str(tmp_path)]) == 1
    assert "holds neither model.safetensors.index.json nor" in capsys.readouterr().err


def test_a_checkpoint_that_is_not_fp8_is_told(tmp_path, capsys):
    path = write(tmp_path / "c", {"a.weight": torch.ones(128, 128).bfloat16()}, {})
    assert main(["inspect", str(path)]) == 0
    assert "none, this is not an FP8 checkpoint; `moefp8 quantize`" in capsys.readouterr().out
    assert main(["inspect", str(path), "--json"]) == 0
    assert not json.loads(capsys.readouterr().out)["is_fp8"]
    assert main(["inspect", str(write(tmp_path / "d", deepseek_tensors()))]) == 0
    assert "not an FP8 checkpoint" not in capsys.readouterr().out


def test_whoever_reads_the_first_lines_alone_sees_no_error(tmp_path):
    path = write(tmp_path / "c", deepseek_tensors())
    command = f"{sys.executable} -m moefp8 inspect {path} | true"
    ran = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert ran.stderr == ""


def test_a_tensor_called_scale_that_is_none(tmp_path):
    """Routers of Gemma 4 have a `scale`, and nothing beside it that it could scale."""
    tensors = deepseek_tensors()
    tensors["model.layers.0.mlp.router.scale"] = torch.full((H,), -1.0)
    found = inspect_checkpoint(write(tmp_path / "a", tensors))
    assert found.anomalies == ()
    assert sum(kind.count for kind in found.kinds if kind.scale_dtypes == ()) == 11
    v4 = {key.replace("weight_scale_inv", "scale"): x for key, x in deepseek_tensors().items()}
    v4[SCALE.replace("weight_scale_inv", "scale")].neg_()
    anomaly = told(write(tmp_path / "b", v4), "scales: negative")
    assert anomaly.count == 1


def test_one_too_many_does_not_make_up_for_one_missing(tmp_path):
    drop("layers.0.")(tensors := deepseek_tensors())
    tensors |= fp8_pair(f"model.layers.1.mlp.experts.{E + 1}.up_proj", I, H)
    del tensors["model.layers.1.mlp.experts.0.up_proj.weight"]
    tensors["model.layers.2.norm.weight"] = torch.ones(H)
    path = write(tmp_path / "c", tensors, {**CONFIG, "num_experts": E})
    assert told(path, "layers are missing").count == 1
    assert "experts.0.up_proj.weight" in told(path, "experts are missing").examples[0]


@pytest.mark.parametrize(
    ("told_besides", "is_told"),
    [
        ({}, True),
        ({"zero_expert_num": 1}, False),  # LongCat: a stack has rows for experts that do nothing
        ({"zero_expert_num": 0}, True),
        ({"moe_intermediate_size": [I, I // 2]}, False),  # ERNIE 4.5 VL: as many again for images
        ({"moe_intermediate_size": I}, True),
    ],
)
def test_experts_that_config_json_tells_by_other_names(tmp_path, told_besides, is_told):
    tensors = deepseek_tensors()
    for key in [key for key in tensors if ".experts.0." in key]:
        tensors[key.replace(".experts.0.", f".experts.{E}.")] = tensors[key].clone()
    config = {**CONFIG, "n_routed_experts": E, **told_besides}
    path = write(tmp_path / "c", tensors, config)
    rules = {anomaly.rule for anomaly in inspect_checkpoint(path).anomalies}
    assert ("more experts than config.json tells of" in rules) == is_told


def test_experts_below_another_name_are_of_their_router(tmp_path):
    """ERNIE 4.5 VL has mlp.text_moe.experts beside mlp.gate."""
    weight = torch.ones(E, 2 * I, H).bfloat16()
    tensors = {
        "model.layers.0.mlp.gate.weight": torch.ones(E, H),
        "model.layers.0.mlp.text_moe.experts.gate_up_proj": weight,
        "model.layers.1.mlp.gate.weight": torch.ones(E, H),
        "model.layers.1.mlp.shared_experts.up_proj.weight": weight[0].clone(),
    }
    path = write(tmp_path / "c", tensors, {"num_experts": E, "num_hidden_layers": 2})
    assert told(path, "a router without experts").kind == "model.layers.*.mlp.gate.weight"
    assert told(path, "a router without experts").count == 1
