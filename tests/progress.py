"""What a run with many workers prints: how many there are, how far they are, and what failed."""

import time
from collections.abc import Generator

import pytest
import torch

from tests.workers import Machine


class Progress:
    """A line for every twentieth of the tests, in place of a dot for each test."""

    def __init__(self, session: pytest.Session) -> None:
        self.session, self.num_done, self.begin = session, 0, time.monotonic()
        self.reporter = session.config.pluginmanager.getplugin("terminalreporter")
        workers, threads = session.config.option.numprocesses, torch.get_num_threads()
        each = "1 thread" if threads == 1 else f"{threads} threads"
        self.reporter.write_line(f"{workers} workers of {each}, on {Machine.at_hand()}")

    @pytest.hookimpl(wrapper=True)
    def pytest_report_teststatus(self) -> Generator[None, tuple, tuple]:
        category, _, word = yield
        return category, "", word

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.reporter.write_line(f"FAILED {report.nodeid}")
        if report.when != "teardown":
            return
        before, num_all = self.num_done, self.session.testscollected
        self.num_done += 1
        if self.num_done * 20 // num_all > before * 20 // num_all:
            minutes, seconds = divmod(int(time.monotonic() - self.begin), 60)
            percent = self.num_done * 100 // num_all
            self.reporter.write_line(f"{percent:3} % of {num_all} after {minutes}:{seconds:02}")
