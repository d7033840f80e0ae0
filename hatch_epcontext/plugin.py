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
    from hatch_epcontext.config import Config


# Not subscripted: the number of its type parameters has changed between releases of hatchling.
class EpcontextBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles the models in ``[tool.epcontext]`` and ships them in the wheel.

    The core is imported inside the methods: Hatch makes the class known to every build in an
    environment that has the package, and few of them use it.
    """

    PLUGIN_NAME = "epcontext"

    _staging: tempfile.TemporaryDirectory[str] | None = None
    _output: PurePosixPath | None = None

    def dependencies(self) -> list[str]:
        """What the selected targets are compiled with, for the front end to install."""
        from hatch_epcontext.plan import plan

        if self._skipped():
            return []
        with self._told():
            return list(plan(self._config()).requirements)

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build all jobs, and hand the files to Hatch."""
        from hatch_epcontext import tree, wheel
        from hatch_epcontext.build import Result, build, inspect
        from hatch_epcontext.cache import Cache, default_root
        from hatch_epcontext.plan import TOOLS, check_environment, plan

        if reason := self._skipped():
            self._info(f"skipped: {reason}")
            return
        with self._told():
            config = self._config()
            for override in config.overrides:
                self._info(f"{override} (from the environment)")
            editable = version == "editable"
            if editable and config.editable == "skip":
                self._info('nothing to do: editable = "skip"')
                return
            files = self._tree()
            output = wheel.output_folder(config, files)
            ours = self._leftover(output, files)
            wheel.check_collisions(output, files, ours)
            folder = tree.folder_of(output, files) if editable else None
            if folder is not None:
                tree.check(folder)
            self._staging = tempfile.TemporaryDirectory(
                prefix="hatch-epcontext-", ignore_cleanup_errors=True
            )
            # Resolved, for EPs compare paths, and a temporary folder is often behind a link.
            staging = Path(self._staging.name).resolve()
            planned = plan(config)
            root = (config.cache_dir or default_root()) if config.use_cache else None
            cache = Cache(root, staging / "cache", self._warning)
            if editable and config.editable == "source":
                check_environment((), TOOLS)
                result = Result(inspect(planned, staging), ())
            else:
                result = build(planned, staging, cache, self._info)
            if folder is not None:
                tree.write(result, folder)
                self._info(f"wrote {folder}")
                return
            bundle = wheel.bundle(result, config, staging)
            build_data["force_include"].update(bundle.entries(output))
            self._output = PurePosixPath(
                Path(self.build_config.get_distribution_path(str(Path(output)))).as_posix()
            )
            self._set_tag(config, build_data)

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Prove the finished wheel, which is removed if it is not right."""
        from hatch_epcontext import wheel
        from hatch_epcontext.errors import WheelError

        if self._output is None:
            return
        with self._told():
            try:
                count = wheel.prove(Path(artifact_path), self._output)
            except WheelError:
                Path(artifact_path).unlink(missing_ok=True)
                raise
            self._info(f"{count} files of the manifest are in the wheel, each with its sha256")
        self._clean_up()

    def clean(self, versions: list[str]) -> None:
        """Remove what an editable install wrote into the project, and nothing else."""
        from hatch_epcontext import tree, wheel

        if self.target_name != "wheel":
            return
        with self._told():
            files = self._tree()
            table = self.metadata.config.get("tool", {}).get("epcontext") or {}
            output = table.get("output") if isinstance(table, dict) else None
            if not isinstance(output, str):
                with contextlib.suppress(Exception):
                    output = str(wheel.output_folder(self._config(), files))
            if not output:
                return
            with contextlib.suppress(Exception):
                folder = tree.folder_of(PurePosixPath(output), files)
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

        table = self.metadata.config.get("tool", {}).get("epcontext")
        return load(Path(self.root), table, self.config)

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
        from hatch_epcontext.errors import EpcontextError

        try:
            yield
        except EpcontextError as error:
            self._clean_up()
            self.app.abort(f"epcontext: {error}", error.exit_code)
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
