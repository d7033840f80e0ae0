"""What is the same in a build of each build back end."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import gc
import os
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hatch_epcontext.config.build_hooks import BuildHooks
from hatch_epcontext.config.environ import PREFIX, source_date
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import PyprojectNames, tool_table
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import EpcontextError, MissingError, ModelError, WheelError
from hatch_epcontext.files import remove, temp_dir
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.requirements import INSPECTION, cache_requirements
from hatch_epcontext.system import system_error_text, writing
from hatch_epcontext.text import listing, printable, show_size

if TYPE_CHECKING:
    from hatch_epcontext.jobs.processes.process import Workers
    from hatch_epcontext.package.bundle import Bundle
    from hatch_epcontext.package.companions import Companion
    from hatch_epcontext.package.wheel import ProjectMetadata, Tree

# At its end Python looks for garbage among all that a build has imported: a tenth of a short one.
atexit.register(gc.freeze)


@dataclass(frozen=True)
class Terminal:
    """Where a build prints. ``verbosity``: 1 shows the workers' logs, 2 also ONNX Runtime's verbose log."""

    print_info: Callable[[str], None]
    print_warning: Callable[[str], None]
    verbosity: int = 0

    def info(self, message: str) -> None:
        """Print one line."""
        self.print_info(f"epcontext: {printable(message)}")

    def warn(self, message: str) -> None:
        """Print a warning, which can have several lines."""
        self.print_warning(f"epcontext: {printable(message, lines=True)}")


class ProjectBuild:
    """One build of the project in ``root``, whose other build hooks are ``hooks``.

    The methods import what only some builds need. They raise EpcontextError and OSError.
    """

    def __init__(self, root: Path, terminal: Terminal, hooks: BuildHooks | None = None) -> None:
        self.root, self.terminal, self.hooks = root, terminal, hooks or BuildHooks()
        # Kept until `close`: a back end packs the files later.
        self.staging = contextlib.ExitStack()

    @property
    def backend_name(self) -> str:
        """What packs the project's files."""
        return "hatchling"

    def close(self) -> None:
        """Remove the temporary files."""
        self.staging.close()

    def config(
        self,
        hook_table: Mapping[str, Any] | None = None,
        *,
        pending: bool = False,
        environ: Mapping[str, str] = os.environ,
    ) -> Config:
        """The project's configuration, as `load` returns it; raises ConfigError for an invalid time, too."""
        source_date()
        table = tool_table(self.root)
        return load(self.root, table, hook_table or {}, environ, hooks=self.hooks, pending=pending)

    def requirements_of(self, config: Config, *, editable: bool) -> list[str]:
        """What the front end has to install: the compilers of the selected targets, clients for URLs.

        An editable install that compiles nothing reads the models at most.
        """
        if editable and config.editable != "compile":
            reads = config.editable == "source" and not config.environment.only_from_cache
            return list(INSPECTION) if reads else []
        return [*plan(config.of_wheel()).requirements, *cache_requirements(config.build)]

    def show_overrides(self, config: Config) -> None:
        """Print the environment variables that count."""
        for override in config.environment.overrides:
            self.terminal.info(f"{override} (from the environment)")

    def sdist_config(self, hook_table: Mapping[str, Any] | None = None) -> Config:
        """The configuration for an sdist: a wheel for all targets may be built from it."""
        wheels = (f"{PREFIX}TARGETS", f"{PREFIX}FROM_CACHE")
        environ = {name: text for name, text in os.environ.items() if name not in wheels}
        return self.config(hook_table, pending=True, environ=environ)

    def sdist_additions(
        self, config: Config, builder_config: Any, packed: Tree, wheel_hooks: BuildHooks
    ) -> dict[str, Path]:
        """The files that the wheel is built from and that are not ``packed``, by their path in the sdist.

        ``builder_config``: hatchling's of sdists, which knows what git ignores.
        """
        from hatch_epcontext.package.sdist import additions

        files = additions(config, self.hooks, wheel_hooks, builder_config, packed)
        for path, file in files.items():
            self.terminal.info(f"added to the sdist: {path} ({show_size(file.stat().st_size)})")
        return files

    def check_size(self, archive: Path) -> None:
        """Warn of a wheel or an sdist that package indexes reject by default."""
        from hatch_epcontext.package.wheel import check_size

        if warning := check_size(archive):
            self.terminal.warn(warning)

    def compile(self, config: Config, project: ProjectMetadata, staging: Path) -> Result:
        """Run all jobs of ``config``: `jobs.run` starts them, and `jobs.job` tries the recipes of each.

        A failed job ends no other one; at the end all problems are raised.
        """
        from hatch_epcontext.jobs.run import build_with_report

        workers, show = self._workers(config), self.terminal
        about = project.name, project.version
        return build_with_report(plan(config), staging, show.info, workers, show.warn, *about)

    def read(self, config: Config, staging: Path) -> Result:
        """The sources of an editable install that compiles nothing."""
        from hatch_epcontext.jobs.run import download_sources, open_cache
        from hatch_epcontext.jobs.sources import cut_and_read

        cache, workers = open_cache(config, self.terminal.warn), self._workers(config)
        download_sources(config, workers)
        # A language model's folder serves all targets.
        models = (m for m in config.models if not m.is_stage)
        config = dataclasses.replace(config, models=tuple(models))
        return Result(cut_and_read(config, cache, workers, staging), ())

    def compile_package(
        self, config: Config, project: ProjectMetadata, output: PurePosixPath, packed: Tree
    ) -> tuple[Result, Bundle]:
        """Compile all models, and make the package for ``output`` in the wheel, beside what is ``packed``."""
        from hatch_epcontext.package import wheel
        from hatch_epcontext.package.bundle import bundle

        installing, own = self._companions(config, project, output), config.of_wheel()
        if installing:
            names = listing(config.companions)
            self.terminal.info(f"left to companion wheels (epcontext companions): {names}")
        if line := wheel.unused_platforms(own):
            self.terminal.info(line)
        if line := wheel.check_models(own):
            self.terminal.warn(line)
        about = project.dependencies, project.requires_python
        for line in wheel.loose_bounds(config.targets, *about):
            self.terminal.warn(line)
        staging = self.temp_dir()
        result = self.compile(own, project, staging)
        modules = _modules(config, project, output)
        package = bundle(result, staging, modules, None, installing)
        if warning := wheel.repeated_models(result, packed, self.backend_name, self.root):
            self.terminal.warn(warning)
        return result, package

    def editable_package(
        self, config: Config, project: ProjectMetadata, folder: Path, output: PurePosixPath
    ) -> Callable[[], None]:
        """Make the package of an editable install; returns what writes it into ``folder`` of the project.

        ``output``: the folder by which Python imports it.
        """
        from hatch_epcontext.package.bundle import bundle
        from hatch_epcontext.package.folder import publish, reject_others

        reject_others(folder, edited=True)
        staging, companions = self.temp_dir(), self._companions(config, project, output)
        if config.editable == "compile":
            result = self.compile(config.of_wheel(), project, staging)
        else:
            result = self.read(config, staging)
        package = bundle(result, staging, _modules(config, project, output), folder, companions)

        def write() -> None:
            with writing("the package of the editable install", folder, str(folder)):
                publish(package, result.sources, folder, edited=True)
            self.terminal.info(f"wrote {folder}")

        return write

    def _companions(
        self, config: Config, project: ProjectMetadata, output: PurePosixPath
    ) -> Mapping[str, str]:
        """The requirement that installs each companion, by its import package."""
        if not config.companions:
            return {}
        from hatch_epcontext.package.companions import pinned

        companions = pinned(config, project, output.parts[0])
        return {companion.module: companion.requirement for companion in companions}

    def write_companion(
        self, config: Config, project: ProjectMetadata, companion: Companion
    ) -> Path:
        """Compile what is in ``companion`` of ``project``; returns its wheel, which `close` removes."""
        from hatch_epcontext.package.bundle import bundle
        from hatch_epcontext.package.companions import write_wheel
        from hatch_epcontext.package.wheel import ProjectMetadata

        own, staging = config.of_wheel(companion.name), self.temp_dir()
        about = ProjectMetadata(companion.name, companion.version)
        result = self.compile(own, about, staging)
        module = staging / "__init__.py"
        module.write_text(f'"""Models of {project.name}."""\n', encoding="utf-8", newline="\n")
        package = bundle(result, staging, {module.name: module})
        sbom = self.write_sbom(result, package, about) if own.wheel.sbom else None
        with writing("the wheel of a companion", staging):
            wheel = write_wheel(
                companion, project.name, own, result.sources, package, sbom, staging
            )
        self.verify(wheel, PurePosixPath(companion.module), package, result)
        return wheel

    def write_sbom(self, result: Result, package: Bundle, project: ProjectMetadata) -> Path:
        """Write the SBOM of the models; warns of those without a license."""
        from hatch_epcontext.package import sbom

        for message in sbom.unlicensed(result.sources, PyprojectNames(self.root)):
            self.terminal.warn(message)
        about = project.name, project.version, project.license
        return sbom.write(result.sources, package.package, about, self.temp_dir())

    def verify(self, wheel: Path, output: PurePosixPath, package: Bundle, result: Result) -> None:
        """Remove ``wheel``, and raise, if it is invalid or has outdated models.

        ``output``: the package's folder in it.
        """
        from hatch_epcontext.jobs.sources import check_unchanged
        from hatch_epcontext.package.wheel import differences

        try:
            if self.hooks.after:
                # A hook that ran after this one may have changed a model.
                check_unchanged(result.sources, self.hooks.advice())
            WheelError.check(differences(wheel, output, package.files))
        except (ModelError, WheelError) as error:
            remove(wheel)
            if isinstance(error, WheelError):
                check_unchanged(result.sources)
            raise
        # The manifest has no record of itself.
        self.terminal.info(
            f"verified the wheel: {len(package.files) - 1} files as in the manifest, by RECORD"
        )
        self.check_size(wheel)

    def temp_dir(self) -> Path:
        """A folder that is there until `close`."""
        return self.staging.enter_context(temp_dir())

    def _workers(self, config: Config) -> Workers:
        from hatch_epcontext.jobs.processes.process import Workers

        verbosity, settings = self.terminal.verbosity, config.build
        info = self.terminal.info
        log = info if verbosity > 0 else None
        return Workers(settings.timeout, log, verbosity > 1, settings.memory_limit, info)


def _modules(config: Config, project: ProjectMetadata, output: PurePosixPath) -> Mapping[str, Path]:
    """The modules of the package in ``output``, by their path in it."""
    from hatch_epcontext.package.bundle import import_name, modules

    return modules(import_name(output) if project.freezes else None, config.models)


def message_of(error: BaseException, root: Path) -> tuple[str, int] | None:
    """The message and the exit code of an expected error of a build of the project in ``root``."""
    if isinstance(error, EpcontextError):
        text = error.text(PyprojectNames(root))
        if isinstance(error, MissingError):
            text += "\n    Or build with isolation: then the front end installs them."
        return f"epcontext: {text}", error.exit_code
    if reason := system_error_text(error):
        return f"epcontext: {printable(reason, lines=True)}", 1
    if isinstance(error, KeyboardInterrupt):
        return "epcontext: the build was interrupted.", 130
    return None
