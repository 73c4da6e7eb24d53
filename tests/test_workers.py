"""`--numprocesses auto` starts as many workers as cores and memory allow; which tests they take."""

import os

import pytest

from tests.workers import (
    GIB,
    WORKER_GIB,
    Machine,
    begin_with_slow_files,
    let_files_take_turns,
)


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Of a machine of 16 cores with memory for 10 workers, outside a container."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    for folder in ("proc", "sys/fs/cgroup"):
        (tmp_path / folder).mkdir(parents=True)
    free = 10 * WORKER_GIB << 20
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 999999999 kB\nMemAvailable: {free} kB\n")
    return tmp_path


def limit(root, **files: str) -> None:
    for name, text in files.items():
        (root / "sys/fs/cgroup" / name.replace("_", ".")).write_text(text)


def used(num_bytes: int) -> str:
    return f"anon {num_bytes - 100}\nfile 999999999999\nshmem 100\n"


def test_a_worker_for_each_core_that_has_memory(root):
    assert Machine.at_hand(root).num_workers == 10
    (root / "proc/meminfo").write_text("MemAvailable: 999999999 kB\n")
    assert Machine.at_hand(root).num_workers == 16
    (root / "proc/meminfo").write_text("MemAvailable: 1 kB\n")
    assert Machine.at_hand(root).num_workers == 1


def test_a_container_has_limits_of_its_own(root):
    limit(root, cpu_max="max 100000\n", memory_max="max\n", memory_stat=used(GIB))
    assert Machine.at_hand(root).num_workers == 10
    limit(root, memory_max=str(5 * WORKER_GIB * GIB))
    assert Machine.at_hand(root).num_workers == 4
    limit(root, cpu_max="350000 100000\n")
    assert Machine.at_hand(root).num_workers == 3
    limit(root, cpu_max="50000 100000\n")
    assert Machine.at_hand(root).num_workers == 1


def test_where_nothing_tells_of_memory_cores_count(root, tmp_path):
    assert Machine.at_hand(tmp_path / "none").num_workers == 16


# ---- Which tests they take ----


class Case:
    """A test that pytest has collected."""

    def __init__(self, path: str, number: int, **marks: str) -> None:
        self.path, self.number, self.marks = path, number, marks

    def iter_markers(self, name: str) -> list[str]:
        return [self.marks[name]] if name in self.marks else []

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        assert mark.name not in self.marks
        (self.marks[mark.name],) = mark.args


def test_files_take_turns_and_what_is_slow_comes_first():
    sizes = {"long": 100, "short": 30}
    plain = [Case(path, i) for path, size in sizes.items() for i in range(size)]
    ranks = [Case("ranks", 0, xdist_group="2 ranks"), Case("ranks", 1, xdist_group="2 ranks")]
    slow, not_chosen = Case("short", -1, slow="yes"), Case("long", 0)
    items = [not_chosen, *plain, slow, *ranks]
    let_files_take_turns(items, [*plain, slow, *ranks])
    assert {*items[:4]} == {not_chosen, slow, *ranks}
    assert {*items[4:]} == {*plain}
    assert [x.marks.get("xdist_group") for x in (*ranks, slow)] == ["2 ranks", "2 ranks", None]
    found = {"long": [], "short": []}
    for group in dict.fromkeys(x.marks["xdist_group"] for x in items[4:]):
        cases = [x for x in plain if x.marks["xdist_group"] == group]
        (path,) = {x.path for x in cases}
        found[path].append([x.number for x in cases])
    for path, size in sizes.items():
        assert found[path] == [list(range(size))[i : i + 4] for i in range(0, size, 4)]
    for half in items[4:69], items[69:]:
        assert 11 <= sum(x.path == "short" for x in half) <= 19


def test_every_worker_begins_with_slow_files():
    """A part of the list for each, as `--dist worksteal` cuts it."""
    sizes = {"a": 50, "b": 10, "c": 20, "d": 30, "e": 40}
    slow = {("b", 3), ("c", 0), ("c", 19), ("e", 7)}
    items = [
        Case(path, i, **({"slow": "yes"} if (path, i) in slow else {}))
        for path, size in sizes.items()
        for i in range(size)
    ]
    before = list(items)
    begin_with_slow_files(items, 3)
    assert len(items) == len(before)
    assert {*items} == {*before}
    begins = [items[part * 50].path for part in range(3)]
    assert begins == ["c", "b", "e"]
    by_file = [[x.number for x in items if x.path == path] for path in sizes]
    assert by_file == [list(range(size)) for size in sizes.values()]
    for path in ("b", "c", "e"):  # no test comes between those of a file
        places = [i for i, x in enumerate(items) if x.path == path]
        assert places[-1] - places[0] == len(places) - 1


def test_more_slow_tests_than_a_worker_gets():
    items = [Case("a", i, slow="yes") for i in range(9)] + [Case("b", 0)]
    before = list(items)
    begin_with_slow_files(items, 2)
    assert {*items} == {*before}
    begin_with_slow_files(items, 20)
    assert {*items} == {*before}
