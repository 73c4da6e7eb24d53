"""What a case returned, as named leaves that two processes can compare.

A leaf is a tensor or a text.
"""

import dataclasses
import hashlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

Leaf = torch.Tensor | str
RAISED = "/raised"  # the leaf of a case that raised what it does not expect
_TIMES = re.compile(r"\d[\d,]*\.?\d*(?= ?(?:s|ms|us|seconds|tokens/s|TFLOP/s)\b)")
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_MAX_SHOWN = 100


def leaves(name: str, value: Any) -> Iterator[tuple[str, Leaf]]:
    """Take a value apart; times and absolute paths are left out of texts."""
    if isinstance(value, torch.Tensor):
        yield name, _plain(value)
    elif isinstance(value, nn.Module):
        yield f"{name}/repr", steady(repr(value))
        yield from leaves(f"{name}/state", value.state_dict())
    elif isinstance(value, Mapping) and value:
        for key, part in value.items():
            yield from leaves(f"{name}/{key}", part)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from leaves(name, value._asdict())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [x.name for x in dataclasses.fields(value) if x.name != "seconds"]
        yield from leaves(name, {x: getattr(value, x) for x in names})
    elif isinstance(value, Set):
        yield from leaves(name, sorted(value))
    elif isinstance(value, Path):
        yield from _files(name, value)
    elif isinstance(value, list | tuple) and value:
        for index, part in enumerate(value):
            yield from leaves(f"{name}/{index}", part)
    else:
        yield name, steady(value if isinstance(value, str) else repr(value))


def _plain(tensor: torch.Tensor) -> Leaf:
    tensor = tensor.detach()
    if tensor.is_meta:
        return f"meta tensor, {_kind(tensor)}"
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return torch.empty(whole.shape, dtype=whole.dtype).copy_(whole)


def _files(name: str, folder: Path) -> Iterator[tuple[str, Leaf]]:
    """Yield a digest of each file, and what JSON and safetensors hold."""
    for path in sorted(x for x in folder.rglob("*") if x.is_file()):
        here, data = f"{name}/{path.relative_to(folder)}", path.read_bytes()
        if path.suffix in (".json", ".txt", ".md"):
            yield here, steady(data.decode())
            continue
        yield f"{here}/digest", hashlib.sha256(data).hexdigest()
        if path.suffix == ".safetensors":
            yield from leaves(here, load_file(path))


def steady(text: str) -> str:
    """Leave out of a text what differs from run to run."""
    folders = {os.getcwd(): "HERE", sys.prefix: "PYTHON", library(): "LIBRARY"}
    for folder in sorted(folders, key=len, reverse=True):  # one may contain another
        text = text.replace(folder, folders[folder])
    return _ADDRESS.sub("0x#", _TIMES.sub("#", text))


def library() -> str:
    """The checkout whose library this process has imported."""
    return str(Path(sys.modules["moefp8"].__file__ or "").parents[1])


# ---- Compare ----


def difference(here: Leaf | None, there: Leaf | None) -> str | None:
    """Say how two leaves differ, or None if they do not."""
    if here is None or there is None:
        return "only there" if here is None else "only here"
    if isinstance(here, str) or isinstance(there, str):
        if isinstance(here, str) and isinstance(there, str):
            return None if here == there else _compare_texts(here, there)
        return f"{_shown(here)} here, {_shown(there)} there"
    if _kind(here) != _kind(there):
        return f"{_kind(here)} here, {_kind(there)} there"
    return _compare_bits(here, there)


def _compare_bits(here: torch.Tensor, there: torch.Tensor) -> str | None:
    bits = [x.reshape(-1).view(torch.uint8).view(x.numel(), -1) for x in (here, there) if x.numel()]
    if not bits or torch.equal(*bits):
        return None
    differing = (bits[0] != bits[1]).any(dim=1).nonzero().flatten()
    first = int(differing[0])
    index = [int(x) for x in torch.unravel_index(torch.tensor(first), here.shape)]
    values = [x.reshape(-1)[first].item() for x in (here, there)]
    how = f"at {index} {values[0]!r} here, {values[1]!r} there"
    return f"{how} ({len(differing)} of {here.numel()} values, {here.dtype})"


def _compare_texts(here: str, there: str) -> str:
    at = next((i for i, (x, y) in enumerate(zip(here, there, strict=False)) if x != y), None)
    at = min(len(here), len(there)) if at is None else at
    begin = max(at - 20, 0)
    parts = (repr(x[begin : begin + _MAX_SHOWN]) for x in (here, there))
    return "{} here, {} there".format(*parts)


def _kind(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)}"


def _shown(leaf: Leaf) -> str:
    return repr(leaf[:_MAX_SHOWN]) if isinstance(leaf, str) else _kind(leaf)
