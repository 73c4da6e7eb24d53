"""An action waits for an import that somebody else may never do."""

import importlib.util
import sys

import pytest

from moefp8.system.imports import after_import

NAME = "library_of_this_test"


@pytest.fixture
def library(tmp_path, monkeypatch):
    (tmp_path / f"{NAME}.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    finders = list(sys.meta_path)
    yield
    sys.modules.pop(NAME, None)
    sys.meta_path[:] = finders


def test_it_waits_for_the_import(library):
    values = []
    after_import(NAME, lambda: values.append(sys.modules[NAME].value))
    assert importlib.util.find_spec(NAME) is not None
    assert values == []
    importlib.import_module(NAME)
    assert values == [3]
    del sys.modules[NAME]
    importlib.import_module(NAME)
    assert values == [3]


def test_it_acts_at_once_after_the_import(library):
    importlib.import_module(NAME)
    values = []
    after_import(NAME, lambda: values.append(1))
    assert values == [1]


def test_what_is_not_there_stays_an_import_error():
    after_import("no_library_of_this_name", lambda: None)
    try:
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_library_of_this_name")
    finally:
        sys.meta_path.pop(0)
