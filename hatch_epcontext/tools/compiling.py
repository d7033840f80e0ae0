"""Models -> files at a user's place, all or none."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from dataclasses import dataclass
from pathlib import Path

from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ConfigError, Kind, OutputError, Problem
from hatch_epcontext.files import replace_files, sweep, temp_dir
from hatch_epcontext.jobs.artifact import Built, Result
from hatch_epcontext.jobs.plan import Plan, plan
from hatch_epcontext.jobs.report import Report, make_report
from hatch_epcontext.system import check_apart, check_folder, writing


@dataclass(frozen=True)
class CompileResult:
    """The result of compiling models.

    ``files``: the written files, sidecars before the context models that name them.
    ``report``: coverage, validation, times, sizes and versions of each model.
    """

    files: tuple[Path, ...]
    report: Report


def is_file(output: Path, models: Sized) -> bool:
    """Whether ``output`` is a file and not a folder; raises ConfigError for a file and several ``models``."""
    if output.suffix != ".onnx" or output.is_dir():
        return False
    if len(models) > 1:
        message = "is a file, and several models need a folder."
        raise ConfigError(Problem(Kind.INVALID_VALUE, str(output), message))
    return True


def compile_models(
    config: Config, output: Path, run: Callable[[Plan, Path], Result], *, overwrite: bool
) -> CompileResult:
    """Compile the models of ``config``, and write the results to ``output``, a file or a folder.

    ``run`` runs a plan in the temporary folder that it gets. Nothing is written unless all jobs succeed.
    Raises what ``run`` raises; ConfigError when one environment cannot build the targets; and OutputError
    when a file exists without ``overwrite``, when the folder is a file, or when the result would replace a
    source's file.
    """
    if chosen := next((model for model in config.models if model.fallback != "auto"), None):
        message, hint = "is for a model package.", "Give an output that ends with .ortpackage."
        raise ConfigError(Problem.at(chosen.key / "fallback", Kind.NOT_APPLICABLE, message, hint))
    file = is_file(output, config.models)
    if file:
        check_apart(config.report, output)
    folder, name = (output.parent, output.name) if file else (output, None)
    check_folder(folder)
    sweep(folder)
    if not overwrite:
        refuse_existing(_expected(config, output, file=file))
    with temp_dir() as staging:
        result = run(plan(config), staging)
        files = _destinations(result.built, name)
        written = tuple(folder / name for name in files)
        replaced = {path.resolve() for path in written}
        sources = [model.path for model in config.models]
        for source in result.sources:
            sources += source.users_files
        refuse_sources(sources, replaced.__contains__)
        if not overwrite:
            refuse_existing(written)
        with writing("a result", folder, str(output), OutputError):
            replace_files(folder, files)
    return CompileResult(written, make_report(result))


def _expected(config: Config, output: Path, *, file: bool) -> list[Path]:
    """The results whose names are known before compiling."""
    if file:
        return [output]
    return [
        output / target.provider.result_file(model.name)
        for model in config.models
        for target in model.targets
    ]


def _destinations(built: Iterable[Built], name: str | None) -> dict[str, Path]:
    """Each file's path in the output folder -> the file itself; ``name`` renames the context model.

    Sidecars come first, so that no published model names an unpublished file.
    """
    sidecars, models = {}, {}
    for artifact in (result.artifact for result in built):
        contexts = {context.model_file for context in artifact.record.contexts}
        for file in artifact.record.files:
            if file in contexts:
                models[name or file] = artifact.folder / file
            else:
                sidecars[file] = artifact.folder / file
    return {**sidecars, **models}


def refuse_existing(paths: Iterable[Path]) -> None:
    """Raise OutputError if any of ``paths`` exists."""
    hint = "Choose another place, or allow overwriting (on the command line: --overwrite)."
    problems = [
        Problem(Kind.FILE_EXISTS, str(path), "exists already.", hint)
        for path in paths
        if path.exists()
    ]
    if problems:
        raise OutputError(*problems)


def refuse_sources(files: Iterable[Path], is_replaced: Callable[[Path], bool]) -> None:
    """Raise OutputError for ``files`` of source models whose real path ``is_replaced`` by the output."""
    message = "is a file of the source model, which the output would replace."
    problems = [
        Problem(Kind.FILE_EXISTS, str(file), message, "Choose another place.")
        for file in dict.fromkeys(files)
        if is_replaced(file.resolve())
    ]
    if problems:
        raise OutputError(*problems)
