"""The keys and config of the checkpoint that a model was loaded from, for the next save.

The record is a plain dict on the root module: deepcopy and pickle keep it.
"""

from dataclasses import dataclass
from typing import Any

from torch import nn

_ATTRIBUTE = "_moefp8_checkpoint"


@dataclass(frozen=True)
class Record:
    """config: config.json, or {} if there is none; names: model key -> another checkpoint key."""

    config: dict[str, Any]
    names: dict[str, str]


def remember(model: nn.Module, config: dict[str, Any], names: dict[str, str]) -> None:
    setattr(model, _ATTRIBUTE, {"config": config, "names": names})


def recall(model: nn.Module) -> Record:
    """Return the record of the latest load into this root module, or an empty one."""
    return Record(**getattr(model, _ATTRIBUTE, {"config": {}, "names": {}}))
