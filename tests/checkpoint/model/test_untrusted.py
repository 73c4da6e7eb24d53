"""Models that transformers would build of a config.json that somebody made to hurt."""

import socket
import threading

import pytest
from huggingface_hub import constants

from moefp8.checkpoint import quantize_checkpoint
from moefp8.checkpoint.model import untrusted
from moefp8.checkpoint.model.skeleton import Skeleton, skeleton_of
from moefp8.checkpoint.model.untrusted import offline
from moefp8.cli.main import main
from tests.checkpoint.deadline import within
from tests.checkpoint.quantize.cases import LINEAR, bf16, write_source

QWEN3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 128,
    "moe_intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "num_experts": 4,
    "num_hidden_layers": 1,
}
ENDLESS = {
    "layers": ({"num_hidden_layers": 10**9}, "'num_hidden_layers' of config.json must be at most"),
    "layers in parts": ({"num_hidden_layers": 2**20}, "ValueError: a model that takes more than"),
    "experts": ({"num_experts": 2**62}, "'num_experts' of config.json must be at most 1,048,576"),
    "experts of stacks": ({"num_experts": 2**20}, "it would have 2,097,152 experts, and may"),
    "layers of GPT-2": ({"model_type": "gpt2", "n_layer": 10**9}, "'n_layer' of config.json must"),
    "labels": ({"num_labels": 10**9}, "'num_labels' of config.json must be at most"),
    "a list": ({"model_type": "swin", "depths": [2, 10**9]}, "'depths' of config.json must be"),
    "below": ({"model_type": "llava", "text_config": {"num_layers": 10**9}}, "'num_layers' of"),
}


@pytest.mark.parametrize("what", ENDLESS)
def test_models_without_end_are_not_built(monkeypatch, what):
    changed, reason = ENDLESS[what]
    monkeypatch.setattr(untrusted, "_MAX_CALLS", 10_000)  # fewer than in use, to save time
    skeleton_of(QWEN3)  # imports transformers, which takes seconds once
    with within(20):
        told = skeleton_of({**QWEN3, **changed})
    assert isinstance(told, str)
    assert reason in told


def test_a_model_without_end_is_told_by_names(tmp_path):
    config = {**QWEN3, "num_hidden_layers": 10**9}
    source = write_source(tmp_path / "s", {LINEAR: bf16(4, 4)}, config)
    with within(20):
        report = quantize_checkpoint(source, tmp_path / "t")
    assert report.basis.startswith("names ('num_hidden_layers' of config.json must be at most")


FETCHED = {
    "_attn_implementation": "evil/kernel",
    "attn_implementation": {"": "evil/kernel"},
    "experts_implementation": "evil/kernel",
    "_experts_implementation": "evil/kernel",
    "auto_map": {"AutoModelForCausalLM": "evil/code--modeling.Evil"},
}


def no_network(monkeypatch) -> list[str]:
    """Return the hosts that the network is asked for, in vain."""
    asked: list[str] = []

    def ask(host, *_, **__):
        asked.append(host)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", ask)
    return asked


@pytest.mark.parametrize("key", FETCHED)
def test_nothing_that_a_config_names_is_fetched_and_run(monkeypatch, key):
    asked = no_network(monkeypatch)
    loaded: list[str] = []
    monkeypatch.setattr(
        "transformers.integrations.hub_kernels.load_and_register_attn_kernel",
        lambda name, *_, **__: loaded.append(name),
    )
    config = {**QWEN3, key: FETCHED[key]}
    assert isinstance(skeleton_of(config), Skeleton)
    assert isinstance(skeleton_of({"model_type": "llava", "text_config": config}), Skeleton)
    assert asked == loaded == []


def test_a_backbone_is_not_asked_for(monkeypatch):
    asked = no_network(monkeypatch)
    config = {"model_type": "dpt", "backbone": "evil/x", "use_pretrained_backbone": True}
    before = constants.HF_HUB_OFFLINE
    assert "OfflineModeIsEnabled" in str(skeleton_of(config))
    assert asked == []
    assert constants.HF_HUB_OFFLINE is before


def test_other_threads_are_not_offline():
    found: list[bool] = []
    with offline():
        thread = threading.Thread(target=lambda: found.append(bool(constants.is_offline_mode())))
        thread.start()
        thread.join()
        assert constants.is_offline_mode()
    assert found == [False]
    assert not constants.is_offline_mode()


@pytest.mark.parametrize("key", ["hidden_act", "model_type"])
def test_what_a_terminal_would_obey_is_not_in_what_told(tmp_path, capsys, key):
    config = {**QWEN3, key: "\x1b[2J\nFAKE LINE"}
    source = write_source(tmp_path / "s", {LINEAR: bf16(4, 4)}, config)
    assert main(["quantize", str(source), str(tmp_path / "t")]) == 0
    out, err = capsys.readouterr()
    assert "FAKE LINE" in out
    assert all(line.isprintable() for line in [*out.split("\n"), *err.split("\n")])
    assert not any(line.startswith("FAKE LINE") for line in out.split("\n"))
