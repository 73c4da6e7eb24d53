"""What is built once, and what forks wait for: see also tests/kernels/jit/test_forks.py."""

import threading
import time

import pytest

from moefp8.system.threads import ForksWait, Once

PATIENCE_S = 300  # only what hangs takes as long, however busy the machine is


def test_a_failed_build_is_tried_again():
    once: Once[str, int] = Once()
    with pytest.raises(ZeroDivisionError):
        once.get("key", lambda: 1 // 0)
    assert once.get("key", lambda: 1) == 1


def test_forks_wait_for_those_within_and_nobody_enters_meanwhile():
    order = []
    forks_wait = ForksWait()
    within, end, late_has_begun = threading.Event(), threading.Event(), threading.Event()

    def first():
        with forks_wait:
            within.set()
            end.wait(PATIENCE_S)
            order.append("first")

    def fork():
        forks_wait._empty()
        order.append("fork")
        late_has_begun.wait(PATIENCE_S)
        time.sleep(0.05)
        forks_wait._door.release()

    def late():
        late_has_begun.set()
        with forks_wait:
            order.append("late")

    threads = [threading.Thread(target=target) for target in (first, fork, late)]
    threads[0].start()
    within.wait(PATIENCE_S)
    threads[1].start()
    while not forks_wait._door.locked():
        time.sleep(0.001)
    threads[2].start()
    end.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert order == ["first", "fork", "late"]
