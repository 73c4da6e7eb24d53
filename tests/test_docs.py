"""README, docs/ and other pages: blocks run, commands exist, links lead somewhere.

Blocks of ```python run on the CPU, those of ```python gpu are compiled, and run where there is a
GPU. CHECKPOINT, ORIGINAL and COMPRESSED are small checkpoints in the folder where a page runs;
their vocabularies are smaller than those of examples, so that no page counts on a size. TEXT is a
text there.
"""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_checkpoint import write_small_checkpoint
from transformers.utils.import_utils import is_serve_available

from tests.gpu import on_gpu
from tests.hf.model_cases import BLOCKS as OF_COMPRESSED_TENSORS
from tests.public import surface

REPOSITORY = Path(__file__).parents[1]
README = REPOSITORY / "README.md"
INDEX = REPOSITORY / "docs" / "README.md"
PAGES = sorted((REPOSITORY / "docs").glob("*.md"))
DESIGN = sorted((REPOSITORY / "docs" / "design").glob("*.md"))
OTHERS = [
    *(REPOSITORY / name for name in ("CONTRIBUTING.md", "SECURITY.md", "benchmarks/README.md")),
    *DESIGN,
]
FENCED = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
PYTHON, ON_GPU, BASH, OUTPUT = "python", "python gpu", "bash", ""
VOCAB_SIZE = 300


class Block(NamedTuple):
    """line: how many lines of the page come before the text."""

    page: Path
    line: int
    kind: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, match.start(2)), *match.groups())
        for match in FENCED.finditer(text)
    ]


def name_of(page: Path) -> str:
    return str(page.relative_to(REPOSITORY).with_suffix(""))


def scripts() -> Iterator[Any]:
    """What runs in one namespace: a block of the README, a whole page of docs."""
    for block in blocks_of(README):
        if block.kind != OUTPUT:
            yield pytest.param([block], id=f"README:{block.line}")
    for page in PAGES:
        yield pytest.param(blocks_of(page), id=page.stem)


@pytest.fixture
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write_checkpoints(text: str) -> None:
    """Write the checkpoints that text names into the current directory."""
    if re.search("CHECKPOINT|ORIGINAL", text):
        original = write_small_checkpoint(Path("CHECKPOINT"), "deepseek_v3", vocab_size=VOCAB_SIZE)
        original.rename("ORIGINAL")
    if "TEXT" in text:
        Path("TEXT").write_text(README.read_text()[:1500])
    if "COMPRESSED" in text:
        write_small_checkpoint(Path("COMPRESSED"), "qwen3_moe", num_shards=1, vocab_size=VOCAB_SIZE)
        for file in Path("COMPRESSED").glob("*.safetensors"):
            tensors = load_file(file)
            named = {key.replace("_scale_inv", "_scale"): x for key, x in tensors.items()}
            save_file(named, file, metadata={"format": "pt"})
        for file in Path("COMPRESSED").glob("*.json"):
            content = json.loads(file.read_text().replace("_scale_inv", "_scale"))
            if file.name == "config.json":
                content["quantization_config"] = OF_COMPRESSED_TENSORS
            file.write_text(json.dumps(content))


def run_blocks(blocks: list[Block], has_gpu: bool) -> None:
    """Run what stands on a page, from its top to its end."""
    write_checkpoints("".join(block.text for block in blocks))
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        if block.kind == BASH:
            for line in block.text.splitlines():
                run_line(line)
        elif block.kind in (PYTHON, ON_GPU):
            code = compile("\n" * block.line + block.text, str(block.page), "exec")
            if block.kind == PYTHON or has_gpu:
                exec(code, namespace)


def run_line(line: str) -> None:
    words = shlex.split(line.removeprefix("python -m "), comments=True)
    if words[:1] == ["make"]:
        targets = re.findall(r"^([a-z-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
        assert {*words[1:]} <= {*targets}, line
    elif words[:1] == ["moefp8"]:
        run_command(words[1:], line)
    elif words[:1] == ["torchrun"]:
        run_ranks(words[1:], line)
    elif words[:1] == ["pip"] or words[1:3] in (["vllm", "serve"], ["sglang", "serve"]):
        pass  # they need a network, and an engine
    elif words:
        pytest.fail(f"{line}: this test knows no such command")


def run_command(arguments: list[str], line: str) -> None:
    """`bench` goes as far as it goes without a GPU: its layers are known then.

    `serve` goes as far as it goes without a server's packages: with them it would not end.
    """
    if arguments[0] == "serve" and is_serve_available():
        return
    if torch.cuda.is_available():
        done = run_module(["moefp8", *arguments])
        status, errors = done.returncode, done.stderr
    else:  # in this process, which has imported what takes seconds
        status, _, errors = surface.run_command(*arguments)
    if arguments[0] == "serve":
        assert "pip install 'transformers[serving]'" in errors, f"{line}\n{errors}"
    elif arguments[0] == "bench" and "--ranks" not in arguments:
        assert "needs a Hopper GPU" in errors, f"{line}\n{errors}"
    else:
        assert status == 0, f"{line}\n{errors}"


def run_ranks(arguments: list[str], line: str) -> None:
    """Scripts of this repository on one rank, and on two in tests of examples.

    `--standalone` finds a port that is free.
    """
    assert arguments[0] == "--nproc-per-node", line
    in_place = [str(REPOSITORY / x) if x.startswith("examples/") else x for x in arguments]
    in_place[1] = "1"
    done = run_module(["torch.distributed.run", "--standalone", *in_place])
    assert done.returncode == 0, f"{line}\n{done.stderr}"


def run_module(command: list[str]) -> Any:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", *command]
    return subprocess.run(words, env=environment, capture_output=True, text=True, check=False)


# Blocks run on one rank; FSDP2 warns where a model ends in a view, which blocks do not change; and
# transformers renames what works in all its releases that we support.
@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:FSDP is switching to use `NO_SHARD`:UserWarning:torch.distributed.fsdp",
    "ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning:torch.distributed.fsdp",
    "ignore:`gradient_checkpointing_enable` is deprecated:FutureWarning:transformers",
)
@pytest.mark.usefixtures("_in_an_empty_folder")
@pytest.mark.parametrize("blocks", [*scripts()])
def test_blocks_run(blocks):
    run_blocks(blocks, has_gpu=False)


@on_gpu
@pytest.mark.slow
@pytest.mark.usefixtures("_in_an_empty_folder")
@pytest.mark.parametrize(
    "page", [page for page in PAGES if f"```{ON_GPU}\n" in page.read_text()], ids=name_of
)
def test_blocks_run_on_a_gpu(page):
    run_blocks(blocks_of(page), has_gpu=True)
    torch.cuda.synchronize()


@pytest.mark.usefixtures("_in_an_empty_folder")
@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (PYTHON, "import moefp8\nmoefp8.no_such_name\n"),
        (ON_GPU, "no python\n"),
        (BASH, "python -m moefp8 inspect nowhere\n"),
        (BASH, "python -m moefp8 bench CHECKPOINT --no-such-option\n"),
        (BASH, "torchrun --nproc-per-node 1 examples/no_such_example.py\n"),
        (BASH, "make coffee\n"),
        (BASH, "ls\n"),
    ],
)
def test_a_wrong_block_fails(kind, text):
    with pytest.raises((AttributeError, SyntaxError, AssertionError, pytest.fail.Exception)):
        run_blocks([Block(README, 0, kind, text)], has_gpu=False)


@pytest.mark.parametrize("page", [README, *PAGES], ids=name_of)
def test_blocks_keep_to_the_rules(page):
    """Pages say what needs a GPU, and install nothing from an index that lacks it.

    Property tests have no deadline: hypothesis gives a call 200 ms, and the first may compile.
    """
    lines = page.read_text().splitlines()
    for block in blocks_of(page):
        assert block.kind in (PYTHON, ON_GPU, BASH, OUTPUT)
        if block.kind == ON_GPU:
            assert lines[block.line - 3].endswith("needs a GPU:"), block.text
        assert block.text.count("@given(") == block.text.count("deadline=None"), block.text
    assert not re.search(r"pip install \S*moefp8", page.read_text())


def test_the_readme_shows_every_use_and_links_its_page():
    _, _, use = README.read_text().partition("\n## Use\n")
    first, *sections = use.partition("\n## ")[0].split("\n### ")
    assert all(f"```{PYTHON}\n" in section for section in sections)
    assert all(len(pages_in(section.partition("\n")[0])) == 1 for section in sections)
    assert pages_in(first) == ["docs/README.md"]


def test_the_index_links_every_page():
    others = [
        *(f"../{x}.md" for x in ("CHANGELOG", "CONTRIBUTING", "SECURITY", "benchmarks/README"))
    ]
    pages = [str(page.relative_to(INDEX.parent)) for page in [*PAGES, *DESIGN] if page != INDEX]
    assert sorted(pages_in(INDEX.read_text())) == sorted([*others, *pages])


def pages_in(text: str) -> list[str]:
    """Return the pages that a text links, without what comes after #."""
    return re.findall(r"\]\(([\w./-]+\.md)(?:#[\w-]+)?\)", text)


@pytest.mark.parametrize(("page", "most"), [("README.md", 220), ("CONTRIBUTING.md", 130)])
def test_first_pages_are_short(page, most):
    assert (REPOSITORY / page).read_text().count("\n") <= most


# Names of code

CODE = re.compile(
    r"`(k[A-Z]\w+|[A-Z][a-z]+[A-Z]\w+|[a-z]+(?:_[a-z0-9]+)+|[a-z]\w+(?:/\w+)*\.(?:cuh?|py))`"
)


def unknown_names(text: str) -> list[str]:
    """Constants, types, fields and files of text that the sources do not have."""
    sources = [
        file
        for folder in ("moefp8", "tests", "benchmarks", "examples")
        for ending in ("py", "cu", "cuh")
        for file in (REPOSITORY / folder).rglob(f"*.{ending}")
        if file != Path(__file__)
    ]
    words = {word for file in sources for word in re.findall(r"\w+", file.read_text())}

    def is_known(name: str) -> bool:
        return name in words or any(f"/{file}".endswith(f"/{name}") for file in sources)

    return sorted({name for name in CODE.findall(text) if not is_known(name)})


def test_design_pages_name_what_the_code_has():
    pages = [REPOSITORY / "docs" / "hopper-fp8-gemm.md", *DESIGN]
    assert unknown_names("".join(page.read_text() for page in pages)) == []


def test_unknown_names_are_found():
    text = "`kNoSuch` `NoSuchType` `no_such_field` `no_such.cuh` `GemmConfig` `scale_inv` `gemm.cu`"
    assert unknown_names(text) == ["NoSuchType", "kNoSuch", "no_such.cuh", "no_such_field"]


# Links


def broken_links(page: Path) -> list[str]:
    """Targets in this repository that are not there, be it file or heading."""
    prose = re.sub(r"`[^`\n]*`", "", FENCED.sub("", page.read_text()))
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    return [target for target in targets if "://" not in target and not leads(page, target)]


def leads(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = page.parent / path if path else page
    return file.exists() and (not anchor or anchor in anchors_of(file))


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", [README, *PAGES, *OTHERS], ids=name_of)
def test_links_lead_somewhere(page):
    assert broken_links(page) == []


def test_broken_links_are_found(tmp_path):
    (tmp_path / "other.md").write_text("# A title, of `code`\n```bash\n# no title\n```\n")
    page = tmp_path / "page.md"
    page.write_text(
        "[a](other.md) [`b`](other.md#a-title-of-code) [c](https://x.y/z) [d](none.md) "
        "[e](other.md#no-title) ![f](none.png) [g](#here)\n## Here\n```\n[h](none.md)\n```\n"
    )
    assert broken_links(page) == ["none.md", "other.md#no-title", "none.png"]
