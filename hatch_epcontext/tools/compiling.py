"""Models -> files or a model package at a user's path, all or none; or bytes from memory to memory."""

from __future__ import annotations

import glob
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hatch_epcontext.config.paths import is_genai_folder
from hatch_epcontext.config.settings import Config
from hatch_epcontext.errors import ConfigError, Key, Kind, OutputError, Problem
from hatch_epcontext.files import replace_files, sweep, temp_dir
from hatch_epcontext.jobs.artifact import Built, Result
from hatch_epcontext.jobs.plan import Plan, plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.report import Report, make_report
from hatch_epcontext.jobs.requirements import ONNX_RUNTIME, check_environment
from hatch_epcontext.package.bundle import bundle, import_name_in_tree, modules
from hatch_epcontext.package.folder import publish, reject_others
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS, find
from hatch_epcontext.system import check_folder, writing
from hatch_epcontext.text import show, suggestion
from hatch_epcontext.tools.configure import configure, is_file, nested
from hatch_epcontext.tools.inspecting import READING
from hatch_epcontext.worker.requests import CompileRequest

_REQUIREMENTS = (f"{DISTRIBUTIONS[0]}{ONNX_RUNTIME}", *READING)
"""The requirements to compile a model without preparing it."""

Run = Callable[[Plan, Path], Result]
"""What runs a plan in the temporary folder that it gets."""


@dataclass(frozen=True)
class CompileResult:
    """The result of compiling models.

    ``files``: the written files, sidecars before the context models that name them.
    ``report``: coverage, validation, times, sizes and versions of each model.
    """

    files: tuple[Path, ...]
    report: Report


def is_package(output: Path) -> bool:
    """Whether ``output`` is the folder of a model package, by its name."""
    return output.suffix == ".ortpackage"


def check_output(output: Path, models: Iterable[Path]) -> None:
    """Raise ConfigError for a language model among ``models``, unless ``output`` is a model package."""
    folder = next(filter(is_genai_folder, models), None)
    if folder is not None and not is_package(output):
        message = (
            "is a language model, a folder of onnxruntime-genai, which opens what is compiled only inside of "
            "the folder."
        )
        hint = "Give an output that ends with .ortpackage."
        raise ConfigError(Problem(Kind.NOT_APPLICABLE, str(folder), message, hint))


def compile_models(config: Config, output: Path, run: Run, *, overwrite: bool) -> CompileResult:
    """Compile the models of ``config``, and write the results to ``output``: a file, a folder, or a package.

    Nothing is written unless all jobs succeed. Raises what ``run`` raises; ConfigError when one environment
    cannot build the targets; and OutputError when a file exists without ``overwrite``, when the folder is a
    file, or when the result would replace a source's file.
    """
    if is_package(output):
        return export(config, output, run, loader=False, overwrite=overwrite)
    if chosen := next((model for model in config.models if model.fallback != "auto"), None):
        message, hint = "is for a model package.", "Give an output that ends with .ortpackage."
        raise ConfigError(Problem.at(chosen.key / "fallback", Kind.NOT_APPLICABLE, message, hint))
    file = is_file(output, config.models)
    folder, name = (output.parent, output.name) if file else (output, None)
    check_folder(folder)
    sweep(folder)
    planned = plan(config)
    if not overwrite:
        results = [
            job.target.provider.result_file(model.name)
            for job in planned.jobs
            for model in job.models
        ]
        # QNN and OpenVINO name a sidecar after the context model.
        stems = (glob.escape(Path(result).stem) for result in results)
        sidecars = (path for stem in stems for path in sorted(folder.glob(f"{stem}[._]*.bin")))
        _reject_existing(dict.fromkeys((*(folder / (name or r) for r in results), *sidecars)))
    with temp_dir() as staging:
        result = run(planned, staging)
        files = _destinations(result.built, name)
        written = tuple(folder / name for name in files)
        replaced = {path.resolve() for path in written}
        _reject_sources(result, replaced.__contains__)
        if not overwrite:
            # An EP may choose another name.
            _reject_existing(written)
        with writing("a result", folder, str(output), OutputError):
            replace_files(folder, files)
    return CompileResult(written, make_report(result))


def _destinations(built: Iterable[Built], name: str | None) -> dict[str, Path]:
    """Each file's path in the output folder -> the file itself; ``name`` renames the context model.

    Sidecars come first, so that no published model names an unpublished file.
    """
    sidecars, models = {}, {}
    for result in built:
        contexts = {context.model_file for context in result.record.contexts}
        for file in result.record.files:
            if file in contexts:
                models[name or file] = result.folder / file
            else:
                sidecars[file] = result.folder / file
    return {**sidecars, **models}


def _reject_existing(paths: Iterable[Path]) -> None:
    """Raise OutputError if any of ``paths`` exists."""
    hint = "Choose another path, or allow overwriting (on the command line: --overwrite)."
    problems = [
        Problem(Kind.FILE_EXISTS, str(path), "exists already.", hint)
        for path in paths
        if path.exists()
    ]
    OutputError.check(problems)


def _reject_sources(result: Result, is_replaced: Callable[[Path], bool]) -> None:
    """Raise OutputError for the files of source models whose real path ``is_replaced`` by the output."""
    message = "is a file of the source model, which the output would replace."
    problems = [
        Problem(Kind.FILE_EXISTS, str(file), message, "Choose another path.")
        for file in dict.fromkeys(file for source in result.sources for file in source.users_files)
        if is_replaced(file.resolve())
    ]
    OutputError.check(problems)


def export(
    config: Config, folder: Path, run: Run, *, loader: bool, overwrite: bool
) -> CompileResult:
    """Compile the models of ``config``, and make ``folder`` their model package.

    With ``loader`` the folder is also a Python
    package, as in a wheel. Nothing is written unless all jobs succeed. ``overwrite`` replaces an earlier
    package of this tool as a whole; a folder with any other file is never changed.

    Raises what ``run`` raises; ConfigError when one environment cannot build the targets; and OutputError
    when the folder is a file, exists already, has other files or source models, cannot be written, or would
    have no model.
    """
    if not config.models:
        message = (
            "no model would be in it: none has one of the selected targets, or ships its source."
        )
        hint = 'Select other targets, or set fallback = "source".'
        raise OutputError(Problem(Kind.UNKNOWN_TARGET, str(folder), message, hint))
    # A link is kept, and its target replaced.
    target = folder.resolve()
    check_folder(target)
    reject_others(folder, edited=False)
    if not overwrite and folder.exists() and any(folder.iterdir()):
        _reject_existing([folder])
    with temp_dir() as staging:
        result = run(plan(config), staging)
        shipped = modules(import_name_in_tree(target), config.models) if loader else {}
        package = bundle(result, staging, shipped)
        _reject_sources(result, lambda file: file.is_relative_to(target))
        with writing("the model package", target.parent, str(target), OutputError):
            publish(package, result.sources, folder, edited=False)
    return CompileResult(tuple(folder / name for name in package.files), make_report(result))


def compile_to_bytes(
    model: bytes, data: Mapping[str, bytes], provider: str, settings: Mapping[str, Any]
) -> bytes:
    """Compile a model from memory to memory, as `hatch_epcontext.api.compile_to_bytes` describes."""
    able = [p for p in PROVIDERS.values() if p.product == "context" and not p.needs_library]
    if find(provider) not in able:
        message = f"{show(provider)} is not a provider that compiles contexts."
        hint = suggestion(provider, [known.name for known in able])
        raise ConfigError(Problem.at(Key() / "provider", Kind.UNKNOWN_PROVIDER, message, hint))
    with temp_dir() as folder:
        source, result = folder / "model.onnx", folder / "result"
        source.write_bytes(model)
        result.mkdir()
        config = configure({"model": source}, provider, nested(settings, {"from-memory": True}))
        (target,) = config.targets
        check_environment((), _REQUIREMENTS)
        files = {}
        for number, (location, contents) in enumerate(data.items()):
            # Not named after its location, which can be a path.
            file = folder / f"data-{number}"
            file.write_bytes(contents)
            files[location] = str(file)
        paths = (str(source),)
        request = CompileRequest(config.models, paths, target, str(result), buffers=files)
        workers = Workers(config.build.timeout)
        workers.call(request, folder / "worker", location=f"model -> {target.name}")
        (compiled,) = result.iterdir()
        return compiled.read_bytes()
