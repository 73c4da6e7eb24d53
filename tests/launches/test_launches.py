"""What the library launches is what `golden.txt` says, and what it would be with a fault is not."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

import moefp8
from tests.launches import golden, sources
from tests.launches.__main__ import main
from tests.launches.golden import Entry, how_differs
from tests.launches.gpu import Driver, Launched, Library, Memory, Written
from tests.launches.layouts import OPS, Layout, all_layouts

GOLDEN = golden.Golden.read()
SOURCES = {path.stem: path for path in Path(moefp8.__file__).parent.rglob("*.cu")}


@pytest.mark.parametrize("op", OPS)
def test_the_launches_of_an_op_are_those_that_were_recorded(op):
    layouts = [Layout(op, number) for number in range(OPS[op].count)]
    assert len(layouts) == len(GOLDEN.ops[op])
    assert list(golden.compare(layouts, GOLDEN)) == []


def test_sources_are_those_that_were_recorded():
    assert list(golden.differences_of_sources(GOLDEN)) == []
    assert {*GOLDEN.ops} == {*OPS}


def test_kernels_of_every_source_are_launched():
    launched = set()
    for layout in all_layouts(every=9):
        library = Library()
        layout.record(library)
        launched |= {kernel.source for kernel in library.kernels}
    assert launched == {*SOURCES.values()}


def test_no_layout_depends_on_those_before_it():
    layouts = list(all_layouts(every=31))
    assert list(golden.compare(reversed(layouts), GOLDEN)) == []


# ---- Faults ----

Change = Callable[[list[Launched | Written], Launched | Written], Launched | Written | None]


class Faulty(Library):
    """Launches of which some are changed before they are recorded.

    change: takes what was launched before and a launch; returns what is recorded, or None.
    """

    def __init__(self, change: Change) -> None:
        super().__init__()
        self._change = change

    def launch(self, made: Launched | Written) -> None:
        changed = self._change(self.launched, made)
        if changed is not None:
            super().launch(changed)


def with_word(made: Launched, at: int, word: int) -> Launched:
    """The same with another word in its last argument."""
    *maps, data = made.arguments
    return replace(made, arguments=[*maps, data[:at] + word.to_bytes(8, "little") + data[at + 8 :]])


def word_of(made: Launched, at: int) -> int:
    return int.from_bytes(made.arguments[-1][at : at + 8], "little")


def addresses_of(made: Launched) -> list[int]:
    """Where its last argument has addresses."""
    memory, size = Memory(owners=[0] * 64), len(made.arguments[-1])
    return [at for at in range(0, size, 8) if memory.find(word_of(made, at)) is not None]


def of(source: str, change: Callable[[Launched], Launched | None]) -> Change:
    """Changes launches of kernels of a source."""
    return lambda before, made: change(made) if made.kernel.source.stem == source else made


def pitch(made: Launched) -> Launched:
    at = addresses_of(made)[0] + 8
    return with_word(made, at, word_of(made, at) + 16)


def share_tile_counter(before: list[Launched], made: Launched) -> Launched:
    """The second GEMM takes the counter of the first one, which is 4 bytes before its own."""
    if made.kernel.source.stem != "gemm" or before[-1].kernel.source.stem != "gemm":
        return made
    at = next(x for x in addresses_of(made) if word_of(made, x) == word_of(before[-1], x) + 4)
    return with_word(made, at, word_of(before[-1], at))


def change_map(at: int) -> Callable[[Launched], Launched]:
    """Changes a word of the first tensor map."""

    def change(made: Launched) -> Launched:
        first, *rest = made.arguments
        data = first[:at] + bytes([first[at] ^ 16]) + first[at + 1 :]
        return replace(made, arguments=[data, *rest])

    return change


def rename(made: Launched) -> Launched:
    return replace(made, kernel=replace(made.kernel, name=f"{made.kernel.name}_"))


OTHER = "other launches"
FAULTS = {
    "a pitch": (of("combine", pitch), OTHER),
    "a lost pointer": (of("gemm", lambda x: with_word(x, addresses_of(x)[-1], 0)), OTHER),
    "a number that is no address": (of("dispatch", lambda x: with_word(x, 16, 3)), OTHER),
    "another kernel": (of("combine", rename), OTHER),
    "no interleaving": (
        of("gemm", lambda x: replace(x, kernel=replace(x.kernel, interleaving=""))),
        OTHER,
    ),
    "a launch that does not wait": (of("gemm", lambda x: replace(x, attributes={})), OTHER),
    "another grid": (of("dispatch", lambda x: replace(x, grid=(x.grid[0] + 1, 1, 1))), OTHER),
    "another block": (of("combine", lambda x: replace(x, block=(32, 2, 1))), OTHER),
    "less shared memory": (of("gemm", lambda x: replace(x, shared_bytes=1024)), OTHER),
    "a shape in a map": (of("gemm", change_map(24)), OTHER),
    "the box of a map": (of("gemm", change_map(72)), OTHER),
    "a lost launch": (of("combine", lambda x: None), "3 launches instead of 4"),
    "a shared tile counter": (
        share_tile_counter,
        "other places in the call's own memory, and no other difference",
    ),
}


def first_with(op: str, *texts: str, without: str = "none") -> tuple[Layout, Entry]:
    """The first layout of an op whose record has these texts."""
    for layout in all_layouts(op):
        _, record = layout.record()
        if all(x in record.exact for x in texts) and without not in record.exact:
            return layout, Entry.of(record)
    raise AssertionError(f"no layout of {op} has {texts} without {without}")


@pytest.fixture(scope="module")
def experts() -> tuple[Layout, Entry]:
    """Experts whose four launches need no tensor besides inputs, workspace and result."""
    return first_with("experts", "dispatch.cu: dispatch_kernel", without="tensor0")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(experts, fault):
    (layout, before), (change, how) = experts, FAULTS[fault]
    _, record = layout.record(Faulty(change))
    assert how_differs(before, Entry.of(record)) == how


def test_without_a_fault_nothing_differs(experts):
    layout, before = experts
    _, record = layout.record(Faulty(lambda _, made: made))
    assert how_differs(before, Entry.of(record)) == ""


def test_a_copy_that_is_lost_is_seen():
    layout, before = first_with("linear", "copy_ y")
    lose = Faulty(lambda _, made: None if isinstance(made, Written) else made)
    assert how_differs(before, Entry.of(layout.record(lose)[1])) == OTHER


@pytest.mark.parametrize(("more", "how"), [(256, "256 more"), (-256, "256 fewer")])
def test_other_numbers_of_bytes_are_seen(experts, more, how):
    layout, before = experts
    real = Driver.allocate

    def allocate(driver: Driver, num_bytes: int, stream: int) -> int:
        return real(driver, num_bytes + more, stream)

    with mock.patch.object(Driver, "allocate", allocate):
        _, record = layout.record()
    assert how_differs(before, Entry.of(record)) == f"{how} bytes of workspaces"


def test_an_error_is_a_difference(experts):
    layout, _ = experts

    def fail(before, made):
        raise RuntimeError("no GPU")

    with mock.patch.object(Library, "launch", fail):
        difference = golden.difference(layout, GOLDEN)
    assert difference == (layout.id, "raises RuntimeError: no GPU")


# ---- Sources ----

TEXT = """\
// A head.
#include "other.cuh"

constexpr int k = 1;  // a reason
const char* url = "https://a//b";  /* two
lines */ char c = '"';  // "
"""


def test_comments_are_no_part_of_a_source():
    assert sources.without_comments(TEXT) == "\n".join(
        [
            '#include "other.cuh"',
            "constexpr int k = 1;",
            'const char* url = "https://a//b";    char c = \'"\';',
        ]
    )


def test_included_text_is_part_of_a_source(tmp_path):
    source, header = tmp_path / "one.cu", tmp_path / "other.cuh"
    source.write_text(TEXT)
    header.write_text("int x;\n")
    before = sources.text_of(source)
    header.write_text("// A number.\n\nint x;  // of something\n")
    assert sources.text_of(source) == before
    header.write_text("int y;\n")
    assert sources.text_of(source) != before


# ---- The commands ----


def test_check_says_what_differs(capsys, monkeypatch):
    assert main(["check", "--only", "plan"]) == 0
    assert "0 of 60 layouts differ" in capsys.readouterr().out
    text = str(GOLDEN)
    assert golden.Golden.read(text) == GOLDEN
    changed = golden.Golden.read(text)
    entry = changed.ops["plan"][3]
    changed.ops["plan"][3] = entry._replace(modulo_offsets="0", exact="0")
    changed.sources["routing/plan.cu"] = "0"
    monkeypatch.setattr(golden.Golden, "read", lambda: changed)
    assert main(["check", "--only", "plan"]) == 1
    out = capsys.readouterr().out
    assert "plan/3: other launches (model=" in out
    assert "plan: 1 differ" in out
    assert "routing/plan.cu: has another text" in out


def test_record_writes_what_check_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(golden, "PATH", tmp_path / "golden.txt")
    monkeypatch.setattr(golden, "all_layouts", lambda: all_layouts("activation"))
    assert main(["record"]) == 0
    assert "130 layouts" in capsys.readouterr().out
    assert main(["check", "--only", "activation"]) == 0


def test_show_prints_all_of_a_layout(capsys):
    assert main(["show", "dispatch and combine/0"]) == 0
    out = capsys.readouterr().out
    assert "dispatch and combine/0: model=" in out
    assert "plan.cu: " in out
    assert "ids+0" in out
