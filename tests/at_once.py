"""A plugin of pytest (-p tests.at_once): a failure's text when it fails; the end, where pytest has it, may not come."""

from __future__ import annotations

import pytest


class AtOnce:
    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if not report.failed:
            return
        text = report.longreprtext
        self.terminal.ensure_newline()
        self.terminal.write_sep("_", f"{report.nodeid}, {report.when}")
        self.terminal.write_line(text)
        self.terminal.flush()
        report.longrepr = f"{(text.strip().splitlines() or [''])[-1]} (above, where it failed)"


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(AtOnce(terminal), "at_once")
