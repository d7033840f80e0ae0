"""The build hook: Hatch's calls become calls of the core, and typed errors become one message."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

if TYPE_CHECKING:
    from hatch_epcontext.cache import Cache
    from hatch_epcontext.config import Config
    from hatch_epcontext.result import Result


# Not subscripted: the number of its type parameters has changed between releases of hatchling.
class EpcontextBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the models in ``[tool.epcontext]`` and ships them in the wheel.

    The core is imported inside the methods: Hatch makes the class known to every build in an
    environment that has the package, and few of them use it.
    """

    PLUGIN_NAME = "epcontext"

    _staging: tempfile.TemporaryDirectory[str] | None = None
    _output: PurePosixPath | None = None
    _max_size: int | None = None

    def dependencies(self) -> list[str]:
        """What the selected targets are compiled with, for the front end to install."""
        from hatch_epcontext.plan import plan

        if self._skipped():
            return []
        with self._told():
            return list(plan(self._config()).requirements)

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build all jobs, and hand the files to Hatch; an editable install gets them in the project."""
        if reason := self._skipped():
            self._info(f"skipped: {reason}")
            return
        with self._told():
            config = self._config()
            for override in config.overrides:
                self._info(f"{override} (from the environment)")
            if version == "editable":
                self._install_editable(config)
            else:
                self._fill_wheel(config, build_data)

    def _fill_wheel(self, config: Config, build_data: dict[str, Any]) -> None:
        from hatch_epcontext import wheel

        output = self._output_folder(config, self._tree())
        staging = self._stage()
        bundle = wheel.bundle(self._build(config, staging), config, staging)
        build_data["force_include"].update(bundle.entries(output))
        self._output, self._max_size = output, config.max_size
        self._set_tag(config, build_data)

    def _install_editable(self, config: Config) -> None:
        from hatch_epcontext import tree
        from hatch_epcontext.build import inspect
        from hatch_epcontext.plan import plan
        from hatch_epcontext.requirements import INSPECTION, check_environment
        from hatch_epcontext.result import Result

        if config.editable == "skip":
            self._info('nothing to do: editable = "skip"')
            return
        files = self._tree()
        folder = tree.folder_of(self._output_folder(config, files), files)
        tree.check(folder)
        staging = self._stage()
        if config.editable == "compile":
            result = self._build(config, staging)
        else:
            check_environment((), INSPECTION)
            result = Result(inspect(plan(config), staging), ())
        tree.write(result, folder)
        self._info(f"wrote {folder}")
        self._clean_up()

    def _build(self, config: Config, staging: Path) -> Result:
        from hatch_epcontext.build import IncompleteError, build, cache_of
        from hatch_epcontext.plan import plan
        from hatch_epcontext.process import Workers

        cache = cache_of(config, staging, self._warning)
        # What workers do is for those who ask for more, as with `hatch -v build`.
        asked = self.app.verbosity
        workers = Workers(config.timeout, self._info if asked > 0 else None, verbose=asked > 1)
        try:
            result = build(plan(config), staging, cache, self._info, workers)
        except IncompleteError as error:
            self._report(error.result, config, cache)
            raise
        self._report(result, config, cache)
        return result

    def _report(self, result: Result, config: Config, cache: Cache) -> None:
        from hatch_epcontext import page
        from hatch_epcontext.report import make
        from hatch_epcontext.structure import to_json

        report, name = make(result), self.metadata.name
        if kept := cache.keep_report(f"{name}-{self.metadata.version}", to_json(report)):
            self._info(f"report: {kept}")
        if config.report is not None:
            page.write(report, f"{name} {self.metadata.version}", config.report)
            self._info(f"report: {config.report}")

    def _stage(self) -> Path:
        self._staging = tempfile.TemporaryDirectory(
            prefix="hatch-epcontext-", ignore_cleanup_errors=True
        )
        # Resolved, for a temporary folder is often behind a link, and EPs compare paths.
        return Path(self._staging.name).resolve()

    def _output_folder(self, config: Config, files: dict[str, Path]) -> PurePosixPath:
        from hatch_epcontext import wheel

        output = wheel.output_folder(config.output, files)
        wheel.check_collisions(output, files, self._leftover(output, files))
        return output

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Prove the finished wheel, which is removed if it is not right."""
        from hatch_epcontext import wheel
        from hatch_epcontext.errors import WheelError

        if self._output is None:
            return
        with self._told():
            # Where Hatch's own rules for paths have put it.
            output = Path(self.build_config.get_distribution_path(str(Path(self._output))))
            try:
                count = wheel.prove(Path(artifact_path), PurePosixPath(output.as_posix()))
                large = wheel.check_size(Path(artifact_path), self._max_size)
            except WheelError:
                Path(artifact_path).unlink(missing_ok=True)
                raise
            self._info(f"{count} files of the manifest are in the wheel, each with its sha256")
            if large:
                self._warning(large)
        self._clean_up()

    def clean(self, versions: list[str]) -> None:
        """Remove what an editable install wrote into the project, and nothing else."""
        from hatch_epcontext import tree, wheel
        from hatch_epcontext.errors import ConfigError
        from hatch_epcontext.pyproject import tool_table

        if self.target_name != "wheel":
            return
        with self._told():
            # A project can be cleaned whatever is wrong with the rest of its configuration.
            table = tool_table(Path(self.root))
            given = table.get("output") if isinstance(table, dict) else None
            configured = PurePosixPath(given) if isinstance(given, str) else None
            files = self._tree()
            try:
                folder = tree.folder_of(wheel.output_folder(configured, files), files)
            except ConfigError:
                return
            for kept in tree.remove(folder):
                self._warning(f"kept {kept}, which was changed after it was written")

    def _skipped(self) -> str:
        """Why there is nothing to do, or ""."""
        from hatch_epcontext.environment import PREFIX, read_environment

        if self.target_name != "wheel":
            return f"the target is {self.target_name}, and only wheels get models"
        if read_environment(os.environ)[0].skip:
            return f"{PREFIX}SKIP is set"
        return ""

    def _config(self) -> Config:
        from hatch_epcontext.config import load
        from hatch_epcontext.pyproject import tool_table

        root = Path(self.root)
        return load(root, tool_table(root), self.config)

    def _tree(self) -> dict[str, Path]:
        selected = []
        # A project with nothing to ship but models has no files to select, and Hatch raises.
        with contextlib.suppress(ValueError):
            selected = list(self.build_config.builder.recurse_selected_project_files())
        return {Path(each.distribution_path).as_posix(): Path(each.path) for each in selected}

    def _leftover(self, output: PurePosixPath, files: dict[str, Path]) -> frozenset[str]:
        """What an editable install has left in the project, which is kept out of the wheel."""
        from hatch_epcontext import tree

        here = files.get(str(output / "__init__.py"))
        if here is None:
            return frozenset()
        ours = tree.owned(output, here.parent)
        # Hatch passes over reserved paths; those of this build's own files become so by themselves.
        self.build_config.build_reserved_paths.update(str(Path(path)) for path in ours)
        return ours

    def _set_tag(self, config: Config, build_data: dict[str, Any]) -> None:
        from hatch_epcontext import wheel

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
    def _told(self) -> Iterator[None]:
        """Errors that can be foreseen, as one message and without a traceback."""
        from hatch_epcontext.errors import EpcontextError, MissingError

        try:
            yield
        except EpcontextError as error:
            self._clean_up()
            missing = isinstance(error, MissingError)
            hint = "\n    Or build with isolation, which installs it by itself." if missing else ""
            self.app.abort(f"epcontext: {error}{hint}", error.exit_code)
        except OSError as error:
            self._clean_up()
            self.app.abort(f"epcontext: {error}")

    def _clean_up(self) -> None:
        if self._staging is not None:
            self._staging.cleanup()
            self._staging = None

    def _info(self, message: str) -> None:
        self.app.display_info(f"epcontext: {message}")

    def _warning(self, message: str) -> None:
        self.app.display_warning(f"epcontext: {message}")
