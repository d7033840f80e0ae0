"""The steps of one build of Hatch: what the hook does for an sdist, a wheel and an editable install."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hatchling.builders.config import env_var_enabled
from hatchling.builders.constants import EDITABLES_REQUIREMENT, BuildEnvVars

from hatch_epcontext.config.build_hooks import hooks_of_project, read_hooks
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import PyprojectNames, tool_table
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ConfigError, ModelError, WheelError
from hatch_epcontext.files import remove, temp_dir
from hatch_epcontext.jobs.artifact import Result, Source
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.requirements import (
    INSPECTION,
    cache_requirements,
    check_environment,
)
from hatch_epcontext.serialize import to_json
from hatch_epcontext.system import check_file, writing
from hatch_epcontext.text import listing, printable, show_size

if TYPE_CHECKING:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    from hatch_epcontext.jobs.cache.store import Cache
    from hatch_epcontext.jobs.processes.process import Workers
    from hatch_epcontext.package.bundle import Bundle
    from hatch_epcontext.package.sdist import Sdist


class HatchBuild:
    """One build of Hatch, which called ``hook``.

    The methods import what only some builds need. They raise EpcontextError and OSError.
    """

    def __init__(self, hook: BuildHookInterface) -> None:  # type: ignore[type-arg]
        # Not the hook itself, which owns this object, and whose end removes the temporary files.
        self._app, self._metadata, self._target = hook.app, hook.metadata, hook.target_name
        self._root, self._settings, self._selection = (
            Path(hook.root),
            hook.config,
            hook.build_config,
        )
        self._hooks = read_hooks(hook.build_config)
        self._finish: Callable[[Path], None] | None = None
        # Kept until `finish`, because Hatch packs its files after `fill_wheel`; or until the process ends,
        # because Hatch does not finish if another hook fails, or with `--hooks-only`.
        self._staging = contextlib.ExitStack()
        weakref.finalize(hook, self._staging.close)

    def requirements(self) -> list[str]:
        """What the front end has to install: the compilers of the selected targets, clients for URLs."""
        if self._target == "sdist":
            return []
        # Hatch asks before other hooks have made their files.
        config = self._config(pending=bool(self._hooks))
        return [*plan(config).requirements, *cache_requirements(config.build)]

    def fill_sdist(self, build_data: dict[str, Any]) -> None:
        """Add the files that the wheel is built from."""
        sdist = self._sdist()
        for path, file in sdist.additions(self._selection, build_data).items():
            self._info(f"added to the sdist: {path} ({show_size(file.stat().st_size)})")
            build_data["force_include"][str(file)] = path
        if line := sdist.not_contained():
            self._info(line)

    def fill_wheel(self, build_data: dict[str, Any]) -> None:
        """Compile all models, and add their package to the wheel, with its SBOM and its tag."""
        from hatch_epcontext.package import wheel
        from hatch_epcontext.package.bundle import bundle, modules
        from hatch_epcontext.package.dependencies import check_app, too_new_files

        config = self._overridden()
        core = self._metadata.core
        needed = [
            *core.dependencies,
            *itertools.chain.from_iterable(core.optional_dependencies.values()),
        ]
        check_app(config.targets, needed)
        packed = wheel.packed_files(self._selection, build_data)
        selected = wheel.selected_files(self._selection)
        output = self._output_folder(config, selected, packed)
        staging = self._staging.enter_context(temp_dir())
        result = self._compile(config, staging)
        package = bundle(result, staging, modules(self._hooked_name(output), config.models))
        for message in (
            *wheel.repeated_models(result, packed, selected, config.root),
            *too_new_files(package.folder, package.files, needed),
        ):
            self._warn(message)
        build_data["force_include"].update(package.entries(output))
        if config.wheel.sbom:
            sbom = self._write_sbom(result, package, staging)
            build_data["sbom_files"].append(str(sbom))
        self._set_tag(wheel.tag(config), build_data)
        self._finish = lambda path: self._verify(path, config, output, package, result.sources)

    def install_editable(self) -> None:
        """Make the package of an editable install, which `finish` writes into the project."""
        from hatch_epcontext.package.bundle import bundle, modules
        from hatch_epcontext.package.folder import project_folder, publish, refuse_others
        from hatch_epcontext.package.wheel import selected_files

        config = self._overridden()
        if config.editable == "skip":
            self._info('nothing to do: editable = "skip"')
            return
        compiles = config.editable == "compile"
        # Hatch imports it only after this hook has run.
        needed = () if self._selection.dev_mode_dirs else (EDITABLES_REQUIREMENT,)
        reader = () if compiles or config.only_from_cache else INSPECTION
        check_environment((), (*needed, *reader))
        files = selected_files(self._selection)
        output = self._output_folder(config, files, files)
        folder = project_folder(output, files)
        refuse_others(folder, edited=True)
        staging = self._staging.enter_context(temp_dir())
        result = self._compile(config, staging) if compiles else self._read(config, staging)
        shipped = modules(self._hooked_name(output), config.models)
        package = bundle(result, staging, shipped, folder)

        def write(_: Path) -> None:
            with writing("the package of the editable install", folder, str(folder)):
                publish(package, folder, edited=True)
            self._info(f"wrote {folder}")

        self._finish = write
        if env_var_enabled(BuildEnvVars.HOOKS_ONLY):
            # Here Hatch calls no hook again.
            self.finish(folder)

    def finish(self, path: Path) -> None:
        """Verify the wheel at ``path``, or write the package of an editable install."""
        if self._finish is not None:
            self._finish(path)
        self.close()

    def clean(self) -> None:
        """Remove what an editable install wrote into the project, unless it was changed there."""
        from hatch_epcontext.package import wheel
        from hatch_epcontext.package.folder import project_folder, remove

        # Cleaning also works with an invalid configuration.
        table = tool_table(self._root)
        output = table.get("output") if isinstance(table, dict) else None
        configured = PurePosixPath(output) if isinstance(output, str) else None
        files = wheel.selected_files(self._selection)
        try:
            folder = project_folder(wheel.output_folder(configured, files), files)
        except ConfigError:
            return
        if others := remove(folder):
            self._warn(f"kept {folder}: {listing(others)} were added or changed there")

    def close(self) -> None:
        """Remove the temporary files."""
        self._finish = None
        self._staging.close()

    def _config(self, *, pending: bool = False, environ: Mapping[str, str] = os.environ) -> Config:
        table = tool_table(self._root)
        return load(self._root, table, self._settings, environ, hooks=self._hooks, pending=pending)

    def _overridden(self) -> Config:
        config = self._config()
        for override in config.overrides:
            self._info(f"{override} (from the environment)")
        return config

    def _sdist(self) -> Sdist:
        from hatch_epcontext.package.sdist import Sdist

        # A wheel for all targets may be built from the sdist.
        wheels = (f"{PREFIX}TARGETS", f"{PREFIX}FROM_CACHE")
        environ = {name: text for name, text in os.environ.items() if name not in wheels}
        config = self._config(pending=True, environ=environ)
        return Sdist(config, self._hooks, hooks_of_project(self._root))

    def _output_folder(
        self, config: Config, selected: dict[str, Path], packed: dict[str, Path]
    ) -> PurePosixPath:
        from hatch_epcontext.package import wheel

        output = wheel.output_folder(config.output, selected)
        loader = selected.get(str(output / "__init__.py"))
        earlier = frozenset[str]()
        if loader is not None:
            from hatch_epcontext.package.folder import owned_paths

            # The files of an earlier editable install in the project, which the wheel must not contain.
            earlier = owned_paths(output, loader.parent)
        # Hatch leaves out reserved paths; it reserves the paths of this build's files itself.
        self._selection.build_reserved_paths.update(str(Path(path)) for path in earlier)
        wheel.check_collisions(output, packed, earlier)
        return output

    def _in_wheel(self, output: PurePosixPath) -> PurePosixPath:
        # Hatch's rules for paths may move it. They raise ValueError for a project with only models.
        moved = str(Path(output))
        with contextlib.suppress(ValueError):
            moved = self._selection.get_distribution_path(moved)
        return PurePosixPath(Path(moved).as_posix())

    def _hooked_name(self, output: PurePosixPath) -> str | None:
        """The name of the models' package, if the project names hooks for PyInstaller."""
        from hatch_epcontext.package.bundle import import_name

        is_frozen = "pyinstaller40" in self._metadata.core.entry_points
        return import_name(self._in_wheel(output)) if is_frozen else None

    def _compile(self, config: Config, staging: Path) -> Result:
        """Run all jobs of ``config``: `jobs.run` starts them, and `jobs.job` tries the recipes of each.

        A failed job ends no other one; at the end all problems are raised.
        """
        from hatch_epcontext.jobs.run import IncompleteError, build, open_cache

        if config.report is not None:
            check_file(config.report)
        cache, workers = open_cache(config, self._warn), self._workers(config)

        def print_finished(line: str) -> None:
            self._info(line)
            workers.pulse.mark_reported()

        try:
            result = build(plan(config), staging, cache, print_finished, workers, self._warn)
        except IncompleteError as error:
            self._report(error.result, config, cache)
            raise
        self._report(result, config, cache)
        return result

    def _read(self, config: Config, staging: Path) -> Result:
        """The sources of an editable install that compiles nothing."""
        from hatch_epcontext.jobs.run import download_sources, open_cache
        from hatch_epcontext.jobs.sources import cut_models, read_sources

        cache, workers = open_cache(config, self._warn), self._workers(config)
        download_sources(config, workers)
        config = cut_models(config, cache, workers, staging)
        return Result(read_sources(config, cache, workers, staging / "check"), ())

    def _workers(self, config: Config) -> Workers:
        from hatch_epcontext.jobs.processes.process import Workers

        # `hatch -v build` shows the workers' requests and logs, and `-vv` ONNX Runtime's verbose log.
        verbosity, settings = self._app.verbosity, config.build
        log = self._info if verbosity > 0 else None
        return Workers(settings.timeout, log, verbosity > 1, settings.memory_limit, self._info)

    def _report(self, result: Result, config: Config, cache: Cache) -> None:
        from hatch_epcontext.jobs.report import make_report

        report = make_report(result)
        name, version = self._metadata.name, self._metadata.version
        if path := cache.store_report(f"{name}-{version}", to_json(report)):
            self._info(f"report: {path}")
        if config.report is not None:
            # Imported here: few builds write one.
            from hatch_epcontext.jobs.report_file import write_report

            write_report(report, f"{name} {version}", config.report)
            self._info(f"report: {config.report}")

    def _write_sbom(self, result: Result, package: Bundle, staging: Path) -> Path:
        from hatch_epcontext.package import sbom

        core = self._metadata.core
        project = core.name, self._metadata.version, core.license_expression or None
        for message in sbom.unlicensed(result.sources, PyprojectNames(self._root)):
            self._warn(message)
        return sbom.write(result.sources, package.package, project, staging)

    def _set_tag(self, tag: str | None, build_data: dict[str, Any]) -> None:
        if tag is None:
            return
        other = build_data.get("tag") or ("inferred" if build_data.get("infer_tag") else None)
        if other not in (None, tag):
            self._warn(f"another build hook set the wheel's tag ({other}); {tag} is not used")
            return
        build_data["tag"] = tag
        build_data["pure_python"] = tag.endswith("-any")

    def _verify(
        self,
        path: Path,
        config: Config,
        output: PurePosixPath,
        package: Bundle,
        sources: tuple[Source, ...],
    ) -> None:
        """Remove the wheel at ``path``, and raise, if it is invalid or has outdated models."""
        from hatch_epcontext.jobs.sources import check_unchanged
        from hatch_epcontext.package import wheel

        try:
            wheel.verify(path, self._in_wheel(output), package.files)
            warning = wheel.check_size(path)
            if self._hooks.after:
                # A hook that ran after this one may have changed a model.
                check_unchanged(sources, self._hooks.right_order())
        except (ModelError, WheelError) as error:
            remove(path)
            if isinstance(error, WheelError):
                package.check_sources(package.folder)
            raise
        # The manifest has no record of itself.
        self._info(
            f"verified the wheel: {len(package.files) - 1} files as in the manifest, by RECORD"
        )
        if warning:
            self._warn(warning)

    def _info(self, message: str) -> None:
        self._app.display_info(f"epcontext: {printable(message)}")

    def _warn(self, message: str) -> None:
        self._app.display_warning(f"epcontext: {printable(message, lines=True)}")
