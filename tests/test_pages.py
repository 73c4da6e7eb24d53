"""Pages for reference say what the sources say: environment variables, and messages of errors."""

import re
from pathlib import Path

from moefp8.kernels.jit import max_cache_bytes
from tests.public import surface

REPOSITORY = Path(__file__).parents[1]
ENVIRONMENT = REPOSITORY / "docs" / "environment.md"
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
