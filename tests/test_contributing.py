"""The tree in CONTRIBUTING.md is that of the folders."""

import re
from itertools import takewhile
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
TREE = re.compile(r"^```\n(moefp8/\n.*?)^```$", re.DOTALL | re.MULTILINE)
INDENT = 2  # spaces before a folder in another one


def folders_of(tree: str) -> set[str]:
    """Paths of the folders that a tree names: those that its lines begin with."""
    path: list[str] = []
    found = set()
    for line in tree.splitlines():
        del path[(len(line) - len(line.lstrip())) // INDENT :]
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


def test_the_tree_has_every_folder_of_the_package_and_none_that_does_not_exist():
    (tree,) = TREE.findall((REPOSITORY / "CONTRIBUTING.md").read_text())
    told = folders_of(tree)
    assert folders_with_files(REPOSITORY / "moefp8") - told == set()
    assert [name for name in told if not (REPOSITORY / name).is_dir()] == []


def test_folders_are_read_from_a_tree():
    tree = "a/\n  b/     text of c/\n    d/   text\n  e.py   text\nf/  g/ h/ of it\ni/  text; j/\n"
    assert folders_of(tree) == {"a", "a/b", "a/b/d", "f", "g", "h", "i"}


def test_folders_with_files_leave_out_caches(tmp_path):
    for name in ("p/a.py", "p/q/r/b.cu", "p/q/__pycache__/c.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert folders_with_files(tmp_path / "p") == {"p", "p/q/r"}
