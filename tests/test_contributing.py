"""The tree in CONTRIBUTING.md is that of the folders."""

import re
from itertools import takewhile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
TREE = re.compile(r"^```\n(moefp8/\n.*?)^```$", re.DOTALL | re.MULTILINE)
INDENT = 2  # of a folder in another one


def folders_of(tree: str) -> set[str]:
    """Paths of the folders that a tree names: those that its lines begin with.

    Raises:
        ValueError: a line is indented by more than a folder in the one above it.
    """
    path: list[str] = []
    found = set()
    for line in tree.splitlines():
        depth, odd = divmod(len(line) - len(line.lstrip()), INDENT)
        if odd or depth > len(path):
            raise ValueError(f"each level is indented by {INDENT} more, got {line!r}")
        del path[depth:]
        names = [name[:-1] for name in takewhile(lambda name: name.endswith("/"), line.split())]
        found |= {"/".join([*path, name]) for name in names}
        path += names[:1]
    return found


def folders_with_files(root: Path) -> set[str]:
    """Paths of the package's folders, from the parent of `root`; those of caches are none."""
    return {
        str(file.parent.relative_to(root.parent))
        for file in root.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }


def tree_of_contributing() -> set[str]:
    trees = TREE.findall((REPOSITORY / "CONTRIBUTING.md").read_text())
    assert len(trees) == 1
    return folders_of(trees[0])


def test_every_folder_of_the_tree_exists():
    missing = [name for name in tree_of_contributing() if not (REPOSITORY / name).is_dir()]
    assert missing == []


def test_every_folder_of_the_package_is_in_the_tree():
    assert folders_with_files(REPOSITORY / "moefp8") - tree_of_contributing() == set()


def test_folders_are_read_from_a_tree():
    tree = "a/\n  b/     text of c/\n    d/   text\n  e.py   text\nf/  g/ h/ of it\ni/  text; j/\n"
    assert folders_of(tree) == {"a", "a/b", "a/b/d", "f", "g", "h", "i"}
    with pytest.raises(ValueError, match="each level is indented by 2 more, got '    b/'"):
        folders_of("a/\n    b/\n")


def test_folders_with_files_leave_out_caches(tmp_path):
    for name in ("p/a.py", "p/q/r/b.cu", "p/q/__pycache__/c.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert folders_with_files(tmp_path / "p") == {"p", "p/q/r"}
