"""A checkpoint that does not fit is refused: the message names key and file, no byte is written."""

import json
import os
import struct

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from moefp8.checkpoint import CheckpointError, load_checkpoint, quantize_checkpoint, read_config
from moefp8.checkpoint.load import load
from tests.checkpoint.cases import (
    CONFIG,
    E,
    H,
    I,
    StackedExperts,
    Tiny,
    assert_loads,
    deepseek_tensors,
    fp8_pair,
    minimax_name,
    refusal,
    refuse,
    write,
)

EXPERT = "model.layers.0.mlp.experts.1"
LINEAR = "model.layers.0.kv_a_proj_with_mqa"
NORM = "model.layers.0.norm.weight"
UP, SCALE = f"{EXPERT}.up_proj.weight", f"{EXPERT}.up_proj.weight_scale_inv"
FUSED = "model.layers.0.mlp.experts.down_proj"

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def zeros(*shape: int, dtype: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    return torch.zeros(shape).to(dtype)


MISSING = [f"{EXPERT}.gate_proj.weight", UP, f"{EXPERT}.down_proj.weight", f"{LINEAR}.weight"]
MISSING += ["model.layers.1.norm.bias", "model.layers.0.mlp.gate.e_score_correction_bias"]
WRONG = [
    (UP, zeros(I, H + 1), "shape must be [320, 256]"),
    (f"{LINEAR}.weight_scale_inv", torch.zeros(4, 2), "shape must be [5, 2], got [4, 2]"),
    (SCALE, torch.zeros(2, 2), "shape must be [3, 2]"),
    (SCALE, torch.zeros(I, 1), "shape must be [3, 2]"),
    (NORM, torch.zeros(H, 1), "shape must be [256]"),
    (f"{LINEAR}.weight_scale_inv", zeros(5, 2, dtype=torch.uint8), "got U8"),
    (f"{LINEAR}.weight", zeros(576, H, dtype=torch.int8), "got I8"),
    (NORM, zeros(H, dtype=torch.int32), "got I32"),
]
EXTRA = {  # keys in layers that exist, and behind the MTP layer
    "model.layers.3.x": torch.zeros(1),
    **fp8_pair(f"model.layers.0.mlp.experts.{E}.gate_proj", I, H),
    "model.layers.0.surprise.weight": torch.zeros(1),
    f"{LINEAR}.input_scale": torch.zeros(1),
}
# (key -> new tensor, or None for none; what the message says of them)
MISFITS = [
    (
        EXTRA,
        [
            "model.layers.3.x in {file}: extra",
            "model.layers.0.surprise.weight in {file}: extra",
            f"{LINEAR}.input_scale in {{file}}: extra",
            f"model.layers.0.mlp.experts.{E}.gate_proj.weight in {{file}}: expert {E}, but",
            f"has {E} experts",
        ],
    ),
    ({f"{EXPERT}.w1.weight": zeros(I, H)}, [".1.w1.weight", f"{EXPERT}.gate_proj", "already"]),
    ({FUSED: zeros(E, H, I)}, [FUSED, "mlp.experts.0.down_proj.weight", "already"]),
]
for key in MISSING:
    told = ["does not fit", f"{key}: missing from {{path}}"]
    MISFITS.append(({key: None, f"{key}_scale_inv": None}, told))
for key in (UP, f"{LINEAR}.weight"):
    told = [f"{key} in {{file}}: an FP8 weight without its scale", f"{key}_scale_inv"]
    MISFITS.append(({f"{key}_scale_inv": None}, [*told, "(1 problem)"]))
for key, wrong, rule in WRONG:
    MISFITS.append(({key: wrong}, [f"{key} in {{file}}: ", rule, "(1 problem)"]))


@pytest.mark.parametrize(("changes", "needles"), MISFITS)
def test_what_does_not_fit_is_named(tmp_path, changes, needles):
    tensors = {**deepseek_tensors(), **changes}
    config = {**CONFIG, "num_nextn_predict_layers": 1}
    path = write(tmp_path / "c", {key: x for key, x in tensors.items() if x is not None}, config)
    named = [x.format(path=path, file=path / "model.safetensors") for x in needles]
    refuse(path, "unchanged", *named)


@pytest.mark.parametrize("naming", [str, minimax_name])
def test_unquantized_weight_for_an_fp8_module(tmp_path, naming):
    tensors = deepseek_tensors()
    for module in (f"{EXPERT}.down_proj", LINEAR):
        del tensors[f"{module}.weight_scale_inv"]
        tensors[f"{module}.weight"] = torch.zeros(tensors[f"{module}.weight"].shape)
    path = write(tmp_path / "c", {naming(key): tensor for key, tensor in tensors.items()})
    key = naming(f"{EXPERT}.down_proj.weight")
    told = f"{key} in {path / 'model.safetensors'}: dtype must be F8_E4M3"
    refuse(path, told, "then convert it", "(2 problems)")


def test_fp8_weight_for_an_ordinary_module(tmp_path):
    model = Tiny()
    model.model.layers[0].kv_a_proj_with_mqa = nn.Linear(H, 576, bias=False)
    model.model.layers[1].mlp.experts = StackedExperts()
    path = write(tmp_path / "c", deepseek_tensors())
    refuse(
        path,
        f"{LINEAR}.weight in {path / 'model.safetensors'}: an FP8 weight",
        "model.layers.1.mlp.experts.0.gate_proj.weight",
        "convert(model, only=fp8_modules(path, model=model))",
        f"({1 + 3 * E} problems)",  # the scales are not listed as well
        model=model,
    )


def test_a_scale_is_never_dropped(tmp_path):
    """It is not dropped where the model has an FP8 parameter of its own, without a scale."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(128, 128).to(torch.float8_e4m3fn), requires_grad=False)
    path = write(tmp_path / "c", {k[2:]: t for k, t in fp8_pair("m", 128, 128).items()})
    refuse(path, f"weight_scale_inv in {path / 'model.safetensors'}: extra", model=model)


def test_tied_tensors_that_differ(tmp_path):
    path = write(tmp_path / "c", deepseek_tensors())
    needles = ("lm_head.weight", "model.embed_tokens.weight", "ties", "unchanged")
    refuse(path, *needles, model=Tiny(tied=True))


def test_meta_tensors_that_no_checkpoint_stores(tmp_path):
    path = write(tmp_path / "c", deepseek_tensors())
    model = Tiny()
    table = torch.empty(4, device="meta")
    model.model.register_buffer("inv_freq", table, persistent=False)
    model.model.layers[0].plain = table.clone()
    refuse(path, "model.inv_freq: on the meta device", "model.layers.0.plain", model=model)


def test_bad_arguments(tmp_path):
    path = write(tmp_path / "c", deepseek_tensors())
    with pytest.raises(TypeError, match="iterable of patterns"):
        load_checkpoint(Tiny(), path, ignore="lm_head*")
    with pytest.raises(ValueError, match="device must be a real one"):
        load_checkpoint(Tiny(), path, device="meta")
    refuse(path, "rename must return a str", rename=lambda key: None)


NO_DEVICES = [
    ("foo", "got 'foo': Expected one of cpu, cuda"),
    ("", "got ''"),
    ("hpu", "got 'hpu'"),
    pytest.param("cuda", "got 'cuda'", marks=no_gpu),
    pytest.param("cuda:0", "got 'cuda:0'", marks=no_gpu),
    ("cuda:99", "got 'cuda:99'"),
]


@pytest.mark.parametrize(("device", "told"), NO_DEVICES)
def test_a_device_that_is_not_there(tmp_path, device, told):
    path = write(tmp_path / "c", deepseek_tensors())
    with pytest.raises(ValueError, match=rf"device must be one that there is \(cpu.*{told}"):
        load_checkpoint(Tiny(), path, device=device)
    target = tmp_path / "t"
    with pytest.raises(ValueError, match=rf"^quantize_checkpoint: device must be .*{told}"):
        quantize_checkpoint(path, target, device=device)
    assert sorted(tmp_path.iterdir()) == [path]


def test_paths_that_are_no_checkpoint(tmp_path):
    refuse(tmp_path / "nowhere", "nowhere")
    refuse(tmp_path, "model.safetensors.index.json")
    (tmp_path / "x.bin").write_bytes(b"")
    refuse(tmp_path / "x.bin", "x.bin", ".safetensors")
    os.mkfifo(tmp_path / "model.safetensors")
    refuse(tmp_path, "model.safetensors", "regular file")
    assert "config.json" in refusal(read_config, tmp_path)


def write_raw(path, header, data):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def tensor(dtype="U8", shape=(4,), begin=0, end=4):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"\xff\xfe",
        b'{"a": ',
        {"k": 3},
        {"k": {"dtype": "U8", "shape": [4]}},
        {"k": tensor(shape=(5,))},
        {"k": tensor(shape=(-4,))},
        {"k": tensor(shape=(True, 4))},
        {"k": tensor(shape=(4.0,))},
        {"k": tensor(dtype=3)},
        {"k": tensor(dtype="F32")},
        {"k": tensor(begin=4, end=0)},
        {"k": tensor(begin=-4, end=0)},
        {"k": tensor(begin=1, end=5)},
        {"k": tensor(shape=(2**62, 4), end=2**64)},
        {"k": tensor(shape=(0, 2**63), end=0), "l": tensor()},
        {"k": tensor(shape=(2,), end=2)},
        {"k": tensor(), "l": tensor()},
    ],
)
def test_corrupt_header(tmp_path, header):
    path = tmp_path / "model.safetensors"
    write_raw(path, header, bytes(4))
    model = nn.Module()
    model.register_buffer("k", torch.zeros(4, dtype=torch.uint8))
    refuse(path, path, "is broken", model=model)
    write_raw(path, {"k": tensor()}, bytes([1, 2, 3, 4]))  # the same, intact
    load_checkpoint(model, path)
    assert model.k.tolist() == [1, 2, 3, 4]


def test_header_longer_than_the_file_or_the_limit(tmp_path):
    path = tmp_path / "model.safetensors"
    for num_header in (3, 2**40, 2**64 - 1):
        path.write_bytes(struct.pack("<Q", num_header) + b"{}")
        refuse(path, path, "truncated")
    with path.open("wb") as file:  # sparse
        file.write(struct.pack("<Q", 200_000_000))
        file.truncate(300_000_000)
    refuse(path, path)


SMALL = {"a": torch.randn(3, 5), "b": torch.randn(7, dtype=torch.bfloat16)}


def small_model() -> nn.Module:
    return nn.ParameterDict({key: torch.zeros_like(x) for key, x in SMALL.items()})


def small_file(path) -> bytearray:
    save_file(SMALL, path)
    return bytearray(path.read_bytes())


of_one_folder = settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@of_one_folder
@given(data=st.data())
def test_a_truncated_file_is_always_refused(tmp_path, data):
    path = tmp_path / "model.safetensors"
    whole = small_file(path)
    path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 1))])
    refuse(path, path, model=small_model())


@of_one_folder
@given(data=st.data())
def test_a_damaged_header_is_refused_or_harmless(tmp_path, data):
    """One byte of the header changes: an error says so, or the tensors are as they were."""
    path = tmp_path / "model.safetensors"
    whole = small_file(path)
    end = 8 + struct.unpack("<Q", whole[:8])[0]
    whole[data.draw(st.integers(0, end - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(whole)
    model = small_model()
    try:
        load_checkpoint(model, path)
    except CheckpointError:
        assert not any(x.any() for x in model.values())
    else:
        assert all(x.any() for x in model.values())


def test_short_reads_are_continued(tmp_path, monkeypatch):
    tensors, preadv = deepseek_tensors(1), os.preadv
    path = write(tmp_path / "c", tensors)
    monkeypatch.setattr(os, "preadv", lambda file, to, at: preadv(file, [to[0][:1000]], at))
    assert_loads(path, tensors)


def test_a_file_that_changes_between_check_and_read(tmp_path, monkeypatch):
    path = write(tmp_path / "c", deepseek_tensors())

    def slow(*arguments, assign=load.assign):
        os.truncate(path / "model.safetensors", 1000)
        return assign(*arguments)

    monkeypatch.setattr(load, "assign", slow)
    refuse(path, path / "model.safetensors", "changed since it was opened")
