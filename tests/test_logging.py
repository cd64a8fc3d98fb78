"""What is logged: its level, where it goes, and who decides."""

import logging
import os
import subprocess
import sys

import pytest

from bilens.progress import logger, progress_bar

SAY = "from bilens.progress import logger; logger.info('a line'); logger.warning('a warning')"
CONFIGURED = f"import logging; logging.basicConfig(format='mine %(message)s'); {SAY}"


def said(code, **settings):
    """Return what a new process writes to standard error."""
    command, env = [sys.executable, "-c", code], {**os.environ, **settings}
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    return run.stderr


@pytest.mark.parametrize(
    ("code", "settings", "expected"),
    [
        (SAY, {}, "a line\na warning\n"),
        (SAY, {"BILENS_VERBOSITY": "warning"}, "a warning\n"),
        (SAY, {"BILENS_VERBOSITY": "error"}, ""),
        (SAY, {"RANK": "1"}, ""),
        # Once, by the program's own handler.
        (CONFIGURED, {}, "mine a line\nmine a warning\n"),
    ],
)
def test_the_level_is_that_of_the_environment(code, settings, expected):
    assert said(code, **settings) == expected


def test_an_unknown_level_is_refused():
    expected = "BILENS_VERBOSITY=loud, expected one of debug, info, warning, error, critical\n"
    assert said(SAY, BILENS_VERBOSITY="loud").endswith(expected)


def test_a_server_can_hide_lines_of_long_work(caplog, monkeypatch):
    monkeypatch.setattr("bilens.progress.PACE", 0.0)
    for level, count in ((logging.INFO, 1), (logging.WARNING, 0)):
        caplog.set_level(level, logger.name)
        caplog.clear()
        with progress_bar() as bar:
            task = bar.add_task("texts", total=4, note="")
            bar.advance(task)
        assert len(caplog.messages) == count
        assert all(text.startswith("texts: 1 of 4") for text in caplog.messages)
