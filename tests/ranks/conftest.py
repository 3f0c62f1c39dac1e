"""The ranks that all tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks.pool import LAST_S, Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    ranks = Pool(8)
    yield ranks
    ranks.close(LAST_S)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Of the whole matrix, by codec: the cells, and the error that comes nearest to what is allowed."""
    if terminalreporter.config.getoption("--matrix") != "full":
        return
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    told = [value for report in reports for name, value in report.user_properties if name == "cell"]
    terminalreporter.section("matrix")
    # NVLink moves bfloat16: its own roundings are allowed beside the codec's.
    rows = dict.fromkeys((codec, transport == "nvlink") for codec, transport, *_ in told)
    for codec, over_nvlink in rows:
        cells = [cell for cell in told if (cell[0], cell[1] == "nvlink") == (codec, over_nvlink)]
        _, transport, error, allowed = max(cells, key=lambda cell: cell[2] / cell[3])
        worst = f"{error:.1e} of {allowed:.1e} ({transport})"
        terminalreporter.line(f"{codec:16}{len(cells):5} cells, largest error {worst}")
    terminalreporter.line(f"{len(told)} cells")
