"""Fixtures of all rooms, and what a run says of its host: what it found at the start, and skipped at the end."""

from collections import Counter, defaultdict
from pathlib import Path

import jaxtyping
import pytest

from tests import cpu_kernels
from tests.format_rows import format_rows  # noqa: F401

MARGIN = "margin"


FUNCTIONAL = Path(__file__).parents[1] / "lit_qrl" / "functional"


def pytest_configure(config):
    # shapes are checked at every call; Triton reads the source of its kernels, which must stay undecorated
    checked = [f"lit_qrl.functional.{file.stem}" for file in FUNCTIONAL.glob("*.py") if "triton" not in file.stem]
    jaxtyping.install_import_hook(checked, "beartype.beartype")
    try:
        cpu_kernels.limit()
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_report_header(config):
    return cpu_kernels.described()


@pytest.fixture
def quick_plots():
    """Leave the plots of reports out."""
    from tests.tiny_run import without_plots

    with without_plots():
        yield


@pytest.fixture
def margin(record_property):
    """Show a figure in the summary, on the line of its group: `margin(group, figure)`."""
    return lambda group, figure: record_property(MARGIN, (group, figure))


def pytest_terminal_summary(terminalreporter, config):
    reports = [report for report in terminalreporter.stats.get("", []) if report.when == "teardown"]
    figures = defaultdict(list)
    for report in reports:
        for key, value in getattr(report, "user_properties", ()):
            if key == MARGIN:
                figures[value[0]].append(value[1])
    if figures:
        terminalreporter.section("margins")
    for group, values in figures.items():
        terminalreporter.write_line(f"{group}: {', '.join(values)}")
    skipped = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    absent = Counter(reason.partition(cpu_kernels.ABSENT)[2] for reason in skipped if cpu_kernels.ABSENT in reason)
    if absent or "not vllm" not in config.option.markexpr:
        terminalreporter.write_line(f"{sum(absent.values())} tests skipped for want of a kernel on this host")
    for reason, count in absent.most_common():
        terminalreporter.write_line(f"  {count}: {reason}")
