"""`python -m moefp8 serve`: transformers' own server, with moefp8's modules and graphs."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch
from small_checkpoint import write_small_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
)
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.import_utils import is_serve_available

from moefp8 import FP8Linear, GroupedExperts
from moefp8.cli.main import main
from moefp8.hf.serving import load_fp8_checkpoints

STARTS_WITHIN_S = 120


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """A small model with a tokenizer of bytes."""
    directory = tmp_path_factory.mktemp("served") / "fp8"
    write_small_checkpoint(directory, "qwen3_moe", num_shards=1)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {word: i for i, word in enumerate(["<s>", "</s>", *letters])}
    bytes_ = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=bytes_, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    ).save_pretrained(directory)
    return directory


def load(directory: Path):
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)


@pytest.mark.parametrize("graphs", [True, False])
def test_what_the_server_loads_has_our_modules_and_graphs(checkpoint, monkeypatch, graphs):
    """As the server does, it loads without a `quantization_config`, and calls `generate`."""
    before = AUTO_QUANTIZER_MAPPING["fp8"]
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "fp8", before)  # put back after the test
    load_fp8_checkpoints(graphs=graphs, compile=False, batch_invariant=True)
    model = load(checkpoint)
    layers = [x for x in model.modules() if isinstance(x, FP8Linear | GroupedExperts)]
    assert len(layers) == 15
    assert all(x.batch_invariant for x in layers if isinstance(x, FP8Linear))
    assert ("generate" in vars(model)) == graphs
    ids = torch.arange(2, 9)[None]
    options = {"do_sample": False, "max_new_tokens": 5, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **options), type(model).generate(model, ids, **options))
    with (
        pytest.raises(ValueError, match="generate takes no stop_strings")
        if graphs
        else (pytest.raises(ValueError, match="tokenizer"))
    ):
        model.generate(ids, stop_strings=["x"], **options)


def test_a_request_that_stops_at_a_string(checkpoint, monkeypatch):
    """As the server generates for `stop`."""
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "fp8", AUTO_QUANTIZER_MAPPING["fp8"])
    load_fp8_checkpoints(graphs=True, compile=False, batch_invariant=False)
    model, tokenizer = load(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    ids, options = torch.arange(2, 9)[None], {"do_sample": False, "max_new_tokens": 8}
    tokens = model.generate(ids, **options)[0, 7:]
    word = next(x for x in tokens.tolist() if 2 <= x < len(tokenizer))
    config = GenerationConfig(stop_strings=[tokenizer.decode(word)], pad_token_id=1, **options)
    stopped = model.generate(ids, generation_config=config, tokenizer=tokenizer)[0, 7:].tolist()
    assert stopped == tokens.tolist()[: tokens.tolist().index(word) + 1]


def test_a_directory_that_cannot_be_served_is_named(tmp_path, capsys):
    assert main(["serve", str(tmp_path / "none")]) == 1
    assert f"moefp8 serve: there is no directory {tmp_path / 'none'}" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path)]) == 1
    assert "no quantization_config; python -m moefp8 quantize makes" in capsys.readouterr().err
    stored = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": stored}))
    assert main(["serve", str(tmp_path)]) == 1
    assert "compressed-tensors" in capsys.readouterr().err


def test_what_contradicts_itself_or_is_missing_is_named(checkpoint, capsys):
    assert main(["serve", "--no-graphs", "--compile", str(checkpoint)]) == 1
    assert "--compile must be without --no-graphs" in capsys.readouterr().err
    if not is_serve_available():
        assert main(["serve", str(checkpoint)]) == 1
        assert "pip install 'transformers[serving]'" in capsys.readouterr().err


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        return taken.getsockname()[1]


def answer(url: str, body: dict | None = None) -> dict:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=STARTS_WITHIN_S) as came:
        return json.load(came)


@pytest.mark.skipif(not is_serve_available(), reason="needs transformers[serving]")
def test_it_answers_as_the_api_of_openai(checkpoint, tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "moefp8", "serve", str(checkpoint)]
    command += ["--port", str(port), "--device", "cpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        try:
            end = time.monotonic() + STARTS_WITHIN_S
            while True:
                try:
                    assert answer(f"http://localhost:{port}/health")["status"] == "ok"
                    break
                except urllib.error.URLError:
                    assert server.poll() is None, (tmp_path / "log").read_text()
                    assert time.monotonic() < end
                    time.sleep(0.2)
            body = {"model": str(checkpoint), "prompt": "hello", "max_tokens": 4, "temperature": 0}
            came = answer(f"http://localhost:{port}/v1/completions", body)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(timeout=30)
    assert came["usage"] == {"completion_tokens": 4, "prompt_tokens": 5, "total_tokens": 9}
    assert len(came["choices"]) == 1
