"""How fast experts are loaded, and at how much extra memory: `python -m benchmarks.load`.

Writes a checkpoint of MoE experts (E experts, H hidden, I intermediate; DeepSeek keys, several
shards) into a temporary directory, reads it once to warm the page cache, then loads it into
preallocated modules, in a fresh process for every repeat. The baseline is safetensors'
`load_file`, stack, cat, copy. Extra memory is the peak over what was resident before, as a share
of the checkpoint.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.circumstances import circumstances

GOAL_GIB_PER_S, GOAL_EXTRA_PERCENT = 2.0, 10.0
_SIZES: dict[str, Any] = {"num_experts": 32, "hidden_size": 4096, "intermediate_size": 2048}
_NUM_LAYERS, _SHARD_BYTES = 2, 400 << 20


class Experts(nn.Module):
    """`layers.N.mlp.experts`, with every page of every tensor resident."""

    def __init__(self) -> None:
        from moefp8.layers import GroupedExperts

        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(_NUM_LAYERS):
            layer = nn.Module()
            layer.mlp = nn.Module()
            layer.mlp.experts = GroupedExperts(**_SIZES, device="meta")
            self.layers.append(layer)
        self.to_empty(device="cpu")
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
        """Of bytes and their order."""
        total = 0
        for tensor in self.state_dict().values():
            for rows in tensor.view(torch.int32).flatten(0, 1).split(4096):
                total = 31 * total + int(rows.sum(0).mul(torch.arange(rows.shape[1])).sum())
        return total % 2**61


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="write the results there")
    parser.add_argument("--dir", type=Path, help="where the checkpoint is written (about 1.5 GiB)")
    parser.add_argument("--once", choices=_LOADERS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.once:
        print(json.dumps(_measure(options.once, options.dir)))
        return
    directory = Path(tempfile.mkdtemp(prefix="moefp8-load-", dir=options.dir))
    try:
        results = _compare(directory / "checkpoint", options.repeats)
    finally:
        shutil.rmtree(directory)
    _print(results)
    if options.json:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


def _compare(path: Path, repeats: int) -> dict:
    """Alternate the loaders, so that a slow minute of the machine meets both."""
    from moefp8.checkpoint import save_checkpoint

    source = Experts().randomize()
    checksum = source.checksum()
    save_checkpoint(source, path, max_shard_bytes=_SHARD_BYTES)
    del source
    files = sorted(path.glob("*.safetensors"))
    for file in files:
        file.read_bytes()
    runs: dict[str, list[dict]] = {name: [] for name in _LOADERS}
    for _ in range(repeats):
        for name in _LOADERS:
            command = [sys.executable, "-m", "benchmarks.load", "--once", name, "--dir", str(path)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            runs[name].append(json.loads(done.stdout))
            if runs[name][-1].pop("checksum") != checksum:
                raise RuntimeError(f"{name} loaded other bytes than were saved")
    num_bytes = sum(file.stat().st_size for file in files)
    return {**circumstances(), "gib": num_bytes / 2**30, "num_shards": len(files)} | {
        name: {
            "gib_per_s": statistics.median(num_bytes / 2**30 / run["seconds"] for run in each),
            "extra_percent": 100 * max(run["extra_bytes"] for run in each) / num_bytes,
            "runs": each,
        }
        for name, each in runs.items()
    }


def _measure(name: str, path: Path) -> dict:
    """One load in this process: seconds, and peak minus present resident bytes."""
    model = Experts()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status_bytes("VmRSS")
    started = time.perf_counter()
    _LOADERS[name](model, path)
    seconds = time.perf_counter() - started
    extra = _status_bytes("VmHWM") - before
    return {"seconds": seconds, "extra_bytes": extra, "checksum": model.checksum()}


def _load_ours(model: nn.Module, path: Path) -> None:
    from moefp8.checkpoint import load_checkpoint

    load_checkpoint(model, path, progress=False)


def _load_safetensors(model: nn.Module, path: Path) -> None:
    from safetensors.torch import load_file

    tensors = {
        key: value for file in path.glob("*.safetensors") for key, value in load_file(file).items()
    }

    def stack(layer: int, name: str, leaf: str) -> torch.Tensor:
        keys = (f"layers.{layer}.mlp.experts.{e}.{name}.{leaf}" for e in range(num_experts))
        return torch.stack([tensors.pop(key) for key in keys])

    num_experts, state = _SIZES["num_experts"], model.state_dict()
    for layer in range(_NUM_LAYERS):
        prefix = f"layers.{layer}.mlp.experts"
        for leaf, suffix in (("weight", ""), ("weight_scale_inv", "_scale_inv")):
            halves = [stack(layer, name, leaf) for name in ("gate_proj", "up_proj")]
            state[f"{prefix}.gate_up_proj{suffix}"].copy_(torch.cat(halves, dim=1))
            del halves
            state[f"{prefix}.down_proj{suffix}"].copy_(stack(layer, "down_proj", leaf))


_LOADERS = {"moefp8": _load_ours, "safetensors": _load_safetensors}


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; this benchmark needs Linux")


def _print(results: dict) -> None:
    print(
        f"{results['gib']:.2f} GiB of experts in {results['num_shards']} shards, warm page cache; "
        f"{results['cpu']}, torch {results['torch']}"
    )
    print(f"{'':12}  {'GiB/s (median)':>14}  {'extra peak memory':>17}")
    for name in _LOADERS:
        result = results[name]
        print(f"{name:12}  {result['gib_per_s']:14.2f}  {result['extra_percent']:15.1f} %")
    print(f"{'goal':12}  {f'>= {GOAL_GIB_PER_S}':>14}  {f'< {GOAL_EXTRA_PERCENT}':>15} %")


if __name__ == "__main__":
    main()
