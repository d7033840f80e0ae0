"""Errors as data: every problem has a kind, a location, a message and a hint.

The stable id of its `Kind` is printed with each problem, and documented in ``docs/errors.md``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import field, replace
from enum import Enum
from typing import Any, Literal, TypeVar

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.text import dotted, hide_credentials, printable, to_toml

T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound="EpcontextError")

ROOT = "tool.epcontext"
"""The table of ``pyproject.toml`` that holds the configuration."""

HOOK = "tool.hatch.build.hooks.epcontext"
"""Hatch's own table for the hook, which switches it on for wheels and sdists."""


Step = Literal["prepare", "change", "compile", "validate"]
"""What a job does with a recipe, in order."""

STEP_NAMES: Mapping[Step, str] = {
    "prepare": "preparation",
    "change": "preparation",
    "compile": "",
    "validate": "validation",
}
"""What messages call the steps of a job; nothing where it is compiled."""


class Kind(Enum):
    """The kinds of problems, by their ids. `docs/errors.md` explains each; an id is never used again."""

    UNKNOWN_KEY = "EPC001"
    WRONG_TYPE = "EPC003"
    MISSING_KEY = "EPC004"
    INVALID_VALUE = "EPC005"
    CONFLICTING_KEYS = "EPC006"
    NOT_APPLICABLE = "EPC007"
    UNKNOWN_PROVIDER = "EPC008"
    UNKNOWN_TARGET = "EPC009"
    DUPLICATE_NAME = "EPC011"
    INVALID_NAME = "EPC012"
    UNKNOWN_OPTION = "EPC013"
    INVALID_OPTION = "EPC014"
    RESERVED_OPTION = "EPC015"
    CONFLICTING_OPTIONS = "EPC018"
    INVALID_VARIABLE = "EPC020"
    FILE_NOT_FOUND = "EPC021"
    OUTSIDE_PROJECT = "EPC022"
    INVALID_PROFILE = "EPC023"
    INVALID_SHARING = "EPC024"
    INVALID_PYPROJECT = "EPC025"
    NO_OUTPUT_PACKAGE = "EPC026"
    UNREADABLE_FILE = "EPC027"
    NOT_PINNED = "EPC028"
    INVALID_FOLDER = "EPC029"
    INVALID_COMPANION = "EPC030"
    BACKEND_FAILED = "EPC031"
    MISSING_REQUIREMENT = "EPC101"
    CONFLICTING_REQUIREMENTS = "EPC102"
    UNAVAILABLE_PROVIDER = "EPC103"
    UNLOADABLE_LIBRARY = "EPC105"
    NO_DEVICE = "EPC106"
    UNREACHABLE_SCHEDULER = "EPC107"
    VERSION_MISMATCH = "EPC108"
    UNUSABLE_CACHE = "EPC109"
    INVALID_MODEL = "EPC201"
    COMPILED_MODEL = "EPC202"
    EXTERNAL_DATA = "EPC203"
    OPEN_DIMENSION = "EPC204"
    UNKNOWN_INPUT = "EPC205"
    VALUE_MISMATCH = "EPC206"
    UNSUPPORTED_INPUT = "EPC207"
    INVALID_INPUTS = "EPC208"
    SOURCE_FAILED = "EPC209"
    MODEL_CHANGED = "EPC211"
    INVALID_CUT = "EPC212"
    NOT_COMPILABLE = "EPC218"
    UNSUPPORTED_OUTPUT = "EPC219"
    NOT_DOWNLOADED = "EPC220"
    OTHER_CONTENT = "EPC221"
    NOTHING_COMPILED = "EPC301"
    LOW_COVERAGE = "EPC302"
    WRONG_RESULT = "EPC303"
    TOO_LARGE = "EPC304"
    NOT_EMBEDDABLE = "EPC305"
    NOT_SHARED = "EPC306"
    COMPILE_FAILED = "EPC307"
    WORKER_CRASHED = "EPC308"
    WORKER_TIMEOUT = "EPC309"
    INTERRUPTED = "EPC310"
    NOT_CACHED = "EPC311"
    OUT_OF_MEMORY = "EPC312"
    NO_WORKER = "EPC313"
    WORKER_LOST = "EPC314"
    WORKER_KILLED = "EPC315"
    SYSTEM_ERROR = "EPC316"
    OUTPUT_DIFFERS = "EPC401"
    NOT_FINITE = "EPC402"
    OUTPUT_SHAPE = "EPC403"
    NOT_RUN = "EPC404"
    INCONCLUSIVE = "EPC406"
    CONFLICTING_REPORTS = "EPC407"
    FILE_EXISTS = "EPC501"
    INVALID_WHEEL = "EPC502"
    INVALID_PATH = "EPC505"
    CHANGED_FILE = "EPC506"
    WRONG_PROVIDER = "EPC507"
    INVALID_PACKAGE = "EPC508"
    NOT_IN_SDIST = "EPC509"
    RECORDED_SAMPLES = "EPC510"
    INVALID_REPORT = "EPC511"

    @property
    def id(self) -> str:
        """The id, such as ``"EPC012"``."""
        return self.value


@dataclass(frozen=True)
class Key:
    """A key of ``[tool.epcontext]``: names of keys, and indices of list items, from the outside in.

    ``model``: the path of the key's model: one glob can match several.
    ``name``: the name of that model, if its table has one.
    """

    parts: tuple[str | int, ...] = ()
    model: str | None = field(default=None, compare=False)
    name: str | None = field(default=None, compare=False)

    def __truediv__(self, part: str | int) -> Key:
        return Key((*self.parts, part), self.model, self.name)

    def __str__(self) -> str:
        return dotted((*ROOT.split("."), *self.parts))

    def contains(self, other: Key) -> bool:
        """Whether ``other`` is this key, or inside its table or list."""
        return other.parts[: len(self.parts)] == self.parts


@dataclass(frozen=True)
class Setting:
    """A key to set, and its value; None if the user must choose it."""

    key: Key
    value: Any = None

    def __str__(self) -> str:
        return str(self.key) if self.value is None else f"{self.key} = {to_toml(self.value)}"


Advice = tuple[str, tuple[Setting, ...]]
"""What to do, in words, and what to set."""


class KeyNames:
    """Names keys in messages as dotted keys of ``pyproject.toml``. The command line names flags instead."""

    def key(self, key: Key) -> str:
        """The name of ``key``, with its model if it has one."""
        model = ", ".join(filter(None, (key.name, key.model)))
        return hide_credentials(f"{key} ({model})" if model else str(key))

    def targets(self, names: tuple[str, ...]) -> str:
        """The suffix of a key whose problem only the targets ``names`` have."""
        return f" -> {', '.join(names)}" if names else ""

    def setting(self, setting: Setting) -> str:
        """The instruction to write ``setting``."""
        list_name, *rest = setting.key.parts or ("",)
        if list_name != "models" or len(rest) < 2:
            return f"Change {setting}" if setting.value is None else f"Set {setting}"
        name = dotted(rest[1:])
        if setting.value is None:
            change = f"Set {name} = ?" if rest[1] == "dims" and len(rest) > 2 else f"Change {name}"
            return f"{change} in the model's table"
        text = f"{name} = {to_toml(setting.value)}"
        model = setting.key.model
        example = f": {{ path = {to_toml(model)}, {text} }}" if model and len(rest) == 2 else ""
        return f"Set {text} in the model's table{'' if self.is_table(setting.key) else example}"

    def is_table(self, model: Key) -> bool:
        """Whether the list of models is known to have a table for ``model``, and not only a path."""
        return False


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    ``location``: a dotted key, an environment variable, a file, or a job, whose runner sets it.
    ``key``: set if the location is a key of the configuration.
    ``settings``: what the user can set to solve the problem, after the sentence in ``hint``.
    ``log``: the end of a worker's log.
    ``targets``: those that have the problem.
    ``notes``: other recipes for the job, each with its result, or why it was not tried.
    ``step``: that of a job.
    ``causes``: other possible causes, in sentences.
    ``nodes``: the names of the nodes of the model that the EP refuses, if nothing is compiled.
    """

    kind: Kind
    location: str
    message: str
    hint: str | None = None
    key: Key | None = None
    settings: tuple[Setting, ...] = ()
    log: str | None = None
    targets: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    step: Step | None = None
    causes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        # Instead of a path or a key, a user may have given a URL with a password.
        object.__setattr__(self, "location", hide_credentials(self.location))

    @classmethod
    def at(
        cls, key: Key, kind: Kind, message: str, hint: str | None = None, *settings: Setting
    ) -> Problem:
        """A problem with a key of the configuration."""
        return cls(kind, str(key), message, hint, key, settings)

    def text(self, names: KeyNames | None = None) -> str:
        """The problem as a message, in which ``names`` names the keys."""
        location = printable(self.where(names))
        lines = [f"{location}: {self.kind.id}" if location else self.kind.id]
        lines.append(_indented(self.account, "    "))
        if advice := self.advice(names):
            lines.append(_indented(advice, "    "))
        if self.log:
            lines += ["    the end of the worker's log:", _indented(self.log, "    | ")]
        return "\n".join(lines)

    def where(self, names: KeyNames | None = None) -> str:
        """Where it is: the key or the location, the targets and the step."""
        names = names or KeyNames()
        if self.key is not None:
            return names.key(self.key) + names.targets(self.targets)
        # On the command line too, like the lines that a job logs.
        job = self.location + KeyNames().targets(self.targets)
        name = STEP_NAMES[self.step] if self.step else ""
        return f"{job}: {name}" if name else job

    @property
    def account(self) -> str:
        """The message, and the notes, in lines."""
        return "\n".join([self.message, *(f"Note: {note}" for note in self.notes)])

    def advice(self, names: KeyNames | None = None) -> str:
        """What to do: the hint, the other causes and the settings; may be empty."""
        names = names or KeyNames()
        lines = [*filter(None, (self.hint,)), *self.causes]
        lines += filter(None, map(names.setting, self.settings))
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def merged(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """``problems``, merged if they differ only in their targets, with all their settings."""
    distinct: dict[tuple[object, ...], Problem] = {}
    for problem in problems:
        # Logs differ in times and process ids.
        log = re.sub("(?<![0-9a-f])[a-f]*[0-9][0-9a-f]*", "", problem.log or "")
        # Several models of a glob have one key.
        where = replace(problem, targets=()).where()
        same = (problem.kind, where, problem.account, problem.hint, problem.causes, log)
        first = distinct.setdefault(same, problem)
        distinct[same] = replace(
            first,
            targets=_union(first.targets, problem.targets),
            settings=_union(first.settings, problem.settings),
        )
    return tuple(distinct.values())


def _union(first: tuple[T, ...], second: tuple[T, ...]) -> tuple[T, ...]:
    return (*first, *(item for item in second if item not in first))


def _indented(text: str, prefix: str) -> str:
    return textwrap.indent(printable(text, lines=True), prefix)


Diagnosed = Generator[Problem, None, T]
"""The result type of a function that yields the problems that it finds, and then returns a value."""


def collect(checks: Diagnosed[T]) -> tuple[T, list[Problem]]:
    """Run ``checks`` to the end; returns its value, and all problems that it yields."""
    problems: list[Problem] = []
    while True:
        try:
            problems.append(next(checks))
        except StopIteration as end:
            return end.value, problems


class EpcontextError(Exception):
    """Base of all errors that the package raises on purpose; carries one or more problems."""

    exit_code = 1
    headline = "failed"

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    def located(self: ErrorT, location: str, *targets: str, step: Step | None = None) -> ErrorT:
        """The same error; problems without a location get this one."""

        def with_location(problem: Problem) -> Problem:
            if problem.location:
                return problem
            return replace(problem, location=location, targets=targets, step=problem.step or step)

        return self.changed(with_location)

    def changed(self: ErrorT, change: Callable[[Problem], Problem]) -> ErrorT:
        """The same error, with its problems as ``change`` returns them."""
        return type(self)(*map(change, self.problems))

    @classmethod
    def check(cls, problems: Iterable[Problem]) -> None:
        """Raise this error with all ``problems``, if there are any."""
        if every := tuple(problems):
            raise cls(*every)

    def text(self, names: KeyNames | None = None, headline: str | None = None) -> str:
        """All problems as one message below ``headline``, in which ``names`` names the keys."""
        count = f" ({len(self.problems)} problems)" if len(self.problems) > 1 else ""
        lines = [f"{headline or self.headline}{count}:"]
        return "\n".join([*lines, *(problem.text(names) for problem in self.problems)])

    def __str__(self) -> str:
        return self.text()


class ConfigError(EpcontextError):
    """``[tool.epcontext]``, the hook's table or an environment variable is invalid."""

    exit_code = 2
    headline = "invalid configuration"


class RequirementError(EpcontextError):
    """This environment cannot build the selected targets."""

    headline = "this environment cannot build the targets"


class MissingError(RequirementError):
    """Build requirements are missing or too old."""

    headline = "build requirements are missing"


class BuildError(EpcontextError):
    """A model could not be compiled, or its validation failed."""

    headline = "build failed"


class ModelError(BuildError):
    """The cause is a model or its configuration, not ONNX Runtime or the EP."""


class RefusedError(BuildError):
    """A simplifier, an EP or a check refuses what a recipe makes of a model: another recipe may work."""


class LibraryError(RefusedError):
    """ONNX Runtime, an EP or another library raised an error: the worker's log may show more."""


class AccidentError(BuildError):
    """Another build may not meet it, such as a killed worker or a full disk: it is never stored."""


class CrashError(AccidentError):
    """The worker crashed, which another recipe may avoid."""


class LimitError(AccidentError):
    """The worker needs more time or memory than it has, which another recipe may avoid."""


class UnavailableError(AccidentError):
    """The target's EP, its library, or a device that it can run on, is unavailable on this machine."""


class InterruptedBuildError(AccidentError):
    """The build was interrupted."""


def error_of_worker(name: str, problems: Iterable[Problem]) -> BuildError:
    """The error that a worker raised, by the ``name`` of its class; a BuildError for any other."""
    error = globals().get(name)
    if isinstance(error, type) and issubclass(error, BuildError):
        return error(*problems)
    return BuildError(*problems)


class InspectionError(EpcontextError):
    """A file or folder cannot be inspected, or is invalid."""

    headline = "inspection failed"


class OutputError(EpcontextError):
    """The output cannot be written."""

    headline = "nothing is written"


class SdistError(EpcontextError):
    """The wheel cannot be built from the sdist."""

    headline = "incomplete sdist"


class WheelError(EpcontextError):
    """The wheel does not contain what its manifest or its RECORD lists."""

    headline = "invalid wheel"


class BackendError(EpcontextError):
    """The wrapped build back end fails, or returns what the rules for back ends do not allow."""

    headline = "the wrapped build back end failed"


class DownloadError(Exception):
    """A file that cannot be downloaded; the text says why, and ``hint`` what to do."""

    def __init__(self, reason: str, hint: str, kind: Kind = Kind.NOT_DOWNLOADED) -> None:
        super().__init__(reason)
        self.hint = hint
        self.kind = kind
