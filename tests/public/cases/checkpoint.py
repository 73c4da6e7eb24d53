"""Checkpoints: saved, loaded, inspected and quantized."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import moefp8
from moefp8.checkpoint import (
    CheckpointError,
    Inspection,
    LoadReport,
    QuantizeReport,
    WeightReport,
    fp8_layers,
    fp8_modules,
    inspect_checkpoint,
    quantize_checkpoint,
    read_config,
)

from . import attempt, case, randn
from ._small import write_checkpoint


def _model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(136, 200), nn.GELU(), nn.Linear(200, 136)).bfloat16()


def _layer(device: str) -> nn.ModuleDict:
    return nn.ModuleDict(
        {"mlp": moefp8.MoE(136, 72, 4, 2, shared_intermediate_size=72, device=device)}
    )


@case
def saved_and_loaded(device: str) -> Any:
    model = moefp8.convert(_model().to(device))
    moefp8.save_checkpoint(model=model, path="saved", max_shard_bytes=30_000)
    with torch.device("meta"):
        other = _model()
    moefp8.convert(other, only=fp8_modules(path="saved", model=other, ignore=["9.*"], rename=None))
    report = moefp8.load_checkpoint(other, "saved", device=device, progress=False)
    x = randn(5, 136, device=device)
    return Path("saved"), report, other, model(x), other(x)


@case
def moe_layer(device: str) -> Any:
    model = _layer(device)
    moefp8.save_checkpoint(model, "saved")
    other = _layer(device)
    report = moefp8.load_checkpoint(other, "saved")
    return Path("saved"), report, other


@case
def with_masters(device: str) -> Any:
    trained = moefp8.convert(_model().to(device), trainable=True)
    moefp8.save_checkpoint(trained, "plain")
    moefp8.save_checkpoint(moefp8.freeze(trained), "fp8")
    other = moefp8.convert(_model().to(device), trainable=True)
    reports = [moefp8.load_checkpoint(other, "fp8"), moefp8.load_checkpoint(other, "plain")]
    return Path("."), reports, other


@case
def updated(device: str) -> Any:
    """By a trainer of its own names, in two calls; then what is refused, and what is missing."""
    model, x = moefp8.convert(_model().to(device)), randn(5, 136, device=device)
    weights = {f"net.{name}": y for name, y in _model().to(device).state_dict().items()}
    first = {name: weights.pop(name) for name in ("net.2.bias", "net.0.weight")}
    with moefp8.updating(model=model, rename=lambda name: name.removeprefix("net.")) as block:
        block.add(named_tensors=first)
        block.add(weights.items())
    experts = moefp8.GroupedExperts(2, 136, 72, device=device)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        with moefp8.checkpoint.updating(experts) as part:
            part.add(tensors)

    stack = randn(2, 136, 72, device=device)
    refused = [attempt(partial(add, {name: stack.mT})) for name in ("down_proj", "down")]
    add({"down_proj": stack})
    missing = attempt(partial(add, {"0.down_proj.weight": stack[0]}))
    return model, model(x), experts, refused, missing


@case
def deepseek_layer(device: str) -> Any:
    """One layer of a published kind, by `rename` and `ignore`."""
    write_checkpoint("deepseek_v3")
    layer = moefp8.MoE(
        256,
        128,
        16,
        4,
        shared_intermediate_size=128,
        device="meta",
        scoring="sigmoid",
        num_groups=4,
        topk_groups=2,
        scaling_factor=2.5,
        correction_bias=True,
    )
    others = ["model.layers.[!1].*", "*.self_attn.*", "*norm.*", "*embed*", "lm_head.*"]
    report = moefp8.load_checkpoint(
        model=layer,
        path="CHECKPOINT",
        ignore=others,
        rename=lambda key: key.removeprefix("model.layers.1.mlp."),
        device=device,
        progress=False,
    )
    config = read_config(path="CHECKPOINT")
    return report, layer(randn(7, 256, device=device)), config


@case
def rank_parts(device: str) -> Any:
    moefp8.save_checkpoint(_layer(device), "whole")
    plan = {"*.experts": "experts", "*.shared_experts": "intermediate"}
    outcomes = []
    for rank in range(3):
        part = moefp8.shard(_layer("meta"), plan, rank, 3)
        report = moefp8.load_checkpoint(part, "whole", device=device)
        outcomes.append((report, part, part["mlp"](randn(5, 136, device=device))))
    return outcomes


@case
def inspected(device: str) -> Any:
    write_checkpoint("qwen3_moe")
    inspection = inspect_checkpoint(path="CHECKPOINT", weights=True, progress=False)
    other = inspect_checkpoint("ORIGINAL")
    layers = fp8_layers(path="CHECKPOINT", top_k=2)
    again = Inspection(
        path="here",
        family=inspection.family,
        kinds=inspection.kinds,
        left_out=inspection.left_out,
        dtypes=inspection.dtypes,
        files=inspection.files,
        anomalies=inspection.anomalies,
    )
    verdicts = [(x.is_fp8, x.is_loadable) for x in (inspection, other, again)]
    return (
        inspection,
        other,
        verdicts,
        layers,
        layers.names,
        layers.top_k,
        fp8_modules("CHECKPOINT"),
    )


@case
def quantized(device: str) -> Any:
    write_checkpoint("qwen3_moe")
    done = quantize_checkpoint(
        source="ORIGINAL",
        target="quantized",
        skip=["*.layers.0.self_attn.*"],
        device=device,
        max_shard_bytes=2_000_000,
        progress=False,
    )
    report = done.to_dict()
    report.pop("seconds")
    worst = done.worst(num=3), done.worst(), done.median_error()
    return Path("quantized"), report, worst, str(done), inspect_checkpoint("quantized")


@case
def reports_made_by_hand(device: str) -> Any:
    weight = WeightReport(key="a", shape=(3, 4), error=0.5, max_error=0.25)
    return [
        LoadReport(num_tensors=1, num_bytes=2, seconds=3.0, ignored=("a",)),
        weight,
        QuantizeReport(
            weights=(weight,),
            kept=("b",),
            conversion=moefp8.layers.Conversion({"a": "linear"}),
            basis="names",
            source_bytes=10,
            target_bytes=5,
            num_shards=1,
            num_resumed=0,
            seconds=1.0,
        ),
        str(CheckpointError("one line", "another")),
    ]


@case
def errors(device: str) -> Any:
    moefp8.save_checkpoint(moefp8.convert(_model()), "saved")
    file = Path("saved/model.safetensors")
    with torch.device("meta"):
        model = moefp8.convert(_model())
    longer = nn.Sequential(*_model(), nn.Linear(136, 8))
    outcomes = [
        attempt(lambda: moefp8.load_checkpoint(model, "nowhere")),
        attempt(lambda: moefp8.load_checkpoint(longer, "saved")),
        attempt(lambda: moefp8.load_checkpoint(_model(), "saved")),
        attempt(lambda: moefp8.load_checkpoint(model, "saved", ignore=["0.weight"])),
        attempt(lambda: moefp8.load_checkpoint(model, "saved", device="nothing")),
        attempt(lambda: moefp8.save_checkpoint(model, "other")),
        attempt(lambda: quantize_checkpoint("saved", "target")),
        attempt(lambda: inspect_checkpoint("nowhere")),
        attempt(lambda: fp8_modules("saved", model=nn.Sequential(nn.Linear(3, 4)))),
        attempt(lambda: read_config("nowhere")),
    ]
    file.write_bytes(file.read_bytes()[:-100])
    return [
        *outcomes,
        attempt(lambda: moefp8.load_checkpoint(model, "saved")),
        attempt(lambda: inspect_checkpoint("saved")),
    ]
