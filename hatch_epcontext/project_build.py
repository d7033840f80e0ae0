"""The steps of a build that are the same for each build back end."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hatch_epcontext.config.build_hooks import BuildHooks
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import PyprojectNames, tool_table
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ModelError, WheelError
from hatch_epcontext.files import remove, temp_dir
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.requirements import cache_requirements
from hatch_epcontext.system import check_folder
from hatch_epcontext.text import printable

if TYPE_CHECKING:
    from hatch_epcontext.jobs.processes.process import Workers
    from hatch_epcontext.package.bundle import Bundle


@dataclass(frozen=True)
class Project:
    """What the build back end knows of the project.

    ``dependencies`` are all, also those of extras. ``freezes``: it names hooks for PyInstaller.
    """

    name: str
    version: str
    license: str | None = None
    dependencies: tuple[str, ...] = ()
    freezes: bool = False


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
        """The project's configuration, as `load` returns it."""
        table = tool_table(self.root)
        return load(self.root, table, hook_table or {}, environ, hooks=self.hooks, pending=pending)

    def requirements_of(self, config: Config) -> list[str]:
        """What the front end has to install: the compilers of the selected targets, clients for URLs."""
        return [*plan(config).requirements, *cache_requirements(config.build)]

    def show_overrides(self, config: Config) -> None:
        """Print the environment variables that count."""
        for override in config.overrides:
            self.terminal.info(f"{override} (from the environment)")

    def compile(self, config: Config, project: Project, staging: Path) -> Result:
        """Run all jobs of ``config``: `jobs.run` starts them, and `jobs.job` tries the recipes of each.

        A failed job ends no other one; at the end all problems are raised.
        """
        from hatch_epcontext.jobs.run import IncompleteError, build, open_cache

        if config.report is not None:
            check_folder(config.report.parent)
        cache, workers = open_cache(config, self.terminal.warn), self._workers(config)

        def print_finished(line: str) -> None:
            self.terminal.info(line)
            workers.pulse.mark_reported()

        try:
            result = build(
                plan(config), staging, cache, print_finished, workers, self.terminal.warn
            )
        except IncompleteError as error:
            self._report(error.result, config, project)
            raise
        self._report(result, config, project)
        return result

    def read(self, config: Config, staging: Path) -> Result:
        """The sources of an editable install that compiles nothing."""
        from hatch_epcontext.jobs.run import download_sources, open_cache
        from hatch_epcontext.jobs.sources import cut_models, read_sources

        cache, workers = open_cache(config, self.terminal.warn), self._workers(config)
        download_sources(config, workers)
        config = cut_models(config, cache, workers, staging)
        return Result(read_sources(config, cache, workers, staging / "check"), ())

    def write_sbom(self, result: Result, package: Bundle, project: Project, staging: Path) -> Path:
        """Write the SBOM of the models; warns of those without a license."""
        from hatch_epcontext.package import sbom

        for message in sbom.unlicensed(result.sources, PyprojectNames(self.root)):
            self.terminal.warn(message)
        about = project.name, project.version, project.license
        return sbom.write(result.sources, package.package, about, staging)

    def verify(self, wheel: Path, output: PurePosixPath, package: Bundle, result: Result) -> None:
        """Remove ``wheel``, and raise, if it is invalid or has outdated models.

        ``output``: the package's folder in it.
        """
        from hatch_epcontext.jobs.sources import check_unchanged
        from hatch_epcontext.package.wheel import check_size, verify

        try:
            verify(wheel, output, package.files)
            warning = check_size(wheel)
            if self.hooks.after:
                # A hook that ran after this one may have changed a model.
                check_unchanged(result.sources, self.hooks.advice() or "")
        except (ModelError, WheelError) as error:
            remove(wheel)
            if isinstance(error, WheelError):
                package.check_sources(package.folder)
            raise
        # The manifest has no record of itself.
        self.terminal.info(
            f"verified the wheel: {len(package.files) - 1} files as in the manifest, by RECORD"
        )
        if warning:
            self.terminal.warn(warning)

    def temp_dir(self) -> Path:
        """A folder that is there until `close`."""
        return self.staging.enter_context(temp_dir())

    def _workers(self, config: Config) -> Workers:
        from hatch_epcontext.jobs.processes.process import Workers

        verbosity, settings = self.terminal.verbosity, config.build
        info = self.terminal.info
        log = info if verbosity > 0 else None
        return Workers(settings.timeout, log, verbosity > 1, settings.memory_limit, info)

    def _report(self, result: Result, config: Config, project: Project) -> None:
        if config.report is not None:
            from hatch_epcontext.jobs.report import make_report
            from hatch_epcontext.jobs.report_file import write_report

            title = f"{project.name} {project.version}"
            write_report(make_report(result), title, config.report)
            self.terminal.info(f"report: {config.report}")
