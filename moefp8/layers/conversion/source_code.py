"""Which weights the methods of a class read, instead of calling the modules that hold them."""

import ast
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any

from torch import nn

from .stacks import STACKS

_WEIGHTS = {"weight", *STACKS}
_READ_SAFELY = {"device", "shape", "size", "ndim", "is_meta", "numel", "requires_grad", "data_ptr"}
_NOT_FORWARD = {"__init__", "_init_weights", "init_weights", "reset_parameters", "extra_repr"}


@cache
def read_weights(kind: Any) -> frozenset[str]:
    """`a.b` for each `self.a.b.weight` in methods of a class, `a.*` for `self.a[i].weight`."""
    found: set[str] = set()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] == "torch" or not issubclass(base, nn.Module):
            continue
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(base)))
        except (OSError, TypeError, SyntaxError):  # a class made at run time has no source
            continue
        for method in ast.walk(tree):
            if isinstance(method, ast.FunctionDef) and method.name not in _NOT_FORWARD:
                found |= _weights_in(method)
    return frozenset(found)


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
    return {chain for found in chains for chain in found if chain}


def _local_names(method: ast.FunctionDef) -> dict[str, set[str]]:
    """Local name -> the modules that it may stand for, as `_chains` spells them."""
    arguments = [*method.args.posonlyargs, *method.args.args]
    known = {argument.arg: {""} for argument in arguments[:1]}  # self
    for node in ast.walk(method):
        if isinstance(node, ast.Assign):
            targets, found = node.targets, _chains(node.value, known)
        elif isinstance(node, ast.For | ast.comprehension):
            targets, found = [node.target], _elements(node.iter, known)
        else:
            continue
        for target in targets:
            if isinstance(target, ast.Name) and found:
                known.setdefault(target.id, set()).update(found)
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
