"""Measured configurations are kept, read back, and taken by the launchers; without a GPU."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moefp8.functional.experts import experts
from moefp8.functional.linear import fp8_linear
from moefp8.kernels.common.activation import SWIGLU
from moefp8.kernels.gemm.interface import GroupLayout
from moefp8.kernels.gemm.sizes import Sizes
from moefp8.kernels.gemm.sm90 import heuristic, tuned
from moefp8.kernels.gemm.sm90.config import GemmConfig
from moefp8.kernels.gemm.sm90.expert_configs import experts_configs
from moefp8.kernels.gemm.sm90.gemms import Sm90
from moefp8.kernels.gemm.sm90.tuned import ConfigSource, Dense, Experts, Table
from moefp8.kernels.gemm.sms import set_num_sms
from moefp8.kernels.program import Record, Span, Target
from moefp8.kernels.targets import target_with
from moefp8.quant.quantize import quantize_128x128
from moefp8.tuning import tune as tuning
from moefp8.tuning.keep import keep, to_json
from tests.gpu import ARCH, NUM_SMS
from tests.kernels.gemm.cases import filled

LINEAR, EXPERTS, RANK = Dense(512, 1024), Experts(4, 2, 256, 128), Experts(4, 2, 256, 128, 16)
FLAT, WIDE = filled(64, 128, num_product_buffers=2), filled(128, 256, parts=2)
PAIR = filled(192, 128, grouped=True, gate_up=True), filled(192, 128, grouped=True)
FOUND = {
    LINEAR: {8: None, 64: FLAT, 72: None, 128: WIDE, 192: FLAT},
    EXPERTS: {1: None, 16: PAIR, 32: PAIR, 64: None},
    RANK: {64: PAIR, 128: PAIR},
}


@pytest.fixture
def hopper(monkeypatch):
    """An H200, as far as the file's name asks."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(name="NVIDIA H200", multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


@pytest.fixture
def table(own_cache, monkeypatch):
    """A table that is kept in a cache folder of this test, and forgotten in memory."""
    tuned.measured.cache_clear()
    keep(0, FOUND)
    yield
    tuned.measured.cache_clear()


@pytest.mark.usefixtures("table")
def test_what_is_kept_is_found():
    assert tuned.measured(0).configs == FOUND
    other = {Dense(8, 8): {8: None}}
    keep(0, other)
    assert tuned.measured(0).configs == FOUND | other
    assert keep(0, {LINEAR: {8: FLAT}}).endswith(tuned.file_name(0))
    assert tuned.measured(0).configs[LINEAR] == {8: FLAT}


def test_a_choice_holds_where_it_was_measured_and_between_two_that_agree():
    table = Table(FOUND)
    of_experts = {n: table.look_up(EXPERTS, n) for n in (1, 2, 15, 16, 20, 31, 32, 33, 64, 1000)}
    assert {n for n, config in of_experts.items() if config == PAIR} == {16, 20, 31, 32}
    assert {config for n, config in of_experts.items() if config != PAIR} == {None}
    assert table.look_up(Dense(1, 1), 8) is None


def test_choices_are_the_tables_or_the_heuristic_s():
    configs = ConfigSource(NUM_SMS, NUM_SMS, Table(FOUND))
    without = ConfigSource(NUM_SMS, NUM_SMS)
    assert configs.dense(60, *LINEAR) == configs.dense(64, *LINEAR) == FLAT
    assert configs.dense(160, *LINEAR) == FLAT
    for m in (1, 8, 70, 1000):
        assert configs.dense(m, *LINEAR) == without.dense(m, *LINEAR)
        assert without.dense(m, *LINEAR) == heuristic.choose_config(m, *LINEAR, NUM_SMS)
    sizes = Sizes(20, 2, 4, 256, 128, masked=False)
    assert experts_configs(configs, sizes) == PAIR
    assert experts_configs(without, sizes) != PAIR
    assert experts_configs(configs, sizes._replace(masked=True)) != PAIR
    rank = sizes._replace(num_global_experts=16)  # what was measured of the whole says nothing
    assert experts_configs(configs, rank) == experts_configs(without, rank) != PAIR
    assert experts_configs(configs, rank._replace(num_tokens=100)) == PAIR
    assert experts_configs(configs, sizes._replace(num_tokens=100)) != PAIR


@pytest.mark.usefixtures("own_cache")
def test_a_file_from_before_there_were_ranks_is_read():
    told = to_json(Table({EXPERTS: FOUND[EXPERTS]}))
    del told[0]["num_global_experts"]
    assert tuned._table_from(told).configs == {EXPERTS: FOUND[EXPERTS]}


@pytest.mark.usefixtures("table")
def test_launchers_take_them(gpu, monkeypatch):
    monkeypatch.setattr(gpu.library, "cuLaunchKernelEx", lambda *_: 0)
    weight, scales = quantize_128x128(torch.randn(*LINEAR), False)

    def kernels(layer: Experts = EXPERTS, tokens: int = 20) -> list[str]:
        gpu.kernels.clear()
        gpu.prepared().clear()
        fp8_linear(torch.zeros(60, LINEAR.k).bfloat16(), weight, scales, None)
        e, k, h, i, num_global = layer
        gate_up = torch.zeros(e, 2 * i, h).to(torch.float8_e4m3fn), torch.zeros(e, 2, 2)
        down = torch.zeros(e, h, i).to(torch.float8_e4m3fn), torch.zeros(e, 2, 1)
        ids = torch.zeros(tokens, k, dtype=torch.int64)
        x, weights = torch.zeros(tokens, h).bfloat16(), (*gate_up, *down)
        experts(x, ids, torch.ones(tokens, k), *weights, SWIGLU, False, 0, num_global)
        return [kernel.name for kernel in gpu.kernels if kernel.name.startswith("gemm")]

    expected = [FLAT.kernel_name("kNone")]
    expected += [config.kernel_name("kNone", GroupLayout.OFFSETS) for config in PAIR]
    assert kernels() == kernels(RANK, 100) == kernels(Experts(*EXPERTS[:-1], 4)) == expected
    assert not set(kernels(RANK)) & set(expected[1:])
    try:
        set_num_sms(100)  # measured with all of them
        assert not set(kernels()) & set(expected)
    finally:
        set_num_sms(None)


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-20],
        lambda data: data.partition(b"\n")[2],
        lambda data: data.replace(b'"wgmma_m": 64', b'"wgmma_m": 65'),
        lambda data: b"[" * 5000 + b"]" * 5000,
        lambda data: bytes(range(256)),
    ],
)
def test_a_file_that_says_something_else_is_not_used(tmp_path, damage):
    path = tmp_path / "cache" / tuned.file_name(0)
    damaged = damage(path.read_bytes())
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    tuned.measured.cache_clear()
    told = "cannot be used .*so the heuristic chooses; `python -m moefp8 bench"
    with pytest.warns(UserWarning, match=told) as warned:
        assert tuned.measured(0).configs == {}
    assert len(str(warned[0].message)) < 1000
    keep(0, FOUND)
    assert tuned.measured(0).configs == FOUND


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("put", "told"),
    [
        (os.mkfifo, "no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), "symbolic links"),
        (lambda path: path.mkdir(), "directory"),
        (lambda path: [path.touch(), os.truncate(path, 1 << 40)], "1,099,511,627,776 bytes"),
    ],
)
def test_what_is_no_file_of_ours_is_not_read(tmp_path, put, told):
    path = tmp_path / "cache" / tuned.file_name(0)
    path.unlink()
    put(path)
    tuned.measured.cache_clear()
    with pytest.warns(UserWarning, match=f"cannot be used .*{told}.*so the heuristic chooses"):
        assert tuned.measured(0).configs == {}


@pytest.mark.usefixtures("own_cache")
def test_without_a_file_the_heuristic_chooses():
    tuned.measured.cache_clear()
    assert tuned.measured(0).configs == {}


@pytest.mark.usefixtures("hopper")
def test_another_kernel_source_has_another_file(monkeypatch):
    name = tuned.file_name(0)
    assert name.startswith("tuned-nvidia-h200-132-")
    monkeypatch.setattr(tuned, "source_digest", lambda source: "other")
    other = tuned.file_name(0)
    monkeypatch.setattr(tuned, "source_digest", lambda source: "another")
    assert len({name, other, tuned.file_name(0)}) == 3


@pytest.mark.usefixtures("hopper")
def test_a_comment_leaves_the_file_its_name(monkeypatch, tmp_path):
    (tmp_path / "inner.cuh").write_text("constexpr int kX = 1;\n")
    source = tmp_path / "gemm.cu"
    monkeypatch.setattr(tuned, "SOURCE", source)
    names = []
    for text in (
        '#include "inner.cuh"\nint y = f(kX, "//");\n',
        '// New.\n#include "inner.cuh"\n\nint y =   f(kX, // x\n "//"); /* y\n */',
        '#include "inner.cuh"\nint y = f(kX, "// new");\n',
    ):
        source.write_text(text)
        names.append(tuned.file_name(0))
    (tmp_path / "inner.cuh").write_text("constexpr int kX = 2;\n")
    names.append(tuned.file_name(0))
    assert names[0] == names[1]
    assert len(set(names)) == 3


FORMER_NAMES = [
    "tuned-nvidia-h200-132-d3d8678c1c8b.txt",  # before activations other than SwiGLU
    "tuned-nvidia-h200-132-2e75b2e110fd.txt",  # while comments counted
]
FORMER_NAME = FORMER_NAMES[0]


@pytest.mark.usefixtures("own_cache", "hopper")
@pytest.mark.parametrize("name", FORMER_NAMES)
def test_a_table_of_a_former_name_is_adopted(name):
    """Where a kernel has changed, tables of before say nothing: delete this, and the digests.

    Where its text has changed and its machine code has not, `_DIGEST` becomes the new digest.
    """
    path = Path(keep(0, FOUND))
    former = path.rename(path.with_name(name))
    assert former != path
    assert tuned.stored(0).configs == FOUND
    former.unlink()
    assert tuned.stored(0).configs == FOUND


@pytest.mark.usefixtures("own_cache", "hopper")
def test_a_table_is_not_adopted_by_other_kernels(monkeypatch):
    path = Path(keep(0, FOUND))
    path.rename(path.with_name(FORMER_NAME))
    monkeypatch.setattr(tuned, "source_digest", lambda source: "other")
    assert tuned.stored(0).configs == {}


@pytest.mark.usefixtures("own_cache", "hopper")
def test_a_newer_table_wins_over_the_former():
    path = Path(keep(0, FOUND))
    former = path.rename(path.with_name(FORMER_NAME))
    keep(0, {LINEAR: {8: FLAT}})
    assert tuned.stored(0).configs == {**FOUND, LINEAR: {8: FLAT}}
    assert former.exists()


# Measuring


def test_tokens_are_powers_of_two_and_half_way_between_them():
    assert tuning.tokens_to_tune(200) == [1, 2, 4, 8, 16, 32, 64, 96, 128, 192]
    assert tuning.tokens_to_tune(1) == [1]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ({"a": 10, "b": 9, "c": 11}, {"a": 10, "b": 9.5}, (10, 9.5, "b")),
        ({"a": 10, "b": 9, "c": 11}, {"a": 10, "b": 9.95}, (10, 10, None)),  # once is no proof
        ({"a": 10, "b": 9.95, "c": 11}, {}, (10, 10, None)),
        ({"a": 10, "b": 12, "c": 11}, {}, (10, 10, None)),
    ],
)
def test_what_is_faster_must_be_so_twice(monkeypatch, first, second, expected):
    rounds = iter((first, second))

    def us_in_turns(calls, repeats):
        us = next(rounds)
        assert set(us) == set(calls)
        return us

    monkeypatch.setattr(tuning, "us_in_turns", us_in_turns)
    assert tuning._faster(dict.fromkeys("abc", lambda: None), "a") == expected


def test_what_is_compared_begins_with_the_heuristic_s_choice():
    base = ConfigSource(NUM_SMS, NUM_SMS)
    for m in (1, 64, 512, 4096):
        first, *rest = tuning._dense_configs(m, 4096, 7168, base)
        assert first == base.dense(m, 4096, 7168)
        assert 1 <= len(rest) <= 12
        assert first not in rest
    for tokens in (1, 32, 1024, 8192):
        sizes = Sizes(tokens, 8, 128, 2048, 768, masked=False)
        both = tuning._experts_configs(sizes, base)
        assert (both[0][0], both[1][0]) == experts_configs(base, sizes)
        for configs, gate_up in zip(both, (True, False), strict=True):
            assert len(set(configs)) == len(configs) >= 2
            assert all(c.grouped and c.gate_up == gate_up and c.stages >= 2 for c in configs)


# What `precompile` asks: all choices, without asking for each number of tokens

LAYERS = [(4, 2, 256, 128), (256, 8, 7168, 2048), (128, 8, 2048, 768), (8, 8, 64, 64), (1, 1, 9, 9)]
RANKS = [
    (32, 8, 7168, 2048, 256),
    (1, 8, 7168, 2048, 256),
    (21, 8, 2048, 768, 128),
    (1, 3, 9, 9, 4),
]


@pytest.mark.parametrize("num_sms", [1, 78, 132])
@pytest.mark.parametrize("layer", [*LAYERS, *RANKS, (64, 1, 4096, 16384), (3, 5, 8192, 8192)])
@pytest.mark.parametrize("most", [1, 7, 33, 70, 6000])
def test_all_choices_of_experts_are_listed(num_sms, layer, most):
    experts = Experts(*layer)
    measured = {1: None, 16: PAIR, 32: PAIR, 64: None, 2000: PAIR}
    table = Table({experts: measured}) if num_sms == 132 else Table()
    configs = ConfigSource(num_sms, num_sms, table)
    for masked in (True, False):
        num_experts, top_k, h, i, num_global = experts
        sizes = Sizes(most, top_k, num_experts, h, i, masked, num_global)
        each = {experts_configs(configs, sizes._replace(num_tokens=n)) for n in range(1, most + 1)}
        chosen, span, target = set(), Span(1, most), Target(ARCH, num_sms, Sm90(configs))
        while span.first <= most:
            r = Record(target, (), span=span)
            some = sizes._replace(num_tokens=span.first)
            chosen.add(target.gemms.experts(r, some, saves=False))
            span = Span(span.last + 1, most)
        assert chosen == each


@pytest.mark.parametrize("num_sms", [1, 132])
@pytest.mark.parametrize(("h", "i"), [(9, 9), (7168, 2048), (16384, 53248)])
@pytest.mark.parametrize("most", [1, 200, 20000])
def test_all_choices_of_shared_experts_are_listed(num_sms, h, i, most):
    target = target_with(ARCH, num_sms)

    def choice(span: Span | None, tokens: int) -> GemmConfig:
        return target.gemms.shared_gate_up(Record(target, (), span=span), tokens, h, i, saves=False)

    each = {choice(None, tokens) for tokens in range(1, most + 1)}
    chosen, span = set(), Span(1, most)
    while span.first <= most:
        chosen.add(choice(span, span.first))
        span = Span(span.last + 1, most)
    assert chosen == each
