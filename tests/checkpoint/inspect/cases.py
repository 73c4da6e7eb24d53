"""Checkpoints to inspect."""

import json
import math
import struct
from pathlib import Path

from tests.checkpoint.cases import CONFIG

E4M3 = "F8_E4M3"
EXPERT = "m.mlp.experts.0.down_proj.weight"
LINEAR = {"a.weight": (E4M3, [8, 8]), "a.weight_scale_inv": ("F32", [1, 1])}


def config_with(**quantization) -> dict:
    """Return a config.json whose quantization_config tells this besides."""
    told = {**CONFIG["quantization_config"], **quantization}
    return {**CONFIG, "quantization_config": told}


def write_header(path: Path, header, data: bytes = b"") -> Path:
    """Write a file of that header, as JSON or as it is, and data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def headers_only(path: Path, tensors: dict[str, tuple[str, list[int]]]) -> Path:
    """Write a file of zeros, of dtypes that PyTorch has or not."""
    bits = {"F32": 32, "BF16": 16, "F16": 16, "F4": 4, "I64": 64}
    header, end = {}, 0
    for key, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * bits.get(dtype, 8) // 8
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    return write_header(path, header, bytes(end))
