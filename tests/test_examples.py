"""What a newcomer runs: the examples; and the tables of the README."""

import re
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import generate
import pytest
import torch
import train
from safetensors.torch import save_file
from small_checkpoint import write_small_checkpoint

from benchmarks import report
from moefp8 import convert, load_checkpoint

REPOSITORY = Path(__file__).parents[1]


def errors(output: str, what: str) -> list[float]:
    return [float(x) for x in re.findall(rf"{what}\s+worst (\S+)", output)]


@pytest.mark.slow
def test_generate_writes_loads_and_compares_both_families():
    command = [sys.executable, "examples/generate.py", "--max-new-tokens", "4"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    output = result.stdout
    assert "deepseek_v3 from" in output
    assert "qwen3_moe from" in output
    exact = errors(output, "same FP8 operands")
    close = errors(output, "BF16 model it comes from")
    assert len(exact) == len(close) == 2
    assert max(exact) < 6e-3
    assert max(close) < 0.5
    speeds = r"generated 4 tokens at [\d,.]+ tokens/s, after a prefill of 64 at [\d,.]+:"
    assert len(re.findall(speeds, output)) == 2
    loaded = r"loaded [\d.]+ MiB in [\d.]+ s, 5\d% of the [\d.]+ MiB of BF16"
    assert len(re.findall(loaded, output)) == 2


def test_speeds_are_those_of_a_warm_model(monkeypatch):
    """By a clock that only sleep moves: what else the machine does takes no time."""
    slept_s = [0.0]
    monkeypatch.setattr(time, "sleep", slept_s.append)
    monkeypatch.setattr(time, "perf_counter", lambda: sum(slept_s))

    class Slow:
        longest = 0  # attention may be compiled for each length of the cache

        def generate(self, ids, *, max_new_tokens, **options):
            num_new_lengths = max(0, max_new_tokens - self.longest)
            self.longest = max(self.longest, max_new_tokens)
            time.sleep(0.05 + 0.02 * max_new_tokens + 0.1 * num_new_lengths)
            return torch.cat((ids, torch.zeros(1, max_new_tokens, dtype=ids.dtype)), dim=1)

    tokens, prefill_s, token_s = generate.generate(Slow(), torch.ones(1, 3, dtype=torch.int64), 9)
    assert tokens == [0] * 9
    assert (prefill_s, token_s) == pytest.approx((0.07, 0.02))


@pytest.fixture
def run(monkeypatch, capsys) -> Callable[..., str]:
    """What an example prints that runs in this process, which has imported torch."""

    def run(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(REPOSITORY / "examples" / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_generate_takes_a_checkpoint(run, tmp_path):
    write_small_checkpoint(tmp_path / "fp8", "qwen3_moe", num_shards=1)
    output = run("generate.py", "--checkpoint", str(tmp_path / "fp8"))
    assert len(errors(output, "same FP8 operands")) == 1


@pytest.mark.slow
def test_finetune_trains_saves_and_loads(run, tmp_path):
    options = "--steps", "4", "--length", "64", "--max-new-tokens", "4"
    output = run("finetune.py", *options, "--adapters", str(tmp_path))
    losses = [float(x) for x in re.findall(r"loss (\S+)", output)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5
    assert "loaded them; ..." in output
    names = {file.name for file in tmp_path.iterdir()}
    assert names == {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_train_saves_both_forms(run, tmp_path, dtype):
    options = "--steps", "4", "--accumulate", "2", "--sample", "4", "--out", str(tmp_path)
    output = run("train.py", "--dtype", dtype, *options)
    losses = [float(x) for x in re.findall(r"step +\d+   loss (\S+)", output)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.5
    master, fp8 = (float(x) for x in re.findall(r"saved \w+: (\S+) MiB", output))
    assert 3 < master / fp8 < 4
    assert "\ndef __init__(self" in output
    size = train.SIZES["small"]
    model = train.LanguageModel(size)
    load_checkpoint(model, tmp_path / "master")
    loaded = convert(train.LanguageModel(size), skip="lm_head")
    load_checkpoint(loaded, tmp_path / "fp8")
    converted = convert(model, skip="lm_head").state_dict()
    for name, x in loaded.state_dict().items():
        assert torch.equal(x.view(torch.uint8), converted[name].view(torch.uint8)), name


@pytest.mark.slow
def test_a_server_has_the_logits_of_its_trainer(run):
    output = run("trainer_and_server.py", "--steps", "2", "--length", "400")
    assert "server in FP8: KL mean 0, largest 0\n" in output
    assert float(re.findall(r"server in BF16: KL mean (\S+),", output)[0]) > 1e-6
    assert "15 of 15 layers give 1, 3, 64 rows alone the bits that they have among" in output


def test_finetune_names_a_vocabulary_that_is_too_small_for_bytes(run, tmp_path):
    write_small_checkpoint(tmp_path / "fp8", "qwen3_moe", vocab_size=100)
    with pytest.raises(SystemExit, match=r"a vocabulary of \d+ or more tokens.*, got 100"):
        run("finetune.py", "--checkpoint", str(tmp_path / "fp8"))


def test_swap_linears(run):
    assert "FP8Linear(in_features=512" in run("swap_linears.py")


def test_moe_block(run):
    assert "output [2, 64, 512] torch.bfloat16" in run("moe_block.py")


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="torch without gloo")
def test_serve_parallel_reads_a_part_of_the_checkpoint_on_each_rank(tmp_path):
    write_small_checkpoint(tmp_path / "fp8", "qwen3_moe", vocab_size=300)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "examples/serve_parallel.py", str(tmp_path / "fp8")]
    command += ["--max-new-tokens", "3", "--device", "cpu"]
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    lines = re.findall(r"^rank .*", result.stdout, re.MULTILINE)
    size = sum(file.stat().st_size for file in (tmp_path / "fp8").glob("*.safetensors"))
    for rank, line in enumerate(lines):
        assert f"rank {rank} of 2 on cpu: read " in line
        assert f"experts {4 * rank} to {4 * rank + 3} of each layer" in line
        assert f"{3 * (rank + 1)} tokens, {rank + 1} at a time, at " in line
        assert len(line.rpartition(": ")[2].split()) == 3
        assert 0.5 < float(re.findall(r"read (\S+) MiB", line)[0]) * 2**20 / size < 0.62
    assert len(lines) == 2


def test_serve_parallel_is_started_by_torchrun(run, capsys):
    with pytest.raises(SystemExit):
        run("serve_parallel.py")
    assert "start it with torchrun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (torch.ones(8, 8), "nothing in FP8; `python -m moefp8 quantize` makes an FP8 checkpoint"),
        (torch.ones(8, 8).to(torch.float8_e4m3fn), "must have experts in FP8, got other layers"),
    ],
)
def test_serve_parallel_says_how_experts_get_into_fp8(run, tmp_path, capsys, tensor, message):
    tensors = {"layers.0.up.weight": tensor}
    if tensor.dtype == torch.float8_e4m3fn:
        tensors["layers.0.up.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(SystemExit):
        run("serve_parallel.py", str(tmp_path))
    assert message in capsys.readouterr().err


def test_serve_parallel_has_no_use_for_a_prompt_without_a_tokenizer(run, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run("serve_parallel.py", str(tmp_path), "--prompt", "hello")
    assert f"there is no tokenizer_config.json in {tmp_path}; " in capsys.readouterr().err


def test_the_tables_of_pages_are_those_of_the_results():
    for page in report.PAGES:
        assert report.with_tables(page.read_text()) == page.read_text()


def test_every_table_has_one_place():
    text = "".join(page.read_text() for page in report.PAGES)
    for name in report.TABLES:
        assert text.count(f"<!-- {name} -->\n") == text.count(f"<!-- /{name} -->\n") == 1
    assert text.count("<!-- /") == len(report.TABLES)


def test_serve_vllm_says_what_it_needs(run, monkeypatch, capsys):
    monkeypatch.setenv("MOEFP8_VLLM", "0")  # it sets it, and the variable is as before afterwards
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(SystemExit):
        run("serve_vllm.py", "DIR")
    assert "; pip install vllm" in capsys.readouterr().err
