"""Models -> a model package in a folder of the user's choice, without a wheel."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import Kind, OutputError, Problem
from hatch_epcontext.files import replace_files, sweep, temp_dir
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.plan import Plan, plan
from hatch_epcontext.jobs.report import make_report
from hatch_epcontext.package.bundle import bundle
from hatch_epcontext.package.manifest import FILE
from hatch_epcontext.package.modules import bytecode, import_name_in_tree, modules
from hatch_epcontext.package.reader import own_files
from hatch_epcontext.system import check_apart, check_folder, writing
from hatch_epcontext.text import listing
from hatch_epcontext.tools.compiling import CompileResult

_MAX_NAMED = 5
"""The most files that a message names."""


def export(
    config: Config,
    folder: Path,
    run: Callable[[Plan, Path], Result],
    *,
    loader: bool,
    overwrite: bool,
) -> CompileResult:
    """Compile the models of ``config``, and make ``folder`` their model package.

    ``run`` runs a plan in the temporary folder that it gets. With ``loader`` the folder is also a Python
    package, as in a wheel. Nothing is written unless all jobs succeed. ``overwrite`` replaces an earlier
    package of this tool as a whole; a folder with any other file is never changed.

    Raises what ``run`` raises; ConfigError when one environment cannot build the targets; and OutputError
    when the folder is a file, exists already, has other files or source models, is or contains the current
    folder or the project, cannot be written, or would have no model.
    """
    # A link is kept, and its target replaced.
    place = folder.resolve()
    _check_place(config, folder, place, overwrite=overwrite)
    with temp_dir() as staging:
        result = run(plan(config), staging)
        made = bundle(
            result, staging, modules(import_name_in_tree(place), config.models) if loader else {}
        )
        _refuse_sources(place, (file for source in result.sources for file in source.users_files))
        # Compiling is slow: another program may have written there.
        _refuse_existing(folder, place, overwrite=overwrite)
        with writing("the model package", place.parent, str(place), OutputError):
            # Real copies: the bundle only links files of the cache and of the project.
            files = {name: made.folder / name for name in made.files}
            replace_files(place, files, _all_files(place), made.check_sources)
    return CompileResult(tuple(folder / name for name in made.files), make_report(result))


def _check_place(config: Config, folder: Path, place: Path, *, overwrite: bool) -> None:
    """Raise the errors that are known before compiling."""
    if not config.models:
        message = (
            "no model would be in it: none has one of the selected targets, or ships its source."
        )
        hint = 'Select other targets, or set fallback = "source".'
        raise OutputError(Problem(Kind.UNKNOWN_TARGET, str(folder), message, hint))
    check_apart(config.report, place)
    check_folder(place)
    check_folder(place.parent)
    _refuse_sources(place, (model.path for model in config.models))
    for name, inside in (("the current folder", Path.cwd()), ("the project", config.root)):
        if inside.resolve().is_relative_to(place):
            message = f"is {name}, or contains it, and would be replaced."
            hint = "Choose a folder of its own for the model package."
            raise OutputError(Problem(Kind.FILE_EXISTS, str(folder), message, hint))
    _refuse_existing(folder, place, overwrite=overwrite)


def _refuse_sources(place: Path, files: Iterable[Path]) -> None:
    """Raise OutputError if any of ``files``, those of source models, is in the folder ``place``."""
    inside = [file for file in dict.fromkeys(files) if file.resolve().is_relative_to(place)]
    if inside:
        message = f"is a file of the source model, in the folder that would be replaced: {place}."
        hint = "Choose another folder."
        raise OutputError(*(Problem(Kind.FILE_EXISTS, str(file), message, hint) for file in inside))


def _refuse_existing(folder: Path, place: Path, *, overwrite: bool) -> None:
    """Raise OutputError unless ``place`` is new, empty, or a package that may be replaced.

    ``folder`` is ``place`` as the user wrote it.
    """
    sweep(place)
    if not place.exists() or not any(place.iterdir()):
        return
    recorded = own_files(place)
    ours = frozenset() if recorded is None else {*recorded, FILE}
    if foreign := [name for name in _files(place) if name not in ours]:
        what = "this tool did not write" if ours else "are not a model package of this tool"
        message = f"the folder has files that {what}: {listing(foreign, _MAX_NAMED)}."
        hint = "Choose another folder, or move them away: they are never overwritten."
        raise OutputError(Problem(Kind.FILE_EXISTS, str(folder), message, hint))
    if not overwrite:
        hint = "Choose another place, or allow overwriting (on the command line: --overwrite)."
        raise OutputError(Problem(Kind.FILE_EXISTS, str(folder), "exists already.", hint))


def _files(place: Path) -> Iterator[str]:
    """The files below ``place``, without what Python writes when it imports the loader."""
    compiled = bytecode(place)
    for name in _all_files(place):
        if place / name not in compiled:
            yield name


def _all_files(place: Path) -> list[str]:
    paths = [path for path in sorted(place.rglob("*")) if path.is_symlink() or not path.is_dir()]
    return [path.relative_to(place).as_posix() for path in paths]
