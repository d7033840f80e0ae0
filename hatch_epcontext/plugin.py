"""The build hook: Hatch's calls become calls of the core, and typed errors become one message."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hatchling.builders.config import env_var_enabled
from hatchling.builders.constants import EDITABLES_REQUIREMENT, BuildEnvVars
from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from hatch_epcontext.config.build_hooks import BuildHooks
    from hatch_epcontext.config.settings import Config
    from hatch_epcontext.jobs.artifact import Result, Source
    from hatch_epcontext.jobs.cache.cache import Cache
    from hatch_epcontext.jobs.processes.process import Workers
    from hatch_epcontext.package.bundle import Bundle
    from hatch_epcontext.package.manifest import ModelPackage
    from hatch_epcontext.package.sdist import Sdist


# Not subscripted: the number of its type parameters differs between releases of hatchling.
class EpcontextBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the models in ``[tool.epcontext]`` and ships them in the wheel; an sdist gets their sources.

    The methods import the core: Hatch loads the class in every build in an environment with the package, and
    few of these builds use it.
    """

    PLUGIN_NAME = "epcontext"

    _staging: contextlib.ExitStack | None = None
    _wheel: tuple[Config, PurePosixPath, Bundle, tuple[Source, ...]] | None = None
    _editable: tuple[Bundle, Path] | None = None

    def dependencies(self) -> list[str]:
        """The build requirements of the selected targets, for the front end to install."""
        from hatch_epcontext.jobs.plan import plan
        from hatch_epcontext.jobs.requirements import (
            cache_requirements,
            download_requirements,
        )

        if self._reason_to_skip():
            return []
        with self._errors_as_message():
            hooks = self._hooks()
            if self.target_name == "sdist":
                return list(download_requirements(self._sdist().downloaded))
            # Hatch calls this before other hooks have made their files.
            config = self._config(hooks, pending=bool(hooks))
            needed = (
                plan(config).requirements,
                cache_requirements(config.build),
                () if config.only_from_cache else download_requirements(config.models),
            )
            return list(itertools.chain.from_iterable(needed))

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build all jobs, and pass the files to Hatch; an editable install gets them in the project.

        ``version``: Hatch's name of the kind of wheel, ``"standard"`` or ``"editable"``.
        """
        if reason := self._reason_to_skip():
            self._info(f"skipped: {reason}")
            return
        from hatch_epcontext.jobs.termination import terminated_as_error

        with terminated_as_error(), self._errors_as_message():
            if self.target_name == "sdist":
                self._fill_sdist(build_data)
                return
            config = self._config(self._hooks())
            for override in config.overrides:
                self._info(f"{override} (from the environment)")
            if version == "editable":
                self._install_editable(config)
            else:
                self._fill_wheel(config, build_data)

    def _fill_sdist(self, build_data: dict[str, Any]) -> None:
        from hatch_epcontext.jobs.downloads import download_models
        from hatch_epcontext.text import show_size

        sdist = self._sdist()
        if models := sdist.downloaded:
            download_models(models, sdist.config, self._info)
        for path, file in sdist.additions(self.build_config, build_data).items():
            self._info(f"added to the sdist: {path} ({show_size(file.stat().st_size)})")
            build_data["force_include"][str(file)] = path
        if line := sdist.not_contained():
            self._info(line)

    def _sdist(self) -> Sdist:
        from hatch_epcontext.config.build_hooks import hooks_of_project
        from hatch_epcontext.config.environ import PREFIX
        from hatch_epcontext.package.sdist import Sdist

        # A wheel for all targets may be built from the sdist.
        chosen = (f"{PREFIX}TARGETS", f"{PREFIX}FROM_CACHE")
        environ = {name: text for name, text in os.environ.items() if name not in chosen}
        hooks = self._hooks()
        config = self._config(hooks, pending=True, environ=environ)
        return Sdist(config, hooks, hooks_of_project(Path(self.root)))

    def _fill_wheel(self, config: Config, build_data: dict[str, Any]) -> None:
        from hatch_epcontext.package.bundle import bundle, modules
        from hatch_epcontext.package.dependencies import check_app, too_new_files
        from hatch_epcontext.package.wheel import packed_files, repeated_models, selected_files

        core = self.metadata.core
        needed = [
            *core.dependencies,
            *itertools.chain.from_iterable(core.optional_dependencies.values()),
        ]
        check_app(config.targets, needed)
        packed = packed_files(self.build_config, build_data)
        # An sdist may contain models from elsewhere, which are no files of the app.
        places = [
            config.root / model.download.place_in_sdist for model in config.models if model.download
        ]
        of_sdist = {path for path, file in packed.items() if any(map(file.is_relative_to, places))}
        for path in map(str, map(Path, of_sdist)):
            # With only-include = ["."] Hatch's own paths begin with that.
            self.build_config.build_reserved_paths |= {path, f"{os.curdir}{os.sep}{path}"}
        files = {path: file for path, file in packed.items() if path not in of_sdist}
        selected = selected_files(self.build_config)
        output = self._output_folder(config, selected, files)
        staging = self._make_staging()
        result = self._build(config, staging)
        package = bundle(result, staging, modules(self._hooked_name(output), config.models))
        for message in (
            *repeated_models(result, files, selected, config.root),
            *too_new_files(package.folder, package.files, needed),
        ):
            self._warning(message)
        build_data["force_include"].update(package.entries(output))
        if config.wheel.sbom:
            build_data["sbom_files"].append(str(self._write_sbom(result, package.package, staging)))
        self._wheel = config, output, package, result.sources
        self._set_tag(config, build_data)

    def _write_sbom(self, result: Result, package: ModelPackage, staging: Path) -> Path:
        from hatch_epcontext.config.pyproject import PyprojectNames
        from hatch_epcontext.package import sbom

        core = self.metadata.core
        for message in sbom.unlicensed(result.sources, PyprojectNames(Path(self.root))):
            self._warning(message)
        project = core.name, self.metadata.version, core.license_expression or None
        return sbom.write(result.sources, package, project, staging)

    def _install_editable(self, config: Config) -> None:
        from hatch_epcontext.jobs.artifact import Result
        from hatch_epcontext.jobs.cut_models import cut_models
        from hatch_epcontext.jobs.requirements import INSPECTION, check_environment
        from hatch_epcontext.jobs.run import download_sources, open_cache
        from hatch_epcontext.jobs.sources import read_sources
        from hatch_epcontext.package.bundle import bundle, modules
        from hatch_epcontext.package.folder import project_folder, refuse_others
        from hatch_epcontext.package.wheel import selected_files

        if config.editable == "skip":
            self._info('nothing to do: editable = "skip"')
            return
        # Hatch imports it only after this hook has run.
        needed = () if self.build_config.dev_mode_dirs else (EDITABLES_REQUIREMENT,)
        check_environment((), needed)
        files = selected_files(self.build_config)
        output = self._output_folder(config, files, files)
        folder = project_folder(output, files)
        refuse_others(folder, edited=True)
        staging = self._make_staging()
        compiled = config.editable == "compile"
        if not compiled:
            check_environment((), () if config.only_from_cache else INSPECTION)
        workers = self._workers(config)
        download_sources(config, workers, ships_all=True)
        if compiled:
            result = self._build(config, staging)
        else:
            cache = open_cache(config, self._warning)
            config = cut_models(config, cache, workers, staging)
            result = Result(read_sources(config, cache, workers, staging / "check"), ())
        shipped = modules(self._hooked_name(output), config.models)
        self._editable = bundle(result, staging, shipped, folder), folder
        if env_var_enabled(BuildEnvVars.HOOKS_ONLY):
            # Here Hatch does not call `finalize`.
            self._write_editable(*self._editable)
            self._clean_up()

    def _write_editable(self, package: Bundle, folder: Path) -> None:
        from hatch_epcontext.package.folder import publish
        from hatch_epcontext.system import writing

        with writing("the package of the editable install", folder, str(folder)):
            publish(package, folder, edited=True)
        self._info(f"wrote {folder}")

    def _build(self, config: Config, staging: Path) -> Result:
        """Run all jobs of ``config``: `jobs.run` starts them, and `jobs.job` tries the recipes of each.

        A failed job ends no other one, unless ``fail-fast`` is set; at the end all problems are raised.
        """
        from hatch_epcontext.jobs.plan import plan
        from hatch_epcontext.jobs.run import IncompleteError, build, open_cache
        from hatch_epcontext.system import check_file

        if config.report is not None:
            check_file(config.report)
        cache = open_cache(config, self._warning)
        workers = self._workers(config)

        def print_finished(line: str) -> None:
            self._info(line)
            workers.pulse.mark_reported()

        try:
            result = build(plan(config), staging, cache, print_finished, workers, self._warning)
        except IncompleteError as error:
            self._report(error.result, config, cache)
            raise
        self._report(result, config, cache)
        return result

    def _workers(self, config: Config) -> Workers:
        from hatch_epcontext.jobs.processes.process import Workers

        # `hatch -v build` shows the workers' requests and logs, and `-vv` ONNX Runtime's verbose log.
        verbosity, settings = self.app.verbosity, config.build
        log = self._info if verbosity > 0 else None
        return Workers(settings.timeout, log, verbosity > 1, settings.memory_limit, self._info)

    def _report(self, result: Result, config: Config, cache: Cache) -> None:
        from hatch_epcontext.jobs.report import make_report
        from hatch_epcontext.serialize import to_json

        report, name = make_report(result), self.metadata.name
        if path := cache.store_report(f"{name}-{self.metadata.version}", to_json(report)):
            self._info(f"report: {path}")
        if config.report is not None:
            from hatch_epcontext.jobs import html_report

            html_report.write(report, f"{name} {self.metadata.version}", config.report)
            self._info(f"report: {config.report}")

    def _make_staging(self) -> Path:
        from hatch_epcontext.files import temp_dir

        # Kept until `finalize`, because Hatch packs its files after `initialize`; or until the process ends,
        # because Hatch runs no `finalize` if another hook fails, or with `--hooks-only`.
        self._staging = contextlib.ExitStack()
        weakref.finalize(self, self._staging.close)
        return self._staging.enter_context(temp_dir())

    def _output_folder(
        self, config: Config, selected: dict[str, Path], packed: dict[str, Path]
    ) -> PurePosixPath:
        from hatch_epcontext.package import wheel
        from hatch_epcontext.package.folder import owned_paths

        output = wheel.output_folder(config.output, selected)
        loader = selected.get(str(output / "__init__.py"))
        # The files of an earlier editable install in the project, which the wheel must not contain.
        earlier = owned_paths(output, loader.parent) if loader else frozenset()
        # Hatch leaves out reserved paths; it reserves the paths of this build's files itself.
        self.build_config.build_reserved_paths.update(str(Path(path)) for path in earlier)
        wheel.check_collisions(output, packed, earlier)
        return output

    def _place_in_wheel(self, output: PurePosixPath) -> PurePosixPath:
        # Hatch's rules for paths may move it. They raise ValueError for a project with only models.
        moved = str(Path(output))
        with contextlib.suppress(ValueError):
            moved = self.build_config.get_distribution_path(moved)
        return PurePosixPath(Path(moved).as_posix())

    def _hooked_name(self, output: PurePosixPath) -> str | None:
        """The name of the models' package, if the project names hooks for PyInstaller."""
        from hatch_epcontext.package.bundle import import_name

        is_frozen = "pyinstaller40" in self.metadata.core.entry_points
        return import_name(self._place_in_wheel(output)) if is_frozen else None

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Verify the finished wheel; an invalid one is removed. An editable install gets its files.

        These are written only now, so that a failed install leaves nothing in the project.
        """
        with self._errors_as_message():
            if self._editable is not None:
                self._write_editable(*self._editable)
            elif self._wheel is not None:
                self._verify(Path(artifact_path), *self._wheel)
        self._clean_up()

    def _verify(
        self,
        path: Path,
        config: Config,
        output: PurePosixPath,
        package: Bundle,
        sources: tuple[Source, ...],
    ) -> None:
        """Remove the wheel at ``path``, and raise, if it is invalid or has outdated models."""
        from hatch_epcontext.errors import ModelError, WheelError
        from hatch_epcontext.files import remove
        from hatch_epcontext.jobs.sources import check_unchanged
        from hatch_epcontext.package import wheel

        hooks = self._hooks()
        try:
            wheel.verify(path, self._place_in_wheel(output), package.files)
            warning = wheel.check_size(path, config.wheel.max_size)
            if hooks.after:
                # A hook that ran after this one may have changed a model.
                check_unchanged(sources, hooks.right_order())
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
            self._warning(warning)

    def clean(self, versions: list[str]) -> None:
        """Remove what an editable install wrote into the project, and nothing else."""
        from hatch_epcontext.config.pyproject import tool_table
        from hatch_epcontext.errors import ConfigError
        from hatch_epcontext.package import wheel
        from hatch_epcontext.package.folder import project_folder, remove
        from hatch_epcontext.text import listing

        if self.target_name != "wheel":
            return
        with self._errors_as_message():
            # Cleaning also works with an invalid configuration.
            table = tool_table(Path(self.root))
            output = table.get("output") if isinstance(table, dict) else None
            configured = PurePosixPath(output) if isinstance(output, str) else None
            files = wheel.selected_files(self.build_config)
            try:
                folder = project_folder(wheel.output_folder(configured, files), files)
            except ConfigError:
                return
            if others := remove(folder):
                self._warning(f"kept {folder}: {listing(others)} were added or changed there")

    def _reason_to_skip(self) -> str | None:
        """The reason why the hook does nothing in this build, if there is one."""
        from hatch_epcontext.config.environ import PREFIX, read_environment
        from hatch_epcontext.errors import collect

        if self.target_name not in ("wheel", "sdist"):
            return f"the target is {self.target_name}, and only wheels and sdists contain models"
        environment, _ = collect(read_environment(os.environ))
        return f"{PREFIX}SKIP is set" if environment.skip else None

    def _config(
        self, hooks: BuildHooks, *, pending: bool = False, environ: Mapping[str, str] = os.environ
    ) -> Config:
        from hatch_epcontext.config.load import load
        from hatch_epcontext.config.pyproject import tool_table

        root = Path(self.root)
        table = tool_table(root)
        return load(root, table, self.config, environ, hooks=hooks, pending=pending)

    def _hooks(self) -> BuildHooks:
        from hatch_epcontext.config.build_hooks import read_hooks

        return read_hooks(self.build_config)

    def _set_tag(self, config: Config, build_data: dict[str, Any]) -> None:
        from hatch_epcontext.package import wheel

        tag = wheel.tag(config)
        if tag is None:
            return
        other = build_data.get("tag") or ("inferred" if build_data.get("infer_tag") else None)
        if other not in (None, tag):
            self._warning(f"another build hook set the wheel's tag ({other}); {tag} is not used")
            return
        build_data["tag"] = tag
        build_data["pure_python"] = tag.endswith("-any")

    @contextlib.contextmanager
    def _errors_as_message(self) -> Iterator[None]:
        """Turn expected errors into one message without a traceback."""
        from hatch_epcontext.config.pyproject import PyprojectNames
        from hatch_epcontext.errors import EpcontextError, MissingError
        from hatch_epcontext.system import os_error_text
        from hatch_epcontext.text import printable

        try:
            yield
        except BaseException as error:
            self._clean_up()
            if isinstance(error, EpcontextError):
                text = error.text(PyprojectNames(Path(self.root)))
                if isinstance(error, MissingError):
                    text += "\n    Or build with isolation: then the front end installs them."
                self.app.abort(f"epcontext: {text}", error.exit_code)
            if isinstance(error, OSError):
                self.app.abort(f"epcontext: {printable(os_error_text(error), lines=True)}")
            if isinstance(error, KeyboardInterrupt):
                self.app.abort("epcontext: the build was interrupted.", 130)
            raise

    def _clean_up(self) -> None:
        if self._staging is not None:
            self._staging.close()
            self._staging = None

    def _info(self, message: str) -> None:
        from hatch_epcontext.text import printable

        self.app.display_info(f"epcontext: {printable(message)}")

    def _warning(self, message: str) -> None:
        from hatch_epcontext.text import printable

        self.app.display_warning(f"epcontext: {printable(message, lines=True)}")
