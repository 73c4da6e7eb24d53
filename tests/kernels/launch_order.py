"""Reads in the text of a kernel that it waits before it lets the next kernel start.

Programmatic launches rest on this: each kernel waits for the one before it, so at most two of a
stream are unfinished. A thread that returns without either call is fine where others wait.

The reader follows branches, loops and calls of functions in the same sources. It finds functions by
name; where several have one name, a call may be of each. A condition that is a constant of the
house (`kIsCounted`) has one value in a kernel; any other may hold or not each time. What the reader
cannot follow is refused.
"""

import re
from collections.abc import Collection, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

import moefp8

PACKAGE = Path(moefp8.__file__).parent
WAIT, LET = "wait_for_previous_kernel", "let_next_kernel_start"
_NOTES = re.compile(r'//[^\n]*|/\*.*?\*/|^[ \t]*#(?:\\\n|[^\n])*|"(?:\\.|[^"\\])*"', re.S | re.M)
_TOKEN = re.compile(r"[A-Za-z_]\w*|->|&&|\|\||\S")
_CONSTANT = re.compile(r"(!?)(k[A-Z]\w*)")  # in its negation, if it is one
_CONDITION = re.compile(r"\bif (?:constexpr )?\( (?:! )?(k[A-Z]\w*) \)")
_UNCLEAR = {"?", "&&", "||"}  # an operand may not be evaluated
_CLOSING = {"(": ")", "{": "}", "[": "]", "<": ">"}
_ATTRIBUTES = "__launch_bounds__", "__align__"
Tokens = list[str]
State = bool | None


class Unclear(Exception):
    """The reader cannot tell what the text does."""


class Statement(NamedTuple):
    """kind: "do", "if", "loop", "block", "return", "jump", or "opaque" for what is not read.

    tokens: an expression, or a condition. parts: the statements within; of an "if" one or two.
    """

    kind: str
    tokens: Tokens
    parts: tuple["Statement", ...] = ()


class Function(NamedTuple):
    name: str
    is_kernel: bool
    tokens: Tokens  # of its body


def text_of(source: Path) -> str:
    """A .cu file after all that it includes, each file once."""
    folders, seen = (source.parent, PACKAGE / "kernels" / "device"), {source.name}

    def texts(path: Path) -> Iterator[str]:
        text = path.read_text()
        for name in re.findall(r'^#include "(.+)"', text, re.M):
            if name not in seen:
                seen.add(name)
                yield from texts(next(at / name for at in folders if (at / name).exists()))
        yield text

    return "\n".join(texts(source))


def problems_of(text: str, assumed: Collection[tuple[str, str]] = ()) -> dict[str, set[str]]:
    """What is wrong with each kernel of a text, by the kernel's name; nothing, if it waits in time.

    assumed: (function, condition) where a condition is taken to hold. Raises Unclear.
    """
    functions = functions_of(text)
    reader = _Reader(functions, assumed)
    return {kernel.name: reader.read(kernel) for kernel in functions if kernel.is_kernel}


# ---- Text to statements ----


def functions_of(text: str) -> list[Function]:
    """All functions, those of structures included.

    Raises Unclear if `WAIT` or `LET` is called outside of them.
    """
    tokens, functions = _TOKEN.findall(_NOTES.sub(" ", text)), list[Function]()
    at = begin = 0
    while at < len(tokens):
        if tokens[at] == "{" and tokens[at - 1] in (")", "const"):
            head, end = tokens[begin:at], _end_of(tokens, at)
            body = tokens[at + 1 : end - 1]
            functions.append(Function(_name_of(head), "__global__" in head, body))
            at = begin = end
        else:
            at += 1
            if tokens[at - 1] in "{};":
                begin = at
    for name in (WAIT, LET):
        num_found = sum(x.tokens.count(name) + (x.name == name) for x in functions)
        if num_found != tokens.count(name):
            raise Unclear(f"{name} is called outside of all functions")
    return functions


def _name_of(head: Tokens) -> str:
    """The word before the parameters, which are the first parentheses but those of attributes."""
    at = 0
    while head[at] != "(":
        at = _end_of(head, at + 1) if head[at] in _ATTRIBUTES else at + 1
    if head[at - 1] in ("if", "for", "while", "switch"):
        raise Unclear(f"{' '.join(head)} is in no function")
    return head[at - 1]


def _end_of(tokens: Tokens, at: int) -> int:
    """The place after what closes the bracket at `at`."""
    opening, closing, depth = tokens[at], _CLOSING[tokens[at]], 0
    for i in range(at, len(tokens)):
        depth += (tokens[i] == opening) - (tokens[i] == closing)
        if depth == 0:
            return i + 1
    raise Unclear(f"nothing closes {' '.join(tokens[at : at + 8])}")


def _block(tokens: Tokens) -> Statement:
    parts, at = list[Statement](), 0
    while at < len(tokens):
        statement, at = _statement(tokens, at)
        parts.append(statement)
    return Statement("block", [], tuple(parts))


def _statement(tokens: Tokens, at: int) -> tuple[Statement, int]:
    """The statement that begins at a place, and the place after it."""
    word = tokens[at]
    if word == "{":
        end = _end_of(tokens, at)
        return _block(tokens[at + 1 : end - 1]), end
    if word in ("if", "for", "while"):
        at = tokens.index("(", at)
        end = _end_of(tokens, at)
        head = tokens[at + 1 : end - 1]
        part, end = _statement(tokens, end)
        parts = [part]
        if word == "if" and tokens[end : end + 1] == ["else"]:
            part, end = _statement(tokens, end + 1)
            parts.append(part)
        return Statement("if" if word == "if" else "loop", head, tuple(parts)), end
    end = at
    if word == "switch":
        end = _end_of(tokens, tokens.index("{", at))
        return Statement("opaque", tokens[at:end]), end
    while tokens[end] != ";":
        end = _end_of(tokens, end) if tokens[end] in "({[" else end + 1
    kinds = {"return": "return", "break": "jump", "continue": "jump", "do": "opaque"}
    return Statement(kinds.get(word, "do"), tokens[at:end]), end + 1


def _is_call(tokens: Tokens, at: int) -> bool:
    """Whether a name is called, or is the type of an object that is made."""
    at += 1
    if tokens[at : at + 1] == ["<"] and ">" in tokens[at:]:  # arguments of a template, or less than
        at = _end_of(tokens, at)
    return at < len(tokens) and (tokens[at] in ("(", "{") or tokens[at].isidentifier())


def _lambdas(tokens: Tokens) -> Iterator[Tokens]:
    """The bodies of the lambdas in an expression."""
    for at, token in enumerate(tokens):
        before = tokens[at - 1] if at > 0 else "="
        if token != "[" or before in (")", "]") or before.isidentifier():
            continue  # an index, or names for the parts of a value
        end = _end_of(tokens, at)
        if tokens[end : end + 1] == ["("]:
            end = _end_of(tokens, end)
        if tokens[end : end + 1] == ["{"]:
            yield tokens[end : _end_of(tokens, end)]


# ---- Statements to what they do ----


class _Reader:
    """A state is whether the previous kernel has been waited for; None: no way leads there."""

    def __init__(self, functions: list[Function], assumed: Collection[tuple[str, str]]) -> None:
        self._assumed = assumed
        self._by_name: dict[str, list[Function]] = {}
        for function in functions:
            self._by_name.setdefault(function.name, []).append(function)
        self._calling = {WAIT, LET}  # names of functions that may call one of the two
        while more := {x.name for x in functions if self._calls(x.tokens)} - self._calling:
            self._calling |= more
        texts = (" ".join(x.tokens) for x in functions if x.name in self._calling)
        self._constants = sorted({name for x in texts for name in _CONDITION.findall(x)})

    def read(self, kernel: Function) -> set[str]:
        self._problems = set[str]()
        for values in product((False, True), repeat=len(self._constants)):
            self._values = dict(zip(self._constants, values, strict=True))
            self._within, self._returns, self._waits = [kernel], [[]], False
            self._run(_block(kernel.tokens), False)
            if not self._waits:
                self._problems.add("it never waits")
        return self._problems

    def _calls(self, tokens: Tokens) -> Tokens:
        """The names, in the order of the text, that are called and may call one of the two."""
        named = (at for at, name in enumerate(tokens) if name in self._calling)
        return [tokens[at] for at in named if _is_call(tokens, at)]

    def _run(self, statement: Statement, state: State) -> State:
        kind, tokens, parts = statement
        if state is None:
            return None
        if kind == "block":
            for part in parts:
                state = self._run(part, state)
            return state
        if kind == "opaque" and self._calls(tokens):
            raise Unclear(f"{tokens[0]} in {self._within[-1].name}")
        state = self._evaluate(tokens, state)
        if kind == "if":
            return self._branch("".join(tokens), parts, state)
        if kind == "loop":  # it may end before its part does anything
            self._run(parts[0], state)
            return state
        if kind == "return" or "return" in tokens:
            self._returns[-1].append(state)
        return None if kind in ("return", "jump") else state

    def _branch(self, condition: str, parts: tuple[Statement, ...], state: State) -> State:
        constant = _CONSTANT.fullmatch(condition)
        holds = None
        if constant is not None and constant[2] in self._values:
            holds = self._values[constant[2]] != bool(constant[1])
        elif (self._within[-1].name, condition) in self._assumed:
            holds = True
        if holds is not None:
            taken = parts[:1] if holds else parts[1:]
            return self._run(taken[0], state) if taken else state
        ways = [self._run(part, state) for part in parts] + [state] * (len(parts) == 1)
        return _either(ways)

    def _evaluate(self, tokens: Tokens, state: State) -> State:
        """The calls of an expression, in the order of the text."""
        calls = self._calls(tokens)
        if calls and (_UNCLEAR & {*tokens} or any(map(self._calls, _lambdas(tokens)))):
            raise Unclear(f"{' '.join(tokens)} in {self._within[-1].name}")
        for name in calls:
            state = self._call(name, state)
        return state

    def _call(self, name: str, state: State) -> State:
        if name == WAIT:
            self._waits = True
            return True
        if name == LET:
            if not state:
                where = self._within[-1].name
                self._problems.add(f"{where} lets the next kernel start before it waits")
            return state
        ways = list[State]()
        for function in self._by_name[name]:
            if function in self._within:  # what it does is being read already
                ways.append(state)
                continue
            self._within.append(function)
            self._returns.append([])
            ways.append(self._run(_block(function.tokens), state))
            ways += self._returns.pop()
            self._within.pop()
        return _either(ways)


def _either(ways: list[State]) -> State:
    """The state where several ways meet."""
    states = [state for state in ways if state is not None]
    return all(states) if states else None
