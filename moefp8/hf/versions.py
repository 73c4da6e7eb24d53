"""The versions of transformers that the plug-in runs with."""

import re
from importlib.util import find_spec

import torch

OLDEST = (5, 10)  # as pyproject.toml says: since then it asks a quantizer for conversions


def check() -> None:
    """Raise ImportError where transformers is missing or older than OLDEST."""
    needed, way_out = ".".join(map(str, OLDEST)), "pip install '.[hf]' in a clone"
    if find_spec("transformers") is None:
        raise ImportError(f"moefp8.hf needs transformers >= {needed}: {way_out}")
    from transformers import __version__ as version

    if tuple(int(number) for number in re.findall(r"\d+", version)[:2]) < OLDEST:
        raise ImportError(f"moefp8.hf needs transformers >= {needed}, got {version}: {way_out}")


def has_ep_implementations() -> bool:
    """Whether transformers asks for implementations of expert parallelism by name, as 5.23 does."""
    name = "transformers.distributed.expert_parallel"
    return torch.distributed.is_available() and find_spec(name) is not None
