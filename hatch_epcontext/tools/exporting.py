"""Models -> a model package in a folder of the user's choice, without a wheel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import Kind, OutputError, Problem
from hatch_epcontext.files import temp_dir
from hatch_epcontext.jobs.artifact import Result
from hatch_epcontext.jobs.plan import Plan, plan
from hatch_epcontext.jobs.report import make_report
from hatch_epcontext.package.bundle import bundle, import_name_in_tree, modules
from hatch_epcontext.package.folder import publish, refuse_others
from hatch_epcontext.system import check_apart, check_folder, writing
from hatch_epcontext.tools.compiling import CompileResult, refuse_existing, refuse_sources


def is_package(output: Path) -> bool:
    """Whether ``output`` is the folder of a model package, by its name."""
    return output.suffix == ".ortpackage"


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
        shipped = modules(import_name_in_tree(place), config.models) if loader else {}
        package = bundle(result, staging, shipped)
        files = (file for source in result.sources for file in source.users_files)
        refuse_sources(files, lambda file: file.is_relative_to(place))
        # Compiling is slow: another program may have written there.
        _refuse_existing(folder, overwrite=overwrite)
        with writing("the model package", place.parent, str(place), OutputError):
            publish(package, folder, edited=False)
    return CompileResult(tuple(folder / name for name in package.files), make_report(result))


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
    refuse_sources((model.path for model in config.models), lambda file: file.is_relative_to(place))
    for name, inside in (("the current folder", Path.cwd()), ("the project", config.root)):
        if inside.resolve().is_relative_to(place):
            message = f"is {name}, or contains it, and would be replaced."
            hint = "Choose a folder of its own for the model package."
            raise OutputError(Problem(Kind.FILE_EXISTS, str(folder), message, hint))
    _refuse_existing(folder, overwrite=overwrite)


def _refuse_existing(folder: Path, *, overwrite: bool) -> None:
    """Raise OutputError unless ``folder`` is new, empty, or a package that may be replaced."""
    refuse_others(folder, edited=False)
    if not overwrite and folder.exists() and any(folder.iterdir()):
        refuse_existing([folder])
