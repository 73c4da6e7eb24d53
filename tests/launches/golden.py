"""The file of all records, `golden.txt`, and how what is launched now differs from it."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.launches import sources
from tests.launches.layouts import Layout, all_layouts
from tests.launches.record import Record, digest

PATH = Path(__file__).with_name("golden.txt")
_HEAD = """\
# What the library launches, recorded by `python -m tests.launches record`; `check` compares.
# sources: a digest of each kernel's text with what it includes, without comments.
# Others: for each layout of an op, digests of its launches, exact and modulo offsets in the call's
# own memory, bytes of its workspaces and of its tensors, and how many launches there are.
"""
_SOURCES = "sources"


class Entry(NamedTuple):
    """A record in short: see `Record`."""

    exact: str
    modulo_offsets: str
    workspace_bytes: int
    tensor_bytes: int
    num_launches: int

    @classmethod
    def of(cls, record: Record) -> "Entry":
        return cls(digest(record.exact), digest(record.modulo_offsets), *record.sizes)

    @classmethod
    def parse(cls, line: str) -> "Entry":
        exact, modulo_offsets, *sizes = line.split()
        return cls(exact, modulo_offsets, *map(int, sizes))


class Difference(NamedTuple):
    """how: in words."""

    id: str
    how: str


class Golden(NamedTuple):
    """sources: path -> digest. ops: op -> an entry for each layout, in their order."""

    sources: dict[str, str]
    ops: dict[str, list[Entry]]

    @classmethod
    def read(cls, text: str | None = None) -> "Golden":
        """What the file says, or a text in its place."""
        golden, section = cls({}, {}), ""
        for line in (PATH.read_text() if text is None else text).splitlines():
            if line.startswith("["):
                section = line.strip("[]")
            elif section == _SOURCES:
                path, text_digest = line.split()
                golden.sources[path] = text_digest
            elif not line.startswith("#"):
                golden.ops.setdefault(section, []).append(Entry.parse(line))
        return golden

    @classmethod
    def now(cls, layouts: Iterable[Layout]) -> "Golden":
        golden = cls(sources.digests(), {})
        for layout in layouts:
            golden.ops.setdefault(layout.op, []).append(Entry.of(layout.record()[1]))
        return golden

    def __str__(self) -> str:
        lines = [f"[{_SOURCES}]", *map(" ".join, self.sources.items())]
        for op, entries in self.ops.items():
            lines += [f"[{op}]", *(" ".join(map(str, entry)) for entry in entries)]
        return _HEAD + "\n".join(lines) + "\n"


def write() -> Golden:
    """Record all layouts into the file."""
    golden = Golden.now(all_layouts())
    PATH.write_text(str(golden))
    return golden


# ---- Comparing ----


def differences_of_sources(golden: Golden) -> Iterator[Difference]:
    now = sources.digests()
    for path in sorted({*now, *golden.sources}):
        if now.get(path) != golden.sources.get(path):
            what = "is new" if path not in golden.sources else "has another text"
            yield Difference(path, what if path in now else "is gone")


def difference(layout: Layout, golden: Golden) -> Difference | None:
    """How a layout's launches differ from those in the file, if they do."""
    entries = golden.ops.get(layout.op, [])
    if layout.number >= len(entries):
        return Difference(layout.id, "is not in the file; run `python -m tests.launches record`")
    try:
        description, record = layout.record()
    except Exception as error:
        return Difference(layout.id, f"raises {type(error).__name__}: {error}")
    how = how_differs(entries[layout.number], Entry.of(record))
    return Difference(layout.id, f"{how} ({description})") if how else None


def how_differs(before: Entry, now: Entry) -> str:
    """In words; nothing if they are equal."""
    changes = []
    if before.num_launches != now.num_launches:
        changes.append(f"{now.num_launches} launches instead of {before.num_launches}")
    elif before.modulo_offsets != now.modulo_offsets:
        changes.append("other launches")
    elif before.exact != now.exact:
        changes.append("other places in the call's own memory, and no other difference")
    for name in ("workspace", "tensor"):
        more = getattr(now, f"{name}_bytes") - getattr(before, f"{name}_bytes")
        if more:
            changes.append(f"{abs(more):,} {'more' if more > 0 else 'fewer'} bytes of {name}s")
    return ", ".join(changes)


def compare(layouts: Iterable[Layout], golden: Golden) -> Iterator[Difference]:
    """The layouts whose launches differ from those in the file."""
    for layout in layouts:
        change = difference(layout, golden)
        if change is not None:
            yield change
