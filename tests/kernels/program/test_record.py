"""A record refuses what no launch could be made of, and names become positions in a launch."""

import pytest
import torch

from moefp8.kernels.gemm import segments
from moefp8.kernels.program import (
    Codes,
    Place,
    Record,
    Tensor,
    Word,
    layouts,
    prepare_launch,
    prepare_launches,
)
from tests.kernels.program.test_place import copy, record
from tests.launches.gpu import recording
from tests.records import TARGET


def test_a_name_is_used_once():
    r = record()
    r.buffer("rows", 16)
    for name in ("rows", "x"):
        with pytest.raises(ValueError, match=f"each name must be used once, got '{name}' again"):
            r.buffer(name, 16)


def test_a_step_touches_inputs_and_buffers_alone():
    with pytest.raises(ValueError, match="touches 'rows', no input and no buffer"):
        copy(record(), "x", "rows")


def test_a_field_that_the_kernel_does_not_have_is_refused():
    r = record()
    arguments = {"group_of_row": Place("x"), "list": Place("y"), "num_cols": 3}
    with pytest.raises(ValueError, match="Arguments has no 'num_cols'"):
        r.step(segments.kernel_of(), 1, 32, arguments, programmatic=True)


def test_one_launch_is_of_one_step_without_buffers():
    r = record()
    r.buffer("rows", 16)
    copy(r, "x", "rows")
    with recording(), pytest.raises(ValueError, match="got 1 steps and 1 buffers"):
        prepare_launch(r, 0)


def test_addresses_go_where_their_names_are():
    r = Record(TARGET, ("unused", "x", "y"))
    rows = r.buffer("rows", 1000)
    found = r.buffer("found", 1000)
    for source, to in ((Place("x", 8), rows), (rows.after(16), found), (found, Place("y"))):
        arguments = {"group_of_row": source, "list": to, "num_rows": 5, "num_groups": 7}
        r.step(segments.kernel_of(), 1, 32, arguments, programmatic=True)
    with recording() as driver:
        prepare_launches(r, 0)(0, (1 << 20, 1 << 21, 1 << 22))
        (workspace,) = (driver.memory.owners.index(0),)
        at = driver.memory.allocate(0) - (1 << 36) * (len(driver.memory.owners) - 1 - workspace)
    words = [
        [int.from_bytes(x.arguments[0][i : i + 8], "little") for i in (0, 8)]
        for x in driver.library.launched
    ]
    assert words == [[(1 << 21) + 8, at], [at + 16, at + 1024], [at + 1024, 1 << 22]]
    assert {x.arguments[0][16:] for x in driver.library.launched} == {b"\5\0\0\0\7\0\0\0"}


def test_a_word_is_no_address_and_touches_nothing():
    r = Record(TARGET, ("x", "turn"))
    r.step(
        segments.kernel_of(),
        1,
        32,
        {"group_of_row": Word("turn"), "list": Place("x")},
        programmatic=True,
    )
    assert r.steps[0].touched == ("x",)
    with recording() as driver:
        prepare_launch(r, 0).on(0, (1 << 20, 77))
    assert driver.library.launched[0].arguments[0][:8] == (77).to_bytes(8, "little")


def test_layouts_are_those_of_tensors_with_how_their_addresses_are_aligned():
    memory = torch.empty(1 << 10, dtype=torch.uint8)
    aligned = memory[-memory.data_ptr() % 16 :]
    for offset, alignment in ((0, 16), (2, 2), (4, 4), (8, 8), (12, 4), (16, 16)):
        x = aligned[offset : offset + 240].view(torch.bfloat16).view(12, 10)
        made = Tensor.of(x, "x")
        assert made == Tensor((12, 10), (10, 1), torch.bfloat16, Place("x"), alignment)
        assert made.is_aligned == (alignment == 16)
        assert made.mT.strides == x.mT.stride()
        assert made.batched().shape == (1, 12, 10)
        assert made.batched().first() == made
    assert layouts(x=x, y=None) == {"x": made, "y": None}


def test_codes_have_their_scales_rows_innermost_at_multiples_of_16_bytes():
    r = record()
    data, scale_inv = r.codes("codes", (2, 7, 130))
    assert (data.strides, scale_inv.strides) == ((7 * 144, 144, 1), (16, 1, 8))
    assert scale_inv.shape == (2, 7, 2)
    assert r.buffers == {"codes": 2 * 7 * 144, "codes_scales": 2 * 2 * 8 * 4}
    assert Codes(data, scale_inv).first().data.shape == (7, 130)
