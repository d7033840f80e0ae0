"""The public API: everything in ``__all__``, and nothing else of the package.

All functions run ONNX Runtime and EPs in worker processes, and import neither onnxruntime nor onnx.
They raise subclasses of `EpcontextError`, whose ``problems`` have a kind, a location (of an argument its
key of ``[tool.epcontext]``), a message and a hint.

The variables ``HATCH_EPCONTEXT_CACHE_DIR``, ``_NO_CACHE``, ``_JOBS`` and ``_TIMEOUT`` apply as in a build;
``settings`` win over them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hatch_epcontext.errors import (
    BuildError,
    ConfigError,
    EpcontextError,
    InspectionError,
    Key,
    Kind,
    MissingError,
    ModelError,
    OutputError,
    Problem,
    RequirementError,
    Setting,
)
from hatch_epcontext.files import FileRecord
from hatch_epcontext.graph.facts import NodeFacts, TensorFacts
from hatch_epcontext.jobs.artifact import FailureReport, Result
from hatch_epcontext.jobs.plan import Plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.recipe import Times
from hatch_epcontext.jobs.report import JobReport, ModelReport, Report
from hatch_epcontext.jobs.run import IncompleteError, build, open_cache
from hatch_epcontext.providers import OptionValue
from hatch_epcontext.text import printable
from hatch_epcontext.tools import compiling as compile_tool
from hatch_epcontext.tools import validating as validate_tool
from hatch_epcontext.tools.compiling import CompileResult
from hatch_epcontext.tools.configure import configure, name_models, nested
from hatch_epcontext.tools.validating import ValidatedContext
from hatch_epcontext.worker.requests import ContextFacts, InspectReply
from hatch_epcontext.worker.results import (
    Agreement,
    Coverage,
    Preparation,
    Validation,
    ValidationStatus,
)

__all__ = [
    "Agreement",
    "BuildError",
    "CompileResult",
    "ConfigError",
    "ContextFacts",
    "Coverage",
    "EpcontextError",
    "FailureReport",
    "FileRecord",
    "IncompleteError",
    "InspectReply",
    "InspectionError",
    "JobReport",
    "Key",
    "Kind",
    "MissingError",
    "ModelError",
    "ModelReport",
    "NodeFacts",
    "OutputError",
    "Preparation",
    "Problem",
    "Report",
    "RequirementError",
    "Setting",
    "TensorFacts",
    "Times",
    "ValidatedContext",
    "Validation",
    "ValidationStatus",
    "compile_models",
    "compile_to_bytes",
    "validate_context",
]

StrPath = str | os.PathLike[str]


def compile_models(
    models: StrPath | Sequence[StrPath] | Mapping[str, StrPath],
    output: StrPath,
    provider: str,
    *,
    provider_options: Mapping[str, OptionValue] | None = None,
    dims: Mapping[str, int] | None = None,
    settings: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    log: Callable[[str], None] | None = None,
) -> CompileResult:
    """Compile ONNX models for one execution provider, validate the results, and write them.

    The same as ``epcontext compile``, without a report. Nothing is written if a model fails.

    ``models``: one file, several, or files by name. The default name is the file's stem. A folder of
    onnxruntime-genai becomes a part of a model package.
    ``output``: a folder; or for one model the context model's own file, which ends with ``.onnx``. A folder
    that ends with ``.ortpackage`` becomes a model package.
    ``provider``: a name of ``docs/providers.md``, or ONNX Runtime's name of the EP.
    ``provider_options``: checked by name and value.
    ``dims``: sizes of open dimensions, by name. If shapes stay open, as for the CPU, they are only those of
    the dummy inputs.
    ``settings``: any other keys of a target, a model or the build, dotted or as in TOML, such as
    ``{"embed": True, "validate": "require", "shapes": {"x": (1, 3)}, "build.timeout": 600}``; ``fallback``;
    and ``from-memory``, with which the compiler reads and writes memory only.
    ``overwrite``: replace existing files; of a model package the whole folder, if this function wrote it.
    ``log``: gets a line for each finished model or group, and warnings.

    A key of ``dims``, ``shapes`` or ``constants`` applies to all models, or, with a model's name before it
    (``"decoder:length"``), to that model only. Models with one ``share-weights`` share one sidecar.

    Raises ConfigError for invalid arguments, RequirementError if a package is missing or the provider is
    not available here, BuildError if a model is invalid, does not compile or is not valid afterwards, and
    OutputError if the output exists already.

    >>> result = compile_models(
    ...     Path("digits.onnx"),
    ...     Path("out"),
    ...     "qnn",
    ...     dims={"batch": 1},
    ...     settings={"chip": "snapdragon-x-elite"},
    ... )  # doctest: +SKIP
    >>> [file.name for file in result.files]  # doctest: +SKIP
    ['digits_ctx_qnn.bin', 'digits_ctx.onnx']
    """
    output = Path(output)
    named = _by_name(models, output)
    compile_tool.check_output(output, named.values())
    config = configure(named, provider, _settings(settings, provider_options, dims))

    def run(planned: Plan, staging: Path) -> Result:
        return build(planned, staging, open_cache(config, line), line)

    def line(text: str) -> None:
        if log is not None:
            log(printable(text))

    return compile_tool.compile_models(config, output, run, overwrite=overwrite)


def _by_name(
    models: StrPath | Sequence[StrPath] | Mapping[str, StrPath], output: Path
) -> Mapping[str, Path]:
    if isinstance(models, Mapping):
        return {name: Path(path) for name, path in models.items()}
    several = [models] if isinstance(models, str | os.PathLike) else models
    return name_models([Path(path) for path in several], output)


def _settings(
    settings: Mapping[str, Any] | None,
    provider_options: Mapping[str, OptionValue] | None,
    dims: Mapping[str, int] | None = None,
) -> Mapping[str, Any]:
    tables = {"provider-options": provider_options, "dims": dims}
    return nested({key: table for key, table in tables.items() if table}, settings or {})


def validate_context(
    context: StrPath,
    *,
    source: StrPath | None = None,
    provider: str | None = None,
    provider_options: Mapping[str, OptionValue] | None = None,
    dims: Mapping[str, int] | None = None,
    settings: Mapping[str, Any] | None = None,
    log: Callable[[str], None] | None = None,
) -> ValidatedContext:
    """Validate a context model, or an optimized graph, that any tool wrote.

    The same as ``epcontext validate``: a copy of the model and its files in another folder must open without
    compiling, and run.

    ``source``: the source model, with whose outputs on the CPU those of the context are compared. It gets the
    fixed shapes of the context model, ``dims``, and the ``shapes`` and ``constants`` of ``settings``.
    ``provider``: needed only for an optimized graph; a context names its own.
    ``provider_options``: for loading. Options that name a chip must fit the context.
    ``settings``: any other keys of a target, a model or the build, as in `compile_models`. With
    ``{"validate": "structure"}`` only the files are checked, and with ``{"validate": "auto"}`` a model that
    this machine cannot run is no error.
    ``log``: gets what the worker does, and each line that it prints.

    Returns the facts of the model and its validation; without a source its ``agreements`` are empty.
    Raises InspectionError if the file is not a context model, a file is missing, or it is for another
    provider or chip; ConfigError for invalid arguments; RequirementError if a package is missing; and
    BuildError if the model cannot be run here, or fails.

    >>> validated = validate_context(
    ...     Path("out/digits_ctx.onnx"), source=Path("digits.onnx")
    ... )  # doctest: +SKIP
    >>> validated.validation.agreements  # doctest: +SKIP
    (Agreement(output='probs', max_abs=0.0007, cosine=0.99999, snr=61.3, ...),)
    """
    return validate_tool.validate_context(
        Path(context),
        provider,
        None if source is None else Path(source),
        _settings(settings, provider_options, dims),
        lambda timeout: Workers(timeout, log),
    )


def compile_to_bytes(
    model: bytes,
    provider: str,
    provider_options: Mapping[str, OptionValue] | None = None,
    *,
    data: Mapping[str, bytes] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> bytes:
    """Compile an ONNX model from memory to memory: a context model with the compiled blob inside.

    For apps that compile on the user's machine. The model is neither prepared nor validated.

    ``model``: the contents of an ONNX file. Its shapes must be fixed if the EP needs that.
    ``provider``: the name of a provider that compiles contexts.
    ``provider_options``: checked by name and value.
    ``data``: the contents of its external data files, by their locations in the model.
    ``settings``: any other keys of a target or the build, such as ``{"device": "gpu", "build.timeout": 60}``.

    Returns the contents of the context model. Raises ConfigError for invalid arguments,
    RequirementError if ONNX Runtime or onnx is not installed, and BuildError if the model is invalid, or
    if the EP is unavailable, compiles nothing or takes too long.

    >>> context = compile_to_bytes(
    ...     Path("fixed.onnx").read_bytes(), "qnn", settings={"chip": "snapdragon-x-elite"}
    ... )  # doctest: +SKIP
    """
    return compile_tool.compile_to_bytes(
        model, data or {}, provider, _settings(settings, provider_options)
    )
