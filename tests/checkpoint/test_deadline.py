import time

import pytest

from tests.checkpoint.deadline import within


def work() -> None:
    while True:
        pass


def test_work_counts_and_waiting_does_not():
    with within(0.05):
        time.sleep(0.2)  # as where a machine is busy with other work
    with pytest.raises(TimeoutError, match=r"took 0\.05 s of CPU time"), within(0.05):
        work()
