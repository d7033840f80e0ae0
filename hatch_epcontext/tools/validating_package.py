"""Validates a model package of ours: its manifest, its files, and the outputs of its variants."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
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
    UnavailableError,
)
from hatch_epcontext.files import link_or_copy, temp_dir
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.requirements import INSPECTION, check_environment
from hatch_epcontext.jobs.validation import reason_not_to_run
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
    copy_named_files,
    fixed_shapes,
    is_run,
    reason_not_run,
    reason_not_to_open,
)
from hatch_epcontext.worker.requests import InspectReply, ValidateRequest
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
    model: InspectReply | None
    validation: Validation | None
    problems: tuple[Problem, ...] = ()

    @property
    def name(self) -> str:
        """The component and the variant in a message: ``"digits -> x-elite"``."""
        return f"{self.component} -> {self.variant}"


@dataclass(frozen=True)
class ValidatedPackage:
    """The package at ``path``. ``problems`` are those of files that belong to no variant."""

    path: str
    variants: tuple[ValidatedVariant, ...]
    problems: tuple[Problem, ...] = ()

    def check(self) -> None:
        """Raise BuildError if variants failed, or were not run."""
        problems = list(self.problems)
        for variant in self.variants:
            # A damaged source is a problem of all that are compared with it. Not in a dict: the settings
            # of a problem can have tables.
            problems += [problem for problem in variant.problems if problem not in problems]
        if problems:
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

    Raises InspectionError with all errors of the manifest; ConfigError for names that the
    package does not have, and for settings that only a single context model takes; and RequirementError
    when ONNX Runtime is not installed.
    """
    settings = nested(REQUIRED, settings)
    _refuse_settings(settings)
    folder, package = _read(path)
    if not any(component.variants for component in package.components.values()):
        raise InspectionError(Problem(Kind.INVALID_PACKAGE, str(path), "has no variants."))
    chosen = _chosen(package, components, variants, has_source=source is not None)
    validator = _Validator(str(path), folder, package, source, settings, make_workers)
    if validator.is_run:
        check_environment((), INSPECTION)
    finished = []
    with validator.workers:
        for component, variant in chosen:
            validated = validator.validate(component, variant)
            if not validator.is_required and validated.validation is not None:
                validated = replace(validated, problems=())
            done(validated)
            finished.append(validated)
    owners = [v for c in package.components.values() for v in c.variants.values()]
    unowned = (
        problem
        for name, problem in validator.damaged.items()
        if not any(_owns(variant, name) for variant in owners)
    )
    return ValidatedPackage(str(path), tuple(finished), tuple(unowned))


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
    if folder != "." and len(packages) > 1:
        message = f"has several model packages: {listing(packages)}."
        hint = "Name the folder of one of them."
        raise InspectionError(Problem(Kind.INVALID_PATH, str(path), message, hint))
    return path / folder, packages[folder]


def _owns(variant: Variant, name: str) -> bool:
    path = PurePosixPath(name)
    return name == variant.model_file or path.is_relative_to(variant.variant_directory)


def _chosen(
    package: ModelPackage, components: Sequence[str], variants: Sequence[str], *, has_source: bool
) -> list[tuple[str, str]]:
    """The names of each chosen component and variant.

    Raises ConfigError for unknown ones, and for several models if they have a source, which is that of one.
    """
    # The components of a model's shapes have its name too.
    models = {name: value.about.model for name, value in package.components.items()}
    known_variants = dict.fromkeys(v for c in package.components.values() for v in c.variants)
    known = dict.fromkeys((*models, *models.values()))
    problems = [
        Problem(kind, f"--{noun}", f"the package has no {noun} {show(n)}.", suggestion(n, names))
        for noun, kind, given, names in (
            ("component", Kind.UNKNOWN_MODEL, components, known),
            ("variant", Kind.UNKNOWN_TARGET, variants, known_variants),
        )
        for n in given
        if n not in names
    ]
    if problems:
        raise ConfigError(*problems)
    found = [
        (component, variant)
        for component, value in package.components.items()
        for variant in value.variants
        if not components or {component, models[component]} & set(components)
        if not variants or variant in variants
    ]
    if not found:
        message = "none of the chosen components has a variant of this name."
        raise ConfigError(Problem(Kind.UNKNOWN_TARGET, "--variant", message))
    several = sorted({models[component] for component, _ in found})
    if has_source and len(several) > 1:
        message = f"is the source of one model, and these are several: {listing(several)}."
        hint = "Choose one with --component."
        raise ConfigError(Problem(Kind.CONFLICTING_KEYS, "--source", message, hint))
    return found


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
        self.damaged = {
            Path(problem.location).relative_to(folder).as_posix(): problem
            for problem in damaged_files(folder, package)
        }
        self._source = source
        self._settings = settings
        config = self._configure(next(iter(self._components)))
        mode = config.models[0].validate.mode
        self.is_run, self.is_required = is_run(mode), mode == "require"
        self.workers = make_workers(config.build.timeout)

    def validate(self, component: str, variant: str) -> ValidatedVariant:
        """Validate one variant; all that is wrong with it is in the result."""
        found = self._components[component].variants[variant]
        result = ValidatedVariant(component, variant, found.ep, None, None)
        location = f"{self._location}: {result.name}"
        try:
            self._refuse_damaged(found)
            file = self._folder / found.model_file
            model = inspect_model(file, self.workers)
            result = replace(result, model=model)
            verify_model(file, model)
            target = _target(found, variant, file, model)
            if not self.is_run:
                return replace(result, validation=Validation(ValidationStatus.STRUCTURE))
            validation = self._run(component, target, file, model, location)
        except EpcontextError as error:
            # The key of a problem is one that no user wrote.
            problems = tuple(
                problem
                if problem.key is None and problem.location
                else replace(problem, key=None, location=location)
                for problem in error.problems
            )
            if (reason := reason_not_run(error)) is None:
                return replace(result, problems=problems)
            validation = Validation(ValidationStatus.STRUCTURE, reason=reason)
            if not self.is_run:
                return replace(result, validation=validation)
            # The log of a worker that only looked for a device says nothing more.
            problems = tuple(replace(problem, log=None) for problem in problems)
            return replace(result, validation=validation, problems=problems)
        if validation.status is not ValidationStatus.RAN:
            how = (
                "run on the CPU only"
                if validation.status is ValidationStatus.RAN_ON_CPU
                else "not run"
            )
            not_run = _not_run(f"it was {how}: {validation.reason}", location)
            result = replace(result, problems=not_run.problems)
        return replace(result, validation=validation)

    def _refuse_damaged(self, variant: Variant) -> None:
        damaged = [problem for file, problem in self.damaged.items() if _owns(variant, file)]
        if damaged:
            raise InspectionError(*damaged)

    def _configure(self, component: str) -> Config:
        """The configuration with what the user's settings say of ``component``."""
        own = for_model(component, self._components, self._settings)
        # Any file will do for the path: the model itself is not read here.
        return configure({"model": self._folder / FILE}, "cpu", own)

    def _run(
        self, component: str, target: Target, file: Path, opened: InspectReply, location: str
    ) -> Validation:
        """Open and run a variant from a moved copy; raises EpcontextError if it fails."""
        found = self._components[component].variants[target.name]
        reason = reason_not_to_run(target.provider, target.settings)
        reason = reason or reason_not_to_open(file, opened, target.provider)
        if found.about is not None and found.about.needs_device:
            reason = reason or f"only the device itself can open it, and no simulator of {found.ep}"
        if reason:
            raise _not_run(reason, location)
        (model,) = self._configure(component).models
        reference = self._reference(component, target.name)
        about = self._components[component].about
        names = {tensor.name for tensor in opened.inputs}
        shapes = fixed_shapes(tensor for tensor in about.inputs if tensor.name in names)
        to_run = replace(
            model,
            name=component,
            path=reference or file,
            targets=(),
            static_shapes=True,
            shapes={**shapes, **fixed_shapes(opened.inputs), **model.shapes},
        )
        with temp_dir() as staging:
            name = _copy(self._folder / found.variant_directory, file, opened, staging / "moved")
            context = Context(component, name, opened.inputs, opened.outputs)
            request = ValidateRequest(
                to_run,
                target,
                "context" if opened.contexts else "optimized",
                context,
                str(staging / "moved"),
                model.tolerance_for(target) if reference else None,
                self._sharing(target.name, found, context),
                has_source=reference is not None,
            )
            validation = self.workers.call(request, staging / "validate", location=location)
        if validation.differs:
            raise BuildError(*validation.problems).located(location)
        if reference is not None or validation.reason is not None:
            return validation
        is_reference = found.ep == CPU_EP
        reason = "it is the reference" if is_reference else "the package has no reference for it"
        return replace(validation, reason=reason)

    def _reference(self, component: str, variant: str) -> Path | None:
        """The model to compare a variant with: the user's, the package's own source, or a CPU variant.

        None if there is no other one than the variant itself. Raises InspectionError if it is damaged.
        """
        variants = self._components[component].variants
        if variant == SOURCE:
            return None
        if self._source is not None:
            return self._source.absolute()
        on_cpu = (name for name, other in variants.items() if other.ep == CPU_EP)
        name = SOURCE if SOURCE in variants else next(on_cpu, variant)
        if name == variant:
            return None
        self._refuse_damaged(variants[name])
        file = self._folder / variants[name].model_file
        return file.absolute()

    def _sharing(self, variant: str, found: Variant, context: Context) -> tuple[Context, ...]:
        """The contexts of the variant's weight-sharing group, with its own as the last."""
        if found.about is None or found.about.sharing is None:
            return ()
        others = (
            Context(member, PurePosixPath(its.model_file).name, (), ())
            for member in found.about.sharing.members
            if member != context.model and member in self._components
            if (its := self._components[member].variants.get(variant))
        )
        return (*others, context)


def _target(found: Variant, name: str, file: Path, model: InspectReply) -> Target:
    """What the variant ``found`` is opened for.

    Raises InspectionError when its manifest and its file disagree, and BuildError when nothing is known
    of its EP, or when it needs a secret or names files elsewhere.
    """
    about, options = found.about, found.ort
    # The source is for the CPU.
    settings = about.settings if about else CompileSettings(provider="cpu", ep=CPU_EP, device="cpu")
    if settings.provider not in PROVIDERS:
        raise _not_run(f"{settings.provider} is not a known provider")
    settings = replace(
        settings, session_options={**settings.session_options, **options.session_options}
    )
    load_options = {**options.provider_options, **(about.load_options if about else {})}
    target = Target(name, settings, about.plugin if about else None, load_options)
    _check_contexts(found, target.provider, file, model)
    secrets = (*(about.secrets if about else ()), *secrets_in(load_options))
    if reason := next(_reasons_not_to_open(target, secrets), None):
        raise _not_run(reason)
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


def _not_run(reason: str, location: str = "") -> BuildError:
    hint = (
        "Validate it on a machine that can run it, or add --set validate=auto; --set validate=structure runs "
        "nothing."
    )
    return UnavailableError(Problem(Kind.NOT_RUN, location, f"{reason}.", hint))


def _copy(folder: Path, file: Path, model: InspectReply, moved: Path) -> str:
    """Put the files of a variant in ``folder`` into ``moved``; returns the model file's path there."""
    if not model.contexts:
        copy_named_files(file, model, moved)
        return file.name
    # All of them: an EP may look for files that no node names.
    # What a link names, because its place is another one.
    shutil.copytree(folder, moved, copy_function=lambda a, b: link_or_copy(Path(a).resolve(), b))
    return file.relative_to(folder).as_posix()
