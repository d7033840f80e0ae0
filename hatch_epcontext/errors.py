"""What can go wrong, told as: where, what happened, what to do."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    ``where`` is a dotted key of ``pyproject.toml``, an environment variable, a file or a job;
    ``log`` is the end of what a worker printed, if that helps.
    """

    where: str
    what: str
    fix: str = ""
    log: str = ""

    def __str__(self) -> str:
        lines = [self.where, textwrap.indent(self.what, "    ")]
        if self.fix:
            lines.append(textwrap.indent(self.fix, "    "))
        if self.log:
            lines += ["    the end of the worker's log:", textwrap.indent(self.log, "    | ")]
        return "\n".join(lines)


class EpcontextError(Exception):
    """Base of all errors that the package raises on purpose; carries one or more problems."""

    exit_code = 1
    headline = "failed"

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        count = f" ({len(self.problems)} problems)" if len(self.problems) > 1 else ""
        return "\n".join([f"{self.headline}{count}:", *(str(problem) for problem in self.problems)])


class ConfigError(EpcontextError):
    """``[tool.epcontext]``, the hook's table or an environment variable is not right."""

    exit_code = 2
    headline = "the configuration is not right"


class RequirementError(EpcontextError):
    """This environment lacks what the selected targets are compiled with."""

    headline = "the environment is not right"


class MissingError(RequirementError):
    """Something is not installed, or too old."""


class BuildError(EpcontextError):
    """A model could not be compiled or did not pass its validation."""

    headline = "nothing is shipped, because not every model could be compiled and proven"


class ModelError(BuildError):
    """A model, or what its configuration says of it, is at fault: not ONNX Runtime and not the EP."""


class InspectionError(EpcontextError):
    """A file or folder is none that can be inspected, or not what it says of itself."""

    headline = "it is not right"


class OutputError(EpcontextError):
    """What was made cannot be put where it is wanted."""

    headline = "nothing is written"


class WheelError(EpcontextError):
    """The wheel would not hold, or does not hold, what the manifest says."""

    headline = "the wheel is not right"
