"""The steps of one build of Hatch: what the hook does for an sdist, a wheel and an editable install."""

from __future__ import annotations

import contextlib
import itertools
import os
import weakref
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hatchling.builders.config import env_var_enabled
from hatchling.builders.constants import EDITABLES_REQUIREMENT, BuildEnvVars

from hatch_epcontext.config.build_hooks import hooks_of_project, read_hooks
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.settings import Config
from hatch_epcontext.jobs.requirements import INSPECTION, check_environment
from hatch_epcontext.project_build import Project, ProjectBuild, Terminal
from hatch_epcontext.system import writing
from hatch_epcontext.text import show_size

if TYPE_CHECKING:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    from hatch_epcontext.package.sdist import Sdist


class HatchBuild(ProjectBuild):
    """One build of Hatch, which called ``hook``."""

    def __init__(self, hook: BuildHookInterface) -> None:  # type: ignore[type-arg]
        app = hook.app
        # `hatch -v build` shows the workers' requests and logs, and `-vv` ONNX Runtime's verbose log.
        terminal = Terminal(app.display_info, app.display_warning, app.verbosity)
        super().__init__(Path(hook.root), terminal, read_hooks(hook.build_config))
        # Not the hook itself, which owns this object, and whose end removes the temporary files.
        self._metadata, self._target = hook.metadata, hook.target_name
        self._hook_table, self._selection = hook.config, hook.build_config
        self._finish: Callable[[Path], None] | None = None
        # Until the process ends: Hatch does not finish if another hook fails, or with `--hooks-only`.
        weakref.finalize(hook, self.staging.close)

    def requirements(self) -> list[str]:
        """What the front end has to install."""
        if self._target == "sdist":
            return []
        # Hatch asks before other hooks have made their files.
        return self.requirements_of(self.config(self._hook_table, pending=bool(self.hooks)))

    def fill_sdist(self, build_data: dict[str, Any]) -> None:
        """Add the files that the wheel is built from."""
        sdist = self._sdist()
        for path, file in sdist.additions(self._selection, build_data).items():
            self.terminal.info(f"added to the sdist: {path} ({show_size(file.stat().st_size)})")
            build_data["force_include"][str(file)] = path
        if line := sdist.not_contained():
            self.terminal.info(line)

    def fill_wheel(self, build_data: dict[str, Any]) -> None:
        """Compile all models, and add their package to the wheel, with its SBOM and its tag."""
        from hatch_epcontext.package import wheel
        from hatch_epcontext.package.bundle import bundle, modules
        from hatch_epcontext.package.dependencies import check_app, too_new_files

        config = self._overridden()
        project = self._project()
        check_app(config.targets, project.dependencies)
        packed = wheel.packed_files(self._selection, build_data)
        selected = wheel.selected_files(self._selection)
        output = self._output_folder(config, selected, packed)
        staging = self.temp_dir()
        result = self.compile(config, project, staging)
        package = bundle(result, staging, modules(self._hooked_name(output), config.models))
        for message in (
            *wheel.repeated_models(result, packed, selected, config.root),
            *too_new_files(package.folder, package.files, project.dependencies),
        ):
            self.terminal.warn(message)
        build_data["force_include"].update(package.entries(output))
        if config.wheel.sbom:
            sbom = self.write_sbom(result, package, project, staging)
            build_data["sbom_files"].append(str(sbom))
        self._set_tag(wheel.tag(config), build_data)
        self._finish = lambda path: self.verify(path, self._in_wheel(output), package, result)

    def install_editable(self) -> None:
        """Make the package of an editable install, which `finish` writes into the project."""
        from hatch_epcontext.package.bundle import bundle, modules
        from hatch_epcontext.package.folder import project_folder, publish, refuse_others
        from hatch_epcontext.package.wheel import selected_files

        config = self._overridden()
        if config.editable == "skip":
            self.terminal.info('nothing to do: editable = "skip"')
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
        staging = self.temp_dir()
        result = (
            self.compile(config, self._project(), staging)
            if compiles
            else self.read(config, staging)
        )
        shipped = modules(self._hooked_name(output), config.models)
        package = bundle(result, staging, shipped, folder)

        def write(_: Path) -> None:
            with writing("the package of the editable install", folder, str(folder)):
                publish(package, folder, edited=True)
            self.terminal.info(f"wrote {folder}")

        self._finish = write
        if env_var_enabled(BuildEnvVars.HOOKS_ONLY):
            # Here Hatch calls no hook again.
            self.finish(folder)

    def finish(self, path: Path) -> None:
        """Verify the wheel at ``path``, or write the package of an editable install."""
        if self._finish is not None:
            self._finish(path)
        self.close()

    def close(self) -> None:
        """Remove the temporary files."""
        self._finish = None
        super().close()

    def _project(self) -> Project:
        core = self._metadata.core
        dependencies = (
            *core.dependencies,
            *itertools.chain.from_iterable(core.optional_dependencies.values()),
        )
        return Project(
            core.name,
            self._metadata.version,
            core.license_expression or None,
            dependencies,
            "pyinstaller40" in core.entry_points,
        )

    def _overridden(self) -> Config:
        config = self.config(self._hook_table)
        self.show_overrides(config)
        return config

    def _sdist(self) -> Sdist:
        from hatch_epcontext.package.sdist import Sdist

        # A wheel for all targets may be built from the sdist.
        wheels = (f"{PREFIX}TARGETS", f"{PREFIX}FROM_CACHE")
        environ = {name: text for name, text in os.environ.items() if name not in wheels}
        config = self.config(self._hook_table, pending=True, environ=environ)
        return Sdist(config, self.hooks, hooks_of_project(self.root))

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

        return import_name(self._in_wheel(output)) if self._project().freezes else None

    def _set_tag(self, tag: str | None, build_data: dict[str, Any]) -> None:
        if tag is None:
            return
        other = build_data.get("tag") or ("inferred" if build_data.get("infer_tag") else None)
        if other not in (None, tag):
            self.terminal.warn(
                f"another build hook set the wheel's tag ({other}); {tag} is not used"
            )
            return
        build_data["tag"] = tag
        build_data["pure_python"] = tag.endswith("-any")
