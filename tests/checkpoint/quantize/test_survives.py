"""quantize_checkpoint is killed, starved of disk, and run twice; what is there is whole."""

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from moefp8.checkpoint import CheckpointError, quantize_checkpoint
from moefp8.checkpoint.quantize import select_by_name, stream
from moefp8.cli.main import main
from tests.checkpoint.cases import read, refusal
from tests.checkpoint.quantize import killed
from tests.checkpoint.quantize.cases import (
    LAYER,
    bf16,
    deepseek_v3,
    files_of,
    finished,
    interrupt,
    partial_of,
    quantization_of,
    write_source,
)

ROOT = Path(__file__).parents[3]
SMALL = {"max_shard_bytes": 200_000}


@pytest.fixture
def source(tmp_path) -> Path:
    return write_source(tmp_path / "s", deepseek_v3()[0], num_shards=2)


def refused(source: Path, target: Path, **options) -> str:
    return refusal(quantize_checkpoint, source, target, **{**SMALL, **options})


def num_open() -> int:
    return len(os.listdir("/proc/self/fd"))


# kill -9


@pytest.mark.slow
@pytest.mark.parametrize("when", ["calls", "moments", "race"])
def test_killed_and_resumed(tmp_path, when):
    tensors = {key: x for key, x in deepseek_v3()[0].items() if key.startswith(LAYER)}
    source = write_source(tmp_path / "s", tensors, num_shards=2)
    (tmp_path / "w").mkdir()
    command = [sys.executable, "-m", killed.__name__, when, source, tmp_path / "w"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    if when == "race":
        told = done.stdout.strip().splitlines()
        assert len(told) == 15, told
        others = [x for x in told if "another process writes it" not in x]
        assert all("exists and is not" in x for x in others), others


def test_the_command_goes_on_where_it_was_killed(tmp_path):
    tensors = {f"model.layers.{n}.q_proj.weight": bf16(1024, 1024) for n in range(24)}
    source = write_source(tmp_path / "s", tensors)
    for target in (tmp_path / f"t{number}" for number in range(20)):
        command = [sys.executable, "-m", "moefp8", "quantize", source, target]
        command += ["--max-shard-bytes", "2200000"]
        running = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while len(finished(target)) < 3 and running.poll() is None:
            time.sleep(0.001)
        running.send_signal(signal.SIGKILL)
        if running.wait() == -signal.SIGKILL:
            break  # on a busy machine, it may end before this process sees three shards
    assert not target.exists()
    before = finished(target)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert f"in 12 shards ({len(before)} were there already)" in done.stdout
    for name, known in before.items():
        status = (target / name).stat()
        assert (status.st_ino, status.st_mtime_ns) == known
    quantize_checkpoint(source, tmp_path / "whole", max_shard_bytes=2_200_000)
    assert files_of(target) == files_of(tmp_path / "whole")


# Runs that are not the same


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"skip": ["indexer"]}, "another skip, plan than now"),
        ({"max_shard_bytes": 300_000}, "another max_shard_bytes, plan than now"),
        ("shard", "another source than now"),
        ("config.json", "another source than now"),
        ("tokenizer.json", "another source than now"),
    ],
)
def test_another_job_is_refused(source, tmp_path, change, told):
    target = tmp_path / "t"
    before = interrupt(source, target, **SMALL)
    options = change if isinstance(change, dict) else {}
    if not options:
        path = source / change if change != "shard" else next(source.glob("*.safetensors"))
        os.utime(path, ns=(0, 0))
    message = refused(source, target, **options)
    for part in (told, f"{partial_of(target)}: was begun", "remove the directory"):
        assert part in message
    assert finished(target) == before
    shutil.rmtree(partial_of(target))
    quantize_checkpoint(source, target, **{**SMALL, **options})


def test_names_that_are_not_utf_8(source, tmp_path):
    path, target = tmp_path / os.fsdecode(b"s\xff"), tmp_path / os.fsdecode(b"t\xfe")
    source.rename(path)
    (path / os.fsdecode(b"caf\xe9.txt")).write_text("x")
    interrupt(path, target, **SMALL)
    assert quantize_checkpoint(path, target, **SMALL).num_resumed == 3
    assert (target / os.fsdecode(b"caf\xe9.txt")).read_text() == "x"


def test_a_version_that_chooses_otherwise_is_refused(source, tmp_path, monkeypatch):
    """The version's shards have the same names, and other tensors in them."""
    target = tmp_path / "t"
    before = interrupt(source, target, **SMALL)
    kept = re.compile(rf"{select_by_name._KEPT.pattern}|.*kv_a_proj_with_mqa.*")
    monkeypatch.setattr(select_by_name, "_KEPT", kept)
    assert "another plan than now" in refused(source, target)
    assert finished(target) == before


LOCK = """
import fcntl, sys
with open(sys.argv[1], "w") as file:
    fcntl.lockf(file, fcntl.LOCK_EX)
    print(flush=True)
    input()
"""


def test_one_process_at_a_time(source, tmp_path):
    target = tmp_path / "t"
    before = interrupt(source, target, **SMALL)
    lock = partial_of(target) / "lock"
    holder = subprocess.Popen(
        [sys.executable, "-c", LOCK, lock], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    holder.stdout.readline()
    num_before = num_open()
    assert f"another process writes it, and holds {lock}" in refused(source, target)
    assert num_open() == num_before
    holder.communicate(b"\n")
    assert quantize_checkpoint(source, target, **SMALL).num_resumed == len(before)


def around(monkeypatch, before=lambda: None, after=lambda: None) -> None:
    """Let something happen before or after the tensors of a shard are written."""
    real = stream.run_all

    def run_all(*arguments, **options):
        before()
        real(*arguments, **options)
        after()

    monkeypatch.setattr(stream, "run_all", run_all)


def test_one_thread_at_a_time(source, tmp_path, monkeypatch):
    """Locks of files are those of a process, and closing one of its descriptors unlocks."""
    target, told = tmp_path / "t", []

    def second():
        thread = threading.Thread(target=lambda: told.append(refused(source, target)))
        thread.start()
        thread.join()

    around(monkeypatch, before=second)
    quantize_checkpoint(source, target, **SMALL)
    monkeypatch.undo()
    assert all(f"{target}: another thread writes it" in x for x in told)
    quantize_checkpoint(source, tmp_path / "whole", **SMALL)
    assert files_of(target) == files_of(tmp_path / "whole")
    assert "exists" in refused(source, target)


def test_a_folder_that_may_not_be_entered(source, tmp_path, monkeypatch):
    """The fault is injected: tests may run as root, who may enter everywhere."""
    real = os.scandir

    def denied(path):
        if Path(path).name == "templates":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", denied)
    assert f"Permission denied: '{source / 'templates'}'" in refused(source, tmp_path / "t")


def test_targets_that_are_there(source, tmp_path):
    (tmp_path / "full" / "x").mkdir(parents=True)
    (tmp_path / "file").touch()
    before = sorted(tmp_path.iterdir())
    for name in ("full", "file"):
        told = refused(source, tmp_path / name)
        assert f"{name}: exists and is not an empty directory" in told
    assert sorted(tmp_path.iterdir()) == before


def test_what_a_kill_after_the_rename_leaves_is_removed(source, tmp_path):
    target = tmp_path / "t"
    quantize_checkpoint(source, target)
    partial_of(target).mkdir()
    (partial_of(target) / "job.json").write_text("{}")
    assert "exists" in refused(source, target)
    assert not partial_of(target).exists()


def test_a_source_that_changes_meanwhile(source, tmp_path, monkeypatch):
    shards = sorted(source.glob("*.safetensors"))
    around(monkeypatch, after=lambda: [os.utime(shard, ns=(0, 0)) for shard in shards])
    assert f"{shards[0]}: changed while it was read" in refused(source, tmp_path / "t")
    assert not finished(tmp_path / "t")


def test_a_source_cut_short_meanwhile(source, tmp_path, monkeypatch):
    shards = sorted(source.glob("*.safetensors"))
    around(monkeypatch, before=lambda: [os.truncate(shard, 5000) for shard in shards])
    told = refused(source, tmp_path / "t")
    assert re.search(r"in .*: reading failed .*file ends.*; finished", told)


# Disks


def failing_after(number: int, call: str, code: int):
    """Return os.call, which after that number fails wherever it would write."""
    real, left = getattr(os, call), [number]

    def fail(*arguments, **options):
        left[0] -= 1
        if left[0] < 0 and (call != "open" or arguments[1] & (os.O_WRONLY | os.O_RDWR)):
            raise OSError(code, os.strerror(code), str(arguments[0]))
        return real(*arguments, **options)

    return fail


@pytest.mark.parametrize("call", ["pwrite", "fsync", "rename", "replace", "mkdir", "open"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_every_call_may_fail(source, tmp_path, monkeypatch, call, code):
    """If the n-th fails, there is an error, and nothing half-written or open; then it goes on."""
    whole, target = tmp_path / "whole", tmp_path / "t"
    quantize_checkpoint(source, whole, **SMALL)
    kept, told = 0, []
    for number in range(0, 1000, 1 if call in ("rename", "mkdir") else 7):
        num_before, before = num_open(), finished(target)
        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing_after(number, call, code))
            try:
                quantize_checkpoint(source, target, **SMALL)
                break
            except CheckpointError as error:
                told.append(str(error))
        assert num_open() == num_before
        assert not target.exists()
        assert before.items() <= finished(target).items()
        assert not list(partial_of(target).rglob("*.safetensors.tmp"))
        kept = len(finished(target))
        if number % 2:
            shutil.rmtree(partial_of(target), ignore_errors=True)
    assert told
    assert all(os.strerror(code) in x and str(tmp_path) in x for x in told)
    assert all("finished shards are kept" in x for x in told)
    assert kept or call in ("mkdir", "open", "replace")
    assert files_of(target) == files_of(whole)


def test_a_full_disk_names_key_and_file(source, tmp_path, monkeypatch):
    real = os.pwrite

    def full(file, data, position):
        if len(data) == 200 * 256:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(file, data, position)

    monkeypatch.setattr(os, "pwrite", full)
    key = r"model\.layers\.[01]\.self_attn\.kv_a_proj_with_mqa\.weight"
    told = rf"{key} in .*\.t\.partial/checkpoint/model.*: .*No space left on device"
    assert re.match(told, refused(source, tmp_path / "t"))


def test_a_disk_that_is_really_full(source, tmp_path):
    """The disk is larger the next time."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [sys.executable, "-m", "moefp8", "quantize", source, disk / "t"]
    command += ["--max-shard-bytes", "200000"]
    script = f"""
mount -t tmpfs -o size=500k none {disk}
! "$@"
test $(ls {disk}/.t.partial/checkpoint | grep -c safetensors$) = 2
test $(ls -A {disk}) = .t.partial
mount -o remount,size=50m {disk}
"$@"
ls -A {disk}
"""
    within = ["unshare", "-rm", "sh", "-exc", script, "sh"]
    if not shutil.which("unshare") or subprocess.run(["unshare", "-rm", "true"]).returncode:
        pytest.skip("no right to mount")
    done = subprocess.run([*within, *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "No space left on device" in done.stderr
    assert "(2 were there already)" in done.stdout
    assert done.stdout.endswith("\nt\n")


# The command


def test_the_command(source, tmp_path, capsys):
    target, report = tmp_path / "t", tmp_path / "report.json"
    arguments = ["quantize", str(source), str(target), "--json", str(report), "--device", "cpu"]
    assert main([*arguments, "--skip", "indexer", "--skip", "*.shared_experts.*"]) == 0
    out = capsys.readouterr().out
    keys = {key for key, tensor in read(target).items() if tensor.dtype == torch.float8_e4m3fn}
    told = json.loads(report.read_text())
    assert {weight["key"] for weight in told["weights"]} == keys
    assert told["median_error"] == pytest.approx(0.0264, abs=2e-4)
    assert f"{told['median_error']:.5f}  is the median of {len(keys)} weights" in out
    assert "FP8: 2 linears, 2 experts" in out
    assert "stays: 1 lm_head (by name, or skipped)" in out
    assert len(out.splitlines()) < 25
    kept = quantization_of(target)["modules_to_not_convert"]
    assert "model.layers.0.self_attn.indexer.wk" in kept
    assert "model.layers.0.mlp.shared_experts.gate_proj" in kept
    assert main(["quantize", str(source), str(target)]) == 1
    assert main(["quantize", str(source), str(tmp_path / "u"), "--skip", "nowhere"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert errors[0].startswith(f"moefp8 quantize: {target}: exists")
    assert errors[1].startswith("moefp8 quantize: --skip: every pattern must match")


@pytest.mark.parametrize("name", ["nowhere/report.json", "folder", "file/report.json"])
def test_a_json_file_that_cannot_be_written_is_told_before_the_work(source, tmp_path, capsys, name):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    report, target = tmp_path / name, tmp_path / "t"
    assert main(["quantize", str(source), str(target), "--json", str(report)]) == 1
    told = capsys.readouterr()
    assert f"--json must name a file in a directory that is there, got {report}" in told.err
    assert (told.out, target.exists()) == ("", False)


def test_nobody_reads_what_it_prints(source, tmp_path, capsys, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    report = tmp_path / "report.json"
    with os.fdopen(writer, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        assert main(["quantize", str(source), str(tmp_path / "t"), "--json", str(report)]) == 0
        monkeypatch.undo()
    assert capsys.readouterr().err == ""
    assert json.loads(report.read_text())["weights"]
