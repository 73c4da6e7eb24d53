"""`python -m moefp8 compare`: what it prints, writes and refuses."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from small_checkpoint import small_config, write_small_checkpoint
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from moefp8.cli.main import main
from tests.gpu import on_gpu

SIZES = "--tokens", "200", "--length", "64"
WORDS = ["a", "layer", "of", "experts", "is", "a", "layer", "and", "so", "on"]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> tuple[str, str]:
    """Directories of a BF16 model and of the same in FP8."""
    directory = tmp_path_factory.mktemp("compare") / "fp8"
    return str(write_small_checkpoint(directory, "qwen3_moe")), str(directory)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(" ".join(WORDS) * 20)
    return str(file)


def copy_with_tokenizer(source: str, target: Path, words: list[str]) -> str:
    """A tokenizer of words that begins each text with <s>, whose id is 1."""
    shutil.copytree(source, target)
    ids = {word: i for i, word in enumerate(["<unk>", "<s>", *dict.fromkeys(words)])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>"
    ).save_pretrained(target)
    return str(target)


def test_fp8_beside_its_source(checkpoints, text, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    files = [str(tmp_path / "figures.json"), str(tmp_path / "layers.png")]
    options = "--json", files[0], "--plot", files[1], "--device", "cpu"
    assert main(["compare", *checkpoints, "--text", text, *SIZES, *options]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^A: \S+-bf16, qwen3_moe in BF16, 12\.\d MiB of weights$", out, re.MULTILINE)
    assert re.search(r"^B: \S+fp8, qwen3_moe in FP8, 6\.\d MiB of weights$", out, re.MULTILINE)
    assert "3 rows of 64 bytes (there is no tokenizer), on cpu\n" in out
    figures = json.loads(Path(files[0]).read_text())
    assert f"A {figures['perplexity_a']:.4f}, B {figures['perplexity_b']:.4f}: " in out
    assert f"% of {3 * 63} tokens" in out
    rows = re.findall(r"^([ >]) (model\.layers\.\d) +([\d.e-]+) ", out, re.MULTILINE)
    assert [float(kl) for *_, kl in rows] == pytest.approx(
        [layer["kl"] for layer in figures["layers"]], rel=0.05
    )
    costs = [layer["kl"] for layer in figures["layers"]]
    costliest = costs.index(max(costs))
    assert [mark == ">" for mark, *_ in rows] == [i == costliest for i in range(3)]
    assert out.splitlines()[-1].startswith(f"> model.layers.{costliest} costs most: ")
    assert all({*layer["parts"]} == {"self_attn", "mlp"} for layer in figures["layers"])
    assert Path(files[1]).read_bytes().startswith(b"\x89PNG")


def test_one_directory_is_quantized_as_it_is_loaded(checkpoints, text, tmp_path, capsys):
    file = tmp_path / "figures.json"
    options = "--skip", "*.layers.1.*", "--json", str(file)
    assert main(["compare", checkpoints[0], "--text", text, *SIZES, *options]) == 0
    assert "-bf16, quantized as it was loaded, qwen3_moe in FP8, " in capsys.readouterr().out
    layers = json.loads(file.read_text())["layers"]
    assert [layer["own"]["worst"] > 0 for layer in layers] == [True, False, True]
    assert [layer["kl"] > 0 for layer in layers] == [True, False, True]
    assert layers[1]["parts"] == {}


def test_each_row_begins_as_the_tokenizer_begins_a_text(checkpoints, text, tmp_path, capsys):
    """Rows of 9 tokens hold <s> and 8 of the text's 181 words."""
    a, b = (copy_with_tokenizer(x, tmp_path / Path(x).name, WORDS) for x in checkpoints)
    file = tmp_path / "figures.json"
    sizes = "--tokens", "1000", "--length", "9"
    assert main(["compare", a, b, "--text", text, *sizes, "--json", str(file)]) == 0
    assert "22 rows of 9 tokens, on cpu\n" in capsys.readouterr().out
    tokenizer = PreTrainedTokenizerFast.from_pretrained(a)
    ids = torch.tensor(tokenizer(Path(text).read_text()).input_ids[1 : 22 * 8 + 1]).view(22, 8)
    ids = torch.nn.functional.pad(ids, (1, 0), value=1)
    model = AutoModelForCausalLM.from_pretrained(a, dtype=torch.bfloat16)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(
            model(ids).logits[:, :-1].flatten(0, 1).double(), ids[:, 1:].flatten()
        )
    assert json.loads(file.read_text())["perplexity_a"] == pytest.approx(loss.exp().item(), 1e-3)


def test_other_tokenizers_are_refused(checkpoints, text, tmp_path, capsys):
    a, b = (
        copy_with_tokenizer(x, tmp_path / Path(x).name, words)
        for x, words in zip(checkpoints, (WORDS, WORDS[::-1]), strict=True)
    )
    assert main(["compare", a, b, "--text", text]) == 1
    assert "A and B must have one vocabulary, but their tokenizers" in capsys.readouterr().err


WRONG = {
    "nowhere: there is no such file or directory": ["A", "nowhere"],
    r"A and B must be directories with a config.json, got \S+json": ["A", "CONFIG"],
    "B: is FP8 already; give what it comes from as A and this as B": ["B"],
    "--skip is for A that is quantized as it is loaded": ["A", "B", "--skip", "x"],
    "--tokens and --length must be at least 2, got 1 and 1024": ["A", "B", "--tokens", "1"],
    "must have a row of --length 4000, got 780 bytes.*; give a longer text": [
        *("A", "B", "--length", "4000")
    ],
    "--tokens must be at least --length, .* got 512 and 1024; give a larger --tokens": [
        *("A", "--tokens", "512")
    ],
    "--json must name a file in a directory that is there, got no/x": ["A", "B", "--json", "no/x"],
    "--plot must name a file in a directory that is there, got .": ["A", "B", "--plot", "."],
    r"the plot must end in one of .*\.png, .*, got x\.odd": ["A", "B", "--plot", "x.odd"],
    r"--device cuda:99 must be a GPU that torch can use, which are \d+": [
        *("A", "B", "--device", "cuda:99")
    ],
    "--device must be one of torch's, such as cpu or cuda, got gpu": ["A", "B", "--device", "gpu"],
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_input_is_one_sentence(message, checkpoints, text, capsys):
    names = {**dict(zip("AB", checkpoints, strict=True)), "CONFIG": f"{checkpoints[0]}/config.json"}
    argv = [names.get(x, x) for x in WRONG[message]]
    assert main(["compare", *argv, "--text", text]) == 1
    error = capsys.readouterr().err
    assert error.startswith("moefp8 compare: ")
    assert re.search(message.replace("B: ", f"{checkpoints[1]}: "), error)


MXFP4 = {"quantization_config": {"quant_method": "mxfp4"}}
NVFP4 = {"quantization": {"quant_algo": "NVFP4"}}


@pytest.mark.parametrize("is_b", [False, True])
@pytest.mark.parametrize(
    ("file", "facts", "name"),
    [("config.json", MXFP4, "mxfp4"), ("hf_quant_config.json", NVFP4, "NVFP4")],
)
def test_other_formats_are_named(checkpoints, text, tmp_path, capsys, file, facts, name, is_b):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(facts))
    directories = [checkpoints[0], str(tmp_path)] if is_b else [str(tmp_path)]
    assert main(["compare", *directories, "--text", text]) == 1
    error = capsys.readouterr().err
    assert f"{tmp_path}: {file}: quant_method must be one of fp8, compressed-tensors, " in error
    assert f"'{name}', a format that moefp8 does not load; " in error
    assert "FP8 already" not in error


def test_a_text_that_is_missing_is_one_sentence(checkpoints, capsys):
    assert main(["compare", *checkpoints, "--text", "nowhere.txt"]) == 1
    assert "No such file or directory: 'nowhere.txt'" in capsys.readouterr().err


def test_other_layers_and_vocabularies_are_refused(checkpoints, text, tmp_path, capsys):
    for name, value in (("num_hidden_layers", 2), ("vocab_size", 500)):
        config = small_config("qwen3_moe")
        setattr(config, name, value)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / name)
        assert main(["compare", checkpoints[0], str(tmp_path / name), "--text", text, *SIZES]) == 1
    errors = capsys.readouterr().err
    assert "a and b must have the same layers, got 3 and 2 in 'model.layers'" in errors
    assert "a and b must have one vocabulary, got logits of 512 and 500 tokens" in errors


def test_bytes_need_a_vocabulary_and_masked_models_need_labels(text, tmp_path, capsys):
    sizes = {"hidden_size": 128, "vocab_size": 50, "num_hidden_layers": 1}
    for name, words in (("few", ["Qwen3MoeForCausalLM"]), ("masked", ["BertForMaskedLM"])):
        (tmp_path / name).mkdir()
        config = {"model_type": "qwen3_moe", "architectures": words, **sizes}
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        assert main(["compare", str(tmp_path / name), "--text", text]) == 1
    errors = capsys.readouterr().err
    assert "must have a tokenizer for its 50 words, got an id of 121 (bytes" in errors
    assert "must be a causal language model, got BertForMaskedLM; moefp8.testing" in errors


@pytest.mark.parametrize("missing", ["matplotlib", "transformers"])
def test_what_is_not_installed_is_one_sentence(checkpoints, text, capsys, monkeypatch, missing):
    for name in {missing, *(x for x in sys.modules if x.startswith(f"{missing}."))}:
        monkeypatch.setitem(sys.modules, name, None)
    options = ["--plot", "x.png"] if missing == "matplotlib" else []
    assert main(["compare", *checkpoints, "--text", text, *SIZES, *options]) == 1
    assert re.search(rf"compare: .*{missing}.*install", capsys.readouterr().err)


@on_gpu
def test_both_models_run_on_a_gpu(checkpoints, text, capsys):
    pytest.importorskip("accelerate")
    assert main(["compare", *checkpoints, "--text", text, *SIZES]) == 0
    assert ", on cuda\n" in capsys.readouterr().out
