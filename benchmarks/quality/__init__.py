"""What does FP8 cost trained models? `python -m benchmarks.quality`.

Each model in BF16 is compared with the same model after `moefp8.convert`, by
`moefp8.testing.compare_models`. Reading order: `language_models` (those that `examples/train.py`
trains), `packages` (trained ones that packages of the Python index ship), `table`, `plot`.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

RESULTS = Path(__file__).parents[1] / "results" / "quality.json"


class Subject(NamedTuple):
    """A model in BF16, on its device, and what it is to predict.

    title: what it is, in a few words; text: what is predicted; unit: one of its tokens.
    ids, labels, logits: as in `compare_models`.
    """

    title: str
    text: str
    unit: str
    model: nn.Module
    ids: Any
    labels: Any = None
    logits: Any = None
    skip: tuple[str, ...] = ()
    options: dict[str, Any] = {}  # noqa: RUF012  # of the model's forward
    about: dict[str, Any] = {}  # noqa: RUF012  # further facts for the results


class Missing(Exception):
    """A package that ships the model is not installed."""


def rows_of(ids: torch.Tensor, num_rows: int, length: int) -> torch.Tensor:
    """int64 [num_rows, length]: pieces of ids [N], evenly from its beginning to its end."""
    starts = torch.linspace(0, len(ids) - length, num_rows, dtype=torch.float64).long()
    return ids[starts[:, None] + torch.arange(length)].long()
