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
from .bucket import Bucket, Filler, device_of_all
from .place import PLAIN, Arrival, Home, Place
from .places import Places, config_of, listed
from .write import Writer

_Names = tuple[str, ...]
_Tensors = tuple[torch.Tensor, ...]
NamedTensors = Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]
_NUM_NAMED = 5
_RULE = "update.add: takes a mapping of names to tensors, or pairs (name, tensor)"


@contextmanager
def updating(model: nn.Module, *, rename: Callable[[str], str] | None = None) -> "Iterator[Update]":
    """Write a trainer's tensors into a model while it serves: in place, bucket by bucket.

        with moefp8.updating(model) as update:
            for bucket in buckets:  # {name: tensor}, or pairs (name, tensor)
                update.add(bucket)

    No tensor moves, so CUDA graphs of the model stay as they are, and their next replay computes
    with the new weights. Tensors made of weights are updated in their own memory: transposed FP8
    weights, FP8 codes of master weights, and FP8 weights beside experts of transformers;
    `moefp8.hf.DecodingGraphs` copies what it has merged at its next `generate`. A block may update
    any tensors of the model, in any order. After it, the `state_dict` has the same bits as after a
    load of the same tensors.

    Names are those that `load_checkpoint` takes for this model, and in a model of transformers also
    those that transformers renames: experts one by one (`mlp.experts.3.gate_proj.weight`) or
    stacked (`mlp.experts.gate_up_proj` [E, 2I, H], gate rows first). Tensors are whole and on any
    device. In a model that `shard` or expert parallelism has cut, each rank takes them all, keeps
    its part, and skips experts of other ranks.

    - FP8 weights take bf16, fp16 or fp32, quantized on the model's device by the rule of `convert`
      and `trainable=True`; or E4M3 codes and their `*_scale_inv`, in one call or in two.
    - Master weights take any float dtype, cast to theirs; or codes and scales, dequantized.
    - All else takes what `load_checkpoint` takes, cast to its dtype.
    - Experts that `convert` made of stacks [E, in, out], or of rows of gate and of up in turns, as
      those of gpt-oss, take E4M3 codes and scales alone: nothing says in which order others came.

    `update.add` checks names, shapes and dtypes of all its tensors before it writes any of them;
    values are not checked. It works on the current stream of each device and waits for no GPU:
    tensors may be freed or written again after it as after any operation of that stream. Replays on
    another stream have to wait for this one.

    A block must complete each tensor that it begins: all experts of a stack, gate and up, codes and
    scales. An exception in the block is raised as it is, without a list of missing parts; the model
    is then partly written, and has to be updated or loaded before it is used.

    Args:
        model: filled, on real devices.
        rename: name of a tensor -> name in the model, where a trainer has names of its own.

    Raises:
        ValueError: on entry, for a model that cannot be written, as with DTensors or on the meta
            device. At the end of the block, for missing parts: it names the first five. By
            `update.add`, for names that the model does not know (it names the nearest), for other
            shapes and dtypes, and for tensors added before in this block; a tied tensor may come
            under each of its names, and the last one stays.
        TypeError: by `update.add`, for anything but pairs of str and tensor.
        RuntimeError: by `update.add`, after the block, or while a CUDA graph is captured.
    """
    update = Update(model, rename)
    try:
        yield update
    finally:
        update._close()
    update._check_complete()


class Update:
    """The object that a block of `updating` adds tensors to."""

    def __init__(self, model: nn.Module, rename: Callable[[str], str] | None) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"updating: model must be an nn.Module, got {type(model).__name__}")
        self._model, self._rename = model, rename
        self._places, tensors = Places.of(model)
        self._writer: Writer | None = Writer(model, self._places, tensors)
        self._parts: dict[str, Filler] = {}  # by part; `_known_buckets` has more
        self._known_buckets: list[Bucket] = []
        self._has_scales = self._has_codes = False  # of this block so far
        self._begun: dict[Home, None] = {}
        meta = [owner.names[0] for owner, x in tensors.items() if x.is_meta]
        if meta:
            raise ValueError(
                f"updating: {', '.join(meta[:_NUM_NAMED])} of {len(meta)} tensors are on the meta "
                "device; load a checkpoint with moefp8.load_checkpoint first"
            )

    def add(self, named_tensors: NamedTensors) -> None:
        """Write a bucket: a mapping of names to tensors, or pairs of both; see `updating`."""
        if self._writer is None:
            raise RuntimeError("update.add: the block of moefp8.updating has ended; open another")
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "update.add: a CUDA graph is being captured; weights are written between replays"
            )
        names, tensors = _named(named_tensors)
        inner = names
        if self._rename is not None:
            inner = tuple([renamed(name, self._rename) for name in names])
        device = device_of_all(tensors)
        bucket = self._known(names, inner, tensors, device)
        if bucket is not None:
            self._known_buckets.append(bucket)
        else:
            bucket = self._match(names, inner, tensors)
            self._parts |= bucket.fillers
        self._begun |= bucket.begun
        self._has_scales |= bucket.has_scales
        self._has_codes |= bucket.has_codes
        self._writer.write(bucket, tensors, device)

    def _known(
        self, names: _Names, inner: _Names, tensors: _Tensors, device: torch.device | None
    ) -> Bucket | None:
        """The bucket kept from an earlier block with these names, if nothing differs."""
        buckets = self._places.buckets
        bucket = None if self._has_scales else buckets.find(names, inner, tensors, device)
        if bucket is None or not self._parts.keys().isdisjoint(bucket.fillers):
            return None
        return bucket if all(map(bucket.is_apart_from, self._known_buckets)) else None

    @property
    def _fillers(self) -> dict[str, Filler]:
        """What has filled each part in this block."""
        for bucket in self._known_buckets:
            self._parts |= bucket.fillers
        self._known_buckets.clear()
        return self._parts

    def _match(self, names: _Names, inner: _Names, tensors: _Tensors) -> Bucket:
        """Find the place of each tensor. Raises ValueError with a sentence for each misfit.

        inner: the names in the model.
        """
        arrived: list[tuple[Place, int]] = []
        fillers: dict[str, Filler] = {}
        problems: list[str] = []
        scales: list[tuple[str, Place]] = []
        before, has_twins, has_strangers = self._fillers, False, False
        known = self._places.by_name
        for number, (name, tensor) in enumerate(zip(names, tensors, strict=True)):
            place = known.get(inner[number])
            if place is None or not place.takes(tensor):
                place = self._judge(name, inner[number], tensor, problems)
            if place is None:
                has_strangers = True
                continue
            entry = name, place, tensor.dtype is E4M3
            for part in place.parts:
                if part in fillers or part in before:
                    other = fillers.get(part) or before[part]
                    if not _are_twins(other[1], place):
                        problems.append(
                            f"{name}: {other[0]} came for {part} in this block already; a block "
                            "takes each tensor once"
                        )
                        break
                    has_twins = True
                fillers[part] = entry
            else:
                if place.is_scale:
                    scales.append((name, place))
                if place.is_here:
                    arrived.append((place, number))
        problems += self._check_scales(fillers, scales)
        if problems:
            raise ValueError(
                f"update.add: {len(problems)} of the tensors do not fit the model; none of this "
                f"call was written:\n{listed(problems)}"
            )
        if has_twins:  # of tensors that fill the same parts, the last one is written
            arrived = list({(x.home, x.parts): (x, number) for x, number in arrived}.values())
        bucket = Bucket(tensors, fillers, arrived)
        if not (has_twins or has_strangers or scales):
            self._places.buckets.keep(names, inner, bucket)
        return bucket

    def _judge(
        self, name: str, inner: str, tensor: torch.Tensor, problems: list[str]
    ) -> Place | None:
        """Find the place of a tensor; None if it is skipped, or a problem, which is noted."""
        arrival = Arrival.of(name, tensor)
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

    def _check_scales(
        self, fillers: dict[str, Filler], scales: list[tuple[str, Place]]
    ) -> Iterator[str]:
        """Yield a sentence for each scale of a weight that is not FP8, and for each unknown cut."""
        inventory = self._places.inventory
        for name, place in scales:
            weights = [part.removesuffix(SCALE_SUFFIX) for part in place.parts]
            others = (fillers.get(part) or self._fillers.get(part) for part in weights)
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
            for part, (name, _, is_fp8) in fillers.items():
                scale = None if is_fp8 else self._fillers.get(part + SCALE_SUFFIX)
                if scale is not None:
                    yield f"{name}: its scale {scale[0]} came before, but it is not FP8"

    def _close(self) -> None:
        """Update the tensors that are made of weights; nothing can be added from then on."""
        writer, self._writer = self._writer, None
        if writer is not None and self._begun:
            writer.follow()

    def _check_complete(self) -> None:
        """Raise ValueError unless all parts of each tensor that was begun have come."""
        missing = list(self._missing())
        if missing:
            more = f" and {len(missing) - _NUM_NAMED} more" if len(missing) > _NUM_NAMED else ""
            raise ValueError(
                f"updating: the block has ended, but {', '.join(missing[:_NUM_NAMED])}{more} did "
                "not come, of tensors that were begun; the model is partly written: update it "
                "again before using it"
            )

    def _missing(self) -> Iterator[str]:
        whole = {home for bucket in self._known_buckets for home in bucket.whole}
        rest = self._begun.keys() - whole if not self._has_codes else self._begun.keys()
        fillers = self._fillers if rest else {}
        for home in self._begun if rest else ():
            if home not in rest or (not self._has_codes and home.needed.keys() <= fillers.keys()):
                continue
            for part in home.needed:
                weight = fillers.get(part)
                if weight is None:
                    yield part
                elif weight[2] and part + SCALE_SUFFIX not in fillers:
                    yield part + SCALE_SUFFIX


def _named(named_tensors: NamedTensors) -> tuple[_Names, _Tensors]:
    """Return the names and their tensors. Raises TypeError for anything else."""
    if isinstance(named_tensors, str | torch.Tensor) or not isinstance(named_tensors, Iterable):
        raise TypeError(f"{_RULE}, got {type(named_tensors).__name__}")
    if isinstance(named_tensors, Mapping):
        names, tensors = tuple(named_tensors), tuple(named_tensors.values())
    else:
        pairs = list(named_tensors)
        if set(map(type, pairs)) - {tuple, list} or set(map(len, pairs)) - {2}:
            kinds = ", ".join(sorted({type(pair).__name__ for pair in pairs}))
            raise TypeError(f"{_RULE}, got {kinds}")
        names, tensors = zip(*pairs, strict=True) if pairs else ((), ())
    are_tensors = all(issubclass(kind, torch.Tensor) for kind in set(map(type, tensors)))
    if not (are_tensors and set(map(type, names)) <= {str}):
        kinds = next(
            f"({type(name).__name__}, {type(x).__name__})"
            for name, x in zip(names, tensors, strict=True)
            if type(name) is not str or not isinstance(x, torch.Tensor)
        )
        raise TypeError(f"{_RULE}, got {kinds}")
    return names, tensors


def _not_readable(tensor: torch.Tensor) -> str | None:
    """Say why the values of a tensor cannot be copied."""
    if tensor.is_meta:
        return "it is on the meta device, and has no values"
    if type(tensor) not in PLAIN and is_traceable_wrapper_subclass(tensor):
        kind = type(tensor).__name__
        return f"a {kind} has no values of its own; send a whole tensor, as full_tensor() gives it"
    return None if tensor.layout is torch.strided else not_dense(tensor)


def _are_twins(one: Place, other: Place) -> bool:
    """Whether they are one tied tensor under two names."""
    is_tied = one.home is other.home and one.parts == other.parts
    return is_tied and one.slot.name != other.slot.name
