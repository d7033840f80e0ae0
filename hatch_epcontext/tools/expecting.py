"""What the loader does with each target of a wheel on a machine, without a session and without the loader.

``_check.py``, which is copied into apps, says the same with an ONNX Runtime at hand; a test compares both.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from hatch_epcontext.errors import InspectionError, Kind, Problem
from hatch_epcontext.package.manifest import ModelPackage, Variant
from hatch_epcontext.package.wheel import DAMAGED_ARCHIVE, ProjectMetadata
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS, describe_chip
from hatch_epcontext.shipped import CPU_EP, PREPARED, SOURCE, Device
from hatch_epcontext.text import listing
from hatch_epcontext.tools.environment import Machine, ProviderState, describe_machine, examine
from hatch_epcontext.tools.inspecting import inspect, verify
from hatch_epcontext.worker.requests import Runtime
from hatch_epcontext.worker.results import ValidationStatus

Prospect = Literal["opens", "cannot", "unknown"]

_Result = tuple[Prospect, str]


@dataclass(frozen=True)
class Expectation:
    """What becomes of a ``target`` of a ``model``, and why. ``unknown``: only opening it shows that.

    ``package``: the folder in the wheel of the model package that has the model.
    """

    package: str
    model: str
    target: str
    answer: Prospect
    reason: str


@dataclass(frozen=True)
class Wheel:
    """A wheel with models: its packages by folder, its tags, and the versions of Python that it needs.

    ``requires``: what pip installs with it, or with one of its extras.
    """

    path: Path
    packages: Mapping[str, ModelPackage]
    tags: frozenset[Tag]
    python: SpecifierSet
    requires: tuple[Requirement, ...]


def read_wheel(path: Path) -> Wheel:
    """The wheel at ``path``, whose files were compared with its records; none of its code runs.

    Raises InspectionError for anything else, and for a wheel that is damaged, or that pip cannot read.
    """
    try:
        tags = parse_wheel_filename(path.name)[-1]
    except InvalidWheelFilename as error:
        message = f"has no name of a wheel ({error}), and pip installs nothing else."
        raise InspectionError(Problem(Kind.INVALID_PATH, str(path), message)) from error
    inspection = inspect(path)
    verify(path, inspection)
    try:
        with zipfile.ZipFile(path) as archive:
            (name,) = (
                n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n)
            )
            metadata = ProjectMetadata.read(archive.read(name).decode())
        python = SpecifierSet(metadata.requires_python or "")
        requires = tuple(map(Requirement, metadata.dependencies))
    except (OSError, *DAMAGED_ARCHIVE, ValueError) as error:
        message = f"its METADATA cannot be read: {error}."
        raise InspectionError(Problem(Kind.INVALID_WHEEL, str(path), message)) from error
    return Wheel(path, inspection.packages, tags, python, requires)


@dataclass(frozen=True)
class _Candidate:
    """A variant that the loader may open, of a component in the package in this ``folder`` of the wheel."""

    wheel: Wheel
    folder: str
    component: str
    target: str

    @property
    def package(self) -> ModelPackage:
        return self.wheel.packages[self.folder]

    @property
    def variant(self) -> Variant:
        return self.package.components[self.component].variants[self.target]


def this_machine(wheels: Iterable[Wheel]) -> Machine:
    """This machine, whose EPs were asked about the contexts of ``wheels``."""
    asked: dict[str, list[str]] = {}
    packages = (package for wheel in wheels for package in wheel.packages.values())
    for _, _, variant in itertools.chain.from_iterable(package.variants for package in packages):
        if (about := variant.about) and about.compares and variant.compatibility_string:
            for name in (name for name, known in PROVIDERS.items() if known.ep == variant.ep):
                asked.setdefault(name, []).append(variant.compatibility_string)
    strings = {name: tuple(dict.fromkeys(texts)) for name, texts in asked.items()}
    return describe_machine(*examine(strings))


def expect(wheels: Sequence[Wheel], machine: Machine) -> list[Expectation]:
    """What ``load`` does with each target of ``wheels`` there, if none before it is opened.

    It has no arguments, and the app registers no EP's library itself. A companion among the wheels counts for
    the app whose wheel names it.
    """
    packages = {folder: package for wheel in wheels for folder, package in wheel.packages.items()}
    companions = {name for package in packages.values() for name in package.about.companions}
    new = _installed_with(wheels, machine)
    expectations = []
    for wheel in wheels:
        for folder in (folder for folder in wheel.packages if folder not in companions):
            for (model, target), component in _firsts(wheel.packages[folder]).items():
                candidate = _Candidate(wheel, folder, component, target)
                answer = _in_wheel(candidate, wheels, machine, new)
                expectations.append(Expectation(folder, model, target, *answer))
    return expectations


def _firsts(package: ModelPackage) -> dict[tuple[str, str], str]:
    """For each model and target the component that ``load`` opens without ``shapes``."""
    firsts: dict[tuple[str, str], str] = {}
    for name, component in package.components.items():
        modules, own = component.about.modules, component.variants
        for target in dict.fromkeys((*modules, *own)):
            if modules.get(target) or target in own:
                firsts.setdefault((component.about.model, target), name)
    return firsts


def _installed_with(wheels: Iterable[Wheel], machine: Machine) -> frozenset[str]:
    """The distributions that pip installs anew there, with ``wheels`` or one of their extras."""
    new = set()
    for requirement in (requirement for wheel in wheels for requirement in wheel.requires):
        name = canonicalize_name(requirement.name)
        # A file may have a version that is none.
        with contextlib.suppress(InvalidVersion):
            version = Version(machine.packages.get(name, ""))
            if requirement.specifier.contains(version, prereleases=True):
                continue
        new.add(name)
    return frozenset(new)


def _in_wheel(
    candidate: _Candidate, wheels: Iterable[Wheel], machine: Machine, new: frozenset[str]
) -> _Result:
    """As `_find_variant` of the loader: this candidate, or that of a companion."""
    if reason := _reason_not_to_install(candidate.wheel, machine):
        return "cannot", reason
    about = candidate.package.components[candidate.component].about
    if not (module := about.modules.get(candidate.target)):
        return _unless_replaced(candidate, machine, new)
    install = candidate.package.about.companions.get(module, module)
    companion = next((wheel for wheel in wheels if module in wheel.packages), None)
    if companion is None:
        return "unknown", f"it is in the wheel of {install}"
    if reason := _reason_not_to_install(companion, machine):
        return "cannot", reason
    components = companion.packages[module].components
    same, target = components.get(candidate.component), candidate.target
    if same is None or same.about.identity != about.identity or target not in same.variants:
        return "cannot", f"{companion.path.name} is for another version of this model"
    return _unless_replaced(
        _Candidate(companion, module, candidate.component, target), machine, new
    )


def _unless_replaced(candidate: _Candidate, machine: Machine, new: frozenset[str]) -> _Result:
    """What the loader does with the candidate, unless what is ``new`` there may change it."""
    answer, reason = _as_installed(candidate, machine)
    plugin = candidate.variant.facts.plugin
    own = {canonicalize_name(plugin.package)} if plugin else set()
    if answer != "unknown" and (changing := new & own.union(DISTRIBUTIONS)):
        return "unknown", f"{reason}, but pip installs {listing(sorted(changing))} with the wheel"
    return answer, reason


def _as_installed(candidate: _Candidate, machine: Machine) -> _Result:
    if machine.runtime is None:
        return "unknown", "nothing is known of an ONNX Runtime there"
    variant = candidate.variant
    if variant.ep != CPU_EP or variant.facts.plugin is not None:
        answer, reason = _expect_device(variant, machine, machine.runtime)
        return answer, reason + (_older_ep(variant, machine) if answer == "unknown" else "")
    # In the build the source ran beside what was compiled of it.
    of_model = tuple(candidate.package.components[candidate.component].variants.values())
    built = of_model if candidate.target == SOURCE else (variant,)
    doubt = _doubt_wheel(candidate.wheel) or _doubt_build(built, machine.runtime)
    doubt = doubt or _doubt_files(candidate)
    return ("unknown", doubt) if doubt else ("opens", f"{CPU_EP} on cpu")


def _reason_not_to_install(wheel: Wheel, machine: Machine) -> str:
    platforms = sorted({tag.platform for tag in wheel.tags})
    if "any" not in platforms and set(platforms).isdisjoint(machine.tags):
        return f"the wheel is for {listing(platforms)}"
    # A development version of Python has more behind its numbers.
    python = re.sub(r"[^\d.].*", "", machine.python)
    if not wheel.python.contains(python, prereleases=True):
        return f"the wheel needs Python {wheel.python}"
    return ""


def _expect_device(variant: Variant, machine: Machine, runtime: Runtime) -> _Result:
    """As `Opener.find_devices` and `_add_devices` of the loader, for any EP but the CPU's."""
    facts = variant.facts
    if variant.ep in runtime.eps:
        return "unknown", f"only opening it shows what {variant.ep} does"
    if not runtime.lists_devices:
        return "cannot", f"onnxruntime {runtime.version} is too old for {variant.ep}"
    if facts.plugin is None:
        without = f"onnxruntime {runtime.version} does not contain {variant.ep}"
        is_windows = machine.platform == "win32"
        return ("unknown", f"{without}, but Windows ML may") if is_windows else ("cannot", without)
    own = variant.ep, facts.plugin.module
    states = (state for state in machine.providers if (state.ep, state.module) == own)
    state = next(states, None) if facts.plugin.module else None
    if state is None:
        return "unknown", f"nothing is known of the library of {variant.ep} there"
    return _expect_on(state, variant, facts.settings.device or variant.device or "any")


def _expect_on(state: ProviderState, variant: Variant, device: Device) -> _Result:
    """The same for a kind of device of an EP whose library is known there."""
    ep, about = variant.ep, variant.about
    reason = " ".join((state.reason or f"{ep} finds no device").split()).rstrip(".")
    if not state.devices or not state.is_all:
        return "cannot" if state.is_all else "unknown", reason
    fitting = [offered for offered in state.devices if offered.kind == device]
    if device == "any" and not (about and about.needs_device):
        fitting = fitting or [*state.devices]
    if not fitting:
        kinds = listing(sorted({offered.kind for offered in state.devices}))
        return "cannot", f"{ep} finds no {'device' if device == 'any' else device}, only {kinds}"
    compatibility = variant.compatibility_string or ""
    if about and about.compares and compatibility in fitting[0].incompatible:
        return "cannot", f"{ep} there says that it cannot run {compatibility[:40]}"
    best = f"{fitting[0].kind} ({fitting[0].vendor or 'unknown'})"
    chip = describe_chip(ep, compatibility)
    fits = f"runs what is for {chip}" if chip else "fits"
    return "unknown", f"{ep} finds {best}; only opening it shows whether it {fits}"


def _doubt_wheel(wheel: Wheel) -> str:
    """Why pip may not install the wheel."""
    if "py3" in {tag.interpreter for tag in wheel.tags}:
        return ""
    return f"the wheel is for {listing(sorted(map(str, wheel.tags)))}"


def _older_ep(variant: Variant, machine: Machine) -> str:
    """As in the loader's ``check``: that the EP's package there is older than the one that compiled."""
    about, plugin = variant.about, variant.facts.plugin
    package = plugin.package if plugin else ""
    built, there = about and about.compiled_with.get(package), machine.packages.get(package)
    if not (built and there) or _numbers(there)[:2] >= _numbers(built)[:2]:
        return ""
    return f"; {package} {built} compiled it, and {there} is there"


def _doubt_build(built: Iterable[Variant], runtime: Runtime) -> str:
    """Why ONNX Runtime need not open what the build opened: of these variants, or beside them."""
    every = (variant.about for variant in built)
    ran = [about for about in every if about and about.validation.status is ValidationStatus.RAN]
    if not ran:
        return "the build did not open it"
    # A library that the project names is called by its import package.
    plugins = {about.plugin.package.replace("_", "-") for about in ran if about.plugin}
    for about in ran:
        for name, version in about.compiled_with.items():
            is_runtime = name.startswith("onnxruntime") and name not in plugins
            if is_runtime and _numbers(runtime.version) < _numbers(version):
                return f"the build had {name} {version}, and {runtime.version} is there"
    return ""


def _doubt_files(candidate: _Candidate) -> str:
    """Why the candidate's files need not be those that the build opened."""
    package, variant, wheel = candidate.package, candidate.variant, candidate.wheel.path
    if package.layout != "portable":
        return "the models of an editable install are elsewhere"
    if variant.about and variant.about.settings.optimization == "all":
        return 'optimization = "all" is for the processor of the build machine'
    own = f"{variant.variant_directory}/"
    # Variants may share a folder: the model of another one is not opened.
    others = {other.model_file for _, _, other in package.variants} - {variant.model_file}
    for name, recorded in package.files.items():
        if not name.startswith(own) or name.startswith(f"{own}{PREPARED}/") or name in others:
            continue
        if _sha256(wheel, str(PurePosixPath(candidate.folder, name))) != recorded.sha256:
            return f"{name} differs from its record in the manifest"
    return ""


@functools.cache
def _sha256(wheel: Path, name: str) -> str:
    """The hex sha256 of the file ``name`` in ``wheel``; empty if it cannot be read."""
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(name) as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    except DAMAGED_ARCHIVE:
        return ""
    return digest.hexdigest()


def opens_nothing(expectations: Iterable[Expectation]) -> list[str]:
    """The models of which no target opens: there ``load`` raises an error."""
    answers: dict[tuple[str, str], set[Prospect]] = {}
    for expectation in expectations:
        model = expectation.package, expectation.model
        answers.setdefault(model, set()).add(expectation.answer)
    return [model for (_, model), known in answers.items() if known == {"cannot"}]


def _numbers(version: str) -> list[int]:
    """As in ``_check.py``, which imports nothing of the package: the first three, to compare releases."""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
