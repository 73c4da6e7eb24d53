"""examples/train.py: the text, the model, and that training lowers the loss."""

import inspect
from dataclasses import replace

import pytest
import torch
import train

import moefp8
from moefp8.testing import relative_error
from tests.gpu import on_gpu

CPU = torch.device("cpu")
TINY = replace(train.SIZES["small"], layers=1, experts=4, rows=2, length=64)


@pytest.fixture(scope="module")
def text() -> tuple[torch.Tensor, torch.Tensor]:
    return train.read_text(TINY)


def trained(dtype: str, text: torch.Tensor, steps: int, device: str = "cpu") -> list[float]:
    model, text = train.make_model(TINY, dtype, device), text.to(device)
    trainer = train.Trainer(model, steps, TINY.lr)
    return [trainer.step(text, TINY, step).item() for step in range(steps)]


def test_the_split_is_the_same_each_time_and_shares_no_file(text):
    again = train.read_text(TINY)
    assert all(torch.equal(x, y) for x, y in zip(text, again, strict=True))
    to_train, held_out = (bytes(x.numpy().tobytes()) for x in text)
    assert 0.01 < len(held_out) / len(to_train) < 0.15
    module = inspect.getsource(inspect).encode()
    assert (module in to_train) != (module in held_out)


def test_tests_are_no_text(tmp_path):
    for name in ("b.py", "a/c.py", "a.py", "test/d.py", "a/tests/e.py", "f.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert train.python_files(tmp_path) == [b"a/c.py", b"a.py", b"b.py"]


def test_too_little_text_is_an_error():
    with pytest.raises(RuntimeError, match=r"must have 1,000,000,000 bytes, got [\d,]+ in \d+"):
        train.read_text(replace(TINY, least_text=10**9))


def test_a_step_has_the_same_bytes_in_any_run(text):
    first, again, other = (train.batch(text[0], TINY, step) for step in (3, 3, 4))
    assert first.shape == (2, 65)
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    start = bytes(first[0].tolist())
    assert start in text[0].numpy().tobytes()


@pytest.mark.parametrize("size", train.SIZES)
def test_sizes_fit_blocks_and_have_the_parameters_that_are_told(size):
    chosen = train.SIZES[size]
    assert chosen.hidden % 128 == chosen.intermediate % 128 == 0
    assert chosen.hidden % chosen.heads == 0
    num_parameters = sum(x.numel() for x in train.LanguageModel(chosen).parameters())
    least, most = {"small": (1e6, 2e6), "large": (9e7, 1.2e8)}[size]
    assert least < num_parameters < most


def test_experts_are_those_that_moefp8_knows():
    """The example's experts, and plain ones of moefp8 with the same weights."""
    torch.manual_seed(0)
    experts = train.Experts(4, 128, 128)
    moe = moefp8.dequantize(moefp8.MoE(128, 128, num_experts=4, top_k=2), dtype=torch.float32)
    weights = {name: torch.randn(x.shape) / 11 for name, x in experts.named_parameters()}
    experts.load_state_dict(weights)
    moe.experts.load_state_dict(weights)
    x, scores = torch.randn(9, 128), torch.rand(9, 2)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(9)])  # the last has no tokens
    expected = moe.experts(x, chosen, scores)
    torch.testing.assert_close(experts(x, chosen, scores), expected, rtol=1e-4, atol=1e-5)


@on_gpu
def test_experts_on_a_gpu_are_those_of_the_cpu():
    """Grouped GEMMs, forward and backward, beside the loop; the last expert has no tokens."""
    torch.manual_seed(0)
    experts = train.Experts(4, 256, 128)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, std=0.06)
    x = torch.randn(300, 256, dtype=torch.bfloat16)
    chosen = torch.stack([torch.randperm(3)[:2] for _ in range(300)])
    inputs = x, chosen, torch.rand(300, 2)

    def run(device: str) -> list[torch.Tensor]:
        there, moved = experts.to(device), [x.to(device) for x in inputs]
        y = there(*moved)
        found = torch.autograd.grad(y.float().square().sum(), list(there.parameters()))
        return [x.detach().float().cpu() for x in (y, *found)]

    for found, expected in zip(run("cuda"), run("cpu"), strict=True):
        assert relative_error(found.flatten(0, -2)[:768], expected.flatten(0, -2)[:768]) < 0.03
    assert not run("cuda")[1][3].any()


@on_gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_training_on_a_gpu_is_that_on_the_cpu(text, dtype):
    found, expected = ([*trained(dtype, text[0], 8, device)] for device in ("cuda", "cpu"))
    assert found == pytest.approx(expected, rel=0.02)


def test_what_convert_leaves_and_takes():
    model = moefp8.convert(train.LanguageModel(TINY), skip="lm_head")
    fp8 = {n for n, m in model.named_modules() if isinstance(m, moefp8.FP8Linear)}
    linears = {"attention.qkv_proj", "attention.o_proj"}
    linears |= {"shared_expert.gate_up_proj", "shared_expert.down_proj"}
    assert fp8 == {f"layers.0.{name}" for name in linears}
    assert isinstance(model.layers[0].experts, moefp8.GroupedExperts)
    assert type(model.lm_head) is torch.nn.Linear


def test_tokens_do_not_see_what_comes_later():
    model = train.make_model(TINY, "bf16", CPU)
    ids = torch.randint(256, (1, 16))
    changed = ids.clone()
    changed[0, 9] += 1
    same = (model(ids)[0] == model(changed % 256)[0]).all(dim=-1)[0]
    assert same[:9].all()
    assert not same[9:].any()


def test_balance_is_1_where_all_experts_are_equally_busy():
    router = train.Router(4, 4, 1)
    torch.nn.init.eye_(router.weight)
    x = 9 * torch.eye(4)
    assert router(x)[2].item() == pytest.approx(1, abs=1e-3)
    assert router(x[:1].expand(4, 4))[2].item() == pytest.approx(4, abs=0.01)


def test_the_loss_falls(text):
    losses = trained("bf16", text[0], 20)
    assert losses[0] == pytest.approx(5.55, abs=0.1)  # log(256)
    assert sum(losses[-5:]) / 5 < losses[0] - 1.5


def test_accumulated_gradients_are_of_all_batches(text):
    """One step of two batches, and one of a batch with both."""
    both = replace(TINY, rows=4)

    def batch(number: int) -> torch.Tensor:
        return train.batch(text[0], TINY, number)

    one, other = (train.make_model(TINY, "bf16", CPU) for _ in range(2))
    accumulated = train.Trainer(one, 4, TINY.lr, accumulate=2)
    loss = accumulated.step(text[0], TINY, 0)
    ids = torch.cat((batch(0), batch(1)))
    assert ids.shape == (both.rows, both.length + 1)
    expected, _ = train.losses(other, ids)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-3)


def test_learning_rates_rise_and_fall_to_a_tenth():
    trainer = train.Trainer(train.LanguageModel(TINY), 100, 1.0)
    rates = []
    for _ in range(100):
        rates.append(trainer.schedule.get_last_lr()[0])
        trainer.optimizer.step()
        trainer.schedule.step()
    assert rates[:2] == pytest.approx([0.2, 0.4])
    assert max(rates) == pytest.approx(1)
    assert rates[-1] == pytest.approx(0.1, abs=0.01)
    assert rates[5:] == sorted(rates[5:], reverse=True)


def test_fp8_learns_as_bf16_does(text):
    bf16, fp8 = (sum(trained(dtype, text[0], 24)[-12:]) for dtype in ("bf16", "fp8"))
    assert fp8 == pytest.approx(bf16, rel=0.02)  # of 128 bytes a step: seeds differ by as much


def test_what_cannot_be_done_is_told_before_training(monkeypatch, capsys, tmp_path):
    (tmp_path / "fp8").mkdir()
    (tmp_path / "fp8" / "model.safetensors").touch()
    monkeypatch.setattr(train, "read_text", lambda size: pytest.fail("it began"))
    for given, told in (
        (("--out", str(tmp_path)), "fp8 must be empty, or not be there yet"),
        (("--steps", "0"), "--steps: must be at least 1, got 0"),
        (("--accumulate", "-1"), "--accumulate: must be at least 1, got -1"),
    ):
        monkeypatch.setattr("sys.argv", ["train.py", *given])
        with pytest.raises(SystemExit):
            train.main()
        assert told in capsys.readouterr().err
