"""What the stand-in of a GPU has to know of each kernel."""

from pathlib import Path

import moefp8
from tests.fakes.emulator import ARGUMENTS


def test_the_arguments_of_every_kernel_are_known():
    """A graph of launches copies them; which launches become one depends on addresses."""
    sources = Path(moefp8.__file__).parent.rglob("*.cu")
    assert {x.stem for x in sources} == ARGUMENTS.keys()
