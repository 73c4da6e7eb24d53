"""Checkpoints that somebody made to hurt: pipes, links, costly JSON, keys for terminals."""

import json
import os
import struct
import time
from collections import Counter
from contextlib import suppress
from itertools import islice, product
from random import Random

import pytest
import torch

from moefp8.checkpoint import (
    CheckpointError,
    fp8_layers,
    inspect_checkpoint,
    load_checkpoint,
    quantize_checkpoint,
    read_config,
    save_checkpoint,
)
from moefp8.cli.inspect import lines_of
from moefp8.cli.main import main
from tests.checkpoint.cases import (
    CONFIG,
    Tiny,
    assert_loads,
    deepseek_tensors,
    model_bytes,
    refusal,
    write,
)
from tests.checkpoint.deadline import within
from tests.checkpoint.inspect.cases import config_with, write_header
from tests.checkpoint.quantize.cases import EXPERTS, LINEAR, PLAIN, bf16, write_source
from tests.sampling import sample

INDEX = "model.safetensors.index.json"


def refused(call, *arguments, **options) -> str:
    with within(5):
        return refusal(call, *arguments, **options)


# ---- What files are ----


def device(path):
    path.symlink_to("/dev/null")  # an endless one is told by the same look


KINDS = {
    "a pipe": (os.mkfifo, "must be a regular file"),
    "a device": (device, "a link out of the checkpoint, to /dev/null"),
    "a folder": (os.mkdir, "must be a regular file"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_what_is_no_regular_file_is_not_read(tmp_path, kind, name):
    path = write(tmp_path / "c", deepseek_tensors(), num_shards=2)
    (path / name).unlink()
    make, rule = KINDS[kind]
    make(path / name)
    all_refuse(path, f"{path / name}: {rule}")
    if name == "config.json":
        assert f"{path / name}: {rule}" in refused(read_config, path)
    with within(5):
        told = [x for anomaly in inspect_checkpoint(path).anomalies for x in anomaly.examples]
    assert any(f"{path / name}: {rule}" in x for x in told)


def test_a_pipe_in_the_place_of_a_temporary_file_is_removed(tmp_path):
    (tmp_path / ".t.partial").mkdir(mode=0o700)
    os.mkfifo(tmp_path / ".t.partial" / "job.json.tmp")
    with within(5):
        save_checkpoint(torch.nn.Linear(2, 2), tmp_path / "t")
    assert [path.name for path in tmp_path.iterdir()] == ["t"]


def test_what_a_config_links_to_is_not_copied(tmp_path):
    """Whoever runs quantize may read a secret that whoever made the source may not."""
    source = write_source(tmp_path / "s", {LINEAR: bf16(4, 4)})
    (source / "config.json").rename(tmp_path / "secret.json")
    (source / "config.json").symlink_to(tmp_path / "secret.json")
    for given in (source, source / "model.safetensors"):
        message = refused(quantize_checkpoint, given, tmp_path / "t")
        assert f"{source}/config.json: a link out of the checkpoint, to {tmp_path}" in message
    assert not (tmp_path / "t").exists()


@pytest.mark.parametrize("subfolder", [".", "text_encoder"])
def test_a_hub_cache_links_to_its_blobs(tmp_path, subfolder):
    path = write(tmp_path / "snapshots" / "1f2e" / subfolder, deepseek_tensors(), num_shards=2)
    (tmp_path / "blobs").mkdir()
    for number, file in enumerate(list(path.iterdir())):
        blob = file.rename(tmp_path / "blobs" / file.name)
        file.symlink_to(blob if number % 2 else os.path.relpath(blob, path))
    assert_loads(os.fspath(path), deepseek_tensors())
    assert read_config(path) == CONFIG


def test_a_shard_that_is_a_link_out_is_not_read(tmp_path):
    path = write(tmp_path / "c", deepseek_tensors())
    shard = path / "model.safetensors"
    other = shard.rename(tmp_path / "other.safetensors")
    shard.symlink_to(other)
    all_refuse(path, f"{shard}: a link out of the checkpoint, to {other}")
    load_checkpoint(Tiny(), shard)  # which link to follow is then the user's own choice


def test_an_index_does_not_lead_through_a_link_out(tmp_path):
    path = write(tmp_path / "c", deepseek_tensors(), num_shards=2)
    (tmp_path / "other").mkdir()
    weight_map = json.loads((path / INDEX).read_text())["weight_map"]
    for name in set(weight_map.values()):
        (path / name).rename(tmp_path / "other" / name)
    (path / "sub").symlink_to(tmp_path / "other")
    write_index(path, {key: f"sub/{name}" for key, name in weight_map.items()})
    all_refuse(path, f"{path}/sub/model-00001-of-00002.safetensors: a link out of the checkpoint")


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_one_file_of_many_names_is_read_once(tmp_path, monkeypatch, link):
    path = write_many(tmp_path / "c", 200)
    (path / "model.safetensors").rename(path / "0.safetensors")
    for i in range(1, 100):
        link(path / "0.safetensors", path / f"{i}.safetensors")
    write_index(path, {f"k{i}": f"{i}.safetensors" for i in range(100)})
    real, opened = os.open, Counter()

    def count(file, *arguments, **options):
        opened[os.path.basename(file)] += 1
        return real(file, *arguments, **options)

    monkeypatch.setattr(os, "open", count)
    all_refuse(path, f"{path}/1.safetensors: is the same file as {path}/0.safetensors")
    shards = {name: times for name, times in opened.items() if name.endswith(".safetensors")}
    assert shards == {"0.safetensors": 4}  # once by each of the four readers


def test_keys_that_two_files_have_are_counted(tmp_path):
    path = write_many(tmp_path / "c", 3_000)
    (path / "copy.safetensors").write_bytes((path / "model.safetensors").read_bytes())
    (path / "model.safetensors").rename(path / "first.safetensors")
    write_index(path, {"k0": "first.safetensors", "k1": "copy.safetensors"})
    all_refuse(path, "k0 in", "the same key is in", "(101 problems)")


def test_small_files_are_small(tmp_path):
    path = write(tmp_path / "c", deepseek_tensors())
    os.truncate(path / "config.json", 200 << 30)  # a hole
    assert "at most 100,000,000 bytes" in refused(load_checkpoint, Tiny(), path)


# ---- What JSON costs ----


def checkpoint_of(path, header, data=b""):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(PLAIN))
    write_header(path / "model.safetensors", header, data)
    return path


def write_index(path, weight_map):
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def write_many(path, num_tensors):
    header = {f"k{i}": {**entry([]), "data_offsets": [i, i + 1]} for i in range(num_tensors)}
    return checkpoint_of(path, header, bytes(num_tensors))


def check_message(message: str) -> None:
    assert len(message) < 10_000
    assert all(line.isprintable() for line in message.split("\n"))
    assert len(message.split("\n")) < 15


def all_refuse(path, *needles) -> None:
    """Every reader refuses path in short time, with a message that a terminal can show."""
    model = Tiny()
    before = model_bytes(model)
    for call, *arguments in (
        (load_checkpoint, model, path),
        (fp8_layers, path),
        (quantize_checkpoint, path, path.parent / "t"),
    ):
        message = refused(call, *arguments)
        check_message(message)
        assert all(needle in message for needle in needles), message
    assert model_bytes(model) == before
    with within(5):
        for anomaly in inspect_checkpoint(path).anomalies:
            check_message("\n".join(anomaly.examples))


def entry(shape, num_bytes=0, dtype="U8"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, num_bytes]}


NESTED = "[" * 900 + "]" * 900
VERY_NESTED = "[" * 5000 + "]" * 5000
HEADERS = {
    "a product of 4300 digits": ({"x": entry([2**62] * 300)}, "x in", "bad dtype 'U8' or shape"),
    "a shape without end": ({"x": entry([2**62] * 400_000)}, "x in", "shape"),
    "no memory, but strides": ({"x": entry([0, 2**62, 2**62])}, "x in", "shape"),
    "nested": (f'{{"x": {NESTED}}}'.encode(), "it nests more than 64 deep"),
    "very nested": (f'{{"x": {VERY_NESTED}}}'.encode(), "not valid JSON"),
    "half a character": ({"\ud800": entry([0])}, "not valid JSON", "surrogates not allowed"),
    "ESC": ({"\x1b[2J\nok": entry([0])}, "header", r"'\x1b[2J\nok'"),
    "from right to left": ({"a\u202eb": entry([0])}, "header", r"a\u202eb"),
    "a long key": ({"k" * 3_000_000: entry([0])}, "1 to 1000 printable characters", "kkk"),
    "a long dtype": ({"x": entry([0], dtype="Z" * 3_000_000)}, "bad dtype", "ZZZ"),
    "a long entry": ({"x": ["y" * 3_000_000]}, "an entry holds", "yyy"),
    "many values": (b'{"__metadata__": [' + b"[]," * 2_100_000 + b"0]}", "4,000,000 values"),
}


@pytest.mark.parametrize("what", HEADERS)
def test_headers_that_cost(tmp_path, what):
    header, *needles = HEADERS[what]
    path = checkpoint_of(tmp_path / "c", header)
    all_refuse(path, "model.safetensors", *needles)


INDICES = {
    "half a character": ({"\ud800": "a.safetensors"}, "not valid JSON"),
    "half a name": ({"a": "\udc80.safetensors"}, "not valid JSON"),
    "ESC": ({"a\x1b": "a.safetensors"}, r"a\x1b"),
    "ESC in a name": ({"a": "\x1b.safetensors"}, r"\x1b"),
    "a long name": ({"a": "b" * 3_000_000}, "bbb", "must lie in the directory"),
    "a long list": ({"a": ["b"] * 1_000_000}, "must lie in the directory"),
    "many files": ({f"k{i}": f"{i}.safetensors" for i in range(20_000)}, "names 20,000 files"),
    "a list": (["b"] * 1_000_000, "weight_map must map keys to files"),
}


@pytest.mark.parametrize("what", INDICES)
def test_indices_that_cost(tmp_path, what):
    weight_map, *needles = INDICES[what]
    (tmp_path / "c").mkdir()
    write_index(tmp_path / "c", weight_map)
    all_refuse(tmp_path / "c", INDEX, *needles)


@pytest.mark.parametrize("text", [NESTED, VERY_NESTED, '"\\ud800"', "1" * 5000])
def test_configs_that_cost(tmp_path, text):
    path = write(tmp_path / "c", deepseek_tensors())
    (path / "config.json").write_text(f'{{"x": {text}}}')
    all_refuse(path, "config.json: not valid JSON")


def test_config_values_of_any_type(tmp_path):
    """Inspecting tells or ignores them; nothing breaks, and nothing is slow."""
    names = "num_hidden_layers num_nextn_predict_layers n_routed_experts num_experts_per_tok"
    names += " model_type architectures text_config quantization_config hidden_size"
    values = [None, True, -1, 10**4000, 1e308, "\x1b[2J", "x" * 100_000, [], [[]], {}, {"a": [1]}]
    cases = list(product(names.split(), range(len(values))))
    loaded = sample(cases, lambda case: case, strength=1)  # to load takes longest
    path = write(tmp_path / "c", deepseek_tensors())
    for name, number in cases:
        (path / "config.json").write_text(json.dumps({**CONFIG, name: values[number]}))
        with within(5):
            "".join(lines_of(inspect_checkpoint(path), 80))
            with suppress(CheckpointError):
                fp8_layers(path)
            if (name, number) in loaded:
                with suppress(CheckpointError):
                    load_checkpoint(Tiny(), path)


@pytest.mark.parametrize("block", [[10**400, 1], [1, 10**400], [10**30, 128]])
def test_blocks_of_any_size(tmp_path, block):
    path = write(tmp_path / "c", deepseek_tensors(), config_with(weight_block_size=block))
    assert not inspect_checkpoint(path).is_loadable
    check_message(refused(load_checkpoint, Tiny(), path))


def test_an_empty_stack_of_many_experts(tmp_path):
    """It is refused, since each expert would be taken apart."""
    stack, names = entry([2**40, 0, 0], dtype="BF16"), ("gate_up_proj", "down_proj")
    path = checkpoint_of(tmp_path / "c", {f"{EXPERTS}.{name}": stack for name in names})
    with within(5):
        inspect_checkpoint(path)
        message = refused(quantize_checkpoint, path, tmp_path / "t")
    assert "an empty stack cannot be quantized" in message


def test_long_keys_are_inspected_quickly(tmp_path):
    """In CPU time, since other processes run beside this one."""
    path = tmp_path / "c" / "model.safetensors"
    path.parent.mkdir()
    keys = [f"{i}{'_n_' * 330}" for i in range(1500)]
    write_header(path, {key: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]} for key in keys})
    (path.parent / "config.json").write_text(json.dumps(CONFIG))
    started = time.process_time()
    inspect_checkpoint(path.parent)
    assert time.process_time() - started < 2


def test_what_a_terminal_would_obey_is_escaped(tmp_path, capsys):
    config = {**CONFIG, "model_type": "\x1b[2J", "architectures": ["a\nb\r", "\u202e"]}
    path = write(tmp_path / "c\x1b[2J", deepseek_tensors(), config)
    assert main(["inspect", str(path)]) == 0
    assert main(["inspect", str(tmp_path / "\x1b\n")]) == 1
    out, err = capsys.readouterr()
    assert r"c\x1b[2J" in out
    assert r"family    \x1b[2J, a\nb\r, \u202e" in out
    assert all(line.isprintable() for line in [*out.split("\n"), *err.split("\n")])


# ---- Mutations ----


def mutated(random, data: bytes) -> bytes:
    """Change, cut out, put in or repeat a few bytes, or put a token in their place."""
    tokens = [*b'null [] {} -1 1e999 "\\ud800" "\\u001b"'.split(), b"9" * 30, b"[" * 200]
    for _ in range(random.randint(1, 4)):
        begin = random.randrange(len(data) + 1)
        end = min(len(data), begin + random.choice([0, 1, 1, 2, 8, 40]))
        new = random.choice(
            [b"", random.randbytes(end - begin), random.choice(tokens), data[begin:end] * 3]
        )
        data = data[:begin] + new + data[end:]
    return data


def with_value(random, data: bytes) -> bytes:
    """Put another value in the place of one of the JSON."""
    values = [None, True, 0, -1, 2**63, 10**400, 1.5, "", "\x1b", "re:(a+)+x", [], {}]
    values.append([2**62] * 300)
    tree = json.loads(data)
    home = tree
    while True:
        keys = list(home) if isinstance(home, dict) else range(len(home))
        if not keys:
            break
        key = random.choice(list(keys))
        if not isinstance(home[key], (dict, list)) or random.random() < 0.2:
            home[key] = random.choice(values)
            break
        home = home[key]
    return json.dumps(tree).encode()


@pytest.mark.parametrize("seed", range(4))
def test_mutations_are_refused_or_load(tmp_path, seed):
    """Each takes little time, raises no error but ours, and leaves the model as it was."""
    random = Random(seed)
    path = write(tmp_path / "c", deepseek_tensors(1), num_shards=2)
    names = ["config.json", INDEX, *(x.name for x in path.glob("*.safetensors"))]
    sound = {name: (path / name).read_bytes() for name in names}
    model = Tiny(1)
    load_checkpoint(model, path)
    before, num_refused = model_bytes(model), 0
    for number in range(80):
        name = names[number % 4]
        data = sound[name]
        start = 8 if name.endswith(".safetensors") else 0
        end = start + int.from_bytes(data[:8], "little") if start else len(data)
        change = random.choice([mutated, with_value])
        header = change(random, data[start:end])
        length = struct.pack("<Q", len(header)) if start else b""
        (path / name).write_bytes(length + header + data[end:])
        for call, *arguments in ((load_checkpoint, model, path), (fp8_layers, path)):
            try:
                with within(5):
                    call(*arguments)
            except CheckpointError as error:
                num_refused += 1
                check_message(str(error))
        with within(5):
            check_message("\n".join(islice(lines_of(inspect_checkpoint(path), 80), 12))[:9000])
        (path / name).write_bytes(data)
    assert num_refused > 40
    assert model_bytes(model) == before
