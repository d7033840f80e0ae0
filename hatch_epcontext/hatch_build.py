"""One build of Hatch: what the hook does for an sdist, a wheel and an editable install."""

from __future__ import annotations

import contextlib
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hatchling.builders.config import env_var_enabled
from hatchling.builders.constants import EDITABLES_REQUIREMENT, BuildEnvVars

from hatch_epcontext.config.build_hooks import hooks_of_project, read_hooks
from hatch_epcontext.config.settings import Config
from hatch_epcontext.files import remove, replacing
from hatch_epcontext.jobs.requirements import INSPECTION, check_environment
from hatch_epcontext.project_build import ProjectBuild, Terminal
from hatch_epcontext.system import writing

if TYPE_CHECKING:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface

    from hatch_epcontext.jobs.artifact import Result
    from hatch_epcontext.package.bundle import Bundle
    from hatch_epcontext.package.wheel import ProjectMetadata


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
        config = self.config(self._hook_table, pending=bool(self.hooks))
        return self.requirements_of(config, editable=_asks_for_editable())

    def fill_sdist(self, build_data: dict[str, Any]) -> None:
        """Add the files that the wheel is built from."""
        from hatch_epcontext.package.wheel import packed_files

        config = self.sdist_config(self._hook_table)
        packed, hooks = packed_files(self._selection, build_data), hooks_of_project(self.root)
        additions = self.sdist_additions(config, self._selection, packed, hooks)
        build_data["force_include"].update({str(file): path for path, file in additions.items()})
        self._finish = self.check_size

    def fill_wheel(self, build_data: dict[str, Any]) -> None:
        """Compile all models, and add their package to the wheel, with its SBOM and its tag."""
        from hatch_epcontext.package import wheel
        from hatch_epcontext.package.repack import INCOMPLETE, is_faster

        config = self._overridden()
        project = self._project()
        wheel.check_app(config.targets, project.dependencies)
        packed = wheel.packed_files(self._selection, build_data)
        wheel.check_names(packed)
        output = self._output_folder(config, wheel.selected_files(self._selection), packed)
        packed_in = self._in_wheel(output)
        result, package = self.compile_package(config, project, packed_in, packed)
        if config.wheel.sbom:
            build_data["sbom_files"].append(str(self.write_sbom(result, package, project)))
        self._set_tag(wheel.tag(config.of_wheel()), build_data)
        self._finish = lambda path: self.verify(path, packed_in, package, result)
        entries, incomplete = package.entries(output), PurePosixPath(INCOMPLETE)
        # Hatch's rules for paths may move it to where installers do not look.
        if not is_faster(entries.values()) or self._in_wheel(incomplete) != incomplete:
            build_data["force_include"].update({str(file): path for path, file in entries.items()})
            return
        note = self.temp_dir() / incomplete.name
        note.write_text("The build was stopped before it added the models.\n", encoding="utf-8")
        build_data["force_include"][str(note)] = INCOMPLETE
        self._finish = lambda path: self._add_models(path, packed_in, package, result)

    def _add_models(
        self, wheel: Path, output: PurePosixPath, package: Bundle, result: Result
    ) -> None:
        """Replace ``wheel`` by one that has the files of ``package`` in ``output``; remove it by an error."""
        from hatch_epcontext.package.repack import FinishedWheel

        try:
            with writing("the wheel", wheel.parent), replacing(wheel.parent) as new:
                finished = FinishedWheel(wheel, self.backend_name)
                written = finished.write(new, package.entries(output))
                self.verify(written, output, package, result)
        except BaseException:
            remove(wheel)
            raise

    def install_editable(self) -> None:
        """Make the package of an editable install, which `finish` writes into the project."""
        from hatch_epcontext.package.folder import project_folder
        from hatch_epcontext.package.wheel import selected_files

        config = self._overridden()
        if config.editable == "skip":
            self.terminal.info('nothing to do: editable = "skip"')
            return
        compiles = config.editable == "compile"
        # Hatch imports it only after this hook has run.
        needed = () if self._selection.dev_mode_dirs else (EDITABLES_REQUIREMENT,)
        reader = () if compiles or config.environment.only_from_cache else INSPECTION
        check_environment((), (*needed, *reader))
        files = selected_files(self._selection)
        output = self._output_folder(config, files, files)
        folder = project_folder(output, files)
        packed_in = self._in_wheel(output)
        write = self.editable_package(config, self._project(), folder, packed_in)
        self._finish = lambda _: write()
        if env_var_enabled(BuildEnvVars.HOOKS_ONLY):
            # Here Hatch calls no hook again.
            self.finish(folder)

    def finish(self, path: Path) -> None:
        """Check the wheel or the sdist at ``path``, or write the package of an editable install."""
        if self._finish is not None:
            self._finish(path)
        self.close()

    def close(self) -> None:
        """Remove the temporary files."""
        self._finish = None
        super().close()

    def _project(self) -> ProjectMetadata:
        from hatch_epcontext.package.wheel import ProjectMetadata

        metadata = self._selection.core_metadata_constructor(self._metadata)
        freezes = "pyinstaller40" in self._metadata.core.entry_points
        return ProjectMetadata.read(metadata, freezes=freezes)

    def _overridden(self) -> Config:
        config = self.config(self._hook_table)
        self.show_overrides(config)
        return config

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


def _asks_for_editable() -> bool:
    """Whether a front end asks for the requirements of an editable install.

    Hatch does not say so, but hatchling's hook of PEP 660 is among the callers.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "get_requires_for_build_editable":
        frame = frame.f_back
    return frame is not None
