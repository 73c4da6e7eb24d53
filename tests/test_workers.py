"""`--numprocesses auto` starts as many workers as cores and memory allow; which tests they take."""

import os

import pytest

from tests.workers import GIB, WORKER_GIB, Machine, by_the_dozen


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

    def __init__(self, path: str, number: int, group: str | None = None) -> None:
        self.path, self.number, self.group = path, number, group

    def get_closest_marker(self, name: str) -> str | None:
        assert name == "xdist_group"
        return self.group

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        assert self.group is None
        (self.group,) = mark.args


def test_a_worker_takes_a_dozen_neighbours_and_files_take_turns():
    sizes = {"long": 100, "short": 30}
    chosen = [Case(path, i) for path, size in sizes.items() for i in range(size)]
    ranks, not_chosen = [Case("ranks", 0, "2 ranks"), Case("ranks", 1, "1 ranks")], Case("long", 0)
    items = [not_chosen, *chosen, *ranks]
    by_the_dozen(items, [*chosen, *ranks])
    assert {*items} == {not_chosen, *chosen, *ranks}
    assert [x.group for x in (*ranks, not_chosen)] == ["2 ranks", "1 ranks", None]
    found = {"long": [], "short": []}
    for group in dict.fromkeys(x.group for x in items if x in chosen):
        cases = [x for x in items if x.group == group]
        (path,) = {x.path for x in cases}
        found[path].append([x.number for x in cases])
    for path, size in sizes.items():
        dozens = [list(range(size))[i : i + 12] for i in range(0, size, 12)]
        assert found[path] == dozens
    first, second = (items[i : i + len(items) // 2] for i in (0, len(items) // 2))
    for half in first, second:
        assert sum(x.path == "short" for x in half) >= 12
