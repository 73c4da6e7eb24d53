"""`.TARGET.partial` of somebody else, or changed since: refused, or its shards written again."""

import json
import os
import re
from pathlib import Path

import pytest

from moefp8.checkpoint import CheckpointError, quantize_checkpoint
from tests.checkpoint.cases import refusal
from tests.checkpoint.quantize_cases import bf16, files_of, write_source

SMALL = {"max_shard_bytes": 20_000, "progress": False}
LINEARS = [f"model.layers.{i}.q_proj.weight" for i in range(4)]


@pytest.fixture
def source(tmp_path) -> Path:
    return write_source(tmp_path / "s", {key: bf16(128, 128) for key in LINEARS})


def interrupted(source: Path, target: Path) -> Path:
    """The partial directory of a run whose last file could not be written."""
    partial = target.with_name(f".{target.name}.partial")
    with pytest.MonkeyPatch.context() as patch:
        real = os.rename

        def full(first, second, **options):
            if Path(second) == target:
                raise OSError(28, "No space left on device")
            return real(first, second, **options)

        patch.setattr(os, "rename", full)
        assert "No space left" in refusal(quantize_checkpoint, source, target, **SMALL)
    assert len(list((partial / "reports").iterdir())) == 4
    return partial


def refuse(source: Path, target: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        quantize_checkpoint(source, target, **SMALL)
    assert not target.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_of_another_user(source, tmp_path):
    partial = interrupted(source, tmp_path / "t")
    os.chown(partial, 12345, -1)
    refuse(source, tmp_path / "t", r"\.t\.partial belongs to another user \(uid 12345\); remove")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_others_may_write(source, tmp_path, mode):
    interrupted(source, tmp_path / "t").chmod(mode)
    refuse(source, tmp_path / "t", r"others may write to .*\.t\.partial; chmod go-w it; remove")


@pytest.mark.parametrize("job", ["{", '{"written_by": "another"}'])
def test_a_job_of_another_make(source, tmp_path, job):
    partial = interrupted(source, tmp_path / "t")
    (partial / "job.json").write_text(job)
    way_out = rf"remove (the directory|{re.escape(str(partial))}) to start again"
    refuse(source, tmp_path / "t", rf"{re.escape(str(partial))}.*{way_out}")


def test_links(source, tmp_path):
    partial = interrupted(source, tmp_path / "t")
    (partial / "checkpoint").rename(tmp_path / "elsewhere")
    (partial / "checkpoint").symlink_to(tmp_path / "elsewhere")
    refuse(source, tmp_path / "t", "partial/checkpoint: must be a directory, and no link")
    partial.rename(tmp_path / "moved")
    partial.symlink_to(tmp_path / "moved")
    refuse(source, tmp_path / "t", r"\.t\.partial: must be a directory, and no link")


def test_nobody_else_enters_meanwhile(source, tmp_path):
    partial = interrupted(source, tmp_path / "t")
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
    shard.rename(shard.parent.parent.parent / "elsewhere")
    shard.symlink_to(shard.parent.parent.parent / "elsewhere")


def pipe(shard: Path, report: Path) -> None:
    shard.unlink()
    os.mkfifo(shard)


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
    "no report": lambda shard, report: report.unlink(),
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
    partial = interrupted(source, tmp_path / "t")
    shard = sorted((partial / "checkpoint").glob("*.safetensors"))[1]
    FAULTS[fault](shard, partial / "reports" / f"{shard.name}.json")
    done = quantize_checkpoint(source, tmp_path / "t", **SMALL)
    assert done.num_resumed == 3
    whole = quantize_checkpoint(source, tmp_path / "whole", **SMALL)
    assert files_of(tmp_path / "t") == files_of(tmp_path / "whole")
    assert done.weights == whole.weights
    assert not any(path.is_symlink() for path in (tmp_path / "t").iterdir())
