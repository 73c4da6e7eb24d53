"""Pages for reference say what the sources say: environment variables, and messages of errors."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from moefp8.kernels.jit import max_cache_bytes
from tests.public import surface
from tests.test_docs import OUTPUT, blocks_of

REPOSITORY = Path(__file__).parents[1]
ENVIRONMENT = REPOSITORY / "docs" / "environment.md"
TROUBLESHOOTING = REPOSITORY / "docs" / "troubleshooting.md"
VALUE = "\0"  # stands for a value in the text of an f-string
ROW = re.compile(r"^\| ((?:`[A-Z0-9_]+`(?:, then )?)+) \| (.+?) \| .+ \|$", re.MULTILINE)


# Environment variables


def variables_on_the_page(section: str) -> dict[str, str]:
    """Return variable -> default, as the table of a section has them."""
    _, _, text = ENVIRONMENT.read_text().partition(f"\n## {section}\n")
    table = text.partition("\n## ")[0]
    assert len(ROW.findall(table)) == table.count("\n| `")
    return {
        name: default.strip("`")
        for names, default in ROW.findall(table)
        for name in re.findall(r"[A-Z0-9_]+", names)
    }


def test_the_page_has_all_variables_of_the_library():
    assert {*variables_on_the_page("Of the library")} == {*surface.variables("moefp8")}


def test_the_page_has_all_variables_of_tests_and_benchmarks():
    sources = {*surface.variables("tests"), *surface.variables("benchmarks")}
    ours = {name for name in sources if name.startswith("MOEFP8_")}
    assert {*variables_on_the_page("Of tests and benchmarks")} == ours


def test_defaults_are_those_of_the_sources(monkeypatch):
    monkeypatch.delenv("MOEFP8_CACHE_MAX_BYTES", raising=False)
    page = variables_on_the_page("Of the library")
    page |= variables_on_the_page("Of tests and benchmarks")
    folders = map(surface.variables, ("moefp8", "tests", "benchmarks"))
    constants = {name: x for folder in folders for name, x in folder.items() if x and name in page}
    assert {"MOEFP8_COMPILER", "MOEFP8_FUZZ_EXAMPLES"} <= {*constants}
    assert {name: page[name] for name in constants} == constants
    assert page["MOEFP8_CACHE_MAX_BYTES"] == str(max_cache_bytes())


def test_variables_are_found_however_they_are_read(tmp_path):
    (tmp_path / "a.py").write_text(
        "import os\n_NAME = 'BY_NAME'\nos.environ.get(_NAME)\nos.environ['IN_BRACKETS']\n"
        "os.getenv('BY_GETENV', '3')\nos.environ['IS_WRITTEN'] = '1'\n"
    )
    expected = {"BY_NAME": None, "IN_BRACKETS": None, "BY_GETENV": "3"}
    assert surface.variables(str(tmp_path)) == expected


# Messages of errors


def messages_on_the_page() -> list[str]:
    return [block.text.strip() for block in blocks_of(TROUBLESHOOTING) if block.kind == OUTPUT]


def texts_of(tree: ast.Module) -> Iterator[str]:
    """Yield all strings of a file, with VALUE for values that f-strings hold."""
    constants = {
        ast.unparse(node.targets[0]): node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
    }

    def text_of(part: ast.expr) -> str:
        if isinstance(part, ast.Constant):
            return str(part.value)
        assert isinstance(part, ast.FormattedValue)
        return str(constants.get(ast.unparse(part.value), VALUE))

    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(map(text_of, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def texts() -> str:
    files = sorted((REPOSITORY / "moefp8").rglob("*.py"))
    return "\n".join(text for file in files for text in texts_of(ast.parse(file.read_text())))


def stands_in(texts: str, message: str) -> bool:
    """Whether a text has the words of message; `...` inside of it stands for values alone."""
    words = message.strip(" .:;").split("...")
    return len("".join(words)) > 15 and bool(
        re.search(f"{VALUE}+".join(map(re.escape, words)), texts)
    )


def test_the_page_quotes_messages_as_the_code_raises_them(texts):
    messages = messages_on_the_page()
    assert len(messages) >= 20
    assert [message for message in messages if not stands_in(texts, message)] == []


def test_the_page_quotes_messages_of_transformers_as_it_has_them():
    quoted = re.findall(r"^\*\*`(.+)`\*\*", TROUBLESHOOTING.read_text(), re.MULTILINE)
    package = Path(transformers.__file__).parent
    files = [*package.glob("utils/*.py"), package / "modeling_utils.py"]
    texts = "".join(file.read_text() for file in files)
    assert len(quoted) == 2
    assert [message for message in quoted if message not in texts] == []


@pytest.mark.parametrize(
    "message",
    [
        "...: all tensors must be on one GPU, got ...",
        "FP8Linear: the last dimension of ..., got shape ...",
        "...: ... must be ..., got ...",
    ],
)
def test_a_message_that_no_code_raises_is_seen(texts, message):
    assert not stands_in(texts, message)
