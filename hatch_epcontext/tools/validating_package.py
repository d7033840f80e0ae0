"""Validates a model package of ours: its manifest, its files, and the outputs of its variants."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_epcontext.config.settings import CompileSettings, Config, Target
from hatch_epcontext.errors import (
    BuildError,
    ConfigError,
    EpcontextError,
    InspectionError,
    Key,
    Kind,
    Problem,
)
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import INSPECTION, check_environment
from hatch_epcontext.package.manifest import FILE, ModelPackage, Variant
from hatch_epcontext.package.reader import OUTPUT_OPTIONS, PATH_OPTIONS, damaged_files
from hatch_epcontext.providers import PROVIDERS, Provider, secrets_in
from hatch_epcontext.shipped import CPU_EP, OPTION_FILE, OPTION_FILES, SOURCE
from hatch_epcontext.text import listing, show, suggestion
from hatch_epcontext.tools.configure import MODEL_TABLES, configure, for_model, nested
from hatch_epcontext.tools.inspecting import inspect, inspect_model, verify_model
from hatch_epcontext.tools.validating import (
    REQUIRED,
    check_chip,
    fixed_shapes,
    is_run,
    not_run,
    reason_not_run,
    run_moved,
)
from hatch_epcontext.worker.requests import InspectReply
from hatch_epcontext.worker.results import Context, Validation, ValidationStatus

_ELSEWHERE = re.compile(r"(?:^|[\"'])(?:[/\\]|[A-Za-z]:[/\\])|(?:^|[/\\])\.\.(?:[/\\]|$)")
"""What an absolute path and a parent folder have, alone or in JSON."""


@dataclass(frozen=True)
class ValidatedVariant:
    """A variant of a component. ``model``: the facts of its file, None if it cannot be read.

    ``validation`` is None if it failed; ``problems`` are why it failed or was not run.
    """

    component: str
    variant: str
    ep: str
    model: InspectReply | None = None
    validation: Validation | None = None
    problems: tuple[Problem, ...] = ()

    @property
    def name(self) -> str:
        """The component and the variant in a message: ``"digits -> x-elite"``."""
        return f"{self.component} -> {self.variant}"


@dataclass(frozen=True)
class ValidatedPackage:
    """The package at ``path``."""

    path: str
    variants: tuple[ValidatedVariant, ...]

    def check(self) -> None:
        """Raise BuildError if variants failed, or were not run."""
        if problems := [problem for variant in self.variants for problem in variant.problems]:
            raise BuildError(*problems)


def validate_package(
    path: Path,
    source: Path | None,
    components: Sequence[str],
    variants: Sequence[str],
    settings: Mapping[str, Any],
    make_workers: Callable[[float], Workers],
    done: Callable[[ValidatedVariant], None],
) -> ValidatedPackage:
    """Validate the model package in the folder ``path``: its ``components`` and ``variants``, or all of them.

    Each is opened and run in a process of its own, from a copy of its files in another folder, and
    compared with ``source``, or else with the package's own source model or a variant for the CPU.
    ``make_workers`` gets the timeout in seconds; ``done`` gets each variant when it is finished.

    Raises InspectionError with all errors of the manifest, or with all files that are damaged; ConfigError
    for names that the package does not have, and for settings that only a single context model takes; and
    RequirementError when ONNX Runtime is not installed.
    """
    settings = nested(REQUIRED, settings)
    _refuse_settings(settings)
    folder, package = _read(path)
    chosen = _choose(package, components, variants, has_source=source is not None)
    if damaged := list(damaged_files(folder, package)):
        raise InspectionError(*damaged)
    validator = _Validator(str(path), folder, package, source, settings, make_workers)
    if validator.is_run:
        check_environment((), INSPECTION)
    finished = []
    with validator.workers:
        for component, variant in chosen:
            finished.append(validator.validate(component, variant))
            done(finished[-1])
    return ValidatedPackage(str(path), tuple(finished))


def _refuse_settings(settings: Mapping[str, Any]) -> None:
    names = [name for name in settings if name not in ("validate", "build", *MODEL_TABLES)]
    if names:
        message = "is for a single context model: the variants of a model package have their own."
        keys = (Key() / name for name in names)
        raise ConfigError(*(Problem.at(key, Kind.NOT_APPLICABLE, message) for key in keys))


def _read(path: Path) -> tuple[Path, ModelPackage]:
    """The folder of the package in ``path``, and its manifest."""
    packages = inspect(path).packages
    folder = "." if "." in packages else next(iter(packages))
    kind, message, hint = Kind.INVALID_PACKAGE, "has no variants.", None
    if folder != "." and len(packages) > 1:
        kind, message = Kind.INVALID_PATH, f"has several model packages: {listing(packages)}."
        hint = "Name the folder of one of them."
    elif any(component.variants for component in packages[folder].components.values()):
        return path / folder, packages[folder]
    raise InspectionError(Problem(kind, str(path), message, hint))


def _choose(
    package: ModelPackage, components: Sequence[str], variants: Sequence[str], *, has_source: bool
) -> list[tuple[str, str]]:
    """The names of each chosen component and variant.

    Raises ConfigError for unknown ones, and for several models if they have a source, which is that of one.
    """
    # The components of a model's shapes have its name too.
    models = {name: value.about.model for name, value in package.components.items()}
    chosen = [
        name for name, model in models.items() if not components or {name, model} & set(components)
    ]
    problems = []
    for flag, kind, names, known in (
        ("--component", Kind.UNKNOWN_MODEL, components, dict.fromkeys([*models, *models.values()])),
        ("--variant", Kind.UNKNOWN_TARGET, variants, _variants(package, chosen or models)),
    ):
        for name in [name for name in names if name not in known]:
            message = f"the package has no {show(name)}."
            problems.append(Problem(kind, flag, message, suggestion(name, known)))
    several = sorted({models[name] for name in chosen})
    if has_source and len(several) > 1:
        message = f"is the source of one model, and these are several: {listing(several)}."
        hint = "Choose one with --component."
        problems.append(Problem(Kind.CONFLICTING_KEYS, "--source", message, hint))
    if problems:
        raise ConfigError(*problems)
    return [
        (name, variant)
        for name in chosen
        for variant in package.components[name].variants
        if not variants or variant in variants
    ]


def _variants(package: ModelPackage, components: Iterable[str]) -> list[str]:
    return [variant for name in components for variant in package.components[name].variants]


class _Validator:
    def __init__(
        self,
        location: str,
        folder: Path,
        package: ModelPackage,
        source: Path | None,
        settings: Mapping[str, Any],
        make_workers: Callable[[float], Workers],
    ) -> None:
        self._location, self._folder = location, folder
        self._components = package.components
        self._source = source
        self._settings = settings
        config = self._configure(next(iter(self._components)))
        mode = config.models[0].validate.mode
        self.is_run, self._is_required = is_run(mode), mode == "require"
        self.workers = make_workers(config.build.timeout)

    def validate(self, component: str, name: str) -> ValidatedVariant:
        """Validate the variant ``name``; all that is wrong with it is in the result."""
        variant = self._components[component].variants[name]
        result = ValidatedVariant(component, name, variant.ep)
        location = f"{self._location}: {result.name}"
        validation: Validation | None = Validation(ValidationStatus.STRUCTURE)
        try:
            file = self._folder / variant.model_file
            model = inspect_model(file, self.workers)
            result = replace(result, model=model)
            verify_model(file, model)
            target = _target(variant, name, file, model)
            if self.is_run:
                validation = self._run(component, target, file, model, location)
                if self._is_required and validation.status is not ValidationStatus.RAN:
                    reason = f"it was run on the CPU only: {validation.reason}"
                    result = replace(result, problems=not_run(reason, location).problems)
        except EpcontextError as error:
            why = reason_not_run(error)
            validation = Validation(ValidationStatus.STRUCTURE, reason=why) if why else None
            if self._is_required or validation is None:
                # The key of a problem is one that no user wrote.
                problems = (
                    replace(problem, key=None, location=location)
                    if problem.key or not problem.location
                    else problem
                    for problem in error.problems
                )
                result = replace(result, problems=tuple(problems))
        return replace(result, validation=validation)

    def _configure(self, component: str) -> Config:
        """The configuration with what the user's settings say of ``component``."""
        own = for_model(component, self._components, self._settings)
        # Any file will do for the path: the model itself is not read here.
        return configure({"model": self._folder / FILE}, "cpu", own)

    def _run(
        self, component: str, target: Target, file: Path, opened: InspectReply, location: str
    ) -> Validation:
        """Open and run a variant from a moved copy; raises EpcontextError if it fails."""
        variant = self._components[component].variants[target.name]
        if variant.about is not None and variant.about.needs_device:
            reason = f"only the device itself can open it, and no simulator of {variant.ep}"
            raise not_run(reason, location)
        (model,) = self._configure(component).models
        reference = self._reference(component, target.name)
        about = self._components[component].about
        names = {tensor.name for tensor in opened.inputs}
        shapes = fixed_shapes(tensor for tensor in about.inputs if tensor.name in names)
        to_run = replace(
            model,
            name=component,
            path=(reference or file).absolute(),
            targets=(),
            static_shapes=True,
            shapes={**shapes, **fixed_shapes(opened.inputs), **model.shapes},
        )
        return run_moved(
            file,
            opened,
            to_run,
            target,
            model.tolerance_for(target) if reference else None,
            self.workers,
            location,
            compare=reference is not None,
            folder=self._folder / variant.variant_directory,
            sharing=self._sharing(component, target.name),
        )

    def _reference(self, component: str, variant: str) -> Path | None:
        """The model to compare a variant with: the user's, the package's own source, or a CPU variant.

        None if there is no other one than the variant itself.
        """
        if variant == SOURCE or self._source is not None:
            return None if variant == SOURCE else self._source
        variants = self._components[component].variants
        on_cpu = (name for name, other in variants.items() if other.ep == CPU_EP)
        name = SOURCE if SOURCE in variants else next(on_cpu, variant)
        return self._folder / variants[name].model_file if name != variant else None

    def _sharing(self, component: str, variant: str) -> tuple[Context, ...]:
        """The contexts of the other members of the variant's weight-sharing group."""
        about = self._components[component].variants[variant].about
        members = about.sharing.members if about and about.sharing else ()
        return tuple(
            Context(member, PurePosixPath(other.model_file).name, (), ())
            for member in members
            if member != component and member in self._components
            if (other := self._components[member].variants.get(variant))
        )


def _target(found: Variant, name: str, file: Path, model: InspectReply) -> Target:
    """What the variant ``found`` is opened for.

    Raises InspectionError when its manifest and its file disagree, and BuildError when nothing is known
    of its EP, or when it needs a secret or names files elsewhere.
    """
    about, ort = found.about, found.ort
    # The source is for the CPU.
    settings = about.settings if about else CompileSettings(provider="cpu", ep=CPU_EP, device="cpu")
    if settings.provider not in PROVIDERS:
        raise not_run(f"{settings.provider} is not a known provider")
    settings = replace(
        settings, session_options={**settings.session_options, **ort.session_options}
    )
    load_options = {**ort.provider_options, **(about.load_options if about else {})}
    target = Target(name, settings, about.plugin if about else None, load_options)
    _check_contexts(found, target.provider, file, model)
    options = {**settings.session_options, **settings.provider_options, **load_options}
    secrets = (*(about.secrets if about else ()), *secrets_in(options))
    if reason := next(_reasons_not_to_open(target, secrets), None):
        raise not_run(reason)
    check_chip(file, model, target.provider, settings)
    shipped = str(file.parent / OPTION_FILES)
    load_options = {
        name: value.replace(OPTION_FILE, shipped) for name, value in load_options.items()
    }
    return replace(target, load_options=load_options)


def _reasons_not_to_open(target: Target, secrets: Sequence[str]) -> Iterator[str]:
    """What is missing, and what an app may do but a package of somebody else may not: names files elsewhere,
    or read the environment of who validates it.
    """
    settings, plugin, ep = target.settings, target.plugin, target.settings.ep
    if plugin and plugin.path:
        yield f"it names a library elsewhere: {plugin.path}"
    if target.provider.needs_library and not (plugin and plugin.module):
        yield f"no package contains the library of {ep}"
    if places := sorted(PATH_OPTIONS & settings.session_options.keys()):
        yield f"its session option {places[0]} names files elsewhere"
    if secrets:
        yield f"its option {secrets[0]} is a secret, or names a file elsewhere, and only an app gives that"
    provider_options = {**settings.provider_options, **target.load_options}
    for name, value in (*provider_options.items(), *settings.session_options.items()):
        if name in OUTPUT_OPTIONS or _ELSEWHERE.search(value):
            yield f"its option {name} names a file elsewhere: {value!r}"


def _check_contexts(found: Variant, provider: Provider, file: Path, model: InspectReply) -> None:
    """Raise InspectionError if the model's contexts are not those that the manifest names."""
    message, ep = "", found.ep
    written, named = model.compatibility.get(ep), found.compatibility_string
    sources = dict.fromkeys(context.source for context in model.contexts)
    # The manifest may name another EP than the settings in it.
    if others := [name for name in sources if ep != provider.ep or not provider.reads(name)]:
        message = f"has contexts of {listing(map(repr, others))}, and the manifest says {ep}."
    elif written and named and written != named:
        message = (
            f"has the compatibility string {written}, and the manifest says {named}:\n"
            "it was compiled for something else."
        )
    if message:
        raise InspectionError(Problem(Kind.WRONG_PROVIDER, str(file), message))
