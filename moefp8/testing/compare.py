"""Compare two models on the same tokens: perplexity, KL, top-1 agreement, and errors by layer.

R rows of S tokens, V words; a position counts if it has a label.
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from ..layers import FP8Linear, GroupedExperts
from .comparison import Comparison, Errors, LayerComparison
from .errors import row_errors
from .reference import copied_call

NO_LABEL = -100
_TOKENS_OF_A_CALL = 2048  # bounds the layers' outputs that are kept for the other model
_ROWS_OF_LOGITS = 256  # of which probabilities are computed in FP64 at once

_Batch = tuple[torch.Tensor, torch.Tensor]


@torch.no_grad()
def compare_models(
    a: nn.Module,
    b: nn.Module,
    ids: torch.Tensor | Sequence[torch.Tensor],
    *,
    labels: torch.Tensor | Sequence[torch.Tensor] | None = None,
    layers: str | None = None,
    logits: Callable[[Any], torch.Tensor] | None = None,
    **kwargs: Any,
) -> Comparison:
    """Tell how far model `b` is from model `a` on the same tokens, and which layer costs most.

    Use it to ask *is FP8 good enough*: `a` is the BF16 model, `b` the same in FP8. Both are called
    once on all tokens; for the KL divergence of each layer alone, `a` is called once more for each
    layer, with that layer of `b` in its place; and once for `kl_floor`. A NaN makes what it enters
    infinite.

    Args:
        a, b: models in evaluation mode, on one device, with layers of the same names.
        ids: [R, S] int64, or several of such tensors.
        labels: [R, S] int64 for each of ids: the token that is to be predicted there, or -100.
            None: the next token, as for causal models.
        layers: name of the module whose children are the layers. None: the `nn.ModuleList` with
            most parameters of those that are in no other one.
        logits: gets [R, S, V] from what a model returns. None: its `logits`, or what it returns.
        kwargs: further arguments of both models, such as `use_cache=False`.

    Raises:
        ValueError: layers, vocabularies or devices differ, there are no layers or none is called,
            there is no label, or shapes do not fit.
    """
    _check_devices(a, b)
    names = _layer_names(a, b, layers)
    parts = {name: [*_part_names(a, b, name)] for name in names}
    own_names = [*names, *(part for each in parts.values() for part in each)]
    tally = _Tally()
    own_errors = _OwnErrors(a, b, own_names, tally.own)

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        output = model(x, **kwargs)
        return _logits_of(output) if logits is None else logits(output)

    for x, targets in _batches(ids, labels):
        at = targets != NO_LABEL
        with own_errors.hooks(), _outputs(a, names, tally.keep):
            expected = _checked("a", run(a, x), x)[at]
        with _outputs(b, names, tally.add_total):
            actual = _checked("b", run(b, x), x)[at]
        tally.add_logits(expected, actual, targets[at])
        with _rounded_otherwise(a, names):
            tally.tokens["floor"].append(_kl(expected, run(a, x)[at]))
        for name in filter(tally.own.__contains__, names):
            with _with_layer(a, b, name):
                tally.kl_alone[name].append(_kl(expected, run(a, x)[at]))
    if not tally.own:
        raise ValueError(
            f"compare_models: a must call its layers, got no call of {names[0]}; name the module "
            "whose children are the layers (layers=)"
        )
    return tally.comparison(names, parts)


class _Tally:
    """Figures of single positions and rows, batch after batch, on the CPU."""

    def __init__(self) -> None:
        lists = partial(defaultdict[str, list[torch.Tensor]], list)
        self.own, self.total, self.kl_alone, self.tokens = lists(), lists(), lists(), lists()
        self._kept = defaultdict[str, deque[torch.Tensor]](deque)

    def keep(self, name: str, output: torch.Tensor) -> None:
        """Keep what a layer of `a` returns until `add_total` compares that of `b` with it."""
        self._kept[name].append(output.clone())  # the next layer may add to it in place

    def add_total(self, name: str, output: torch.Tensor) -> None:
        rows = row_errors(output, self._kept[name].popleft())
        self.total[name].append(rows.flatten().cpu())

    def add_logits(
        self, expected: torch.Tensor, actual: torch.Tensor, targets: torch.Tensor
    ) -> None:
        """expected, actual: [P, V]; targets: [P]."""
        if expected.shape != actual.shape:
            raise ValueError(
                "compare_models: a and b must have one vocabulary, got logits of "
                f"{expected.shape[-1]} and {actual.shape[-1]} tokens"
            )
        figures = {
            "a": _by_rows(_cross_entropy, expected, targets),
            "b": _by_rows(_cross_entropy, actual, targets),
            "kl": _kl(expected, actual),
            "same": _by_rows(_has_same_top, actual, expected),
            "logits": _by_rows(row_errors, actual, expected),
        }
        for name, values in figures.items():
            self.tokens[name].append(values)
        self._kept.clear()  # a layer that is in both models is kept twice

    def comparison(self, names: list[str], parts: dict[str, list[str]]) -> Comparison:
        tokens = {name: torch.cat(values) for name, values in self.tokens.items()}
        difference = tokens["b"] - tokens["a"]
        num_tokens, change = difference.numel(), _exp(difference.mean())
        std = float(difference.std(correction=0)) / math.sqrt(num_tokens)
        return Comparison(
            num_tokens=num_tokens,
            perplexity_a=_exp(tokens["a"].mean()),
            perplexity_b=_exp(tokens["b"].mean()),
            change=change - 1,
            change_std=change * std,
            kl_mean=float(tokens["kl"].mean()),
            kl_max=float(tokens["kl"].max()),
            kl_floor=float(tokens["floor"].mean()),
            same_top_1=float(tokens["same"].mean()),
            logits=_errors(self.tokens["logits"]),
            layers=[
                LayerComparison(
                    name=name,
                    kl=float(torch.cat(self.kl_alone[name]).mean()),
                    own=_errors(self.own[name]),
                    total=_errors(self.total[name]),
                    parts={
                        part.removeprefix(f"{name}."): _errors(self.own[part])
                        for part in parts[name]
                        if part in self.own
                    },
                )
                for name in names
                if name in self.own
            ],
        )


# ---- Which tokens ----


def _batches(
    ids: torch.Tensor | Sequence[torch.Tensor],
    labels: torch.Tensor | Sequence[torch.Tensor] | None,
) -> list[_Batch]:
    """Pairs (ids, labels) [R, S] of at most `_TOKENS_OF_A_CALL` tokens, or of one row."""
    ids = [ids] if isinstance(ids, torch.Tensor) else [*ids]
    if labels is None:
        labels = [F.pad(x[..., 1:], (0, 1), value=NO_LABEL) for x in ids]
    elif isinstance(labels, torch.Tensor):
        labels = [labels]
    shapes = [[tuple(x.shape) for x in each] for each in (ids, labels)]
    if shapes[0] != shapes[1] or any(len(shape) != 2 for shape in shapes[0]):
        raise ValueError(
            "compare_models: ids must be [R, S], and labels as ids, got "
            f"{' and '.join(str([*map(list, each)]) for each in shapes)}"
        )
    batches = []
    for x, y in zip(ids, labels, strict=True):
        rows = max(1, _TOKENS_OF_A_CALL // max(1, x.shape[1]))
        batches += [z for z in zip(x.split(rows), y.split(rows), strict=True) if _has_label(z[1])]
    if not batches:
        raise ValueError(
            "compare_models: a position must have a label, got none; a row has the labels of all "
            "tokens but its first, so it needs two"
        )
    return batches


def _has_label(labels: torch.Tensor) -> bool:
    return bool((labels != NO_LABEL).any())


# ---- Which modules ----


def _check_devices(a: nn.Module, b: nn.Module) -> None:
    devices = [next(model.parameters(), torch.empty(0)).device for model in (a, b)]
    if devices[0] != devices[1]:
        raise ValueError(
            f"compare_models: a and b must be on one device, got {devices[0]} and {devices[1]}; "
            "layers of b run on what they get in a"
        )


def _layer_names(a: nn.Module, b: nn.Module, container: str | None) -> list[str]:
    if container is None:
        container = _outermost_list(a)
    names = []
    for model in (a, b):
        children = dict(model.named_modules()).get(container, nn.Module()).named_children()
        names.append([f"{container}.{name}".lstrip(".") for name, _ in children])
    if not names[0]:
        raise ValueError(f"compare_models: {container!r} must have layers, got none; name another")
    if names[0] != names[1]:
        raise ValueError(
            f"compare_models: a and b must have the same layers, got {len(names[0])} and "
            f"{len(names[1])} in {container!r}"
        )
    return names[0]


def _outermost_list(model: nn.Module) -> str:
    """The name of the `nn.ModuleList` with most parameters, of those that are in no other."""
    sizes: dict[str, int] = {}
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in sizes)
        if isinstance(module, nn.ModuleList) and len(module) and not is_inside:
            sizes[name] = sum(x.numel() for x in module.parameters())
    if not sizes:
        raise ValueError(
            "compare_models: the model must have its layers in an nn.ModuleList, got none; name "
            "the module whose children they are (layers=)"
        )
    return max(sizes, key=lambda name: sizes[name])


def _part_names(a: nn.Module, b: nn.Module, layer: str) -> Iterator[str]:
    """The children of a layer that hold FP8 modules in one of the models."""
    others = dict(b.get_submodule(layer).named_children())
    for name, child in a.get_submodule(layer).named_children():
        modules = [*child.modules(), *others[name].modules()] if name in others else []
        if any(isinstance(x, FP8Linear | GroupedExperts) for x in modules):
            yield f"{layer}.{name}"


# ---- What they return ----


class _OwnErrors:
    """In a run of `a`, adds the errors of each of `b`'s named modules on the input in `a`."""

    def __init__(
        self, a: nn.Module, b: nn.Module, names: list[str], errors: dict[str, list[torch.Tensor]]
    ) -> None:
        self.a, self.b, self.names, self.errors = a, b, names, errors
        self.outputs: list[torch.Tensor] = []  # of b's modules whose turn in a is not over
        self.is_in_b = False  # modules that are in both have our hooks there, too

    @contextmanager
    def hooks(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for name in self.names:
                module = self.a.get_submodule(name)
                before, after = partial(self._before, name), partial(self._after, name)
                hooks.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
                hooks.callback(module.register_forward_hook(after).remove)
            yield

    def _before(self, name: str, module: nn.Module, *call: Any) -> None:
        if self.is_in_b:
            return
        args, kwargs = copied_call("compare_models", *call)
        self.is_in_b = True
        try:
            output = self.b.get_submodule(name)(*args, **kwargs)
        finally:
            self.is_in_b = False
        self.outputs.append(_first_tensor(output))

    def _after(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if not self.is_in_b:
            rows = row_errors(self.outputs.pop(), _first_tensor(output))
            self.errors[name].append(rows.flatten().cpu())


@contextmanager
def _outputs(
    model: nn.Module, names: list[str], use: Callable[[str, torch.Tensor], None]
) -> Iterator[None]:
    """In a run of the model, call `use(name, output)` after each of its named modules.

    The output may be written to.
    """
    with ExitStack() as hooks:
        for name in names:

            def after(*call: Any, name: str = name) -> None:
                use(name, _first_tensor(call[-1]))

            hooks.callback(model.get_submodule(name).register_forward_hook(after).remove)
        yield


@contextmanager
def _with_layer(a: nn.Module, b: nn.Module, name: str) -> Iterator[None]:
    """`a` has the layer of `b` in the place of its own."""
    own = a.get_submodule(name)
    a.set_submodule(name, b.get_submodule(name))
    try:
        yield
    finally:
        a.set_submodule(name, own)


@contextmanager
def _rounded_otherwise(a: nn.Module, names: list[str]) -> Iterator[None]:
    """The first call of a layer of `a` returns hidden states that differ in their last bit."""
    called = list[str]()

    def round_otherwise(name: str, output: torch.Tensor) -> None:
        if not called:
            generator = torch.Generator(output.device).manual_seed(0)
            noise = torch.rand(output.shape, generator=generator, device=output.device) - 0.5
            output.copy_(output.float() * (1 + torch.finfo(output.dtype).eps * noise))
        called.append(name)

    with _outputs(a, names, round_otherwise):
        yield


def _first_tensor(output: Any) -> torch.Tensor:
    """A layer's hidden states: all that it returns, or the first of several tensors."""
    for x in tree_leaves(output):
        if isinstance(x, torch.Tensor) and x.is_floating_point():
            return x
    raise ValueError(
        f"compare_models: a layer must return hidden states, got {type(output).__name__}; name the "
        "module whose children are the layers (layers=)"
    )


def _logits_of(output: Any) -> Any:
    return getattr(output, "logits", output)


def _checked(name: str, logits: Any, ids: torch.Tensor) -> torch.Tensor:
    shape = [*logits.shape] if isinstance(logits, torch.Tensor) else type(logits).__name__
    if not isinstance(logits, torch.Tensor) or shape[:-1] != [*ids.shape]:
        raise ValueError(
            f"compare_models: logits of {name} must be [R, S, V] = {[*ids.shape, 'V']}, got "
            f"{shape}; say how to get them from what the model returns (logits=)"
        )
    return logits


# ---- Measures ----


def _kl(expected: torch.Tensor, actual: torch.Tensor) -> torch.Tensor:
    """KL(expected || actual) of logits [P, V]: [P]."""

    def measure(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        log_p, log_q = (z.double().log_softmax(dim=-1) for z in (x, y))
        return (log_p.exp() * (log_p - log_q)).sum(dim=-1)

    return _by_rows(measure, expected, actual)


def _cross_entropy(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x.double(), y, reduction="none")


def _has_same_top(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.argmax(dim=-1) == y.argmax(dim=-1)).double()


def _by_rows(measure: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """`measure(*tensors)` [P] on the CPU, of some rows at once: in FP64, logits are large."""
    parts = zip(*(x.split(_ROWS_OF_LOGITS) for x in tensors), strict=True)
    return torch.cat([measure(*part).nan_to_num(math.inf, math.inf).cpu() for part in parts])


def _exp(x: torch.Tensor) -> float:
    return float(x.exp())


def _errors(rows: list[torch.Tensor]) -> Errors:
    errors = torch.cat(rows)
    return Errors(float(errors.median()), float(errors.max()))
