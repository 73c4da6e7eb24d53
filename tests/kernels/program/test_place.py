"""Buffers of a record share memory where no step has both, and nothing is read too early."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moefp8.kernels.gemm import segments
from moefp8.kernels.program import Place, Record, check_early, place
from tests.records import TARGET

KERNEL = segments.kernel_of()  # it reads `group_of_row` and writes `list`


def record(older=()):
    return Record(TARGET, ("x", "y"), older=frozenset(older))


def copy(r, source, to, *, early=(), programmatic=True):
    """A step that reads one place and writes another."""
    arguments = {"group_of_row": Place(source), "list": Place(to)}
    r.step(KERNEL, 1, 32, arguments, early=map(Place, early), programmatic=programmatic)


@st.composite
def records(draw):
    """Steps that each read what a step before wrote, or an input, and write a buffer as a whole.

    Also returns what each step reads and writes.
    """
    r, steps, written = record(), [], ["x"]
    names = [f"buffer{i}" for i in range(draw(st.integers(1, 6)))]
    for name in names:
        r.buffer(name, draw(st.integers(0, 3000)))
    for _ in range(draw(st.integers(1, 10))):
        source, to = draw(st.sampled_from(written)), draw(st.sampled_from(names))
        if source == to:
            continue
        is_old = steps and source not in ("x", steps[-1][1])
        early = (source,) if is_old and draw(st.booleans()) else ()
        copy(r, source, to, early=early)
        steps.append((source, to))
        written.append(to)
    return r, steps


@given(records())
def test_each_step_finds_what_was_written_for_it(made):
    r, steps = made
    offsets, num_bytes = place(r)
    memory = [None] * num_bytes
    written = {}
    for number, (source, to) in enumerate(steps):
        if source != "x":
            begin = offsets[source]
            room = memory[begin : begin + r.buffers[source]]
            assert room == [(source, written[source])] * r.buffers[source]
        begin, size = offsets[to], r.buffers[to]
        assert begin % 256 == 0
        assert begin + size <= num_bytes
        memory[begin : begin + size] = [(to, number)] * size
        written[to] = number


@given(records())
def test_what_is_touched_early_is_no_memory_of_the_step_before(made):
    r, steps = made
    offsets, _ = place(r)

    def room(name):
        return range(offsets[name], offsets[name] + r.buffers[name])

    for before, step, made_step in zip(steps, steps[1:], r.steps[1:], strict=False):
        for early in made_step.early:
            for other in {*before, *step} - {early, "x"}:
                first, second = room(early), room(other)
                apart = first.stop <= second.start or second.stop <= first.start
                assert apart or not (first and second)


@given(records())
def test_all_buffers_take_no_more_than_side_by_side_and_no_less_than_at_any_step(made):
    r, steps = made
    _, num_bytes = place(r)
    touched = {name for step in steps for name in step} - {"x"}
    assert num_bytes <= sum(-(-r.buffers[name] // 256) * 256 for name in touched)
    for source, to in steps:
        assert num_bytes >= sum(r.buffers[name] for name in {source, to} - {"x"})


def test_a_buffer_that_no_step_touches_takes_nothing():
    r = record()
    r.buffer("unused", 1 << 20)
    r.buffer("used", 100)
    copy(r, "x", "used")
    assert place(r) == ({"used": 0}, 100)


def test_two_buffers_share_memory_where_one_is_written_after_the_other_was_last_read():
    r = record()
    for name in ("first", "second", "third"):
        r.buffer(name, 1000)
    copy(r, "x", "first")
    copy(r, "first", "second")
    copy(r, "second", "third")
    offsets, num_bytes = place(r)
    assert offsets["third"] == offsets["first"] != offsets["second"]
    assert num_bytes == 2024


def test_what_is_read_early_lives_a_step_longer_than_what_is_not():
    sizes = []
    for early in ((), ("third",)):
        r = record()
        for name in ("first", "second", "third"):
            r.buffer(name, 1000)
        copy(r, "x", "first")
        copy(r, "first", "second")
        copy(r, "second", "third", early=early)
        sizes.append(place(r).num_bytes)
    assert sizes == [2024, 3048]


@pytest.mark.parametrize("early", ["first", "x"])
def test_what_the_step_before_does_not_write_may_be_read_early(early):
    r = record()
    for name in ("first", "second", "third"):
        r.buffer(name, 1000)
    copy(r, "x", "first")
    copy(r, "x", "second")
    copy(r, early, "third", early=(early,))
    check_early(r)


def test_what_the_step_before_writes_may_not_be_read_early():
    r = record()
    r.buffer("first", 1000)
    copy(r, "x", "first")
    copy(r, "first", "y", early=("first",))
    with pytest.raises(ValueError, match=r"must wait before it touches .* got first as early"):
        check_early(r)


def test_a_first_step_reads_early_only_what_is_older_or_after_all_that_came_before():
    for older, programmatic in ((("x",), True), ((), False)):
        r = record(older)
        copy(r, "x", "y", early=("x",), programmatic=programmatic)
        check_early(r)
    r = record(("y",))
    copy(r, "x", "y", early=("x",))
    with pytest.raises(ValueError, match="got x as early"):
        check_early(r)
