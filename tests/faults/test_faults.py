"""The catalogue fits the library and the tests; one fault of the day is seen to be caught."""

import re
from datetime import date

import pytest

from tests.faults.catalogue import FAULTS
from tests.faults.fault import REPOSITORY, Copy


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_can_be_made_and_names_a_test_of_behaviour(name):
    fault = FAULTS[name]
    assert fault.num_places() == 1
    assert fault.new != fault.old
    file, _, test = fault.caught_by.partition("::")
    text = (REPOSITORY / file).read_text()
    assert file.startswith("tests/")
    assert not file.startswith("tests/launches/")
    assert not test or re.search(rf"^def {test.partition('[')[0]}\(", text, re.MULTILINE)


@pytest.mark.slow
def test_the_fault_of_the_day_is_caught(tmp_path):
    """`make faults` tries all."""
    name = [*FAULTS][date.today().toordinal() % len(FAULTS)]
    assert Copy(tmp_path).verdict(FAULTS[name]) == "caught", name
