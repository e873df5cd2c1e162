"""``--stop-after SECONDS``: a run that ends in time on any machine, and says what it did not come to."""

from __future__ import annotations

import subprocess
import time
import zlib
from pathlib import Path

import pytest

NOT_BEGUN = "not begun: the time of --stop-after was over"


class StopAfter:
    """Skips the tests that would begin later than so many seconds after the start, and counts them. The run begins at another
    file for each commit, so that those at the end are not always the same."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        here = Path(__file__).parent
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, cwd=here, check=False).stdout
        files = list(dict.fromkeys(item.nodeid.partition("::")[0] for item in items))
        first = zlib.crc32(commit) % max(len(files), 1)
        place = {file: (i - first) % len(files) for i, file in enumerate(files)}
        items.sort(key=lambda item: place[item.nodeid.partition("::")[0]])

    @pytest.hookimpl(tryfirst=True)  # before fixtures are made
    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self._end:
            pytest.skip(NOT_BEGUN)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        skipped = terminalreporter.stats.get("skipped", [])
        if left := sum(NOT_BEGUN in str(report.longrepr) for report in skipped):
            terminalreporter.write_line(f"{left} tests were {NOT_BEGUN}", yellow=True)
