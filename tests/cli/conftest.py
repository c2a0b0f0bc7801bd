"""The command line in this process, and checkpoints for it."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from liger_models.cli import app


@pytest.fixture
def command():
    """Run a command line; an exception that the command does not turn into a message fails the test."""

    def run(*arguments: object) -> Result:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return run


@pytest.fixture
def succeeds(command):
    """Run a command line that has to succeed; its stdout."""

    def run(*arguments: object) -> str:
        result = command(*arguments)
        assert result.exit_code == 0, result.output
        return result.stdout

    return run


@pytest.fixture
def refuses(command):
    """Run a command line that has to be refused; its message."""

    def run(*arguments: object) -> str:
        result = command(*arguments)
        assert result.exit_code == 1, result.output
        assert result.stdout == ""
        assert result.stderr.count("error: ") == 1 and "Traceback" not in result.stderr
        return result.stderr.partition("error: ")[2]

    return run


@pytest.fixture
def copied(tmp_path):
    """A copy of a checkpoint, for a test to change."""

    def copy(folder: Path, name: str = "in") -> Path:
        return Path(shutil.copytree(folder, tmp_path / name))

    return copy
