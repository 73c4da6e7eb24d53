"""Which configuration a GEMM runs with: one measured on this GPU, else the heuristic's.

`python -m moefp8 bench --tune` measures; what it finds lies beside the compiled kernels, in a file
for each kind of GPU, and serves the processes that start after that. A measured choice holds for
the sizes that were measured, and between two of them that agree.
"""

import hashlib
import json
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import Field, asdict, astuple, dataclass, field, fields
from functools import cache
from typing import Any, NamedTuple

import torch

from ..jit import read_beside_kernels, source_digest, write_beside_kernels
from . import heuristic
from .config import GemmConfig, is_possible, with_most_stages
from .experts_sizes import Sizes, choose_configs, deciding_numbers
from .launch import SOURCE, Sms, busy_sms

Pair = tuple[GemmConfig, GemmConfig]  # of gate and up, and of down


class Dense(NamedTuple):
    """Weights [N, K]."""

    n: int
    k: int


class Experts(NamedTuple):
    """E routed experts of k choices, contiguous."""

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int


Layer = Dense | Experts
Config = GemmConfig | Pair


@dataclass(frozen=True, eq=False)
class Table:
    """layer -> number of tokens -> what was measured to be faster than the heuristic's choice.

    None: measured, and nothing was. Numbers of tokens rise.
    """

    found: Mapping[Layer, Mapping[int, Config | None]] = field(default_factory=dict)

    def look_up(self, layer: Layer, tokens: int) -> Config | None:
        measured = self.found.get(layer)
        if not measured:
            return None
        if tokens in measured:
            return measured[tokens]
        sizes = list(measured)
        above = bisect_left(sizes, tokens)
        if not 0 < above < len(sizes):
            return None
        config = measured[sizes[above]]
        return config if config == measured[sizes[above - 1]] else None


NOTHING = Table()


@dataclass(frozen=True)
class ConfigSource:
    """num_sms: that may be busy, of all_sms. The table is of GEMMs on all of them."""

    num_sms: int
    all_sms: int
    table: Table = NOTHING

    @property
    def sms(self) -> Sms:
        return Sms(self.num_sms, self.all_sms)

    def dense(self, m: int, n: int, k: int) -> GemmConfig:
        tuned = self.table.look_up(Dense(n, k), heuristic.deciding_size(m))
        if isinstance(tuned, GemmConfig):
            return tuned
        return heuristic.choose_config(m, n, k, self.num_sms, self.num_sms == self.all_sms)

    def experts(self, sizes: Sizes) -> Pair:
        layer = Experts(sizes.num_experts, sizes.top_k, sizes.hidden_size, sizes.intermediate_size)
        tuned = None if sizes.masked else self.table.look_up(layer, sizes.num_tokens)
        return tuned if isinstance(tuned, tuple) else choose_configs(sizes, self.num_sms)

    def all_experts(self, sizes: Sizes) -> set[Pair]:
        """What `experts` chooses for up to as many tokens as `sizes` says."""
        layer = Experts(sizes.num_experts, sizes.top_k, sizes.hidden_size, sizes.intermediate_size)
        measured = self.table.found.get(layer, ())
        numbers = {*deciding_numbers(sizes), *measured, *(n + 1 for n in measured)}
        asked = (sizes._replace(num_tokens=n) for n in numbers if n <= sizes.num_tokens)
        return {self.experts(x) for x in asked}

    def all_gate_up(self, max_tokens: int, h: int, i: int) -> set[GemmConfig]:
        """What `gate_up` chooses for up to so many tokens."""
        loads = heuristic.deciding_loads(1, h, i)
        return {self.gate_up(n, h, i) for n in loads if n <= max_tokens}

    def gate_up(self, tokens: int, h: int, i: int) -> GemmConfig:
        """Of experts that every token takes."""
        return heuristic.choose_experts_configs(tokens, 1, h, i, self.num_sms)[0]


def config_source_of(device_index: int) -> ConfigSource:
    num_sms, all_sms = busy_sms(device_index)
    if num_sms < all_sms:
        return ConfigSource(num_sms, all_sms)
    return ConfigSource(num_sms, all_sms, measured(device_index))


# ---- The file ----

_UNUSABLE = (
    *(OSError, KeyError, TypeError, ValueError, AttributeError, RecursionError),
    ArithmeticError,  # 1e999 is a number in JSON
)
_MOST = 1024  # of any number in a configuration; larger ones would be computed with for long
_MAX_QUOTE = 200


@cache
def measured(device_index: int) -> Table:
    """What was measured on such a GPU, as the file said when it was first asked for."""
    try:
        return _stored(device_index)
    except _UNUSABLE as error:
        warnings.warn(
            f"moefp8: {file_name(device_index)} in the cache folder cannot be used "
            f"({ascii(error)[:_MAX_QUOTE]}), so the heuristic chooses; `python -m moefp8 bench "
            "--tune` writes it anew",
            UserWarning,
            stacklevel=2,
        )
        return NOTHING


def keep(device_index: int, found: Mapping[Layer, Mapping[int, Config | None]]) -> str:
    """Store it with what is there of other layers; the file's path. Raises OSError."""
    try:
        before = _stored(device_index).found
    except _UNUSABLE:
        before = {}
    data = json.dumps(to_json(Table({**before, **found})), indent=1).encode()
    path = write_beside_kernels(file_name(device_index), data)
    measured.cache_clear()
    return str(path)


def _stored(device_index: int) -> Table:
    data = read_beside_kernels(file_name(device_index))
    return NOTHING if data is None else table_from(json.loads(data))


def file_name(device_index: int) -> str:
    """Of this kind of GPU, and of the kernels as they are: others would have other times."""
    if not torch.cuda.is_available():
        return "tuned-without-gpu.json"
    of = torch.cuda.get_device_properties(device_index)
    gpu = "".join(c if c.isalnum() else "-" for c in of.name).lower()
    return f"tuned-{gpu}-{of.multi_processor_count}-{_digest()}.json"


@cache
def _digest() -> str:
    return hashlib.sha256(source_digest(SOURCE).encode()).hexdigest()[:12]


def to_json(table: Table) -> list[dict[str, Any]]:
    return [
        {
            "layer": type(layer).__name__.lower(),
            **layer._asdict(),
            "tokens": {str(size): _plain(config) for size, config in measured.items()},
        }
        for layer, measured in table.found.items()
    ]


def _plain(config: Config | None) -> Any:
    if isinstance(config, tuple):
        return [_plain(x) for x in config]
    if config is None:
        return None
    told = asdict(config)
    return {x.name: told[x.name] for x in fields(config) if told[x.name] != x.default}


def table_from(data: Iterable[Mapping[str, Any]]) -> Table:
    """Raises one of `_UNUSABLE` for what `to_json` did not give."""
    found: dict[Layer, Mapping[int, Config | None]] = {}
    for entry in data:
        of: Any = {"dense": Dense, "experts": Experts}[entry["layer"]]
        layer: Layer = of(**{name: int(entry[name]) for name in of._fields})
        of_sizes = {int(size): _config(x, layer) for size, x in entry["tokens"].items()}
        found[layer] = dict(sorted(of_sizes.items()))
    return Table(found)


def _config(data: Any, layer: Layer) -> Config | None:
    if data is None:
        return None
    if isinstance(layer, Dense):
        return _possible(GemmConfig(**data), layer.k, grouped=False, gate_up=False)
    gate_up, down = (GemmConfig(**x) for x in data)
    return (
        _possible(gate_up, layer.hidden_size, grouped=True, gate_up=True),
        _possible(down, layer.intermediate_size, grouped=True, gate_up=False),
    )


def _possible(config: GemmConfig, k: int, *, grouped: bool, gate_up: bool) -> GemmConfig:
    """It is one that could have been measured. Raises ValueError."""
    if not all(map(_is_meant, fields(config), astuple(config))):
        raise ValueError(f"{config} is no configuration: its numbers are 1 to {_MOST}")
    fits = config.wgmma_m % 64 == config.wgmma_n % 8 == 0
    fits = fits and (config.stages >= 2 if grouped else is_possible(config, k))
    is_kind = (config.grouped, config.gate_up) == (grouped, gate_up)
    if not (fits and is_kind) or config != with_most_stages(config):
        raise ValueError(f"{config} is no configuration for K = {k}")
    return config


def _is_meant(told: Field[Any], value: Any) -> bool:
    least = 0 if told.name == "tail" else 1
    return type(value) is told.type and (told.type is bool or least <= value <= _MOST)
