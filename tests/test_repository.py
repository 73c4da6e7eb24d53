"""Files that the site of a repository reads: citation, security, forms of issues."""

import re
from pathlib import Path

import pytest
import yaml

import moefp8

REPOSITORY = Path(__file__).parents[1]
FORMS = sorted((REPOSITORY / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FIELDS = {"textarea", "input", "dropdown", "checkboxes"}
PAGES = [REPOSITORY / "SECURITY.md", REPOSITORY / "CITATION.cff", *FORMS]


def test_the_citation_says_what_license_and_version_say():
    citation = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())
    licence = (REPOSITORY / "LICENSE").read_text()
    assert {"cff-version", "message", "title", "authors"} <= {*citation}  # what the format needs
    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert citation["version"] == moefp8.__version__
    assert f"{citation['license']} License\n" in licence
    (author,) = citation["authors"]
    assert re.search(rf"^Copyright \(c\) \d+ {author['name']}$", licence, re.MULTILINE)


def test_a_bug_is_reported_with_what_info_prints():
    form = yaml.safe_load((REPOSITORY / ".github" / "ISSUE_TEMPLATE" / "bug.yml").read_text())
    (info,) = (field for field in form["body"] if field.get("id") == "info")
    assert "python -m moefp8 info" in info["attributes"]["label"]
    assert info["validations"] == {"required": True}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_have_the_fields_that_a_site_needs(path):
    form = yaml.safe_load(path.read_text())
    assert form["name"]
    assert form["description"]
    fields = [field for field in form["body"] if field["type"] != "markdown"]
    assert fields
    assert {field["type"] for field in fields} <= FIELDS
    assert all(field["attributes"]["label"] for field in fields)
    ids = [field["id"] for field in fields]
    assert len({*ids}) == len(ids)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_no_address_is_invented(path):
    assert not re.search(r"https?://|www\.|\S@\S", path.read_text())
