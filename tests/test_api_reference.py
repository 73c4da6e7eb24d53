"""`make docs` shows every public name, and warns of nothing."""

import re
import shlex
from pathlib import Path

import pytest

from tests.public import surface

REPOSITORY = Path(__file__).parents[1]


def modules_of_the_reference() -> list[str]:
    """What the Makefile gives pdoc."""
    makefile = (REPOSITORY / "Makefile").read_text().replace("\\\n", " ")
    (modules,) = re.findall(r"^API +:= (.*)$", makefile, re.MULTILINE)
    return shlex.split(modules)


def names_in(site: Path) -> set[str]:
    """Return the dotted names that have a section."""
    return {
        f"{'.'.join(page.relative_to(site).with_suffix('').parts)}.{name}"
        for page in site.rglob("*.html")
        for name in re.findall(r'\bid="([\w.]+)"', page.read_text())
    }


@pytest.mark.filterwarnings("error:::pdoc")
def test_the_reference_shows_every_public_name(tmp_path):
    pdoc = pytest.importorskip("pdoc")
    pdoc.render.configure(docformat="google", show_source=False)
    pdoc.pdoc(*modules_of_the_reference(), output_directory=tmp_path)
    assert {*surface.names()} - names_in(tmp_path) == set()
