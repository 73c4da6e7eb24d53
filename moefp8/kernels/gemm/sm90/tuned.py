"""Which configuration a GEMM runs with: one measured on this GPU, else the heuristic's.

`python -m moefp8 bench --tune` measures, and writes a file beside the compiled kernels, one for
each kind of GPU. Processes that start later read it. A measured choice holds for the sizes that
were measured, and between two of them that agree.
"""

import hashlib
import json
import warnings
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple

import torch

from ...jit import (
    read_beside_kernels,
    source_digest,
    write_beside_kernels,
)
from ...program import Record
from ..sms import Sms
from . import heuristic
from .config import GemmConfig
from .launch import SOURCE

Pair = tuple[GemmConfig, GemmConfig]  # one for gate and up, one for down


class Dense(NamedTuple):
    """Weights [N, K]."""

    n: int
    k: int


class Experts(NamedTuple):
    """E routed experts, k choices for each token, in the contiguous layout.

    num_global_experts: how many the whole model has, if these are one rank's, which get other
        numbers of rows than a whole model of E experts. None: these are all.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    num_global_experts: int | None = None


Layer = Dense | Experts
Config = GemmConfig | Pair


@dataclass(frozen=True, eq=False)
class Table:
    """layer -> number of tokens -> what was measured to be faster than the heuristic's choice.

    None says that nothing measured was faster. Numbers of tokens rise.
    """

    configs: Mapping[Layer, Mapping[int, Config | None]] = field(default_factory=dict)

    def look_up(self, layer: Layer, tokens: int) -> Config | None:
        measured = self.configs.get(layer)
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
    """Chooses configs where num_sms of all_sms SMs may be busy. The table is for all of them."""

    num_sms: int
    all_sms: int
    table: Table = NOTHING

    @property
    def sms(self) -> Sms:
        return Sms(self.num_sms, self.all_sms)

    def dense(self, m: int, n: int, k: int, batch_invariant: bool = False) -> GemmConfig:
        """The config for d [M, N]; batch_invariant: as in `heuristic.choose_config`."""
        tuned = self.table.look_up(Dense(n, k), heuristic.deciding_size(m))
        if isinstance(tuned, GemmConfig) and (tuned.split_k == 1 or not batch_invariant):
            return tuned
        all_sms = self.num_sms == self.all_sms
        return heuristic.choose_config(m, n, k, self.num_sms, all_sms, batch_invariant)


def dense_config(
    r: Record, configs: ConfigSource, m: int, n: int, k: int, batch_invariant: bool
) -> GemmConfig:
    """`ConfigSource.dense` in a description, which also says up to which M the config holds."""
    config = configs.dense(m, n, k, batch_invariant)

    def largest(most: int) -> int:
        size = heuristic.deciding_size(m)
        while size < most and configs.dense(size + 1, n, k, batch_invariant) == config:
            size = heuristic.deciding_size(size + 1)
        return size

    r.hold(m, largest)
    return config


# ---- The file ----

BROKEN = (OSError, ValueError)
# The digest of these sources, and those of former texts with the same machine code; the last one
# covers comments, too. Tables under these are adopted until a kernel changes; then delete them all.
_DIGEST = "2918df91d4bc"
_FORMER_DIGESTS = "7a6a37b4583e", "d3d8678c1c8b", "2e75b2e110fd"


@cache
def measured(device_index: int) -> Table:
    """What was measured on this kind of GPU, as the file said when it was first read."""
    try:
        return stored(device_index)
    except BROKEN as error:
        warnings.warn(
            f"moefp8: {file_name(device_index)} in the cache folder cannot be used ({error}), so "
            "the heuristic chooses; `python -m moefp8 bench --tune` writes it again",
            UserWarning,
            stacklevel=2,
        )
        return NOTHING


def stored(device_index: int) -> Table:
    """Read what tuning/keep.py wrote: a checksum, then the table. Raises one of `BROKEN`."""
    name = file_name(device_index)
    data = read_beside_kernels(name)
    for former in _FORMER_DIGESTS:
        if data is None:
            data = _adopt(name, name.replace(_DIGEST, former))
    if data is None:
        return NOTHING
    expected, _, table = data.partition(b"\n")
    if expected != checksum(table):
        raise ValueError("its checksum does not hold")
    return _table_from(json.loads(table))


def _adopt(name: str, former_name: str) -> bytes | None:
    """The file of the former name, which is then stored under `name`, too."""
    data = read_beside_kernels(former_name)
    if data is not None:
        with suppress(OSError):  # a read-only folder keeps the former file alone
            write_beside_kernels(name, data)
    return data


def checksum(data: bytes) -> bytes:
    return hashlib.sha256(data).hexdigest().encode()


def file_name(device_index: int) -> str:
    """A name for this kind of GPU and these kernels, since others have other times.

    Comments and blank space are no part of a kernel.
    """
    if not torch.cuda.is_available():
        return "tuned-without-gpu.txt"
    properties = torch.cuda.get_device_properties(device_index)
    gpu = "".join(c if c.isalnum() else "-" for c in properties.name).lower()
    digest = checksum(source_digest(SOURCE).encode()).decode()[:12]
    return f"tuned-{gpu}-{properties.multi_processor_count}-{digest}.txt"


def _table_from(data: Iterable[Mapping[str, Any]]) -> Table:
    configs: dict[Layer, Mapping[int, Config | None]] = {}
    for entry in data:
        kind: Any = {"dense": Dense, "experts": Experts}[entry["layer"]]
        by_size = {int(size): _config(x) for size, x in entry["tokens"].items()}
        layer = kind(**{name: entry[name] for name in kind._fields if name in entry})
        configs[layer] = dict(sorted(by_size.items()))
    return Table(configs)


def _config(data: Any) -> Any:
    if isinstance(data, list):
        return tuple(map(_config, data))
    return None if data is None else GemmConfig(**data)
