"""Spellings of names: two names mean one tensor if `canonical` makes them equal."""

import re
from collections.abc import Callable

from ..errors import CheckpointError

Rename = Callable[[str], str]

SCALE_SUFFIX = "_scale_inv"

_FOLDS = (
    (re.compile(r"\.(?:weight_scale|scale)$"), ".weight_scale_inv"),
    (re.compile(r"\.(gate_up_proj|down_proj)_scale$"), r".\1_scale_inv"),
    (re.compile(r"\.(?:block_sparse_moe|ffn)\."), ".mlp."),
    (re.compile(r"\.shared_expert\."), ".shared_experts."),
    (re.compile(r"experts\.([0-9]+\.)?w1\."), r"experts.\1gate_proj."),
    (re.compile(r"experts\.([0-9]+\.)?w3\."), r"experts.\1up_proj."),
    (re.compile(r"experts\.([0-9]+\.)?w2\."), r"experts.\1down_proj."),
    (re.compile(r"\.mlp\.(?:experts\.)?(?=e_score_correction_bias$)"), ".mlp.gate."),
)
_ANY_FOLD = re.compile("|".join(f"(?:{pattern.pattern})" for pattern, _ in _FOLDS))
_SCALE = re.compile(
    r"(.*\.|)(?:weight_scale_inv|weight_scale|scale|(gate_up_proj|down_proj)_scale(?:_inv)?)"
)
_EXPERT = re.compile(r"(.*\bexperts)\.(0|[1-9][0-9]{0,8})\.(?:(?:gate|up|down)_proj|w[123])\.")
_ODD_NUMBER = re.compile(r"\b(?:experts|layers)\.(?!(?:0|[1-9][0-9]*)(?:\.|$))\d+(?=\.|$)")
_NUMBER = re.compile(r"(?:^|(?<=\.))[0-9]+(?=\.)")


def canonical(name: str) -> str:
    """Spell name as DeepSeek-V3 does."""
    if not _ANY_FOLD.search(name):  # most names need no fold; a checkpoint has 100,000
        return name
    for pattern, replacement in _FOLDS:
        name = pattern.sub(replacement, name)
    return name


def weight_of_scale(name: str) -> str | None:
    """Return `X.weight` for `X.weight_scale_inv` and such, and None if name is no scale's."""
    match = _SCALE.fullmatch(name)
    return f"{match[1]}{match[2] or 'weight'}" if match else None


def scale_of_weight(name: str) -> str:
    """Return `X.weight_scale_inv` for `X.weight`, `X.down_proj_scale_inv` for `X.down_proj`."""
    return name + SCALE_SUFFIX


def split_expert(name: str) -> tuple[str, int] | None:
    """Return (`X.experts`, 3) for `X.experts.3.gate_proj.weight`, and None for other names."""
    match = _EXPERT.match(name)
    return (match[1], int(match[2])) if match else None


def has_odd_number(name: str) -> bool:
    """Whether name numbers an expert or a layer as no model does, such as 00 for 0."""
    return _ODD_NUMBER.search(name) is not None


def folded(name: str) -> str:
    """Spell name canonically, with stars for numbers: `model.layers.*.mlp.gate.weight`."""
    return _NUMBER.sub("*", canonical(name))


def join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def renamed(key: str, rename: Rename | None) -> str:
    """Apply the user's own naming to a key."""
    name = rename(key) if rename else key
    if not isinstance(name, str):
        raise CheckpointError(f"{key}: rename must return a str, got {name!r}")
    return name
