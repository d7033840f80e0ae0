"""The wheel: what Hatch packs, the package's place in it, its tag, and models that are in it twice."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from hatch_epcontext.config.settings import Config, Model
from hatch_epcontext.errors import ConfigError, Key, Kind, Problem, Setting
from hatch_epcontext.files import file_sha256
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.text import listing, show_size

FOLDER = "epcontext"
"""The name of the package's folder in the app's import package, by default."""

OUTPUT = Key() / "output"
"""The configuration key of the package's folder in the wheel."""

_MAX_NAMED = 5
"""Of more files than this, a message gives the number."""

Tree = Mapping[str, Path]
"""Files that Hatch packs, by their path in the archive, with forward slashes."""


def selected_files(builder_config: Any) -> dict[str, Path]:
    """The files of the project that the settings of a target select, without what build hooks add."""
    selected = []
    # Hatch raises ValueError for a project that ships nothing but models.
    with contextlib.suppress(ValueError):
        selected = list(builder_config.builder.recurse_selected_project_files())
    return _tree(selected)


def packed_files(builder_config: Any, build_data: dict[str, Any]) -> dict[str, Path]:
    """The same with what settings force into the archive, and with what hooks have added until now."""
    with builder_config.set_build_data(build_data):
        files = selected_files(builder_config)
        for source, path in builder_config.get_force_include().items():
            # A later hook can make it.
            with contextlib.suppress(FileNotFoundError):
                files |= _tree(builder_config.builder.recurse_forced_files({source: path}))
    return files


def _tree(files: Any) -> dict[str, Path]:
    return {Path(file.distribution_path).as_posix(): Path(file.path) for file in files}


def output_folder(configured: PurePosixPath | None, tree: Tree) -> PurePosixPath:
    """The package's folder in the wheel.

    By default ``<import package>/epcontext``, inside the outermost import package of the wheel. Raises
    ConfigError if there is none, or if there are several.
    """
    if configured is not None:
        return configured
    outermost = sorted(map(str, import_packages(tree)))
    if len(outermost) != 1:
        packages = (
            f"several import packages ({listing(outermost)})" if outermost else "no import package"
        )
        message = f"the key is missing, and the wheel has {packages}."
        hint = 'Name a folder for the models in the wheel, such as "my_app/epcontext".'
        raise ConfigError(
            Problem.at(OUTPUT, Kind.NO_OUTPUT_PACKAGE, message, hint, Setting(OUTPUT))
        )
    return PurePosixPath(outermost[0], FOLDER)


def import_packages(tree: Tree) -> set[PurePosixPath]:
    """The outermost import packages in the wheel."""
    packages = {PurePosixPath(path).parent for path in tree if path.endswith("/__init__.py")}
    return {package for package in packages if packages.isdisjoint(package.parents)}


def check_collisions(output: PurePosixPath, tree: Tree, ours: frozenset[str]) -> None:
    """Raise ConfigError if the project has files of its own in the package's folder.

    ``ours``: files in the project that an earlier editable install wrote, as paths in the wheel.
    """
    collisions = sorted(
        path
        for path in tree
        if path not in ours
        and (PurePosixPath(path).is_relative_to(output) or path == f"{output}.py")
    )
    if collisions:
        folder = f"{output}/epcontext" if len(output.parts) == 1 else None
        message = (
            f'the project has files of its own in "{output}": {listing(collisions, _MAX_NAMED)}.'
        )
        hint = "Choose a folder for the models alone."
        raise ConfigError(
            Problem.at(OUTPUT, Kind.NO_OUTPUT_PACKAGE, message, hint, Setting(OUTPUT, folder))
        )


def tag(config: Config) -> str | None:
    """The wheel's tag, or None to leave it to Hatch.

    It names the platforms that the models are for, not the one that compiled them: ``"auto"`` joins the
    platforms of all targets, and leaves the tag to Hatch if one target is for any platform.
    """
    if config.wheel.tag == "any":
        return "py3-none-any"
    if config.wheel.tag != "auto":
        return config.wheel.tag
    platforms = [target.platforms for target in config.targets]
    if not platforms or not all(platforms) or any("any" in names for names in platforms):
        return None
    return f"py3-none-{'.'.join(sorted(set().union(*platforms)))}"


def repeated_models(
    result: Result, shipped: Collection[Path], tree: Tree, selected: Tree, root: Path
) -> Iterator[str]:
    """A warning for each file of a source model that the wheel also holds as package data.

    ``shipped``: the files of the source models that the package contains; ``root``: the project.
    ``selected``: those files of the wheel that Hatch selects, and no build hook adds.
    """
    sizes: dict[int, list[tuple[str, Path]]] = {}
    for name, path in tree.items():
        sizes.setdefault(path.stat().st_size, []).append((name, path))
    # The shapes of one model have one source.
    sources = {source.model.path: source for source in result.sources}
    for source in sources.values():
        # Who ships the model in another way says so.
        files = source.users_files if source.model.fallback != "none" else {}
        for file in filter(Path.is_file, files):
            size = file.stat().st_size
            for name, path in sizes.get(size, ()):
                if _is_same_file(path, file):
                    inside = path.is_relative_to(root)
                    pattern = path.relative_to(root).as_posix() if inside else name
                    again = source.model.path in shipped
                    exclude = (
                        f'Exclude it (exclude = ["{pattern}"] in [tool.hatch.build.targets.wheel])'
                        if name in selected
                        else "Leave it out where it is added (by a build hook, or by force-include)"
                    )
                    yield _repeated(name, size, exclude, source.model, again=again)


def _is_same_file(path: Path, file: Path) -> bool:
    return path.samefile(file) or file_sha256(path) == file_sha256(file)


def _repeated(name: str, size: int, exclude: str, model: Model, *, again: bool) -> str:
    what = f"{name} ({show_size(size)}) is in the wheel as package data"
    if again:
        return (
            f"{what}, and again as the source of the model {model.configured_name}. {exclude}, or set "
            'fallback = "none" for that model.'
        )
    return (
        f"{what}, beside the compiled models of {model.configured_name}. {exclude} if the app opens it "
        'only through the loader; otherwise set fallback = "none" for that model.'
    )
