"""Read the source of modules: weights that they use, and values that a forward can name."""

import ast
import inspect
import sys
import textwrap
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import cache, lru_cache, partial
from itertools import islice
from numbers import Number
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from ...functional.kept import has_memory
from .stacks import STACK_NAMES

_WEIGHTS = {"weight", *STACK_NAMES}
_READ_SAFELY = {"device", "shape", "size", "ndim", "is_meta", "numel", "requires_grad", "data_ptr"}
_NOT_FORWARD = {"__init__", "_init_weights", "init_weights", "reset_parameters", "extra_repr"}


@cache
def read_weights(kind: Any) -> frozenset[str]:
    """`a.b` for each `self.a.b.weight` in methods of a class, `a.*` for `self.a[i].weight`."""
    weights: set[str] = set()
    for base in kind.__mro__:
        if _package(base.__module__) in _TORCH_AND_STDLIB or not issubclass(base, nn.Module):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):  # a class made at run time has no source
            continue
        for method in ast.walk(tree):
            if isinstance(method, ast.FunctionDef) and method.name not in _NOT_FORWARD:
                weights |= _weights_in(method)
    return frozenset(weights)


def _weights_in(method: ast.FunctionDef) -> set[str]:
    safe = {
        id(node.value)
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and node.attr in _READ_SAFELY
    }
    known = _local_names(method)
    chains = (
        _chains(node.value, known)
        for node in ast.walk(method)
        if isinstance(node, ast.Attribute) and node.attr in _WEIGHTS and id(node) not in safe
    )
    return {chain for names in chains for chain in names if chain}


def _local_names(method: ast.FunctionDef) -> dict[str, set[str]]:
    """Local name -> the modules that it may stand for, as `_chains` spells them."""
    arguments = [*method.args.posonlyargs, *method.args.args]
    known = {argument.arg: {""} for argument in arguments[:1]}  # self
    for node in ast.walk(method):
        if isinstance(node, ast.Assign):
            targets, chains = node.targets, _chains(node.value, known)
        elif isinstance(node, ast.For | ast.comprehension):
            targets, chains = [node.target], _elements(node.iter, known)
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name) and chains:
                known.setdefault(target.id, set()).update(chains)
    return known


def _chains(node: ast.expr, known: Mapping[str, set[str]]) -> set[str]:
    """`a.b` for `self.a.b`, `a.*` for `self.a[0]`, "" for self, and nothing for any other value."""
    if isinstance(node, ast.Name):
        return known.get(node.id, set())
    if isinstance(node, ast.Attribute):
        return {f"{chain}.{node.attr}".lstrip(".") for chain in _chains(node.value, known)}
    return _elements(node.value, known) if isinstance(node, ast.Subscript) else set()


def _elements(node: ast.expr, known: Mapping[str, set[str]]) -> set[str]:
    if isinstance(node, ast.Tuple | ast.List):
        return {chain for element in node.elts for chain in _chains(element, known)}
    return {f"{chain}.*" for chain in _chains(node, known) if chain}


# ---- Values ----

_MAX_ELEMENTS = 4096  # that are read of a container or a tensor of integers;
_MAX_FLOATS = 64  # of a tensor of other numbers, which seldom are limits


class Reach(NamedTuple):
    """Everything that a module's forward, and the code that it calls, can name.

    values: path -> each plain value. names: all names that the code uses.
    """

    values: dict[str, Any]
    names: frozenset[str]

    def unread(self, names: Iterable[str]) -> set[str]:
        """The names of attributes that the code cannot read."""
        if self.names & {"getattr", "vars", "__dict__"}:
            return set()
        return {*names} - self.names


def in_reach(module: nn.Module, names: Iterable[str] = ()) -> Reach:
    """Return everything that a module's forward, and the code that it calls, can name.

    Values are constants, defaults, globals and what functions enclose, attributes of modules,
    classes and any other object, and elements of containers. A tensor of integers or of few
    other numbers is its values, any other its identity and version. Code of torch, of
    the standard library and of ours is left out.

    names: treated as names that the code uses. Those of an earlier `Reach` save most of the time.
    """
    known = {"forward", "__call__", *names}
    while True:
        walk = _Walk(set(known))
        walk.visit("", module)
        if walk.names == known:
            return Reach(walk.values, frozenset(known))
        known = walk.names


class _Walk:
    """names: all names that code uses, as far as they are known; the set grows on the way."""

    def __init__(self, names: set[str]) -> None:
        self.names = names
        self.values: dict[str, Any] = {}
        self._visited: dict[int, Any] = {}  # holds the objects, so that no id is used twice

    def visit(self, path: str, x: Any) -> None:
        if isinstance(x, Number | str | bytes | torch.dtype | None):
            self.values[path] = getattr(x, "item", lambda: x)()  # NumPy's numbers have item()
        elif id(x) not in self._visited:
            self._visited[id(x)] = x
            for name, part in self._parts(x):
                self.visit(f"{path}.{name}".lstrip("."), part)

    def _parts(self, x: Any) -> Iterable[tuple[Any, Any]]:
        if isinstance(x, torch.Tensor):
            return [("values", _summary(x))]
        if isinstance(x, list | tuple | set | frozenset | deque):
            return islice(enumerate(x), _MAX_ELEMENTS)
        if isinstance(x, Mapping):
            with suppress(Exception):  # others' mappings may raise anything
                return islice([*x.items()], _MAX_ELEMENTS)
        if isinstance(x, CodeType):
            self.names.update(x.co_names)
            return [("constants", x.co_consts)]
        if isinstance(x, MethodType | staticmethod | classmethod):
            return [("self", getattr(x, "__self__", None)), ("function", x.__func__)]
        if isinstance(x, property):
            return [("getter", x.fget)]
        if isinstance(x, partial):
            return [("function", x.func), ("arguments", (x.args, x.keywords))]
        if isinstance(x, FunctionType):
            return () if _package(x.__module__) in _NOT_WALKED else self._parts_of_function(x)
        if isinstance(x, type):
            own = [z for z in reversed(x.__mro__) if _package(z.__module__) not in _NOT_WALKED]
            return self._named({name: y for base in own for name, y in vars(base).items()})
        if isinstance(x, ModuleType):
            return () if _package(x.__name__) in _NOT_WALKED else self._named(vars(x))
        held = dict(getattr(x, "__dict__", {}))
        slots = (vars(base).get("__slots__", ()) for base in type(x).__mro__)
        names = {y for slot in slots for y in ([slot] if type(slot) is str else slot)}
        held |= {name: getattr(x, name) for name in names & self.names if hasattr(x, name)}
        if isinstance(x, nn.Module):
            held |= {**x._parameters, **x._buffers, **x._modules}
        return [*self._named(held), ("class", type(x))]

    def _named(self, held: Mapping[str, Any]) -> list[tuple[Any, Any]]:
        return [(name, x) for name, x in held.items() if name in self.names]

    def _parts_of_function(self, x: FunctionType) -> Iterator[tuple[Any, Any]]:
        yield "code", x.__code__
        yield "defaults", (x.__defaults__, x.__kwdefaults__)
        yield "wrapped", getattr(x, "__wrapped__", None)
        for name, cell in zip(x.__code__.co_freevars, x.__closure__ or (), strict=True):
            with suppress(ValueError):  # an empty cell
                yield name, cell.cell_contents
        for name in self.names & x.__globals__.keys() & _all_names(x.__code__):
            yield name, x.__globals__[name]


@lru_cache(4096)
def _all_names(code: CodeType) -> frozenset[str]:
    inner = (_all_names(x) for x in code.co_consts if isinstance(x, CodeType))
    return frozenset(code.co_names).union(*inner)


def _summary(x: torch.Tensor) -> Any:
    is_readable = has_memory(x) and x.layout == torch.strided and not x.is_complex()
    if is_readable and x.numel() <= (_MAX_FLOATS if x.is_floating_point() else _MAX_ELEMENTS):
        return tuple(x.flatten().tolist())
    return f"at {id(x)}, version {None if x.is_inference() else x._version}"


_TORCH_AND_STDLIB = {"torch", *sys.stdlib_module_names}
_NOT_WALKED = {*_TORCH_AND_STDLIB, __name__.partition(".")[0]}


def _package(module: str | None) -> str:
    return (module or "").partition(".")[0]
