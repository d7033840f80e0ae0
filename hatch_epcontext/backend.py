"""A PEP 517 build back end: another one builds, and the models are added to its wheels and sdists.

``build-backend = "hatch_epcontext.backend"`` names this module, and ``[tool.epcontext.build]`` the other one,
the *wrapped* back end. Its optional hooks are here only if it has them. With hatchling the build hook does
the same.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_epcontext.config.environ import reason_to_skip
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ConfigError, Key, Kind, Problem, Setting
from hatch_epcontext.files import temp_dir
from hatch_epcontext.package.wheel import OUTPUT
from hatch_epcontext.project_build import ProjectBuild, Terminal, message_of
from hatch_epcontext.system import terminated_as_error, writing

_KEY = Key() / "build" / "backend"

_Settings = Mapping[str, Any] | None


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    """What the wrapped back end and the targets need."""
    return _requirements("get_requires_for_build_wheel", config_settings, editable=False)


def build_wheel(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel with the compiled models; returns its name."""
    with _reported() as build:
        config = build.begin()
    with temp_dir() as folder:
        name = _backend().build_wheel(str(folder), config_settings, metadata_directory)
        with _reported() as build:
            return build.add_to_wheel(config, folder / name, Path(wheel_directory))


def build_sdist(sdist_directory: str, config_settings: _Settings = None) -> str:
    """Build an sdist with the source models; returns its name."""
    with temp_dir() as folder:
        name = _backend().build_sdist(str(folder), config_settings)
        with _reported() as build:
            return build.add_to_sdist(folder / name, Path(sdist_directory))


def _build_editable(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    name: str = _backend().build_editable(wheel_directory, config_settings, metadata_directory)
    with _reported() as build:
        build.install_editable(Path(wheel_directory, name))
    return name


def _get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    return _requirements("get_requires_for_build_editable", config_settings, editable=True)


def __getattr__(name: str) -> Any:
    """An optional hook of the wrapped back end; raises AttributeError for one that it does not have."""
    if not name.startswith(
        ("get_requires_for_build_", "prepare_metadata_for_build_", "build_editable")
    ):
        raise AttributeError(name)
    hook = getattr(_backend(), name)
    own = {
        "build_editable": _build_editable,
        "get_requires_for_build_editable": _get_requires_for_build_editable,
    }
    return own.get(name, hook)


def _requirements(hook: str, config_settings: _Settings, *, editable: bool) -> list[str]:
    with _reported() as build:
        config = build.begin()
        own = build.requirements_of(config, editable=editable) if config else []
    return [*getattr(_backend(), hook, lambda _: [])(config_settings), *own]


@functools.cache
def _backend() -> Any:
    """The wrapped back end."""
    with _reported() as build:
        return build.wrapped()


@contextlib.contextmanager
def _reported() -> Iterator[_Build]:
    """The build of the project in the current folder; expected errors end it with one message."""
    build = _Build(Path.cwd(), Terminal(print, functools.partial(print, file=sys.stderr)))
    try:
        with terminated_as_error():
            yield build
    except BaseException as error:
        if message := message_of(error, build.root):
            build.terminal.print_warning(message[0])
            raise SystemExit(message[1]) from None
        raise
    finally:
        build.close()


class _Build(ProjectBuild):
    """What is added to the results of the wrapped back end."""

    def wrapped(self) -> Any:
        """The module, or the object in it, that ``build.backend`` names."""
        settings = self.config(pending=True).build
        name = settings.backend
        if name is None:
            message = "is required: the build back end that hatch_epcontext.backend calls."
            raise ConfigError(
                Problem.at(_KEY, Kind.MISSING_KEY, message, 'For example "setuptools.build_meta".')
            )
        if name.partition(".")[0] == "hatchling":
            message = "names hatchling, which has hooks."
            hint = (
                'Set build-backend = "hatchling.build" in [build-system], add the table '
                "[tool.hatch.build.hooks.epcontext], and remove this key."
            )
            raise ConfigError(Problem.at(_KEY, Kind.INVALID_VALUE, message, hint))
        # As PEP 517 says of the keys in [build-system].
        sys.path[:0] = [str((self.root / path).resolve()) for path in settings.backend_path]
        module, _, path = name.partition(":")
        try:
            backend = importlib.import_module(module)
            return functools.reduce(getattr, filter(None, path.split(".")), backend)
        except (ImportError, AttributeError) as error:
            message = f"names {name}, which cannot be imported ({error})."
            hint = "Correct it, or add its package to requires in [build-system]."
            raise ConfigError(Problem.at(_KEY, Kind.INVALID_VALUE, message, hint)) from None

    def begin(self) -> Config | None:
        """The configuration; None if the models are left out."""
        return None if self._is_skipped() else self.config()

    def add_to_wheel(self, config: Config | None, built: Path, folder: Path) -> str:
        """Write the wheel ``built`` with the models into ``folder``."""
        from hatch_epcontext.package import wheel
        from hatch_epcontext.package.repack import FinishedWheel

        finished = FinishedWheel(built)
        if config is None:
            place = self.config(pending=True).output
            left_out = self._earlier(place, place) if place else ()
            return finished.write(folder, {}, None, left_out).name
        self.show_overrides(config)
        project = finished.project
        wheel.check_app(config.targets, project.dependencies)
        tag = finished.checked_tag(config.of_wheel())
        tree = {name: self._source_of(name) for name in finished.names}
        output = wheel.output_folder(config.output, tree)
        earlier = self._earlier(output, output)
        wheel.check_collisions(output, tree, earlier)
        result, package = self.compile_package(config, project, output, tree)
        files = {target: Path(source) for source, target in package.entries(output).items()}
        if config.wheel.sbom:
            sbom = self.write_sbom(result, package, project)
            files[f"{finished.info}/sboms/{sbom.name}"] = sbom
        with writing("the wheel", folder):
            written = finished.write(folder, files, tag, earlier)
        self.verify(written, output, package, result)
        return written.name

    def add_to_sdist(self, sdist: Path, folder: Path) -> str:
        """Write ``sdist`` with the sources of the models into ``folder``."""
        from hatchling.builders.sdist import SdistBuilder

        from hatch_epcontext.package.repack import names_of_sdist, write_sdist

        files, earlier = dict[str, Path](), frozenset[str]()
        config = self.sdist_config()
        if not self._is_skipped():
            packed = {name: self.root / name for name in names_of_sdist(sdist)}
            # Of its configuration counts only what git ignores.
            selection = SdistBuilder(str(self.root)).config
            files = self.sdist_additions(config, selection, packed, self.hooks)
        if config.output is not None:
            place = self._source_of(str(config.output)).relative_to(self.root)
            earlier = self._earlier(config.output, PurePosixPath(place))
        with writing("the sdist", folder):
            written = write_sdist(sdist, folder, files, earlier)
        self.check_size(written)
        return written.name

    def install_editable(self, built: Path) -> None:
        """Write the models' package of an editable install into the project; ``built``: its wheel."""
        from hatch_epcontext.package.repack import FinishedWheel

        config = self.begin()
        if config is None or config.editable == "skip":
            return
        self.show_overrides(config)
        if config.output is None:
            message = "is required for an editable install: where its models are written."
            hint = 'For example "my_app/epcontext".'
            skip = Setting(Key() / "editable", "skip")
            raise ConfigError(Problem.at(OUTPUT, Kind.MISSING_KEY, message, hint, skip))
        project = FinishedWheel(built).project
        self.editable_package(config, project, self._folder_of(config.output), config.output)()

    def _is_skipped(self) -> bool:
        if reason := reason_to_skip():
            self.terminal.info(f"skipped: {reason}")
        return reason is not None

    def _source_of(self, name: str) -> Path:
        """The file of the project that is ``name`` in the wheel, as far as the usual layouts say."""
        from hatch_epcontext.package.folder import SOURCE_FOLDERS

        candidates = (self.root / folder / name for folder in (".", *SOURCE_FOLDERS))
        return next((path for path in candidates if path.exists()), self.root / name)

    def _folder_of(self, output: PurePosixPath) -> Path:
        """Where ``output`` is in the project; raises ConfigError if its parent is in no usual place."""
        from hatch_epcontext.package.folder import project_folder

        parent = self._source_of(str(output.parent))
        files = {f"{output.parent}/__init__.py": parent / "__init__.py"} if parent.is_dir() else {}
        return project_folder(output, files)

    def _earlier(self, output: PurePosixPath, place: PurePosixPath) -> frozenset[str]:
        """The files of an editable install, which no archive contains; ``place``: their folder in it."""
        from hatch_epcontext.package.folder import owned_paths

        return owned_paths(place, self._source_of(str(output)))
