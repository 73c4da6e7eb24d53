"""One torch op per kernel: `moefp8::<name>` with a reference, a body of kernels and a fake body.

The dispatcher picks the body by the device of the tensors, so no caller ever asks `x.is_cuda`.
`kernels/targets.py` says which GPUs run our kernels; on any other the reference body runs, made of
PyTorch's operations.
"""

import os
import warnings
from collections.abc import Callable, Container, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from typing import Annotated, Any, get_type_hints

import torch
from torch import _C

from .common.activation import Activation
from .common.checks import check_no_gradient
from .jit import current_driver
from .targets import GEMMS

LIBRARY = torch.library.Library("moefp8", "DEF")

# Scales keep the memory order they were made with, also under torch.compile.
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides)


def register(
    schema: str,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    kernels: Callable[..., Any] | None = None,
    *,
    cuda: Callable[..., Any] | None = None,
    kernels_take: Callable[..., bool] | None = None,
    runs_on: Container[str] = GEMMS,
) -> "Op":
    """Register the op `moefp8::<schema>` and return it, ready to be called.

    Args:
        schema: as in `torch.library.Library.define`; arguments the op writes are `Tensor(a!)`. The
            first argument is a tensor.
        reference: the numerics in PyTorch.
        fake: checks, and returns empty outputs of the shapes, dtypes and strides of `reference`.
        kernels: launches kernels of ours, where `runs_on` says. What it raises is not caught:
            without a kernel there is no result. Other GPUs run `reference`, with a warning.
        cuda: runs on GPUs where `kernels` does not, without a warning.
        kernels_take: whether `kernels` has a kernel for these arguments; for others `reference`
            runs, with a warning.
        runs_on: the architectures that the kernels are for; by default all that have a GEMM.

    The ops are not differentiable, like a detached result: autograd functions around them say what
    a gradient through them means. What they write must not require a gradient, and its version is
    counted up, so that a graph that has saved it raises in its backward.
    """
    name = LIBRARY.define(schema, tags=_TAGS)
    written = _written(name)
    gpu = _on_gpu(name, reference, kernels, cuda, kernels_take, runs_on)
    LIBRARY.impl(name, _writing(name, written, _isolated(reference)), "CPU")
    LIBRARY.impl(name, _writing(name, written, gpu), "CUDA")
    LIBRARY.impl(name, torch.library.fallthrough_kernel, "Autograd")
    torch.library.register_fake(f"moefp8::{name}", fake, lib=LIBRARY)
    direct = None if kernels is None else _writing(name, written, kernels)
    return Op(getattr(torch.ops.moefp8, name).default, direct, kernels_take, runs_on)


_PLAIN = {torch.Tensor, torch.nn.Parameter}
_VALUES = {bool, int, float, type(None), Activation}
_num_dispatch_modes = _C._len_torch_dispatch_stack
_num_function_modes = _C._len_torch_function_stack
_transform = _C._functorch.peek_interpreter_stack
_tracing_state = _C._get_tracing_state
_is_profiling = _C._autograd._profiler_enabled


def any_watches() -> bool:
    """Whether a mode, a transform of functorch, a tracer or a profiler must see all ops."""
    return bool(
        _num_dispatch_modes()
        or _num_function_modes()
        or _transform() is not None
        or _tracing_state() is not None
        or _is_profiling()
    )


def _are_simple(args: Iterable[Any]) -> bool:
    """Whether all are numbers and the like, and tensors whose values are those in their memory."""
    for x in args:
        kind = type(x)
        if kind in _PLAIN:
            if x.is_neg() or x._is_zerotensor():
                return False
        elif kind is list:
            if not _are_simple(x):
                return False
        elif kind not in _VALUES:
            return False
    return True


class Op:
    """A registered op.

    A call goes through the dispatcher, unless skipping it makes no difference: on a GPU that runs
    our kernels, with plain tensors, while nothing traces, transforms or profiles. Then the launcher
    is called directly, which saves the host several microseconds.
    """

    def __init__(
        self,
        overload: Any,
        direct: Callable[..., Any] | None,
        takes: Callable[..., bool] | None,
        runs_on: Container[str],
    ) -> None:
        self.overload, self._direct, self._takes = overload, direct, takes
        self._runs_on = runs_on
        self._takes_activation = any(
            x.name == "activation_kind" for x in overload._schema.arguments
        )

    def __call__(self, *args: Any) -> Any:
        if (
            self._direct is not None
            and not torch.compiler.is_compiling()
            and _are_simple(args)
            and type(args[0]) in _PLAIN
            and current_driver().arch(args[0].get_device()) in self._runs_on
            and not any_watches()
            and (self._takes is None or self._takes(*args))
        ):
            return self._direct(*args)
        return self.overload(*(as_in_schema(args) if self._takes_activation else args))


def as_in_schema(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments as the schema has them: the fields of an `Activation` in its place."""
    return tuple([y for x in args for y in (x if type(x) is Activation else (x,))])


Written = Annotated[torch.Tensor, "written"]  # an argument that an op writes

_SCHEMA_TYPES = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    Written: "Tensor(a!)",
    Written | None: "Tensor(a!)?",
    int: "SymInt",
    int | None: "SymInt?",
    float: "float",
    float | None: "float?",
    bool: "bool",
    bool | None: "bool?",
    str: "str",
}


def register_inputs(
    name: str,
    inputs: Callable[..., Any],
    returns: str,
    *,
    kernels_take: Callable[..., bool] | None = None,
    runs_on: Container[str] = GEMMS,
    **bodies: Callable[[Any], Any],
) -> "Op":
    """Call `register` for an op whose arguments are declared once: as the fields of a NamedTuple.

    The schema follows from their annotations and defaults, and each body takes one such tuple.
    Instead of the class, `inputs` may be a function that makes one from the op's arguments. The
    schema has the fields of an `Activation` as arguments of their own; what the op writes comes
    before them.
    """
    fields = get_type_hints(inputs, include_extras=True)
    fields.pop("return", None)
    defaults = getattr(inputs, "_field_defaults", {})
    position = next((i for i, kind in enumerate(fields.values()) if kind is Activation), None)
    if position is not None:
        parts = get_type_hints(Activation).items()
        named = {f"activation_{part}": kind for part, kind in parts}
        items = [*fields.items()]
        fields = dict([*items[:position], *named.items(), *items[position + 1 :]])
    arguments = ", ".join(
        f"{_SCHEMA_TYPES[kind]} {field}" + (f"={defaults[field]}" if field in defaults else "")
        for field, kind in fields.items()
    )

    def taking_inputs(body: Callable[[Any], Any]) -> Callable[..., Any]:
        if position is None:
            return lambda *args: body(inputs(*args))
        end = position + len(Activation._fields)

        def run(*args: Any) -> Any:
            if type(args[position]) is not Activation:
                args = *args[:position], Activation(*args[position:end]), *args[end:]
            return body(inputs(*args))

        return run

    taking = {which: taking_inputs(body) for which, body in bodies.items()}
    schema = f"{name}({arguments}) -> {returns}"
    return register(schema, **taking, kernels_take=kernels_take, runs_on=runs_on)


def _written(name: str) -> dict[int, str]:
    """Position -> name of the arguments that the op writes."""
    arguments = getattr(torch.ops.moefp8, name).default._schema.arguments
    return {
        index: argument.name
        for index, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    }


def _writing(name: str, written: dict[int, str], body: Callable[..., Any]) -> Callable[..., Any]:
    """`body`, which then treats what it writes as PyTorch's own in-place operations do."""
    if not written:
        return body

    @wraps(body)
    def run(*args: Any) -> Any:
        outputs = [args[index] for index in written if args[index] is not None]
        check_no_gradient(name, written.values(), outputs)
        result = body(*args)
        torch.autograd.graph.increment_version(outputs)
        return result

    return run


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """A context for matmuls in FP32 by contract, which autocast must not turn to 16 bits."""
    if device.type == "meta":  # autocast does not know it
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def _isolated(body: Callable[..., Any]) -> Callable[..., Any]:
    """A PyTorch body as a kernel: it neither records a graph nor heeds autocast."""

    @wraps(body)
    def run(*args: Any) -> Any:
        with torch.no_grad(), without_autocast(args[0].device):
            return body(*args)

    return run


def _on_gpu(
    name: str,
    reference: Callable[..., Any],
    kernels: Callable[..., Any] | None,
    cuda: Callable[..., Any] | None,
    takes: Callable[..., bool] | None,
    runs_on: Container[str],
) -> Callable[..., Any]:
    if kernels is None and cuda is not None:
        return cuda
    isolated = _isolated(reference)

    @wraps(reference)
    def on_gpu(*args: Any) -> Any:
        device_index = args[0].get_device()
        if device_index < 0:  # another argument is on a GPU: the body's check says so
            return isolated(*args)
        if (
            kernels is not None
            and current_driver().arch(device_index) in runs_on
            and (takes is None or takes(*args))
        ):
            return kernels(*args)
        if cuda is not None:
            return cuda(*args)
        _announce_reference(name, device_index)
        return isolated(*args)

    return on_gpu


@cache
def _announce_reference(name: str, device_index: int) -> None:
    """Warn once per op and GPU that PyTorch's operations run; an error under `MOEFP8_STRICT=1`."""
    gpu = torch.cuda.get_device_name(device_index)
    message = f"moefp8::{name} runs its portable PyTorch body on {gpu}: correct, but slow"
    if os.environ.get("MOEFP8_STRICT") == "1":
        raise RuntimeError(f"{message}; MOEFP8_STRICT=1 forbids that, unset it to allow it")
    warnings.warn(message, UserWarning, stacklevel=3)
