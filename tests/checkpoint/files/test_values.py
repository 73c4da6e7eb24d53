"""Counting what tensors hold gives what plain loops count, of the right tensor."""

import json
import math
import struct
from contextlib import ExitStack
from pathlib import Path

import torch

from moefp8.checkpoint.files.reading import open_files
from moefp8.checkpoint.files.source import open_source
from moefp8.checkpoint.files.values import SCALE_TESTS, WEIGHT_TESTS, count_values
from tests.checkpoint.cases import write


def counted(path: Path, tests) -> dict:
    source = open_source(path)
    entries = list(source.entries.values())
    with ExitStack() as stack:
        found = count_values(entries, open_files(stack, entries, source.shards), tests)
    return {name: {entry.key: n for entry, n in x.items()} for name, x in found.items()}


def test_counts_are_of_the_right_tensor_in_any_batch(tmp_path, monkeypatch):
    """Plain loops count the same; batches cut tensors and join files and dtypes."""
    monkeypatch.setattr("moefp8.checkpoint.files.values._BATCH_BYTES", 40)
    monkeypatch.setattr("moefp8.checkpoint.files.values._SERIAL", 3)
    special = torch.tensor([1.0, 0.0, -0.0, -2.0, 0.75, 2.0**-127, 3.0, math.nan, math.inf])
    tensors = {}
    for i, dtype in enumerate([torch.float32, torch.bfloat16, torch.float16] * 5):
        tensors[f"{i}"] = special[torch.randint(0, len(special), (i * 3 % 17,))].to(dtype)
    found = counted(write(tmp_path / "c", tensors, num_shards=2), SCALE_TESTS)
    plain = {
        "not finite": lambda x: x != x or abs(x) == float("inf"),
        "zero": lambda x: x == 0,
        "negative": lambda x: x < 0,
        "no power of two": lambda x: 0 < x < float("inf") and math.frexp(x)[0] != 0.5,
    }
    for name, test in plain.items():
        expected = {key: sum(map(test, x.tolist())) for key, x in tensors.items()}
        assert found[name] == {key: n for key, n in expected.items() if n}, name


def test_scales_at_the_same_place_of_two_files(tmp_path):
    """One tensor begins in its file at the byte where the other ends in its own."""
    tensors = {"a": torch.ones(4), "b": torch.full((4,), math.nan)}
    path = write(tmp_path / "c", tensors, num_shards=2)
    first, second = sorted(path.glob("*.safetensors"))
    header = json.dumps({"b": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    header += b" " * (first.stat().st_size - 8 - len(header))
    second.write_bytes(
        struct.pack("<Q", len(header)) + header + struct.pack("<4f", *[math.nan] * 4)
    )
    assert counted(path, {"not finite": SCALE_TESTS["not finite"]}) == {"not finite": {"b": 4}}


def test_nan_codes_of_weights(tmp_path):
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensors = {"all": codes, "none": codes[:127].clone()}
    found = counted(write(tmp_path / "c", tensors), WEIGHT_TESTS)
    assert found == {"NaN": {"all": 2}}
