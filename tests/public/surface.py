"""What is public, and what of it the cases use.

Public are the names in `__all__` of the modules that README and docs name, what else their blocks
use, methods that they name, the keywords of all of these, options of commands, and environment
variables.
"""

import ast
import contextlib
import inspect
import io
import re
import runpy
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
MODULES = (
    "moefp8",
    "moefp8.adapters",
    "moefp8.checkpoint",
    "moefp8.deep_gemm",
    "moefp8.deep_gemm.testing",
    "moefp8.deep_gemm.utils",
    "moefp8.deep_gemm.utils.layout",
    "moefp8.deep_gemm.utils.math",
    "moefp8.distributed",
    "moefp8.hf",
    "moefp8.kernels",
    "moefp8.layers",
    "moefp8.quant",
    "moefp8.routing",
    "moefp8.testing",
)
COMMANDS = ("info", "inspect", "precompile", "quantize", "compare", "bench")
_BLOCK = re.compile(r"^```python[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_OPTION = re.compile(r"^ +(?:-\w, )?(--[a-z-]+)", re.MULTILINE)
_VARIABLE = re.compile(r"MOEFP8_[A-Z0-9_]+")


@cache
def docs() -> str:
    """README, CHANGELOG and the pages for users."""
    pages = sorted((REPOSITORY / "docs").glob("*.md"))
    return "\n".join(
        x.read_text() for x in (REPOSITORY / "README.md", REPOSITORY / "CHANGELOG.md", *pages)
    )


@cache
def names() -> dict[str, Any]:
    """Return dotted name -> object of all that is public; a method is that of its class."""
    public: dict[str, Any] = {}
    for module in MODULES:
        import_module(module)
        exported = sys.modules[module].__all__
        public |= {f"{module}.{x}": getattr(sys.modules[module], x) for x in exported}
    blocks = "\n".join(_BLOCK.findall(docs()))
    for name in sorted(Source(blocks).names):
        with contextlib.suppress(AttributeError):
            public.setdefault(name, resolved(name))
    classes = {name: x for name, x in public.items() if inspect.isclass(x) and _is_ours(x)}
    for name, x in classes.items():
        public |= {f"{name}.{method}": getattr(x, method) for method in _methods(x)}
    return {name: x for name, x in public.items() if not isinstance(x, ModuleType)}


@cache
def _names_in_docs() -> set[str]:
    """Return words that are called there, or stand there as code."""
    return {*re.findall(r"[.`](\w+)[(`]", docs())}


@cache
def things() -> dict[str, Any]:
    """Return what `names` stand for, each thing once; classmethods as functions of their class."""
    functions = {name: getattr(x, "__func__", x) for name, x in names().items()}
    first = {id(x): name for name, x in reversed(functions.items())}
    return {name: x for name, x in functions.items() if first[id(x)] == name}


def _is_ours(x: Any) -> bool:
    return getattr(x, "__module__", "").partition(".")[0] == "moefp8"


def _methods(owner: type) -> Iterator[str]:
    """Yield the methods of a class of ours that docs name, and `forward`."""
    for base in filter(_is_ours, owner.__mro__):
        for name, value in vars(base).items():
            is_method = callable(value) or isinstance(value, classmethod)
            is_named = name in _names_in_docs() or name == "forward"
            if is_method and is_named and not name.startswith("_"):
                yield name


def resolved(name: str) -> Any:
    """Return the object of a dotted name; raises AttributeError if there is none."""
    parts = name.split(".")
    value: Any = import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            with contextlib.suppress(ImportError):
                import_module(".".join(parts[:i]))
        value = getattr(value, part)
    return getattr(value, "__func__", value)


def parameters(x: Any) -> dict[str, inspect.Parameter]:
    """Return those that a call may name; none for what is no function, class or method."""
    try:
        signature = inspect.signature(x)
    except (TypeError, ValueError):
        return {}
    unnamed = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL
    kinds = {*unnamed, inspect.Parameter.VAR_KEYWORD}
    own = {name: y for name, y in signature.parameters.items() if y.kind not in kinds}
    return {name: y for name, y in own.items() if name not in ("self", "cls")}


def options() -> dict[str, set[str]]:
    """Return command -> its options, as `--help` tells them; "" is for those of no command."""
    return {x: {*_OPTION.findall(run_command(*x.split(), "--help")[1])} for x in ("", *COMMANDS)}


def run_command(*argv: str) -> tuple[int, str, str]:
    """Run `python -m moefp8` in this process; return status, stdout and stderr."""
    out, err, before = io.StringIO(), io.StringIO(), sys.argv
    status: Any = 0
    sys.argv = ["moefp8", *argv]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            runpy.run_module("moefp8", run_name="__main__")
    except SystemExit as ended:
        status = ended.code
    finally:
        sys.argv = before
    return status or 0, out.getvalue(), err.getvalue()


def variables(folder: str) -> dict[str, str | None]:
    """Return environment variable -> default of all that Python files of a folder read.

    The default is None where it is no constant in the call that reads the variable.
    """
    read: dict[str, str | None] = {}
    for file in sorted((REPOSITORY / folder).rglob("*.py")):
        text = file.read_text()
        tree = ast.parse(text if "environ" in text or "getenv" in text else "")
        constants = {
            ast.unparse(node.targets[0]): node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            values = [constants.get(ast.unparse(x), x) for x in _read_by(node)]
            name, default = [getattr(x, "value", None) for x in [*values, None, None]][:2]
            if isinstance(name, str):
                read[name] = default if isinstance(default, str) else None
    return read


def _read_by(node: ast.AST) -> list[ast.expr]:
    """Return the variable that an expression reads, and its default; nothing of any other."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) in ("os.environ.get", "os.getenv"):
        return node.args
    is_read = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
    return [node.slice] if is_read and ast.unparse(node.value) == "os.environ" else []


# ---- What a source uses ----


class Source(ast.NodeVisitor):
    """What Python code uses of moefp8, read without running it.

    names: dotted names. keywords: name of a function or method -> keywords in calls of it; that
    of a method begins with a dot, since nothing tells its class, and "" is a call of a variable.
    strings: all of them; commands: calls whose first argument is the name of a command.
    """

    def __init__(self, *texts: str) -> None:
        self.names: set[str] = set()
        self.keywords: dict[str, set[str]] = defaultdict(set)
        self.commands: dict[str, set[str]] = defaultdict(set)
        self.strings: set[str] = set()
        for text in texts:
            self._known: dict[str, set[str]] = {}  # name in this text -> what of ours it may be
            self.visit(ast.parse(text))

    def visit_Import(self, node: ast.Import) -> None:
        for x in node.names:
            bound = x.asname or x.name.partition(".")[0]
            self._bind(bound, {x.name if x.asname else bound})

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for x in node.names:
            self._bind(x.asname or x.name, {f"{node.module}.{x.name}"})

    def _bind(self, name: str, values: set[str]) -> None:
        ours = {x for x in values if x.partition(".")[0] == "moefp8"}
        self._known[name] = ours
        self.names |= ours

    def visit_For(self, node: ast.For) -> None:
        self._bind_each(node.target, node.iter)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        self._bind_each(node.target, node.iter)
        self.generic_visit(node)

    def _visit_comprehensions_first(self, node: Any) -> None:
        for x in node.generators:
            self.visit(x)
        self.generic_visit(node)

    visit_ListComp = visit_DictComp = visit_GeneratorExp = _visit_comprehensions_first

    def _bind_each(self, target: ast.expr, values: ast.expr) -> None:
        """Let the names of a loop stand for all that they are bound to, one after the other."""
        rows = values.elts if isinstance(values, ast.Tuple | ast.List) else []
        if isinstance(target, ast.Name):
            self._bind(target.id, {y for x in rows for y in self._resolve(x)})
        elif isinstance(target, ast.Tuple):
            for i, name in enumerate(target.elts):
                cells = [x.elts[i] for x in rows if isinstance(x, ast.Tuple)]
                self._bind(ast.unparse(name), {y for x in cells for y in self._resolve(x)})

    def _resolve(self, node: ast.expr) -> set[str]:
        if isinstance(node, ast.Name):
            return self._known.get(node.id, set())
        if isinstance(node, ast.Attribute):
            return {f"{x}.{node.attr}" for x in self._resolve(node.value)}
        return set()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.names |= self._resolve(node)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.strings.add(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        callees = self._resolve(node.func)
        if not callees and isinstance(node.func, ast.Attribute):
            callees = {f".{node.func.attr}"}
        for callee in callees or {""}:
            self.keywords[callee] |= {x.arg for x in node.keywords if x.arg}
        texts = [x.value for x in node.args if isinstance(x, ast.Constant)]
        if texts and texts[0] in COMMANDS:
            self.commands[texts[0]] |= {*texts[1:]}
        self.generic_visit(node)


def cases_source() -> Source:
    folder = Path(__file__).with_name("cases")
    return Source(*(x.read_text() for x in sorted(folder.glob("*.py"))))


def unused(source: Source) -> list[str]:
    """List all that is public and that the source does not use."""
    public = names()
    keywords: dict[int, set[str]] = defaultdict(set)  # id of a function or class -> keywords
    for name in source.names:
        if _exists(name):
            keywords[id(resolved(name))] |= source.keywords.get(name, set())
    missing = []
    for name, x in things().items():
        used = keywords.get(id(x))
        if inspect.isclass(public.get(name.rpartition(".")[0])):
            used = _method_keywords(source, name.rpartition(".")[2], used)
        if callable(x) and used is None:
            missing.append(name)
        missing += [f"{name}({y}=)" for y in parameters(x) if y not in (used or ())]
    for command, known in options().items():
        words = source.commands[command] if command else source.strings
        missing += [f"{command} {y}".strip() for y in sorted(known - words - {"--help"})]
    words = source.strings.union(*source.keywords.values())
    used = {x for word in words for x in _VARIABLE.findall(word)}
    return missing + sorted({*filter(_VARIABLE.fullmatch, variables("moefp8"))} - used)


def _method_keywords(source: Source, method: str, used: set[str] | None) -> set[str] | None:
    """Keywords in calls of any object's method of that name; `forward` is called by its object."""
    callees = (f".{method}", "") if method == "forward" else (f".{method}",)
    others = [source.keywords[x] for x in callees if x in source.keywords]
    return None if used is None and not others else set().union(used or (), *others)


def foreign(source: Source) -> list[str]:
    """List all that the source uses of moefp8 and that is not public, or does not exist."""
    public = {*names(), *MODULES, "moefp8.__all__", "moefp8.__version__"}
    modules = {x.rpartition(".")[0] for x in public}  # as `moefp8.functional` in docs' imports
    others = source.names - public
    return sorted(x for x in others if not any(f"{y}.".startswith(f"{x}.") for y in modules))


def _exists(name: str) -> bool:
    try:
        resolved(name)
    except (AttributeError, ImportError):
        return False
    return True
