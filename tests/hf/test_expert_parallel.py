"""Models of transformers whose experts lie on two ranks give what one process gives."""

import json
import shutil
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from small_checkpoint import write_small_checkpoint

from moefp8.hf.versions import has_ep_implementations
from moefp8.testing import row_errors
from tests.distributed.ranks import Ranks, ranks
from tests.hf.expert_parallel_cases import (
    OWN,
    experts_gradients_and_cache,
    generated,
    load,
    logits,
    logits_of_5_10,
    own_logits,
    own_model,
    read_by,
    saved,
    shared,
    trained,
)
from tests.hf.model_cases import change_config

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
named = pytest.mark.skipif(
    not has_ep_implementations(), reason="transformers before 5.23 has no ep_implementation"
)
FAMILIES = "qwen3_moe", "deepseek_v3"


@pytest.fixture(scope="module")
def group(tmp_path_factory) -> Iterator[Ranks]:
    with ranks(2, tmp_path_factory.mktemp("ranks")) as made:
        yield made


@pytest.fixture(scope="module", params=FAMILIES)
def fp8(request, tmp_path_factory):
    """An FP8 checkpoint; its BF16 original lies beside it as `fp8-bf16`."""
    directory = tmp_path_factory.mktemp(request.param) / "fp8"
    write_small_checkpoint(directory, request.param)
    return directory


@pytest.fixture(scope="module")
def bf16(fp8):
    return fp8.with_name("fp8-bf16")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen") / "fp8"
    write_small_checkpoint(directory, FAMILIES[0], num_shards=1)
    return directory


def prompts() -> list[torch.Tensor]:
    return [torch.randint(2, 512, (2, 9)), torch.randint(2, 512, (1, 14))]


def assert_near(ours: torch.Tensor | str, wanted: torch.Tensor, bound: float) -> None:
    assert not isinstance(ours, str), ours
    assert ours.shape == wanted.shape
    assert float((ours.float() - wanted.float()).norm() / wanted.float().norm()) < bound


# ---- BF16 checkpoints, experts of any implementation ----


@named
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_a_shared_batch_and_its_gradients(group, bf16, implementation):
    ids = prompts()[0]
    options = {"experts_implementation": implementation}
    wanted = trained(bf16, ids, options)
    for ours in group.run(trained, [(bf16, ids, {**options, "distributed": shared(bf16)})] * 2):
        assert not isinstance(ours, str), ours
        assert ours.keys() == wanted.keys()
        for name, x in ours.items():
            assert_near(x, wanted[name], 0.02)


@named
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_batches_of_their_own_and_the_mean_of_their_gradients(group, bf16, implementation):
    options = {"experts_implementation": implementation}
    given = prompts()
    wanted = [trained(bf16, ids, options) for ids in given]
    each = [(bf16, ids, {**options, "distributed": OWN}) for ids in given]
    for rank, ours in enumerate(group.run(trained, each)):
        assert not isinstance(ours, str), ours
        for name, x in ours.items():
            grads = [found[name].float() for found in wanted]
            mean = grads[rank] if name == "logits" else (grads[0] + grads[1]) / 2
            assert_near(x, mean, 0.02)


@named
@pytest.mark.parametrize("ep_implementation", ["moefp8", "all_reduce", "all_to_all"])
def test_fp8_experts_of_a_bf16_checkpoint(group, bf16, ep_implementation):
    """Theirs give our experts ids of this rank, and E with score 0 for all others."""
    options = {"experts_implementation": "moefp8"}
    given = prompts()
    wanted = [logits(bf16, ids, options) for ids in given]
    distributed = {**shared(bf16), "ep_implementation": ep_implementation}
    for ours in group.run(logits, [(bf16, given[0], {**options, "distributed": distributed})] * 2):
        assert_near(ours, wanted[0], 0.06)
    if ep_implementation == "moefp8":
        each = [(bf16, ids, {**options, "distributed": OWN}) for ids in given]
        for ours, theirs in zip(group.run(logits, each), wanted, strict=True):
            assert_near(ours, theirs, 0.06)


@named
def test_weights_are_quantized_once_and_ask_for_gradients_in_vain(group, qwen):
    bf16 = qwen.with_name("fp8-bf16")
    ids = prompts()[0]
    for came in group.run(experts_gradients_and_cache, [(bf16, ids)] * 2):
        assert not isinstance(came, str), came
        said, is_kept, is_new = came
        assert "FP8 weights and their scales have no gradient" in said
        assert is_kept
        assert is_new


@pytest.mark.skipif(has_ep_implementations(), reason="transformers 5.23 has no ep_router")
def test_ids_that_a_router_made_those_of_a_rank(group, qwen):
    bf16 = qwen.with_name("fp8-bf16")
    ids = prompts()[0]
    wanted = logits(bf16, ids, {"experts_implementation": "moefp8"})
    for ours in group.run(logits_of_5_10, [(rank, bf16, ids, "moefp8") for rank in range(2)]):
        assert_near(ours, wanted, 0.06)


# ---- FP8 checkpoints by from_pretrained ----


@named
def test_an_fp8_checkpoint(group, fp8):
    ids = prompts()[0]
    whole = load(fp8, is_fp8=True)
    with torch.no_grad():
        wanted = whole(ids).logits
    came = group.run(logits, [(fp8, ids, {"is_fp8": True, "distributed": shared(fp8)})] * 2)
    for ours in came:
        assert_near(ours, wanted, 0.06)
    assert torch.equal(*came)


@named
def test_a_rank_reads_its_own_experts_alone(group, fp8):
    came = group.run(read_by, [(fp8, {"distributed": shared(fp8)})] * 2)
    whole = sum(x.nbytes for name, x in named_experts(load(fp8, is_fp8=True)))
    for num_read, of_experts, others in came:
        assert of_experts == whole / 2
        # Scales of Qwen3 are stored in BF16 and held in FP32.
        assert 0.99 * (of_experts + others) < num_read <= of_experts + others


def named_experts(model):
    return [(name, x) for name, x in model.named_parameters() if ".experts." in name]


@named
def test_nobody_looks_at_scales_of_the_experts_of_others(group, qwen, tmp_path):
    """Expert 7 of 8 is the second rank's, which refuses its NaN."""
    (file,) = qwen.glob("*.safetensors")
    key = "model.layers.1.mlp.experts.7.up_proj.weight_scale_inv"
    tensors = load_file(file)
    tensors[key].fill_(torch.nan)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text((qwen / "config.json").read_text())
    first, second = group.run(read_by, [(tmp_path, {"distributed": shared(qwen)})] * 2)
    assert not isinstance(first, str), first
    assert f"{key} in" in second
    assert "NaN or infinite" in second


@named
@pytest.mark.parametrize(
    ("change", "rules"),
    [
        ({"tp_plan": None}, ["q_proj: 'colwise' in tp_size = 2", "cannot cut FP8 blocks"]),
        ({"tp_plan": None}, ["tp_plan={'model.layers.*.self_attn.q_proj': 'replicate'"]),
        ({"ep_implementation": "auto"}, ["must be 'moefp8', got 'auto'"]),
        (OWN | {"tp_size": 1}, ["FSDP over 2 ranks", "distributed.expert_parallel"]),
    ],
)
def test_what_would_cut_blocks_is_refused(group, qwen, change, rules):
    options = {"is_fp8": True, "distributed": {**shared(qwen), **change}}
    for message in group.run(logits, [(qwen, prompts()[0], options)] * 2):
        assert isinstance(message, str)
        assert all(rule in message for rule in rules), message


@named
def test_a_bf16_checkpoint_is_not_quantized_in_parts(group, qwen):
    options = {"is_fp8": True, "distributed": shared(qwen)}
    given = [(qwen.with_name("fp8-bf16"), prompts()[0], options)] * 2
    for message in group.run(logits, given):
        assert "quantize the files before" in message


@named
def test_a_part_is_not_saved_for_the_whole(group, qwen, tmp_path):
    for message in group.run(saved, [(qwen, tmp_path, {"distributed": shared(qwen)})] * 2):
        assert "hold one rank's part alone (model.layers.0.mlp.experts" in message
    assert not [*tmp_path.glob("*.safetensors")]


# ---- FP8 checkpoints by load_checkpoint: each rank has its own batch ----


def test_load_checkpoint_reads_a_ranks_experts(group, fp8):
    given = prompts()
    model, num_bytes = own_model(fp8)
    with torch.no_grad():
        wanted = [model(ids).logits for ids in given]
    held = sum(x.nbytes for _, x in named_experts(model))
    for (ours, num_read), theirs in zip(
        group.run(own_logits, [(fp8, ids) for ids in given]), wanted, strict=True
    ):
        assert_near(ours, theirs, 0.06)
        assert float(row_errors(ours.flatten(0, 1), theirs.flatten(0, 1)).median()) < 0.03
        assert num_bytes - num_read == pytest.approx(held / 2, rel=0.001)


@pytest.fixture(scope="module")
def single(fp8, tmp_path_factory):
    """The same with one expert a token, where all bits are those of one process."""
    directory = tmp_path_factory.mktemp("single")
    shutil.copytree(fp8, directory, dirs_exist_ok=True)
    given = {"num_experts_per_tok": 1}
    if "n_group" in json.loads((fp8 / "config.json").read_text()):
        given["topk_group"] = 1
    change_config(directory, **given)
    return directory


def test_ranks_generate_from_their_own_prompts(group, single):
    """One ends before the other, and goes on with the forward until that one has ended, too."""
    given = list(zip(prompts(), (3, 7), strict=True))
    wanted = [generated(single, ids, length) for ids, length in given]
    each = [(generated_synced, single, ids, length) for ids, length in given]
    came = group.run(_call, each)
    for ours, theirs in zip(came, wanted, strict=True):
        assert not isinstance(ours, str), ours
        assert torch.equal(ours, theirs)


def test_a_rank_that_has_ended_before_is_waited_for_in_vain(group, single):
    each = [(single, ids, length, 3) for ids, length in zip(prompts(), (3, 7), strict=True)]
    first, second = group.run(generated, each)
    assert torch.equal(first, generated(single, each[0][1], 3))
    assert "did not come within 3 s" in second


def generated_synced(path, ids, length):
    return generated(path, ids, length, synced_gpus=True)


def _call(function, *arguments):
    return function(*arguments)
