"""Calls back to back: turns, ratios, clock and power, with a clock and calls of the test's own."""

import random
import time
from itertools import chain, cycle, repeat

import pytest
import torch

from benchmarks import session, without_rest
from benchmarks.figures import PAUSES, WITHOUT_REST, of_peer, ratio, tflops, told_mode, told_ratio
from benchmarks.peers import DEEP_GEMM, OURS, Peer
from benchmarks.sensors import Reading, Sensors
from benchmarks.session import Rest
from benchmarks.without_rest import LEAST_BYTES, Loop, Turn, num_copies, turn_of, turns_of
from tests.benchmarks.cases import failing


class Device:
    """Work that was launched, and a clock that runs while one waits for it."""

    def __init__(self) -> None:
        self.launched_ms = self.now_ms = 0.0

    def work(self, us: float) -> None:
        assert self.launched_ms - self.now_ms < 1000, "the host is far ahead"
        self.launched_ms += us / 1e3

    def mark(self) -> "Mark":
        return Mark(self, self.launched_ms)


class Mark:
    def __init__(self, device: Device, ms: float) -> None:
        self.device, self.ms = device, ms

    def synchronize(self) -> None:
        self.device.now_ms = max(self.device.now_ms, self.ms)

    def elapsed_time(self, later: "Mark") -> float:
        assert self.device.now_ms >= later.ms, "nobody waited"
        return later.ms - self.ms


def test_a_turn_is_as_long_as_asked_and_has_no_gap():
    device, waiting = Device(), []

    def run() -> None:
        waiting.append(device.launched_ms - device.now_ms)
        device.work(2000.0)

    turn = turn_of(Loop(run, 20), seconds=0.3, mark=device.mark)
    assert turn.us == pytest.approx(100.0)
    assert 300.0 <= device.now_ms < 310.0
    assert min(waiting[1:]) > 0  # work is queued whenever more is launched
    assert turn.started <= turn.ended


def test_a_turn_leaves_out_how_it_begins():
    """Calls are twice as fast until the clock has followed the load."""
    device, us = Device(), chain(repeat(1000.0, 30), repeat(2000.0))
    turn = turn_of(Loop(lambda: device.work(next(us)), 1), seconds=0.1, mark=device.mark)
    assert turn.us == pytest.approx(2000.0)


def test_everyone_has_one_turn_in_every_round_in_random_order():
    taken = []

    def take_turn(loop: Loop, seconds: float) -> Turn:
        taken.append((loop.num_calls, seconds))
        return Turn(10.0 * loop.num_calls, 0.0, 0.0)

    loops = {name: Loop(lambda: None, i) for i, name in enumerate("abcd", 1)}
    turns = turns_of(loops, rounds=6, seconds=0.3, take_turn=take_turn)
    warm_up, timed = taken[:4], taken[4:]
    assert sum(seconds for _, seconds in warm_up) == pytest.approx(3.0)
    assert {seconds for _, seconds in timed} == {0.3}
    orders = [tuple(i for i, _ in timed[at : at + 4]) for at in range(0, 24, 4)]
    assert all(sorted(order) == [1, 2, 3, 4] for order in orders)
    assert len(set(orders)) > 1
    assert {name: [turn.us for turn in of] for name, of in turns.items()} == {
        name: [10.0 * i] * 6 for i, name in enumerate("abcd", 1)
    }


def timed(us: dict[str, list[float]], sensors: Sensors | None = None) -> dict:
    """Figures of calls that take so long in one round after the other, in turns of 20 ms."""
    times = {name: iter([0.0, *each]) for name, each in us.items()}
    loops = {name: Loop(lambda: None, i) for i, name in enumerate(us)}

    def take_turn(loop: Loop, seconds: float) -> Turn:
        started = time.perf_counter()
        while sensors and not sensors.between(started, time.perf_counter()):
            time.sleep(0.001)  # the turn ends when the clock was read
        return Turn(next(times[list(us)[loop.num_calls]]), started, time.perf_counter())

    rounds = len(us[OURS])
    return without_rest.without_rest(
        loops, OURS, rounds, 0.3, take_turn=take_turn, sensors=sensors or Sensors(no_reading)
    )


def no_reading() -> Reading:
    raise OSError("no driver")


def test_ratios_are_of_the_same_round():
    """Both slow down together: the ratio stays, though the times spread."""
    found = timed({OURS: [100.0, 110.0, 200.0], "other": [120.0, 121.0, 260.0]})
    assert found[OURS] == {"us": 110.0}
    assert found["other"] == {"us": 121.0, "ratio": 1.2, "least": 1.1, "most": 1.3}


def test_clock_and_power_are_those_of_the_turn():
    readings = cycle([Reading(1400.0, 700.0), Reading(1600.0, 600.0)])
    found = timed({OURS: [100.0] * 3, "other": [100.0] * 3}, Sensors(lambda: next(readings)))
    for each in found.values():
        assert 1400 <= each["mhz"] <= 1600
        assert 600 <= each["watts"] <= 700


def test_without_readings_there_are_no_figures():
    with Sensors(no_reading) as sensors:
        time.sleep(0.03)
    assert sensors.between(0.0, time.perf_counter()) == {}
    assert "mhz" not in timed({OURS: [100.0]})[OURS]


def test_copies_fill_what_no_cache_holds():
    assert num_copies(LEAST_BYTES) == 1
    assert num_copies(10 * LEAST_BYTES) == 1
    for num_bytes in (random.Random(0).randrange(1 << 20, LEAST_BYTES) for _ in range(20)):
        assert LEAST_BYTES <= num_copies(num_bytes) * num_bytes < LEAST_BYTES + num_bytes


@pytest.fixture
def capture_runs(monkeypatch) -> None:
    monkeypatch.setattr(without_rest, "captured", lambda call: (call(), call)[1])


@pytest.mark.usefixtures("capture_runs")
def test_a_loop_rotates_over_operands_and_keeps_results():
    ran, alive = [], []

    def call_of(i: int):
        def call() -> torch.Tensor:
            ran.append(i)
            alive.append(torch.empty(1000))
            return alive[-1]

        return call

    loop = Loop.over([call_of(0), call_of(1), call_of(2)], us=150.0)
    assert loop.num_calls == len(ran) == 15  # two milliseconds and a little
    assert ran == [0, 1, 2] * 5
    assert len({result.data_ptr() for result in alive}) == 15
    loop.run()
    assert len(ran) == 30


def test_what_cannot_be_captured_is_called(monkeypatch, capsys):
    monkeypatch.setattr(without_rest, "captured", failing(RuntimeError("no graph")))
    ran = []
    loop = Loop.over([lambda: ran.append(0)], us=1000.0)
    loop.run()
    assert loop.num_calls == len(ran) == 2
    assert "no graph" in capsys.readouterr().out


def test_what_is_not_to_be_captured_is_called(monkeypatch):
    monkeypatch.setattr(without_rest, "captured", failing(AssertionError("it was captured")))
    assert Loop.over([lambda: 0], us=1000.0, captures=False).num_calls == 2


@pytest.mark.usefixtures("capture_runs")
def test_every_copy_is_prepared_and_short_calls_are_not_timed(monkeypatch, capsys):
    given = {}

    def times(loops: dict, ours: str, rounds: int, seconds: float) -> dict:
        given.update(loops=loops, ours=ours, rounds=rounds, seconds=seconds)
        return {name: {"us": 60.0} for name in loops}

    monkeypatch.setattr(session, "without_rest", times)
    prepared: dict[str, list[int]] = {OURS: [], "other": []}
    peers = {
        name: Peer(name, "", prepare=lambda x, n=name: prepared[n].append(x) or (lambda: x))
        for name in prepared
    }
    peers["broken"] = Peer("Broken", "", prepare=failing(RuntimeError("no memory")))
    found = {name: {"us": 50.0} for name in peers}
    rest, calls = Rest(rounds=7, seconds=0.2), dict.fromkeys(peers, lambda: 0)
    assert rest.wants(found)
    rest.add_times(found, peers, calls, copies=[1, 2])
    assert prepared == {OURS: [1, 2], "other": [1, 2]}
    assert (given["ours"], given["rounds"], given["seconds"]) == (OURS, 7, 0.2)
    assert {loop.num_calls for loop in given["loops"].values()} == {42}
    assert found[OURS]["without_rest"] == found["other"]["without_rest"] == {"us": 60.0}
    assert "without_rest" not in found["broken"]
    told = capsys.readouterr().out
    assert told == "Broken is not timed without rest: RuntimeError: no memory\n"
    assert not Rest(rounds=0).wants(found)
    assert not rest.wants({OURS: {"us": 49.0}})


def test_which_mode_is_told():
    row = {
        "peers": {
            OURS: {"us": 100.0, "tflops": 1200.0, "without_rest": {"us": 120.0}},
            DEEP_GEMM: {"us": 105.0, "without_rest": {"us": 132.0, "ratio": 1.11}},
            "refused": {"refused": "it does"},
        }
    }
    assert told_mode(row) == WITHOUT_REST
    assert told_ratio(row, (DEEP_GEMM,)) == 1.11
    assert ratio(row, (DEEP_GEMM,), PAUSES) == pytest.approx(1.05)
    assert ratio(row, (OURS,), WITHOUT_REST, of=DEEP_GEMM) is None
    assert tflops(row, OURS, WITHOUT_REST) == pytest.approx(1000.0)
    assert told_ratio(row, ("refused",)) is None
    assert of_peer(row, "missing", WITHOUT_REST) == {}
    row["peers"][OURS]["us"] = 99.0
    assert told_mode(row) == PAUSES
    row["peers"][OURS] = {"us": 500.0}
    assert told_mode(row) == PAUSES
