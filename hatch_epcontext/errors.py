"""Errors as data: every problem has a kind, a location, a message and a hint.

The stable id of its `Kind` is printed with each problem, and documented in ``docs/errors.md``.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Container, Generator, Iterable
from dataclasses import field, replace
from enum import Enum
from typing import Any, TypeVar

from hatch_epcontext.frozen import dataclass
from hatch_epcontext.text import dotted, hide_credentials, printable, to_toml

T = TypeVar("T")
ErrorT = TypeVar("ErrorT", bound="EpcontextError")

ROOT = "tool.epcontext"
"""The table of ``pyproject.toml`` that holds the configuration."""

HOOK = "tool.hatch.build.hooks.epcontext"
"""Hatch's own table for the hook, which switches it on for wheels and sdists."""


class Kind(Enum):
    """The kinds of problems: id, title, what it means, what to do. An id is never reused."""

    id: str
    title: str
    meaning: str
    remedy: str

    def __new__(cls, id_: str, title: str, meaning: str, remedy: str) -> Kind:
        member = object.__new__(cls)
        member._value_ = member.id = id_
        member.title, member.meaning, member.remedy = title, meaning, remedy
        return member

    UNKNOWN_KEY = (
        "EPC001",
        "Unknown key",
        "A table has a key that does not exist.",
        "Check the spelling. All keys are in `docs/configuration.md`.",
    )
    WRONG_TYPE = (
        "EPC003",
        "Wrong type",
        "A value has the wrong type.",
        "Write a value of the type in the message.",
    )
    MISSING_KEY = (
        "EPC004",
        "Missing key",
        "A required key is missing.",
        "Add it.",
    )
    INVALID_VALUE = (
        "EPC005",
        "Invalid value",
        "A value is out of range or has the wrong form.",
        "Write a value that the message allows.",
    )
    CONFLICTING_KEYS = (
        "EPC006",
        "Conflicting keys",
        "Two settings contradict each other.",
        "Keep one of them.",
    )
    NOT_APPLICABLE = (
        "EPC007",
        "Key does not apply",
        "The key is valid, but not for this provider or in this table.",
        "Remove it, or move it to the place in the message.",
    )
    UNKNOWN_PROVIDER = (
        "EPC008",
        "Unknown provider",
        "No execution provider has this name.",
        "Use a name from `docs/providers.md`, or `plugin` for any other plugin EP.",
    )
    UNKNOWN_TARGET = (
        "EPC009",
        "Unknown target",
        "No target has this name, or the configuration names no target.",
        "Use a name of `[tool.epcontext.targets]`.",
    )
    UNKNOWN_MODEL = (
        "EPC010",
        "Unknown model",
        "No model has this name.",
        "Use a name of `[[tool.epcontext.models]]`.",
    )
    DUPLICATE_NAME = (
        "EPC011",
        "Duplicate name",
        "Two models, targets or groups would share a folder in the wheel.",
        "Give each its own `name`.",
    )
    INVALID_NAME = (
        "EPC012",
        "Invalid name",
        "A name becomes a folder in the wheel, and this one is not valid on every system.",
        "Use letters, digits, `.`, `_` and `-`, with a letter or digit first.",
    )
    UNKNOWN_OPTION = (
        "EPC013",
        "Unknown provider option",
        "The EP does not have this option, and would silently ignore it.",
        "Check the spelling. If the EP is newer than this package: `allow-unknown-options = true`.",
    )
    INVALID_OPTION = (
        "EPC014",
        "Invalid provider option",
        "The EP does not support this value. Many EPs silently accept impossible values.",
        "Write a value that the message allows.",
    )
    RESERVED_OPTION = (
        "EPC015",
        "Reserved option",
        "The build or the loader sets this option.",
        "Remove it, or use the key in the message.",
    )
    DEPRECATED_OPTION = (
        "EPC016",
        "Deprecated provider option",
        "The EP ignores this option of an older release.",
        "Use the replacement in the message.",
    )
    OPTION_SCOPE = (
        "EPC017",
        "Option in the wrong table",
        "`load-options` has an option that counts only when the model is compiled.",
        "Move it to `provider-options`.",
    )
    CONFLICTING_OPTIONS = (
        "EPC018",
        "Conflicting provider options",
        "Provider options exclude or contradict each other, or a list of chips is contradictory.",
        "Keep one of the options, or give each chip one value in each list.",
    )
    UNKNOWN_SESSION_OPTION = (
        "EPC019",
        "Unknown session option",
        "ONNX Runtime does not have this option, and would silently ignore it.",
        "Check the spelling. If ONNX Runtime is newer than this package: `allow-unknown-options = true`.",
    )
    INVALID_VARIABLE = (
        "EPC020",
        "Invalid environment variable",
        "A `HATCH_EPCONTEXT_*` variable does not exist, has an invalid value, or contradicts another one.",
        "Correct it or unset it. All variables are in `docs/configuration.md`.",
    )
    FILE_NOT_FOUND = (
        "EPC021",
        "File not found",
        "The configuration names a file that does not exist.",
        "Check the path. In a build from an sdist, check that the sdist contains the file.",
    )
    UNREADABLE_FILE = (
        "EPC027",
        "Unreadable file",
        "The file is a link to nowhere, a folder, a pipe, or without read permission.",
        "Fetch the file, or correct the path or the pattern.",
    )
    NOT_PINNED = (
        "EPC028",
        "Location is not pinned",
        "A `url` has no commit or no `sha256`, so that its contents may change.",
        "Run `epcontext pin`, which writes both.",
    )
    OUTSIDE_PROJECT = (
        "EPC022",
        "Path outside the project",
        "An sdist cannot contain a file outside the project.",
        "Copy the file into the project, and write its path relative to `pyproject.toml`.",
    )
    INVALID_PROFILE = (
        "EPC023",
        "Invalid optimization profile",
        "An optimization profile is incomplete, or does not fit the model's inputs.",
        "Give `min`, `opt` and `max` shapes to every input with open dimensions.",
    )
    INVALID_SHARING = (
        "EPC024",
        "Invalid weight-sharing group",
        "Models of one group cannot be compiled together.",
        "Give all models of the group the same settings for the target.",
    )
    INVALID_PYPROJECT = (
        "EPC025",
        "Unusable pyproject.toml",
        "`pyproject.toml` is missing, is not TOML, has no `[tool.epcontext]`, or has another build backend.",
        "Correct it. `epcontext init` writes a first configuration.",
    )
    NO_OUTPUT_PACKAGE = (
        "EPC026",
        "No place for the models in the wheel",
        "The wheel has no import package for the models, has several, or has other files in their place.",
        'Set `output`, such as `output = "my_app/epcontext"`.',
    )
    MISSING_REQUIREMENT = (
        "EPC101",
        "Missing build requirements",
        "A package that the targets are built with is missing or too old.",
        "Run the `pip install` command of the message, or build with isolation.",
    )
    CONFLICTING_REQUIREMENTS = (
        "EPC102",
        "Conflicting build requirements",
        "Two distributions install the same files, or no ONNX Runtime distribution fits all targets.",
        "Build some targets with `HATCH_EPCONTEXT_TARGETS`, then all with `HATCH_EPCONTEXT_FROM_CACHE`.",
    )
    UNAVAILABLE_PROVIDER = (
        "EPC103",
        "Provider is not available",
        "The EP has no packages for this Python or this system.",
        "Build on another machine, or select other targets with `HATCH_EPCONTEXT_TARGETS`.",
    )
    MISSING_EP = (
        "EPC104",
        "Execution provider is missing",
        "The installed ONNX Runtime distribution does not contain the EP.",
        "Install the distribution that the message names.",
    )
    UNLOADABLE_LIBRARY = (
        "EPC105",
        "EP library cannot be loaded",
        "The EP's library cannot be imported, loaded or registered.",
        "Install what the message names, or correct `library`, `ep-name` and `registration-name`.",
    )
    NO_DEVICE = (
        "EPC106",
        "No device",
        "The EP offers no device that fits the target.",
        "Change `device` and `device-filter`, or build where such a device is.",
    )
    UNREACHABLE_SCHEDULER = (
        "EPC107",
        "Scheduler cannot be reached",
        "The scheduler of the dask cluster does not answer, or the connection was lost.",
        "Check `build.scheduler`, the network, and TLS. An empty `HATCH_EPCONTEXT_SCHEDULER` builds here.",
    )
    VERSION_MISMATCH = (
        "EPC108",
        "Workers of the cluster have different versions",
        "Machines of the dask cluster and this one have different versions of packages.",
        "Install the same versions, or give the target `resources` that only equal workers have.",
    )
    UNUSABLE_CACHE = (
        "EPC109",
        "Shared cache cannot be used",
        "A cluster's files go through the shared cache, and one of them could not be written or read.",
        "Check `build.cache`, and that this machine and the workers may read and write it.",
    )
    INVALID_MODEL = (
        "EPC201",
        "Invalid model",
        "The file is not an ONNX model, or is a Git LFS pointer.",
        "Name an ONNX file. For Git LFS run `git lfs pull`.",
    )
    COMPILED_MODEL = (
        "EPC202",
        "Model is compiled already",
        "The file is a context model.",
        "Name the source model that it was compiled from.",
    )
    EXTERNAL_DATA = (
        "EPC203",
        "Invalid external data",
        "A file with the model's weights is missing, too short, or outside the model's folder.",
        "Save the model and its data again, in one folder, with relative locations.",
    )
    OPEN_DIMENSION = (
        "EPC204",
        "Open dimension",
        "An input has an open dimension, and the EP compiles only fixed shapes.",
        'Fix it with `dims` or `shapes`, such as `{ path = "a.onnx", dims = { n = 1 } }` in `models`.',
    )
    UNKNOWN_INPUT = (
        "EPC205",
        "Unknown input or dimension",
        "The configuration names an input or dimension that the model does not have.",
        "Use a name that the message lists.",
    )
    VALUE_MISMATCH = (
        "EPC206",
        "Value does not fit the model",
        "A shape, constant or array does not fit the input that it is for.",
        "Use the dtype and shape that the message names.",
    )
    UNSUPPORTED_INPUT = (
        "EPC207",
        "Unsupported input",
        "An input is a sequence, a map or an optional value, or its type is one that ONNX Runtime lacks.",
        "Change the model so that it takes tensors of other types.",
    )
    INVALID_INPUTS = (
        "EPC208",
        "Invalid dummy inputs",
        "The dummy inputs cannot be read or generated, or do not fit the model.",
        "Give an `.npz` with an array for each input, or a folder of ONNX test data.",
    )
    SOURCE_FAILED = (
        "EPC209",
        "Source model does not run",
        "ONNX Runtime cannot run it on the CPU with the dummy inputs.",
        "Give inputs that the model accepts with `validate.inputs`.",
    )
    RUN_TIMEOUT = (
        "EPC210",
        "Model runs for too long",
        "A run on the CPU took longer than `validate.timeout`.",
        "Give smaller inputs with `validate.inputs` or `dims`, or raise `validate.timeout`.",
    )
    MODEL_CHANGED = (
        "EPC211",
        "Model changed during the build",
        "A file of a model or of its dummy inputs changed while the build was running.",
        "Build again when nothing writes to it. Nothing of it was stored or shipped.",
    )
    NOT_DOWNLOADED = (
        "EPC220",
        "Model cannot be downloaded",
        "A model from elsewhere is not in the user's cache, and it cannot be downloaded now.",
        "Do what the message says. Without a network: run `epcontext fetch` where there is one.",
    )
    OTHER_CONTENT = (
        "EPC221",
        "Downloaded file has other content",
        "The file at a `url` is not the one whose hash is in `pyproject.toml`.",
        "Find out why. If the new file is wanted: remove `sha256`, and run `epcontext pin`.",
    )
    INVALID_CUT = (
        "EPC212",
        "Model cannot be cut there",
        "`cut` names a tensor that the graph does not have, or the part between the tensors is not a model.",
        "Name tensors of the graph itself, so that the outputs depend only on the inputs.",
    )
    UNSUPPORTED_OUTPUT = (
        "EPC219",
        "Unsupported output",
        "An output is a sequence, a map or an optional value, or its type is one that ONNX Runtime lacks.",
        "Keep the tensor that it is made of: the message names it.",
    )
    NOT_COMPILABLE = (
        "EPC218",
        "Model cannot be compiled for the target",
        "The model has nodes that the EP cannot compile, such as trees or strings.",
        "Keep the part before or after them with `cut`, or compile the model for the `cpu` provider.",
    )
    NOTHING_COMPILED = (
        "EPC301",
        "Nothing was compiled",
        "The EP compiled no node, or cannot compile ahead of time at all.",
        "Check the chip in `provider-options`, and that the EP supports the model's operators.",
    )
    LOW_COVERAGE = (
        "EPC302",
        "Coverage is too low",
        "The EP left more nodes to the CPU than `min-coverage` allows.",
        "Change the model at the uncovered nodes, or lower `min-coverage`.",
    )
    WRONG_RESULT = (
        "EPC303",
        "Compiled for something else",
        "The EP wrote contexts of another EP or for another chip, or its sidecar is missing.",
        "Check the chip in `provider-options` and `device-filter`.",
    )
    TOO_LARGE = (
        "EPC304",
        "File is too large for ONNX",
        "An ONNX file cannot be larger than 2 GiB.",
        "Remove `embed`, or set `external-initializers = true`.",
    )
    NOT_EMBEDDABLE = (
        "EPC305",
        "Contexts cannot be embedded",
        "The EP cannot load several embedded contexts of one model.",
        "Remove `embed`.",
    )
    NOT_SHARED = (
        "EPC306",
        "Weights are not shared",
        "The models of a group do not share one sidecar, or the EP does not compile them together.",
        "Check that they have the same weights, and that the EP can share them.",
    )
    COMPILE_FAILED = (
        "EPC307",
        "ONNX Runtime or the EP failed",
        "ONNX Runtime or the EP raised an error.",
        "Read the end of the worker's log below the message.",
    )
    WORKER_CRASHED = (
        "EPC308",
        "Worker crashed",
        "A worker process crashed in ONNX Runtime or in the EP.",
        "Read the end of the worker's log below the message.",
    )
    WORKER_TIMEOUT = (
        "EPC309",
        "Worker timed out",
        "A worker took longer than `build.timeout`.",
        "Raise it, or set `HATCH_EPCONTEXT_TIMEOUT`.",
    )
    INTERRUPTED = (
        "EPC310",
        "Build interrupted",
        "The build was interrupted.",
        "Build again: finished jobs are in the cache.",
    )
    NOT_CACHED = (
        "EPC311",
        "Not in the cache",
        "`HATCH_EPCONTEXT_FROM_CACHE` allows a target only from the cache, which does not have it.",
        "Build the target where that is possible, with the same cache.",
    )
    OUT_OF_MEMORY = (
        "EPC312",
        "Out of memory",
        "A worker needs more memory than there is, or than `build.memory-limit` allows.",
        "Lower `build.jobs`, or raise `build.memory-limit` or `HATCH_EPCONTEXT_MEMORY_LIMIT`.",
    )
    NO_WORKER = (
        "EPC313",
        "No worker for the job",
        "No worker of the dask cluster has the resources of the target.",
        "Start a worker with these `--resources`, or change `resources` of the target.",
    )
    WORKER_LOST = (
        "EPC314",
        "Worker of the cluster was lost",
        "Workers of the dask cluster repeatedly ended during a job, or failed outside of it.",
        "Read the logs of the dask workers. Often memory or disk space is short.",
    )
    WORKER_KILLED = (
        "EPC315",
        "Worker was killed",
        "The system, because memory was short, or a user killed a worker.",
        "Build again. If memory is short, lower `build.jobs`.",
    )
    SYSTEM_ERROR = (
        "EPC316",
        "Operating system error",
        "A disk is full, a folder cannot be written, or there are too many open files.",
        "Free space, or move the folder that the message names: `TMPDIR`, `HATCH_EPCONTEXT_CACHE_DIR`.",
    )
    INVALID_REPLY = (
        "EPC317",
        "Unusable reply of a worker",
        "A worker's reply cannot be read, or its log grows without end.",
        "Read the end of its log below the message.",
    )
    OUTPUT_DIFFERS = (
        "EPC401",
        "Outputs differ",
        "An output of the compiled model differs from the CPU's by more than the tolerance.",
        "Give real inputs with `validate.inputs`, or allow more with `validate.tolerance`.",
    )
    NOT_FINITE = (
        "EPC402",
        "Output is not finite",
        "An output has NaN or Inf where the CPU has none.",
        "Often a value leaves the range of float16. Give real inputs with `validate.inputs`.",
    )
    OUTPUT_SHAPE = (
        "EPC403",
        "Output has another shape",
        "An output of the compiled model has another shape than on the CPU.",
        "Report it to the maintainers of the EP.",
    )
    NOT_RUN = (
        "EPC404",
        "Artifact cannot be run on this machine",
        "Validation is required, and this machine cannot run the artifact.",
        'Build where it can be run, or set `validate = "auto"`.',
    )
    WRONG_ASSIGNMENT = (
        "EPC405",
        "Not run by the EP",
        "The artifact opened, but ONNX Runtime assigned no node of it to the EP.",
        "Check that the EP's package and its driver fit the artifact.",
    )
    INCONCLUSIVE = (
        "EPC406",
        "Inconclusive comparison",
        "Validation is required, and an output on the CPU is not finite, or always the same.",
        "Give real inputs with `validate.inputs`.",
    )
    FILE_EXISTS = (
        "EPC501",
        "File exists",
        "An output file exists already, or is a source model.",
        "Choose another place, or add `--overwrite`.",
    )
    INVALID_WHEEL = (
        "EPC502",
        "Invalid wheel",
        "The wheel does not contain what its manifest or its RECORD lists.",
        "Remove stray files from the output folder, let the build backend pack all others, and build again.",
    )
    LARGE_WHEEL = (
        "EPC503",
        "Wheel is too large",
        "It is larger than `wheel.max-size`.",
        "Ship fewer targets, share weights, or raise `wheel.max-size`.",
    )
    EDITABLE_CONFLICT = (
        "EPC504",
        "Editable install cannot write",
        "The output folder in the project has files of its own, or files that were changed.",
        "Move them away, or set another `output`.",
    )
    INVALID_PATH = (
        "EPC505",
        "Nothing to inspect",
        "The path is not an ONNX model, a wheel or a package with models.",
        "Name an ONNX file, a wheel, or a folder with a manifest.",
    )
    CHANGED_FILE = (
        "EPC506",
        "File is missing or changed",
        "A file that a manifest or a model names is missing, or differs from its record.",
        "Restore the file, or build again.",
    )
    WRONG_PROVIDER = (
        "EPC507",
        "Contexts of another provider",
        "The context model has no contexts, or contexts of another EP or chip than named.",
        "Name the provider that compiled it, or leave the provider out.",
    )
    INVALID_PACKAGE = (
        "EPC508",
        "Invalid model package",
        "ONNX Runtime cannot open a model package with this `manifest.json`.",
        "Correct the place in the message, or write the package again.",
    )
    NOT_IN_SDIST = (
        "EPC509",
        "Not in the sdist",
        "The sdist does not contain a file from which the wheel is built.",
        "Change what leaves it out, or switch the hook off for sdists, as the message explains.",
    )
    RECORDED_SAMPLES = (
        "EPC510",
        "Recorded samples in the sdist",
        "The sdist would have what `epcontext record` wrote, which may contain personal data.",
        "Exclude the folder, or remove its `.gitignore` if the files may be published.",
    )


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
    ``tried``: other recipes for the job, each with its result.
    ``step``: the step of the job, unless it is compiling.
    ``causes``: other possible causes, in sentences.
    ``margin``: the decibels by which an output is above its limit, negative.
    ``gap``: the decibels by which it is worse than an emulation of the number format, if there is one.
    """

    kind: Kind
    location: str
    message: str
    hint: str | None = None
    key: Key | None = None
    settings: tuple[Setting, ...] = ()
    log: str | None = None
    targets: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    step: str = ""
    causes: tuple[str, ...] = ()
    margin: float | None = None
    gap: float | None = None

    def __post_init__(self) -> None:
        # In place of a path or a key, a user may have given a URL with a password.
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
        return f"{job}: {self.step}" if self.step else job

    @property
    def account(self) -> str:
        """The message, and what else was tried, in lines."""
        return "\n".join([self.message, *(f"Also tried: {each}" for each in self.tried)])

    def advice(self, names: KeyNames | None = None) -> str:
        """What to do: the hint, the other causes and the settings; may be empty."""
        names = names or KeyNames()
        lines = [*filter(None, (self.hint,)), *self.causes]
        lines += map(names.setting, self.settings)
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.text()


def merged(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """``problems``, merged if they differ only in their targets, with all their settings."""
    found: dict[tuple[object, ...], Problem] = {}
    for each in problems:
        # Logs differ in times and process ids.
        log = re.sub("[0-9a-f]*[0-9][0-9a-f]*", "", each.log or "")
        # Several models of a glob have one key.
        place = replace(each, targets=()).where()
        same = (each.kind, place, each.account, each.hint, each.causes, log)
        first = found.setdefault(same, each)
        found[same] = replace(
            first,
            targets=_union(first.targets, each.targets),
            settings=_union(first.settings, each.settings),
        )
    return tuple(found.values())


def _union(first: tuple[T, ...], second: tuple[T, ...]) -> tuple[T, ...]:
    return (*first, *(each for each in second if each not in first))


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

    def is_only(self, kinds: Container[Kind]) -> bool:
        """Whether all its problems are of these ``kinds``."""
        return all(problem.kind in kinds for problem in self.problems)

    def located(self: ErrorT, location: str, *targets: str, step: str = "") -> ErrorT:
        """The same error; problems without a location get this one."""
        return type(self)(
            *(
                each
                if each.location
                else replace(each, location=location, targets=targets, step=each.step or step)
                for each in self.problems
            )
        )

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
