"""An op is described once, as a record of steps: words of the way before become fewer."""

import pytest

from benchmarks.house import OLD_IDIOM, old_idiom

# How often each word stands in moefp8/. A count may only fall: lower its ceiling with it.
CEILINGS = {
    "Source(": 3,  # of a launch, where a record becomes one, and of a checkpoint
    "Sources(NamedTuple)": 0,
    "Memory(": 0,
    "needed_kernels": 0,
    "Workspace.of": 0,
}


@pytest.mark.parametrize("word", OLD_IDIOM)
def test_a_word_of_the_old_idiom_is_not_used_more_often(word):
    assert old_idiom()[word] <= CEILINGS[word]
