"""A PEP 517 build back end: another one builds, and the models are added to its wheels and sdists.

``build-backend = "hatch_epcontext.backend"`` names this module, and ``[tool.epcontext.build]`` the other one,
the *wrapped* back end. Its optional hooks are here only if it has them. With hatchling the build hook does
the same.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import reprlib
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

from hatch_epcontext.config.environ import reason_to_skip
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import (
    BackendError,
    ConfigError,
    EpcontextError,
    Key,
    Kind,
    Problem,
    Setting,
)
from hatch_epcontext.files import is_regular, replacing
from hatch_epcontext.package.wheel import OUTPUT
from hatch_epcontext.project_build import ProjectBuild, Terminal, message_of
from hatch_epcontext.system import Terminated, terminated_as_error, writing

_KEY = Key() / "build" / "backend"

_VARIABLE = "_HATCH_EPCONTEXT_WRAPS"
"""The variable that names the project whose wrapped back end runs, also for processes that it starts."""

_CORRECT = "Correct that back end, or name another one."

_Settings = Mapping[str, Any] | None


def get_requires_for_build_wheel(config_settings: _Settings = None) -> list[str]:
    """What the wrapped back end and the targets need."""
    with _reported() as build:
        return build.requirements("get_requires_for_build_wheel", config_settings, editable=False)


def build_wheel(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel with the compiled models; returns its name."""
    folder = Path(wheel_directory).absolute()
    with _reported() as build:
        config = build.begin()
        wheel = build.built("build_wheel", config_settings, metadata_directory)
        return build.add_to_wheel(config, wheel, folder)


def build_sdist(sdist_directory: str, config_settings: _Settings = None) -> str:
    """Build an sdist with the source models; returns its name."""
    folder = Path(sdist_directory).absolute()
    with _reported() as build:
        return build.add_to_sdist(build.built("build_sdist", config_settings), folder)


def _build_editable(
    wheel_directory: str, config_settings: _Settings = None, metadata_directory: str | None = None
) -> str:
    folder = Path(wheel_directory).absolute()
    with _reported() as build:
        wheel = build.built("build_editable", config_settings, metadata_directory)
        return build.install_editable(wheel, folder)


def _get_requires_for_build_editable(config_settings: _Settings = None) -> list[str]:
    with _reported() as build:
        return build.requirements("get_requires_for_build_editable", config_settings, editable=True)


def _prepare_metadata(hook: str, metadata_directory: str, config_settings: _Settings = None) -> str:
    folder = Path(metadata_directory).absolute()
    with _reported() as build:
        return build.made(hook, folder, "METADATA", config_settings).name


def _get_requires(hook: str, config_settings: _Settings = None) -> list[str]:
    with _reported() as build:
        return build.required(hook, config_settings)


_OPTIONAL = {
    "build_editable": _build_editable,
    "get_requires_for_build_editable": _get_requires_for_build_editable,
    "get_requires_for_build_sdist": partial(_get_requires, "get_requires_for_build_sdist"),
    **{
        hook: partial(_prepare_metadata, hook)
        for hook in ("prepare_metadata_for_build_wheel", "prepare_metadata_for_build_editable")
    },
}
"""The hooks that a back end may lack."""


def __getattr__(name: str) -> Any:
    """An optional hook, or the exception that is no failure; AttributeError if the wrapped one has none."""
    if name not in (*_OPTIONAL, _UNSUPPORTED):
        raise AttributeError(name)
    with _reported() as build:
        wrapped = build.wrapped
        with build.calling():
            own = getattr(wrapped, name)
    return _OPTIONAL.get(name, own)


_UNSUPPORTED = "UnsupportedOperation"
"""The exception by which a back end says that it builds no sdist here: front ends expect it."""


@contextlib.contextmanager
def _reported() -> Iterator[_Build]:
    """The build of the project in the current folder; expected errors end it with one message."""
    terminal = Terminal(_print, partial(_print, file=sys.stderr))
    build = _Build(Path.cwd(), terminal)
    # The one that called the wrapped back end prints it.
    build.reject_itself()
    try:
        with terminated_as_error():
            yield build
    except BaseException as error:
        is_expected = not isinstance(error, build.unsupported)
        if is_expected and (message := message_of(error, build.root)):
            build.terminal.print_warning(message[0])
            raise SystemExit(message[1]) from None
        raise
    finally:
        build.close()


def _print(text: str, file: TextIO | None = None) -> None:
    """Print ``text``, with escapes for what the encoding of the stream lacks."""
    encoding = getattr(file or sys.stdout, "encoding", None) or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=file)


def _file_name(name: str) -> str:
    """The name of the file that is ``name`` in an archive: UTF-8, also where Python reads names as others."""
    return os.fsdecode(name.encode("utf-8", "surrogateescape"))


def _account(error: BaseException) -> str:
    """``error`` with the lines of code that raised it, below the call of the wrapped back end."""
    frames = error.__traceback__
    lines = traceback.format_exception(error.with_traceback(frames and frames.tb_next))
    return "".join(line for line in lines if not line.startswith("Traceback")).rstrip()


class _Build(ProjectBuild):
    """What is added to the results of the wrapped back end."""

    unsupported: tuple[type[Exception], ...] = ()
    """Its own exception for what it does not build, which front ends expect."""

    @functools.cached_property
    def wrapped(self) -> Any:
        """The module, or the object in it, that ``build.backend`` names."""
        settings, name = self.config(pending=True).build, self.name
        if name.partition(".")[0] == "hatchling":
            message = "names hatchling, which has hooks."
            hint = (
                'Set build-backend = "hatchling.build" in [build-system], add the table '
                "[tool.hatch.build.hooks.epcontext], and remove this key."
            )
            raise ConfigError(Problem.at(_KEY, Kind.INVALID_VALUE, message, hint))
        # As PEP 517 says of the keys in [build-system].
        paths = [str((self.root / path).resolve()) for path in settings.backend_path]
        sys.path[:0] = [path for path in paths if path not in sys.path]
        module, _, path = name.partition(":")
        try:
            with self.calling():
                backend = importlib.import_module(module)
                backend = functools.reduce(getattr, filter(None, path.split(".")), backend)
        except (EpcontextError, KeyboardInterrupt, Terminated):
            raise
        except BaseException as error:
            is_missing = isinstance(error, ImportError | AttributeError)
            reason = f" ({error})." if is_missing else f":\n{_account(error)}"
            message = f"names {name}, which cannot be imported{reason}"
            hint = "Correct it, or add its package to requires in [build-system]."
            raise ConfigError(Problem.at(_KEY, Kind.INVALID_VALUE, message, hint)) from None
        if backend is sys.modules[__name__]:
            raise ConfigError(self._itself())
        return backend

    @property
    def backend_name(self) -> str:
        """The wrapped back end."""
        return self.name

    @functools.cached_property
    def name(self) -> str:
        """The value of ``build.backend``; raises ConfigError without one."""
        name = self.config(pending=True).build.backend
        if name is None:
            message = "is required: the build back end that hatch_epcontext.backend calls."
            raise ConfigError(
                Problem.at(_KEY, Kind.MISSING_KEY, message, 'For example "setuptools.build_meta".')
            )
        return name

    def reject_itself(self) -> None:
        """Raise ConfigError if the wrapped back end of this project calls this one."""
        if os.environ.get(_VARIABLE) == str(self.root):
            raise ConfigError(self._itself())

    def _itself(self) -> Problem:
        message = "names hatch_epcontext.backend itself."
        if self.name != "hatch_epcontext.backend":
            message = f"names {self.name}, which is hatch_epcontext.backend, or calls it."
        hint = 'Name the back end that builds the project, for example "setuptools.build_meta".'
        return Problem.at(_KEY, Kind.INVALID_VALUE, message, hint)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """Where code of the wrapped back end runs."""
        os.environ[_VARIABLE] = str(self.root)
        try:
            yield
        finally:
            del os.environ[_VARIABLE]

    def call(self, hook: str, *arguments: Any) -> Any:
        """What ``hook`` of the wrapped back end returns; raises BackendError for what it raises."""
        wrapped = self.wrapped
        with self.calling():
            called, unsupported = getattr(wrapped, hook, None), getattr(wrapped, _UNSUPPORTED, None)
        if isinstance(unsupported, type) and issubclass(unsupported, Exception):
            self.unsupported = (unsupported,)
        if not callable(called):
            raise self._error(f"has no hook {hook}.")
        try:
            with self.calling():
                return called(*arguments)
        except (EpcontextError, KeyboardInterrupt, Terminated):
            raise
        except self.unsupported:
            raise
        except BaseException as error:
            raise self._error(f"failed in {hook}:\n{_account(error)}", None) from None

    def required(self, hook: str, config_settings: _Settings) -> list[str]:
        """What ``hook`` requires; raises BackendError if it is no list of strings."""
        required = self.call(hook, config_settings)
        if not isinstance(required, list | tuple) or not all(isinstance(r, str) for r in required):
            raise self._error(
                f"returned {reprlib.repr(required)} from {hook}, and not a list of strings."
            )
        return list(required)

    def built(self, hook: str, *arguments: Any) -> Path:
        """The archive that ``hook`` writes into a temporary folder."""
        return self.made(hook, self.temp_dir(), "", *arguments)

    def made(self, hook: str, folder: Path, file: str, *arguments: Any) -> Path:
        """What ``hook`` makes in ``folder``: a file, or a folder with this ``file``.

        Raises BackendError if it does not return its name.
        """
        name = self.call(hook, str(folder), *arguments)
        if isinstance(name, str) and Path(name).name == name and is_regular(folder / name / file):
            return folder / name
        kind = f"a folder with {file}" if file else "a file"
        message = (
            f"returned {reprlib.repr(name)} from {hook}, and not the name of {kind} that it wrote."
        )
        raise self._error(message)

    def _error(self, message: str, hint: str | None = _CORRECT) -> BackendError:
        problem = Problem.at(_KEY, Kind.BACKEND_FAILED, f"{self.name} {message}", hint)
        return BackendError(problem)

    def requirements(self, hook: str, config_settings: _Settings, *, editable: bool) -> list[str]:
        """What ``hook``, which is optional, and the targets need."""
        config = self.begin()
        own = self.requirements_of(config, editable=editable) if config else []
        wrapped = self.wrapped
        with self.calling():
            has_hook = hasattr(wrapped, hook)
        return [*(self.required(hook, config_settings) if has_hook else ()), *own]

    def begin(self) -> Config | None:
        """The configuration; None if the models are left out."""
        return None if self._is_skipped() else self.config()

    def add_to_wheel(self, config: Config | None, built: Path, folder: Path) -> str:
        """Write the wheel ``built`` with the models into ``folder``."""
        from hatch_epcontext.package import wheel
        from hatch_epcontext.package.repack import FinishedWheel

        finished = FinishedWheel(built, self.name)
        if config is None:
            output = self.config(pending=True).output
            left_out = self._earlier(output, output) if output else ()
            with writing("the wheel", folder), replacing(folder) as new:
                return finished.write(new, {}, left_out=left_out).name
        self.show_overrides(config)
        project = finished.project
        wheel.check_app(config.targets, project.dependencies)
        tag = finished.checked_tag(config.of_wheel(), self.terminal.warn)
        tree = {name: self._source_of(name) for name in finished.names}
        output = wheel.output_folder(config.output, tree)
        earlier = self._earlier(output, output)
        wheel.check_collisions(output, tree, earlier)
        result, package = self.compile_package(config, project, output, tree)
        files = package.entries(output)
        if config.wheel.sbom:
            sbom = self.write_sbom(result, package, project)
            files[f"{finished.info}/sboms/{sbom.name}"] = sbom
        with writing("the wheel", folder), replacing(folder) as new:
            written = finished.write(new, files, tag, earlier)
            self.verify(written, output, package, result)
        return written.name

    def add_to_sdist(self, sdist: Path, folder: Path) -> str:
        """Write ``sdist`` with the sources of the models into ``folder``."""
        from hatchling.builders.sdist import SdistBuilder

        from hatch_epcontext.package.repack import names_of_sdist, write_sdist

        files, earlier = dict[str, Path](), frozenset[str]()
        config = self.sdist_config()
        if not self._is_skipped():
            packed = {
                name: self.root / _file_name(name) for name in names_of_sdist(sdist, self.name)
            }
            # Of its configuration counts only what git ignores.
            selection = SdistBuilder(str(self.root)).config
            files = self.sdist_additions(config, selection, packed, self.hooks)
        if config.output is not None:
            path = self._source_of(str(config.output)).relative_to(self.root)
            earlier = self._earlier(config.output, PurePosixPath(path))
        with writing("the sdist", folder), replacing(folder) as new:
            written = write_sdist(sdist, new, files, earlier)
            self.check_size(written)
        return written.name

    def install_editable(self, built: Path, folder: Path) -> str:
        """Put the editable wheel ``built`` into ``folder``, and its models' package into the project."""
        write = self._package_of(built)
        with writing("the wheel", folder), replacing(folder) as new:
            shutil.copyfile(built, new / built.name)
            write()
        return built.name

    def _package_of(self, built: Path) -> Callable[[], None]:
        """Make the models' package of an editable install; returns what writes it into the project."""
        from hatch_epcontext.package.repack import FinishedWheel

        config = self.begin()
        if config is None or config.editable == "skip":
            return lambda: None
        self.show_overrides(config)
        if config.output is None:
            message = "is required for an editable install: where its models are written."
            hint = 'For example "my_app/epcontext".'
            skip = Setting(Key() / "editable", "skip")
            raise ConfigError(Problem.at(OUTPUT, Kind.MISSING_KEY, message, hint, skip))
        project = FinishedWheel(built, self.name).project
        folder = self._folder_of(config.output)
        return self.editable_package(config, project, folder, config.output)

    def _is_skipped(self) -> bool:
        if reason := reason_to_skip():
            self.terminal.info(f"skipped: {reason}")
        return reason is not None

    def _source_of(self, name: str) -> Path:
        """The file of the project that is ``name`` in the wheel, as far as the usual layouts say."""
        from hatch_epcontext.package.folder import SOURCE_FOLDERS

        own = _file_name(name)
        candidates = (self.root / folder / own for folder in (".", *SOURCE_FOLDERS))
        return next((path for path in candidates if path.exists()), self.root / own)

    def _folder_of(self, output: PurePosixPath) -> Path:
        """Where ``output`` is in the project; raises ConfigError if its parent is not where it usually is."""
        from hatch_epcontext.package.folder import project_folder

        parent = self._source_of(str(output.parent))
        files = {f"{output.parent}/__init__.py": parent / "__init__.py"} if parent.is_dir() else {}
        return project_folder(output, files)

    def _earlier(self, output: PurePosixPath, packed: PurePosixPath) -> frozenset[str]:
        """The files of an editable install, which no archive contains; ``packed``: their folder in it."""
        from hatch_epcontext.package.folder import owned_paths

        return owned_paths(packed, self._source_of(str(output)))
