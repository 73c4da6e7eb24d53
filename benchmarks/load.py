"""How fast experts are loaded, and at how much extra memory: `python -m benchmarks.load`.

It writes a checkpoint of MoE experts (E experts, H hidden, I intermediate; DeepSeek keys, several
shards) into a temporary directory, reads it once to warm the page cache, then loads it into
preallocated modules, in a fresh process for every repeat: all of it, also with narrower scales, and
the part of one rank. The baseline is safetensors' `load_file`, stack, cat, copy, which also says
what must come out. Speed counts bytes that were read. Extra memory is the peak over what was
resident before, as a share of them; with `--device cuda` that of the GPU, too.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.circumstances import circumstances

GOAL_GIB_PER_S, GOAL_EXTRA_PERCENT = 3.0, 5.0
_SIZES: dict[str, Any] = {"num_experts": 32, "hidden_size": 4096, "intermediate_size": 2048}
_NUM_LAYERS, _SHARD_BYTES = 2, 400 << 20
_RANK, _NUM_RANKS = 3, 8
_SCALES = {"F32": torch.float32, "BF16": torch.bfloat16, "E8M0": torch.float8_e8m0fnu}


class Experts(nn.Module):
    """`layers.N.mlp.experts`, with every page of every tensor resident.

    kind: how `shard` divides them among ranks; None: they are whole.
    """

    def __init__(self, device: str, kind: Any = None) -> None:
        from moefp8.distributed import shard
        from moefp8.layers import GroupedExperts

        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(_NUM_LAYERS):
            layer = nn.Module()
            layer.mlp = nn.Module()
            layer.mlp.experts = GroupedExperts(**_SIZES, device="meta")
            self.layers.append(layer)
        if kind is not None:
            shard(self, {"*.experts": kind}, _RANK, _NUM_RANKS)
        self.to_empty(device=device)
        for tensor in self.state_dict().values():
            tensor.view(torch.uint8).fill_(1)

    def randomize(self) -> "Experts":
        for tensor in self.state_dict().values():
            if tensor.dtype == torch.float32:
                tensor.uniform_(1e-4, 1e-3)  # scales that are not finite are refused
            else:
                tensor.view(torch.int32).random_()
        return self

    def checksum(self) -> int:
        """A checksum of bytes and their order."""
        total = 0
        for tensor in self.state_dict().values():
            for rows in tensor.view(torch.int32).flatten(0, 1).split(4096):
                order = torch.arange(rows.shape[1], device=rows.device)
                total = 31 * total + int(rows.sum(0).mul(order).sum())
        return total % 2**61


def _load_ours(model: Experts, path: Path) -> int:
    from moefp8.checkpoint import load_checkpoint

    return load_checkpoint(model, path, progress=False).num_bytes


def _load_safetensors(model: Experts, path: Path) -> int:
    from safetensors.torch import load_file

    num_experts, state = _SIZES["num_experts"], model.state_dict()
    device = str(next(iter(state.values())).device)
    tensors = {
        key: value
        for file in path.glob("*.safetensors")
        for key, value in load_file(file, device=device).items()
    }
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())

    def stack(layer: int, name: str, leaf: str) -> torch.Tensor:
        keys = (f"layers.{layer}.mlp.experts.{e}.{name}.{leaf}" for e in range(num_experts))
        return torch.stack([tensors.pop(key) for key in keys])

    for layer in range(_NUM_LAYERS):
        prefix = f"layers.{layer}.mlp.experts"
        for leaf, suffix in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            halves = [stack(layer, name, leaf) for name in ("gate_proj", "up_proj")]
            state[f"{prefix}.gate_up_proj{suffix}"].copy_(torch.cat(halves, dim=1))
            del halves
            state[f"{prefix}.down_proj{suffix}"].copy_(stack(layer, "down_proj", leaf))
    return num_bytes


class _Case(NamedTuple):
    load: Callable[[Experts, Path], int]
    scales: str = "F32"
    kind: str | None = None


_CASES = {
    "moefp8": _Case(_load_ours),
    "safetensors": _Case(_load_safetensors),
    "BF16 scales": _Case(_load_ours, "BF16"),
    "E8M0 scales": _Case(_load_ours, "E8M0"),
    "1/8 of experts": _Case(_load_ours, kind="experts"),
    "1/8 of I": _Case(_load_ours, kind="intermediate"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu", help="cpu, or cuda: straight to the GPU")
    parser.add_argument("--cases", nargs="+", choices=_CASES, default=[*_CASES])
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--dir", type=Path, help="where checkpoints are written (about 4.5 GiB)")
    parser.add_argument("--once", choices=_CASES, help=argparse.SUPPRESS)
    parser.add_argument("--expected", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        measure = _expect if options.expected else _measure
        print(json.dumps(measure(_CASES[options.once], options.dir, options.device)))
        return
    directory = Path(tempfile.mkdtemp(prefix="moefp8-load-", dir=options.dir))
    try:
        num_shards = _write(directory)
        results = _compare(directory, options, num_shards)
    finally:
        shutil.rmtree(directory)
    _print(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def _write(directory: Path) -> int:
    """Write a checkpoint for each dtype of scales, into the page cache; return one's file count."""
    from safetensors.torch import load_file, save_file

    from moefp8.checkpoint import save_checkpoint

    save_checkpoint(Experts("cpu").randomize(), directory / "F32", max_shard_bytes=_SHARD_BYTES)
    files = sorted((directory / "F32").iterdir())
    for name in list(_SCALES)[1:]:
        (directory / name).mkdir()
        for file in files:
            if file.suffix != ".safetensors":
                shutil.copy(file, directory / name)
                continue
            tensors = load_file(file)
            scales = {k: x.to(_SCALES[name]) for k, x in tensors.items() if "scale" in k}
            save_file(tensors | scales, directory / name / file.name)
    for file in directory.glob("*/*.safetensors"):
        file.read_bytes()
    return sum(file.suffix == ".safetensors" for file in files)


def _compare(directory: Path, options: argparse.Namespace, num_shards: int) -> dict:
    """Alternate the cases, so that a slow minute of the machine meets all."""
    device = options.device
    wanted = {name: _once(name, directory, device, "--expected") for name in options.cases}
    runs: dict[str, list[dict]] = {name: [] for name in options.cases}
    for _ in range(options.repeats):
        for name, each in runs.items():
            each.append(_once(name, directory, device))
            if each[-1].pop("checksum") != wanted[name]["checksum"]:
                raise RuntimeError(f"{name} loaded other bytes than were saved")
    return {**circumstances(), "device": device, "num_shards": num_shards} | {
        name: {
            "gib": each[0]["num_bytes"] / 2**30,
            "gib_per_s": statistics.median(
                run["num_bytes"] / 2**30 / run["seconds"] for run in each
            ),
            "extra_percent": max(100 * run["extra_bytes"] / run["num_bytes"] for run in each),
            "gpu_percent": max(100 * run["gpu_bytes"] / run["num_bytes"] for run in each),
            "runs": each,
        }
        for name, each in runs.items()
    }


def _once(name: str, directory: Path, device: str, *flags: str) -> dict:
    path = directory / _CASES[name].scales
    options = ["--once", name, "--dir", str(path), "--device", device, *flags]
    command = [sys.executable, "-m", "benchmarks.load", *options]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def _measure(case: _Case, path: Path, device: str) -> dict:
    """One load in this process: seconds, bytes, and peaks minus what was resident before."""
    model, is_cuda = Experts(device, case.kind), device != "cpu"
    if is_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    gpu_before = torch.cuda.memory_allocated() if is_cuda else 0
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status_bytes("VmRSS")
    started = time.perf_counter()
    num_bytes = case.load(model, path)
    if is_cuda:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - started
    extra = _status_bytes("VmHWM") - before
    gpu = torch.cuda.max_memory_allocated() - gpu_before if is_cuda else 0
    found = {"seconds": seconds, "num_bytes": num_bytes, "extra_bytes": extra, "gpu_bytes": gpu}
    return {**found, "checksum": model.checksum()}


def _expect(case: _Case, path: Path, device: str) -> dict:
    """What must come out: the whole as safetensors loads it, cut afterwards."""
    from moefp8.distributed import shard

    model = Experts(device)
    _load_safetensors(model, path)
    if case.kind is not None:
        shard(model, {"*.experts": case.kind}, _RANK, _NUM_RANKS)
    return {"checksum": model.checksum()}


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def _print(results: dict) -> None:
    print(
        f"experts in {results['num_shards']} shards, warm page cache, to {results['device']}; "
        f"{results.get('gpu', results['cpu'])}, torch {results['torch']}"
    )
    heads = ("GiB read", "GiB/s (median)", "extra host memory", "of the GPU")
    print(f"{'':14}  " + "  ".join(heads))
    for name in (name for name in _CASES if name in results):
        found = results[name]
        print(
            f"{name:14}  {found['gib']:8.2f}  {found['gib_per_s']:14.2f}  "
            f"{found['extra_percent']:15.1f} %  {found['gpu_percent']:8.1f} %"
        )
    goal = f"{f'>= {GOAL_GIB_PER_S}':>14}  {f'< {GOAL_EXTRA_PERCENT}':>15} %"
    print(f"{'goal':14}  {'':8}  {goal}  {f'< {GOAL_EXTRA_PERCENT}':>8} %")


if __name__ == "__main__":
    main()
