"""`updating`: write a trainer's tensors into a model that serves, in place, bucket by bucket."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ...kernels import E4M3
from ..files.config import says_separate
from ..files.names import SCALE_SUFFIX, renamed
from ..model.slots import not_dense
from .places import Arrival, Home, Place, Places, config_of, listed
from .write import Writer

NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
_Came = tuple[str, Place, bool]  # what has filled a part: its name, its place, whether it is FP8
_PLAIN = {torch.Tensor, nn.Parameter}
_NUM_NAMED = 5
_RULE = "update.add: takes a mapping of names to tensors, or pairs (name, tensor)"


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
        self._has_scales = False  # whether some came
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
        arrived, came, problems = self._match(_listed_pairs(named_tensors))
        if problems:
            raise ValueError(
                f"update.add: {len(problems)} of the tensors do not fit the model; none of this "
                f"call was written:\n{listed(problems)}"
            )
        self._came |= came
        self._begun |= dict.fromkeys(place.weight for place, _ in arrived)
        self._has_scales = self._has_scales or any(place.is_scale for place, _ in arrived)
        self._writer.write(arrived)

    def _match(
        self, pairs: list[tuple[str, torch.Tensor]]
    ) -> tuple[list[tuple[Place, torch.Tensor]], dict[str, _Came], list[str]]:
        """Return what is to be written, what came by part, and a sentence for each misfit.

        A trainer may send 20,000 tensors: one that fits takes a microsecond.
        """
        arrived: list[tuple[Place, torch.Tensor]] = []
        came: dict[str, _Came] = {}
        problems: list[str] = []
        scales: list[tuple[str, Place]] = []
        known = self._places.by_name if self._rename is None else {}
        before = self._came
        for name, tensor in pairs:
            place = known.get(name)
            if (
                place is None
                or type(tensor) not in _PLAIN
                or tensor.shape != place.shape
                or tensor.dtype not in place.dtypes
                or tensor.is_meta
                or tensor.layout is not torch.strided
            ):
                place = self._judge(name, tensor, problems)
                if place is None:
                    continue
            entry = name, place, tensor.dtype is E4M3
            for part in place.parts:
                if (part in came or part in before) and self._is_double(part, came, entry):
                    other, *_ = came.get(part) or before[part]
                    problems.append(
                        f"{name}: {other} came for {part} in this block already; a block takes "
                        "each tensor once"
                    )
                    break
                came[part] = entry
            else:
                if place.is_scale:
                    scales.append((name, place))
                if place.is_here:
                    arrived.append((place, tensor))
        problems += self._check_scales(came, scales)
        return arrived, came, problems

    def _judge(self, name: str, tensor: torch.Tensor, problems: list[str]) -> Place | None:
        """Find the place of a tensor; None for what is passed over, and what is a problem."""
        if type(name) is not str or not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{_RULE}, got ({type(name).__name__}, {type(tensor).__name__})")
        inner, arrival = renamed(name, self._rename), Arrival.of(name, tensor)
        try:
            place = self._places.find(inner, self._model)
        except KeyError:
            problems.append(self._places.unknown(arrival))
            return None
        if place is None:
            return None
        if problem := self._places.misfit(arrival, place) or _not_readable(tensor):
            problems.append(f"{name}: {problem}")
            return None
        return place

    def _is_double(self, part: str, came: dict[str, _Came], entry: _Came) -> bool:
        """Whether another tensor came for a part: not the same tied one under another name."""
        one, other = (came.get(part) or self._came[part])[1], entry[1]
        is_tied = one.home is other.home and one.parts == other.parts
        return not is_tied or one.slot.name == other.slot.name

    def _check_scales(
        self, came: dict[str, _Came], scales: list[tuple[str, Place]]
    ) -> Iterator[str]:
        """Yield a sentence for codes and scales of what is not FP8, and for an unknown cut."""
        inventory = self._places.inventory
        for name, place in scales:
            weights = [part.removesuffix(SCALE_SUFFIX) for part in place.parts]
            others = (came.get(part) or self._came.get(part) for part in weights)
            other = next((x for x in others if x is not None and not x[2]), None)
            if other is not None:
                yield f"{name}: extra, the scale of {other[0]}, which did not come in FP8"
            is_unsure = inventory.is_ambiguous(place.slot)
            if is_unsure and not says_separate(config_of(self._model)):
                yield (
                    f"{name}: nothing tells whether gate and up were cut into blocks one after the "
                    "other, or all their rows, since there are as many; send experts one by one "
                    "(experts.0.gate_proj.weight and such), or in 16 bits"
                )
        if self._has_scales:
            for part, (name, _, is_fp8) in came.items():
                scale = None if is_fp8 else self._came.get(part + SCALE_SUFFIX)
                if scale is not None:
                    yield f"{name}: its scale {scale[0]} came before, but it is not FP8"

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
                elif weight[2] and part + SCALE_SUFFIX not in self._came:
                    yield part + SCALE_SUFFIX


def _listed_pairs(named_tensors: NamedTensors) -> list[tuple[str, torch.Tensor]]:
    """List names and tensors. Raises TypeError for anything else."""
    if isinstance(named_tensors, str | torch.Tensor) or not isinstance(named_tensors, Iterable):
        raise TypeError(f"{_RULE}, got {type(named_tensors).__name__}")
    items = named_tensors.items() if isinstance(named_tensors, Mapping) else named_tensors
    pairs = list(items)
    if set(map(type, pairs)) - {tuple, list} or set(map(len, pairs)) - {2}:
        kinds = ", ".join(sorted({type(pair).__name__ for pair in pairs}))
        raise TypeError(f"{_RULE}, got {kinds}")
    return pairs


def _not_readable(tensor: torch.Tensor) -> str | None:
    """Say why the values of a tensor cannot be copied."""
    if tensor.is_meta:
        return "it is on the meta device, and has no values"
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(tensor):
        kind = type(tensor).__name__
        return f"a {kind} has no values of its own; send a whole tensor, as full_tensor() gives it"
    return None if tensor.layout is torch.strided else not_dense(tensor)
