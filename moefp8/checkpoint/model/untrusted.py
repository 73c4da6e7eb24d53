"""Let transformers build a model of an untrusted config.json, bounded and offline.

A number there can make endless layers, and a key can name code that transformers fetches and runs.
"""

import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode

from ...system.threads import lock_of_threads_and_forks
from ..errors import quoted

_MAX_COUNT = 1 << 20  # XLM has 200,000 n_words; others count far less
_MAX_CALLS = 50_000  # a layer calls PyTorch some twenty times; these calls take 3 s
_MAX_EXPERTS = 200_000  # in all stacks together; Kimi-K2 has 46,000
_COUNT = re.compile(
    r"(?!.*param)(?:.*_)?(?:n|num|depths?|layers?|experts?|blocks?|stages?)(?:_.*)?", re.I
)
_FETCHED = re.compile(
    r".*_implementation|use_kernels|kernel_config|auto_map|use_pretrained_backbone|backbone_kwargs|"
    r"pretrained_cfg.*|checkpoint_path"
)

_guard = lock_of_threads_and_forks()
_offline: set[tuple[int, int]] = set()  # (process, thread)


def count_problem(config: Mapping[str, Any], num_tensors: int) -> str | None:
    """Say so if a number of layers, experts or such is more than a checkpoint could have."""
    limit = max(_MAX_COUNT, num_tensors)
    for name, value in _numbers("", config):
        if _COUNT.fullmatch(name) and value > limit:
            return f"{quoted(name)} of config.json must be at most {limit:,}, got {quoted(value)}"
    return None


def _numbers(name: str, value: Any) -> Iterator[tuple[str, int]]:
    """Yield (key, number) for all numbers at any depth; those of a list have the list's key."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(key, item)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(name, item)
    elif type(value) is int:
        yield name, value


def stacks_problem(model: nn.Module, num_tensors: int) -> str | None:
    """Say so if stacked experts are more than a checkpoint could have."""
    limit = max(_MAX_EXPERTS, num_tensors)
    stacked = sum(x.shape[0] for x in model.parameters() if x.ndim == 3)
    return f"it would have {stacked:,} experts, and may {limit:,}" if stacked > limit else None


def without_fetched(config: Mapping[str, Any]) -> dict[str, Any]:
    """Drop the keys, at any depth, that name kernels, code or weights to be fetched.

    None of these keys affects a model's tensors. {"__float__": "Infinity"}, which transformers
    writes where JSON has no number, becomes that number.
    """

    def read(value: dict[str, Any]) -> Any:
        if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {name: x for name, x in value.items() if not _FETCHED.fullmatch(name)}

    return json.loads(json.dumps(config), object_hook=read)


class Bounded(TorchFunctionMode):
    """A context in which a thread calls PyTorch as often as a model of num_tensors could need.

    The next call raises ValueError.
    """

    def __init__(self, num_tensors: int) -> None:
        super().__init__()
        self._limit = self._num_left = max(_MAX_CALLS, 20 * num_tensors)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self._num_left -= 1
        if self._num_left < 0:
            raise ValueError(f"a model that takes more than {self._limit:,} calls to build")
        return func(*args, **(kwargs or {}))


class _Switch:
    """It takes the place of a bool, and is True for the threads that are offline."""

    def __init__(self, others: Any) -> None:
        self.others = others

    def __bool__(self) -> bool:
        return _me() in _offline or bool(self.others)


@contextmanager
def offline() -> Iterator[None]:
    """Make huggingface_hub refuse all requests of this thread to its server."""
    from huggingface_hub import constants

    with _guard:
        if not isinstance(constants.HF_HUB_OFFLINE, _Switch):
            constants.HF_HUB_OFFLINE = _Switch(constants.HF_HUB_OFFLINE)  # type: ignore[assignment]
        _offline.add(_me())
    try:
        yield
    finally:
        with _guard:
            _offline.discard(_me())
            switch: Any = constants.HF_HUB_OFFLINE
            if not _offline and isinstance(switch, _Switch):
                constants.HF_HUB_OFFLINE = switch.others


def _me() -> tuple[int, int]:
    return os.getpid(), threading.get_ident()
