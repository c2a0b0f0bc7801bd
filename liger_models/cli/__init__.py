"""The command line: `liger-models {export,verify,env,families,bench}`."""

from liger_models.cli.commands import app, main

__all__ = ["app", "main"]
