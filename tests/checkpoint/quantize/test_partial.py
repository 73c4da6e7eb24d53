"""A `.TARGET.partial` of somebody else is refused; shards that have changed are written again."""

import json
import os
import re
from pathlib import Path

import pytest

from moefp8.checkpoint import CheckpointError, quantize_checkpoint
from tests.checkpoint.deadline import within
from tests.checkpoint.quantize.cases import bf16, files_of, interrupt, partial_of, write_source

SMALL = {"max_shard_bytes": 20_000, "progress": False}
LINEARS = [f"model.layers.{i}.q_proj.weight" for i in range(4)]


@pytest.fixture
def source(tmp_path) -> Path:
    return write_source(tmp_path / "s", {key: bf16(128, 128) for key in LINEARS})


def interrupted(source: Path, folder: Path) -> Path:
    """Return the partial directory of a run that finished three of four shards."""
    interrupt(source, folder / "t", **SMALL)
    return partial_of(folder / "t")


def refuse(source: Path, target: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        quantize_checkpoint(source, target, **SMALL)
    assert not target.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_of_another_user(source, tmp_path):
    partial = interrupted(source, tmp_path)
    os.chown(partial, 12345, -1)
    refuse(source, tmp_path / "t", r"\.t\.partial belongs to another user \(uid 12345\); remove")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_others_may_write(source, tmp_path, mode):
    interrupted(source, tmp_path).chmod(mode)
    refuse(source, tmp_path / "t", r"others may write to .*\.t\.partial; chmod go-w it; remove")


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ("{", r"/job\.json: not valid JSON"),
        (None, r"/job\.json: must be a regular file"),  # a pipe
        ('{"written_by": "another"}', ": was begun with another"),
    ],
)
def test_a_job_of_another_make(source, tmp_path, job, told):
    partial = interrupted(source, tmp_path)
    (partial / "job.json").unlink()
    if job is None:
        os.mkfifo(partial / "job.json")
    else:
        (partial / "job.json").write_text(job)
    way_out = rf"remove (the directory|{re.escape(str(partial))}) to start again"
    with within(5):
        refuse(source, tmp_path / "t", rf"{re.escape(str(partial))}{told}.*{way_out}")


def test_links(source, tmp_path):
    partial = interrupted(source, tmp_path)
    elsewhere = (partial / "checkpoint").rename(tmp_path / "elsewhere")
    (partial / "checkpoint").symlink_to(elsewhere)
    refuse(source, tmp_path / "t", "partial/checkpoint: must be a directory, and no link")
    partial.symlink_to(partial.rename(tmp_path / "moved"))
    refuse(source, tmp_path / "t", r"\.t\.partial: must be a directory, and no link")


def test_nobody_else_enters_meanwhile(source, tmp_path):
    partial = interrupted(source, tmp_path)
    assert partial.stat().st_mode & 0o777 == 0o700
    quantize_checkpoint(source, tmp_path / "t", **SMALL)
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o777 & ~umask


def poke(shard: Path, report: Path) -> None:
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)


def cut(shard: Path, report: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 1)


def link(shard: Path, report: Path) -> None:
    shard.symlink_to(shard.rename(shard.parents[2] / "elsewhere"))


def pipe(shard: Path, report: Path) -> None:
    shard.unlink()
    os.mkfifo(shard)


def die(shard: Path, report: Path) -> None:
    """Leave what a run leaves that dies before its first shard has a name."""
    report.unlink()
    (shard.parent / "config.json").write_text("{")
    (shard.parent / "templates").mkdir()
    (shard.parent / f"{shard.name}.tmp").write_text("x")


def edited(change):
    def edit(shard: Path, report: Path) -> None:
        value = json.loads(report.read_text())
        change(value)
        report.write_text(json.dumps(value))

    return edit


FAULTS = {
    "poked": poke,
    "cut": cut,
    "a link": link,
    "a pipe": pipe,
    "gone": lambda shard, report: shard.unlink(),
    "no report, but what a dead run left": die,
    "no JSON": lambda shard, report: report.write_text("{"),
    "empty": lambda shard, report: report.write_text("{}"),
    "a list": edited(lambda x: x.update(report=[])),
    "of before": lambda shard, report: report.write_text('{"weights": []}'),
    "no weights": edited(lambda x: x["report"].clear()),
    "a number": edited(lambda x: x["report"].update(weights=3)),
    "another key": edited(lambda x: x["report"]["weights"][0].update(key="y")),
    "another shape": edited(lambda x: x["report"]["weights"][0].update(shape=[1, "x"])),
    "text": edited(lambda x: x["report"]["weights"][0].update(error="0.1")),
    "more": edited(lambda x: x["report"]["weights"].append({})),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_was_changed_is_written_again(source, tmp_path, fault):
    partial = interrupted(source, tmp_path)
    shard = sorted((partial / "checkpoint").glob("*.safetensors"))[1]
    FAULTS[fault](shard, partial / "reports" / f"{shard.name}.json")
    done = quantize_checkpoint(source, tmp_path / "t", **SMALL)
    assert done.num_resumed == 2
    whole = quantize_checkpoint(source, tmp_path / "whole", **SMALL)
    assert files_of(tmp_path / "t") == files_of(tmp_path / "whole")
    assert (done.weights, done.kept) == (whole.weights, whole.kept)
    assert not any(path.is_symlink() for path in (tmp_path / "t").iterdir())
