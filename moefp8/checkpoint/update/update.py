"""`updating`: write a trainer's tensors into a model that serves, in place, bucket by bucket."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...kernels import E4M3
from ..files.config import says_separate
from ..files.names import SCALE_SUFFIX, renamed
from ..model.slots import Role, not_dense
from .places import Arrival, Home, Place, Places, config_of, listed
from .write import Writer

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
_PLAIN = {torch.Tensor, nn.Parameter}
_NUM_NAMED = 5


class _Came(NamedTuple):
    """What has filled a part in this block."""

    name: str
    place: Place
    is_fp8: bool


@contextmanager
def updating(model: nn.Module, *, rename: Callable[[str], str] | None = None) -> "Iterator[Update]":
    """Let a trainer's tensors take the place of a model's, in place, while it serves.

        with moefp8.updating(model) as update:
            for bucket in buckets:  # of a trainer: [(name, tensor), ...] or {name: tensor}
                update.add(bucket)

    No tensor moves, so CUDA graphs of the model go on without a new capture, and their next replay
    computes with the new weights. So does what is derived of weights and kept: transposed FP8
    weights, FP8 codes of master weights, FP8 weights beside those of transformers' experts, and at
    the next `generate` what `moefp8.hf.DecodingGraphs` has merged. A layer's tensors need not come
    together, and a block may bring some tensors of the model alone. After it, `state_dict` is what
    a load of the same tensors gives, bit by bit.

    Copies and kernels run on the current streams, and nothing waits for a GPU. So tensors on a GPU
    may be freed or written after `add` as after any operation of that stream, and replays on other
    streams have to wait for it, as for any write.

    Names are those of `load_checkpoint`, for this model: experts one by one
    (`model.layers.0.mlp.experts.3.gate_proj.weight`) or stacked (`...experts.gate_up_proj`
    [E, 2I, H], gate rows first), and as transformers renames them in a model of its own. Tensors
    are whole, also for a model that `shard` or expert parallelism has cut: each rank keeps its
    part, and passes over experts of others.

    Tensors may be on any device:

    - FP8 weights of moefp8's modules take bf16, fp16 or fp32, which becomes codes and scales as
      `convert` and `trainable=True` make them, on the model's device; or E4M3 codes and their
      `*_scale_inv`, both of them, in one call or in two. Values are not looked at: a scale that is
      NaN is written.
    - Master weights take any float dtype, cast to theirs, or codes and scales, dequantized.
    - All else takes what `load_checkpoint` takes, cast to its dtype.

    Of what has begun to come, all has to come: all experts of a stack, gate and up, codes and
    scales. An exception that leaves the block says nothing of missing parts, and the model is then
    partly written: update it again, or load it, before using it.

    Args:
        model: filled, on real devices.
        rename: name of a tensor -> name in the model, where a trainer has names of its own.

    Raises:
        ValueError: at the begin, if tensors of the model cannot be written, such as DTensors or
            those on the meta device. At the end, if parts of what has begun are missing: it names
            the first five and says how many there are.
    """
    update = Update(model, rename)
    try:
        yield update
    finally:
        update._close()
    update._check_complete()


class Update:
    """A block of `updating`."""

    def __init__(self, model: nn.Module, rename: Callable[[str], str] | None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"updating: model must be an nn.Module, got {type(model).__name__}")
        self._model, self._rename = model, rename
        self._places = Places.of(model)
        self._writer: Writer | None = Writer(model, self._places)
        self._came: dict[str, _Came] = {}  # by part
        self._begun: dict[Home, None] = {}
        meta = [x.owner.names[0] for x in self._places.homes.values() if self._is_meta(x)]
        if meta:
            raise ValueError(
                f"updating: {', '.join(meta[:_NUM_NAMED])} of {len(meta)} tensors are on the meta "
                "device; load a checkpoint with moefp8.load_checkpoint first"
            )

    def add(self, named_tensors: NamedTensors) -> None:
        """Write a bucket: a mapping, or an iterable of pairs (name, tensor). It may be empty.

        Raises:
            ValueError: a name that the model does not know, with the nearest that it knows; another
                shape or a dtype that does not fit; a tensor that came before in this block, or a
                part of it, unless it is tied and comes under another name: then the later one
                stays. All are checked before anything is written; what earlier calls wrote stays.
            TypeError: no pairs of a str and a tensor.
            RuntimeError: after the block, or while a CUDA graph is captured.
        """
        if self._writer is None:
            raise RuntimeError("update.add: the block of moefp8.updating has ended; open another")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "update.add: a CUDA graph is being captured; weights are written between replays"
            )
        arrived, came, problems = self._match(named_tensors)
        if problems:
            raise ValueError(
                f"update.add: {len(problems)} of the tensors do not fit the model; none of this "
                f"call was written:\n{listed(problems)}"
            )
        self._came |= came
        for place, _ in arrived:
            self._begun[place.weight] = None
        self._writer.write(arrived)

    def _match(
        self, named_tensors: NamedTensors
    ) -> tuple[list[tuple[Place, torch.Tensor]], dict[str, _Came], list[str]]:
        """Return what is to be written, what came by part, and a sentence for each misfit."""
        arrived: list[tuple[Place, torch.Tensor]] = []
        came: dict[str, _Came] = {}
        problems: list[str] = []
        scales: list[tuple[str, Place]] = []
        known, before, rename = self._places.by_name, self._came, self._rename
        for name, tensor in _pairs(named_tensors):
            inner = name if rename is None else renamed(name, rename)
            place = known.get(inner)
            if place is None:
                place = self._find(inner, name, tensor, problems)
                if place is None:
                    continue
            if tensor.shape != place.shape or tensor.dtype not in place.dtypes:
                arrival = Arrival.of(name, tensor)
                problems.append(f"{name}: {self._places.misfit(arrival, place)}")
                continue
            if problem := _not_readable(tensor):
                problems.append(f"{name}: {problem}")
                continue
            for part in place.parts:
                other = came.get(part) or before.get(part)
                if other is not None and not _are_twins(other.place, place):
                    problems.append(
                        f"{name}: {other.name} came for {part} in this block already; a block "
                        "takes each tensor once"
                    )
                    break
            else:
                is_fp8 = tensor.dtype is E4M3 or place.role is Role.SCALE
                came.update(dict.fromkeys(place.parts, _Came(name, place, is_fp8)))
                if is_fp8:
                    scales.append((name, place))
                if place.is_here:
                    arrived.append((place, tensor))
        problems += self._check_scales(came, scales)
        return arrived, came, problems

    def _find(
        self, inner: str, name: str, tensor: torch.Tensor, problems: list[str]
    ) -> Place | None:
        """Find the place of a name that did not come before, or say that there is none."""
        try:
            return self._places.find(inner, self._model)
        except KeyError:
            problems.append(self._places.unknown(Arrival.of(name, tensor)))
            return None

    def _check_scales(
        self, came: dict[str, _Came], scales: list[tuple[str, Place]]
    ) -> Iterator[str]:
        """Yield a sentence for codes and scales of what is not FP8, and for an unknown cut."""
        inventory = self._places.inventory
        every = {**self._came, **came}
        for name, place in scales:
            if place.role is not Role.SCALE:
                continue
            weights = (every.get(part.removesuffix(SCALE_SUFFIX)) for part in place.parts)
            other = next((x for x in weights if x is not None and not x.is_fp8), None)
            if other is not None:
                yield f"{name}: extra, the scale of {other.name}, which did not come in FP8"
            is_unsure = inventory.is_ambiguous(place.slot)
            if is_unsure and not says_separate(config_of(self._model)):
                yield (
                    f"{name}: nothing tells whether gate and up were cut into blocks one after the "
                    "other, or all their rows, since there are as many; send experts one by one "
                    "(experts.0.gate_proj.weight and such), or in 16 bits"
                )
        if any(x.place.role is Role.SCALE for x in self._came.values()):
            yield from self._check_weights(came)

    def _check_weights(self, came: dict[str, _Came]) -> Iterator[str]:
        """Yield a sentence for each weight in 16 bits whose scales came before."""
        for part, x in came.items():
            scale = self._came.get(part + SCALE_SUFFIX)
            if scale is not None and not x.is_fp8:
                yield f"{x.name}: its scale {scale.name} came before, but it is not FP8"

    def _is_meta(self, home: Home) -> bool:
        tensor = None if self._writer is None else self._writer.tensors.get(home.owner)
        return tensor is not None and tensor.is_meta

    def _close(self) -> None:
        """Let follow what is made of weights; nothing can be added from then on."""
        writer, self._writer = self._writer, None
        if writer is not None and self._begun:
            writer.follow()

    def _check_complete(self) -> None:
        """Raise ValueError unless all parts of what was begun have come."""
        missing = list(self._missing())
        if missing:
            more = f" and {len(missing) - _NUM_NAMED} more" if len(missing) > _NUM_NAMED else ""
            raise ValueError(
                f"updating: the block has ended, but {', '.join(missing[:_NUM_NAMED])}{more} did "
                "not come, of tensors that were begun; the model is partly written: update it "
                "again before using it"
            )

    def _missing(self) -> Iterator[str]:
        for home in self._begun:
            for part in home.needed:
                weight = self._came.get(part)
                if weight is None:
                    yield part
                elif weight.is_fp8 and part + SCALE_SUFFIX not in self._came:
                    yield part + SCALE_SUFFIX


def _pairs(named_tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield names and tensors. Raises TypeError for anything else."""
    rule = "update.add: takes a mapping of names to tensors, or pairs (name, tensor)"
    if isinstance(named_tensors, str | torch.Tensor) or not isinstance(named_tensors, Iterable):
        raise TypeError(f"{rule}, got {type(named_tensors).__name__}")
    pairs = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    for pair in pairs:
        try:
            name, tensor = pair
        except (TypeError, ValueError):
            raise TypeError(f"{rule}, got {type(pair).__name__}") from None
        if type(name) is not str or not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{rule}, got ({type(name).__name__}, {type(tensor).__name__})")
        yield name, tensor


def _not_readable(tensor: torch.Tensor) -> str | None:
    """Say why the values of a tensor cannot be copied."""
    if tensor.is_meta:
        return "it is on the meta device, and has no values"
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        kind = type(tensor).__name__
        return f"a {kind} has no values of its own; send a whole tensor, as full_tensor() gives it"
    return None if tensor.layout is torch.strided else not_dense(tensor)


def _are_twins(one: Place, other: Place) -> bool:
    """Whether they are one tied tensor under two names."""
    is_tied = one.home is other.home and one.parts == other.parts
    return is_tied and one.slot.name != other.slot.name and one.shape == other.shape
