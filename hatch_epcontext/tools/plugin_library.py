"""Tries the library of any plugin EP: its devices, the operators that it compiles, and the results."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, cast

from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.config.targets import is_path
from hatch_epcontext.errors import BuildError, ConfigError, Kind, Problem
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.artifact import Recipe, Validation, ValidationStatus
from hatch_epcontext.jobs.cache.cache import Cache
from hatch_epcontext.jobs.coverage import describe_coverage
from hatch_epcontext.jobs.executors.local import LocalExecutor
from hatch_epcontext.jobs.job import JobRunner
from hatch_epcontext.jobs.machine import jobs_at_once
from hatch_epcontext.jobs.plan import Job, plan
from hatch_epcontext.jobs.preparation import Prepared
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import INSPECTION, check_environment, installed, owners
from hatch_epcontext.jobs.sources import read_sources
from hatch_epcontext.jobs.validation import reason_not_to_run
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS, Device, Provider
from hatch_epcontext.text import file_name, listing, quoted_key, show_size, to_toml
from hatch_epcontext.tools.configure import SETTABLE, JobSettings, configure
from hatch_epcontext.worker.requests import (
    TRIAL_DIMS,
    AssignedNode,
    AssignRequest,
    EpDevice,
    InspectRequest,
    LibraryReply,
    LibraryRequest,
    TrialsRequest,
)

TIMEOUT = 60.0
"""Seconds for each step with one of the small graphs, unless ``build.timeout`` is set."""

_PROVIDER = "plugin"
_OWN_KEYS = ("library", "ep-name", "registration-name", "virtual-devices")
"""The keys of a target that describe its library."""

_AS_IT_IS: Mapping[str, Any] = {"unroll-limit": 0, "min-coverage": 0}
"""Settings with which a build compiles only what the EP itself supports, without unrolling."""

_AFFIXES = re.compile(r"^(lib)?(onnxruntime_(providers_|ep_)?)?|(_ep)?(_plugin)?$")
"""What a library's name has around that of its EP."""


class StepStatus(Enum):
    """The result of one step with one graph."""

    DONE = "done"
    REFUSED = "refused"
    """The EP supports no node, or writes no contexts, which is no fault."""
    FAILED = "failed"
    """An error, a crash, a hang, or other results than the CPU's."""
    SKIPPED = "skipped"


class Verdict(Enum):
    """The result of all graphs on an EP."""

    WORKS = "works"
    """Contexts open with compiling disabled, and compute what the CPU does; nothing failed."""
    NOT_RUN = "not-run"
    """It compiles contexts, which this machine cannot run; nothing failed."""
    FAULTY = "faulty"
    """A step failed."""
    NO_CONTEXTS = "no-contexts"
    """It supports nodes, but writes no contexts."""
    NO_NODES = "no-nodes"
    """It supports no node of the graphs."""
    UNUSABLE = "unusable"
    """The library cannot be loaded, or offers no device."""


@dataclass(frozen=True)
class TrialStep:
    """One step, in words, with the problems of a refused or failed one."""

    status: StepStatus
    text: str
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True)
class Trial:
    """One graph on the EP.

    ``taken`` and ``left``: the numbers of nodes of each operator that the EP supports, and that are left to
    the CPU. ``run``: opened without a context, and run; ``compiled``: into a context; ``loaded``: the context
    opened in another process with compiling disabled, run, and compared with the CPU.
    """

    graph: str
    taken: Mapping[str, int]
    left: Mapping[str, int]
    run: TrialStep
    compiled: TrialStep
    loaded: TrialStep

    @property
    def steps(self) -> tuple[TrialStep, ...]:
        """All steps, in order."""
        return (self.run, self.compiled, self.loaded)

    @property
    def worst(self) -> StepStatus:
        """The worst result of a step: failed, refused or done."""
        found = {step.status for step in self.steps}
        order = (StepStatus.FAILED, StepStatus.REFUSED, StepStatus.DONE)
        return next((each for each in order if each in found), StepStatus.SKIPPED)


@dataclass(frozen=True)
class LibraryDiagnosis:
    """A library of plugin EPs.

    ``library`` is a path or a package. ``module``: the package with ``get_library_path()`` that has it, None
    without one; ``packages``: the installed distributions that contain it, with their versions, and
    ``distributions`` that of ONNX Runtime.
    ``devices``: those of all its EPs, registered under the name ``registered_as``; with ``virtual`` they are
    virtual devices. ``ep`` is the EP that was tried, on a ``device`` of this kind with these ``options``;
    ``provider``: this package's name for it, None for an unknown EP. ``table``: the TOML of a target that
    uses it, None if there can be none. ``problems``: those of the library itself.
    """

    library: str
    packages: Mapping[str, str]
    distributions: Mapping[str, str]
    verdict: Verdict
    module: str | None = None
    registered_as: str = ""
    devices: tuple[EpDevice, ...] = ()
    virtual: bool = False
    ep: str | None = None
    device: str | None = None
    provider: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    table: str | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def operators(self) -> Mapping[str, tuple[int, int]]:
        """Each operator of the graphs, with the numbers of nodes that were taken and left."""
        taken, left = Counter[str](), Counter[str]()
        for each in self.trials:
            taken.update(each.taken)
            left.update(each.left)
        return {op: (taken[op], left[op]) for op in sorted({*taken, *left})}


def try_library(
    library: str,
    ep_name: str | None,
    graphs: Sequence[str],
    job_settings: JobSettings,
    root: Path,
    make_workers: Callable[[float], Workers],
    log: Callable[[str], None],
) -> LibraryDiagnosis:
    """Register ``library``, the path of a file or a package, and try its EP with ``graphs`` of `TRIALS`.

    ``ep_name``: the EP to try, None for the only one or the main one. A path inside ``root`` is relative in
    the table. ``make_workers`` gets the timeout in seconds, and ``log`` a line for each graph. Raises
    ConfigError when there is no such file or package, when the library has no such EP or several without a
    name given, or when ``job_settings`` are invalid; RequirementError when ONNX Runtime or onnx is missing.
    """
    path, module = _find(library)
    shown = path or module
    runtime = {
        name: version
        for name, version in check_environment((), INSPECTION).items()
        if name in DISTRIBUTIONS
    }
    packages = {name: v for name in sorted(owners(module)) if (v := installed(name))}
    # An invalid timeout is an error of the configuration, which each graph checks.
    given = job_settings.settings.get("build.timeout")
    timeout = given if isinstance(given, int | float) else TIMEOUT
    with temp_dir() as folder, make_workers(timeout) as workers:
        try:
            offer = _register(path, module, ep_name, job_settings, workers, folder)
        except BuildError as error:
            verdict = Verdict.UNUSABLE
            return LibraryDiagnosis(shown, packages, runtime, verdict, problems=error.problems)
        device = _choose(offer, ep_name, job_settings.device)
        known = _known(ep=device.ep)
        job = _with_library(job_settings, offer, device, known)
        trials = _try_all(graphs, job, workers, folder, log)
    verdict = _verdict(trials)
    works = any(each.loaded.status is StepStatus.DONE for each in trials)
    return LibraryDiagnosis(
        shown,
        packages,
        runtime,
        verdict,
        module=offer.reply.module or None,
        registered_as=offer.reply.name,
        devices=offer.reply.devices,
        virtual=offer.request.virtual,
        ep=device.ep,
        device=device.kind,
        provider=known.name if known else None,
        options=job.provider_options,
        trials=trials,
        table=_table(job, packages, root) if works or verdict is Verdict.NOT_RUN else None,
    )


def _find(library: str) -> tuple[str, str]:
    """The path of the library, empty for the name of a package, and the package that may contain it."""
    if not is_path(library):
        if not _is_importable(library):
            message = "is not a package that is installed here."
            hint = "A path has a slash, or ends with .so, .dll or .dylib."
            raise _not_found(library, message, hint)
        return "", library
    # Keeps links: the libraries that it needs may be beside a link.
    path = Path(os.path.abspath(os.path.expanduser(library)))  # noqa: PTH100, PTH111
    if path.is_file():
        return str(path), _package_around(path)
    if path.is_dir():
        raise _not_found(library, "is a folder.", "Name the file of the library inside it.")
    module = re.sub(r"\W", "_", library)
    hint = f"The package is imported as {module}." if _is_importable(module) else "Check the path."
    raise _not_found(library, "does not exist.", hint)


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _not_found(library: str, message: str, hint: str) -> ConfigError:
    return ConfigError(Problem(Kind.FILE_NOT_FOUND, f"--library {library}", message, hint))


def _package_around(path: Path) -> str:
    """The import package that ``path`` is in, empty if it is in none."""
    resolved = path.resolve()
    for folder in filter(None, sys.path):
        root = Path(folder).resolve()
        parts = resolved.relative_to(root).parts if resolved.is_relative_to(root) else ()
        if len(parts) > 1 and (root / parts[0] / "__init__.py").is_file():
            return parts[0]
    return ""


def _known(ep: str | None = None, module: str | None = None) -> Provider | None:
    """The provider of the plugin EP of this name, or in this import package."""
    plugins = ((each, each.plugin) for each in PROVIDERS.values() if each.plugin)
    return next((each for each, own in plugins if each.ep == ep or own.module == module), None)


@dataclass(frozen=True)
class _Offer:
    """What the library of ``request`` offers."""

    request: LibraryRequest
    reply: LibraryReply

    @property
    def is_guessed(self) -> bool:
        """Whether its name comes only from its file."""
        return self.request.name is None and self.reply.main is None


def _register(
    path: str,
    module: str,
    ep_name: str | None,
    job_settings: JobSettings,
    workers: Workers,
    folder: Path,
) -> _Offer:
    """Register the library; raises BuildError when it cannot be loaded, or offers no device."""
    settings, location = job_settings.settings, f"library {path or module}"
    known = _known(module=module) or _known(ep=ep_name)
    plugin = known.plugin if known else None
    name = settings.get("registration-name", plugin.registration_name if plugin else None)
    default_name = _AFFIXES.sub("", Path(path or module).name.split(".")[0]) or "ep"
    virtual = bool(settings.get("virtual-devices"))
    request = LibraryRequest(path, module, name or ep_name, default_name, virtual=virtual)
    reply = workers.call(request, folder / "library", location=location)
    if reply.devices:
        return _Offer(request, reply)
    others: tuple[EpDevice, ...] = ()
    if not virtual:
        # The library loaded before, so it only has no virtual devices.
        with contextlib.suppress(BuildError):
            request = dataclasses.replace(request, virtual=True)
            others = workers.call(request, folder / "virtual", location=location).devices
    raise BuildError(_no_device(location, reply, others, known))


def _no_device(
    location: str, reply: LibraryReply, others: Sequence[EpDevice], known: Provider | None
) -> Problem:
    """The problem of a library without devices; ``others`` are the virtual ones that it has."""
    message = f"the library was registered as {reply.name}, and offers no device on this machine."
    hints = [f"It needs {known.needs}."] if known and known.needs else []
    if others:
        kinds = listing(dict.fromkeys(f"{each.ep} ({each.kind})" for each in others))
        hints.append(
            f"It offers virtual devices, to compile for other machines: {kinds}. "
            "Try them with --set virtual-devices=true."
        )
    return Problem(
        Kind.NO_DEVICE,
        location,
        "\n".join([message, *reply.reasons]),
        "\n".join(hints) or "Try it on a machine that has one, or with a newer ONNX Runtime.",
    )


def _choose(offer: _Offer, ep_name: str | None, kind: str | None) -> EpDevice:
    """The device to try: the first of the chosen EP and kind."""
    devices, main = offer.reply.devices, offer.reply.main
    names = list(dict.fromkeys(each.ep for each in devices))
    ep = ep_name or (names[0] if len(names) == 1 else main)
    if ep is None:
        message = f"the library has several EPs: {listing(names)}."
        raise ConfigError(
            Problem(Kind.MISSING_KEY, "--ep-name", message, "Choose one with --ep-name.")
        )
    if ep not in names:
        message = f"the library offers {listing(names)}, and not {ep}."
        # If its EP is named after the registration, another name does not help.
        hint = (
            "Name one that it offers, or leave --ep-name out."
            if offer.reply.name == ep
            else f"Name one that it offers. Some libraries name their EP after their registration: "
            f"--set registration-name={ep}."
        )
        raise ConfigError(Problem(Kind.UNLOADABLE_LIBRARY, "--ep-name", message, hint))
    own = [each for each in devices if each.ep == ep]
    chosen = [each for each in own if kind in (None, "any", each.kind)]
    if not chosen:
        message = f"{ep} offers no {kind} on this machine."
        hint = f"It offers {listing(dict.fromkeys(each.kind for each in own))}."
        raise ConfigError(Problem(Kind.NO_DEVICE, "--device", message, hint))
    return chosen[0]


def _with_library(
    job_settings: JobSettings, offer: _Offer, device: EpDevice, known: Provider | None
) -> JobSettings:
    """``job_settings`` of a target that uses the library's EP, on devices of this kind."""
    settings: dict[str, Any] = {
        **_AS_IT_IS,
        "build.timeout": TIMEOUT,
        **job_settings.settings,
        "library": offer.reply.module or offer.request.path,
        "ep-name": device.ep,
    }
    if offer.reply.name != device.ep and not offer.is_guessed:
        settings["registration-name"] = offer.reply.name
    if offer.request.virtual:
        settings["virtual-devices"] = True
    # An EP that compiles for any chip does not depend on this machine's devices.
    anywhere = known is not None and known.cross_compiles and not offer.request.virtual
    kind = job_settings.device or (None if anywhere else device.kind)
    given = job_settings.provider_options or _example(known)
    if known:
        given = known.complete(cast("Device", kind or known.devices[0]), given)
    return dataclasses.replace(
        job_settings,
        provider_options=given,
        device=kind,
        settings=settings,
    )


def _example(known: Provider | None) -> Mapping[str, str]:
    """Options that most models need on a known EP, such as those that name a chip."""
    table = parse(known.example).get("provider-options", {}) if known and known.example else {}
    return {name: str(value) for name, value in table.items()}


def _try_all(
    names: Sequence[str],
    job_settings: JobSettings,
    workers: Workers,
    folder: Path,
    log: Callable[[str], None],
) -> tuple[Trial, ...]:
    (folder / "graphs").mkdir()
    request = TrialsRequest(tuple(names), str(folder / "graphs"))
    paths = workers.call(request, folder / "trials", location="the graphs").paths
    dims = {f"{name}:{dim}": n for name in names for dim, n in TRIAL_DIMS.get(name, {}).items()}
    # The other graphs have no sizes to leave open.
    settings = {**job_settings.settings, **({"static-shapes": False} if dims else {})}
    job_settings = dataclasses.replace(job_settings, dims=dims, settings=settings)
    config = configure({name: Path(paths[name]) for name in names}, _PROVIDER, job_settings)
    planned = plan(config.on_this_machine)
    installed_here = check_environment(planned.local_targets, planned.requirements)
    cache = Cache(None, log)
    index = cache.index()
    read = read_sources(planned.config, index, workers, folder / "check")
    at_once = jobs_at_once(config.build.jobs, 0)
    executor = LocalExecutor.make(workers, folder, at_once, installed_here, planned.jobs)
    sources = {source.model.name: source for source in read}
    runner = JobRunner(sources, cache, index, executor, folder, log)

    def run(job: Job) -> Trial:
        trial = _try(job, runner, executor)
        log(f"{trial.graph}: {trial.worst.value}")
        return trial

    with ThreadPoolExecutor(at_once) as pool:
        return tuple(pool.map(run, planned.jobs))


def _try(job: Job, runner: JobRunner, executor: LocalExecutor) -> Trial:
    """Open the graph of ``job`` on the EP, and build it; a step that fails is a result."""
    graph, workers, ep = job.models[0].name, executor.workers, job.target.provider.ep
    operators: Mapping[str, int] = {}
    try:
        with job.locating():
            (prepared,) = executor.preparations.get(job, Recipe("onnxruntime"), workers)
            run, nodes = _open(job, prepared, workers)
            if not nodes:
                request = InspectRequest(prepared.path)
                scratch = Path(prepared.path).with_name("inspect")
                operators = workers.call(request, scratch, location=job.location).operators
    except BuildError as error:
        return Trial(graph, {}, {}, _failed(error), _SKIPPED, _SKIPPED)
    taken = Counter(node.op for node in nodes if node.ep == ep)
    left = Counter(node.op for node in nodes if node.ep != ep)
    try:
        built = runner.run(job)
    except BuildError as error:
        return Trial(graph, taken, left, run, *_not_built(error, takes_some=bool(taken)))
    record, (validation,) = built.artifact.record, built.validations.values()
    coverage, rewrites = record.contexts[0].coverage, record.preparations[0].rewrites
    if operators and not rewrites:
        # A virtual device runs nothing, but the context shows its nodes.
        left = Counter(node.op for node in coverage.uncovered) if coverage else left
        taken = Counter(operators) - left
    parts = [describe_coverage(coverage), show_size(built.artifact.size)]
    parts += [f"rewritten ({'; '.join(rewrites)})"] if rewrites else []
    loaded = TrialStep(StepStatus.SKIPPED, validation.reason or "")
    if validation.status is ValidationStatus.RAN:
        loaded = TrialStep(StepStatus.DONE, _agreement(validation))
    compiled = TrialStep(StepStatus.DONE, ", ".join(parts))
    return Trial(graph, taken, left, run, compiled, loaded)


def _open(
    job: Job, prepared: Prepared, workers: Workers
) -> tuple[TrialStep, Sequence[AssignedNode]]:
    """Open the model without a context; also returns which EP got which node, as far as that is known."""
    if reason := reason_not_to_run(job):
        return TrialStep(StepStatus.SKIPPED, reason), ()
    model, target = job.models[0], job.target
    tolerance = model.tolerance_for(target)
    to_run = model.to_run_on(target)
    request = AssignRequest(to_run, prepared.path, target, prepared.reference, tolerance)
    try:
        scratch = Path(prepared.path).with_name("run")
        reply = workers.call(request, scratch, location=job.location)
    except BuildError as error:
        return _failed(error), ()
    if reply.problems:
        return _failed(BuildError(*reply.problems)), reply.nodes
    taken = sum(node.ep == target.provider.ep for node in reply.nodes)
    if reply.nodes and not taken:
        return TrialStep(StepStatus.REFUSED, "takes no node"), reply.nodes
    text = f"takes {taken} of {len(reply.nodes)} nodes, agrees" if taken else "agrees"
    return TrialStep(StepStatus.DONE, text), reply.nodes


def _not_built(error: BuildError, *, takes_some: bool) -> tuple[TrialStep, TrialStep]:
    """How compiling and opening ended, of which one failed."""
    if any(each.step == "validation" for each in error.problems):
        return TrialStep(StepStatus.DONE, "compiled"), _failed(error)
    # An EP that logs errors has not refused the graph: often a library of its own is missing.
    if any(each.kind is not Kind.NOTHING_COMPILED or each.log for each in error.problems):
        return _failed(error), _SKIPPED
    text = "no context" if takes_some else "takes no node"
    return TrialStep(StepStatus.REFUSED, text, error.problems), _SKIPPED


_SKIPPED = TrialStep(StepStatus.SKIPPED, "")


def _failed(error: BuildError) -> TrialStep:
    return TrialStep(StepStatus.FAILED, f"FAILED: {error.problems[0].kind.id}", error.problems)


def _agreement(validation: Validation) -> str:
    if not validation.compared:
        return "runs, not compared"
    return "agrees" if validation.snr is None else f"agrees ({validation.snr:.0f} dB)"


def _verdict(trials: Iterable[Trial]) -> Verdict:
    trials = tuple(trials)
    compiled = {each.compiled.status for each in trials}
    failed = any(each.worst is StepStatus.FAILED for each in trials)
    if StepStatus.DONE in compiled:
        if failed:
            return Verdict.FAULTY
        loaded = any(each.loaded.status is StepStatus.DONE for each in trials)
        return Verdict.WORKS if loaded else Verdict.NOT_RUN
    if StepStatus.REFUSED not in compiled:
        return Verdict.FAULTY
    return Verdict.NO_CONTEXTS if any(each.taken for each in trials) else Verdict.NO_NODES


def _table(job_settings: JobSettings, packages: Mapping[str, str], root: Path) -> str:
    """The target with ``job_settings``, as it is written in ``pyproject.toml``."""
    settings = job_settings.settings
    library = path = str(settings["library"])
    if is_path(library):
        file = Path(library)
        path = (file.relative_to(root) if file.is_relative_to(root) else file).as_posix()
    keys: dict[str, Any] = {"provider": _PROVIDER, "library": path}
    keys |= {key: settings[key] for key in _OWN_KEYS[1:] if key in settings}
    if not is_path(library):
        keys["requirements"] = [f"{name}>={version}" for name, version in packages.items()]
    own = {key: getattr(job_settings, key) for key in ("device", "optimization", "embed")}
    keys |= {key: value for key, value in own.items() if value is not None}
    keys |= {
        key: value
        for key, value in settings.items()
        if SETTABLE[key] == "target" and key not in _OWN_KEYS and _AS_IT_IS.get(key) != value
    }
    options = job_settings.provider_options, job_settings.session_options
    for key, given in zip(("provider-options", "session-options"), options, strict=True):
        keys |= {key: dict(given)} if given else {}
    ep = str(settings["ep-name"])
    name = file_name(re.sub("ExecutionProvider", "", ep, flags=re.IGNORECASE).lower(), "-")
    head = f"[tool.epcontext.targets.{quoted_key(name)}]"
    return "\n".join([head, *(f"{key} = {to_toml(value)}" for key, value in keys.items())])
