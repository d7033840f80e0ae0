"""``epcontext compile``: compiles any models, into any folder."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import get_args

import click

from hatch_epcontext.cli._common import (
    Verbosity,
    report_options,
    run_plan,
    show_written,
    verbosity_options,
)
from hatch_epcontext.cli._flag_errors import use_flag_names
from hatch_epcontext.cli._flags import job_flags, models_argument
from hatch_epcontext.cli._output import echo
from hatch_epcontext.config.tables import Fallback
from hatch_epcontext.text import show_size
from hatch_epcontext.tools.compiling import compile_models, is_file
from hatch_epcontext.tools.configure import JobSettings, configure, name_models
from hatch_epcontext.tools.exporting import export

_HEADLINE = "compiling failed, nothing is written"

# Click keeps the lines of a paragraph that begins with a backspace.
_EXAMPLES = """\b
Examples:
  epcontext compile model.onnx -o model_ctx.onnx -p qnn -O soc_model=60 -O htp_arch=73 --dim batch=1
  epcontext compile prefill.onnx decode.onnx -o out -p qnn --share-weights
  epcontext compile model.onnx --package model.ortpackage -p qnn -O soc_model=60 -O htp_arch=73
"""


@click.command("compile", epilog=_EXAMPLES)
@models_argument()
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="The context model (.onnx), or a folder.",
)
@click.option(
    "--package",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Instead of OUT: a folder for a model package.",
)
@click.option(
    "--fallback",
    type=click.Choice(get_args(Fallback)),
    help="The source models in the package (default auto).",
)
@job_flags()
@click.option(
    "--embed/--no-embed",
    default=None,
    help="The blob inside the context model, or beside it.",
)
@click.option(
    "--from-memory",
    is_flag=True,
    help="Let the compiler read and write memory only, with the blob inside the context model.",
)
@click.option(
    "--share-weights",
    is_flag=True,
    help="Compile all models into one sidecar.",
)
@click.option(
    "--no-validate",
    is_flag=True,
    help="Run nothing, not even on the CPU.",
)
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace files; of folders only epcontext's own.",
)
@report_options
@verbosity_options
def command(
    models: tuple[Path, ...],
    output: Path | None,
    package: Path | None,
    fallback: Fallback | None,
    provider: str,
    job: JobSettings,
    embed: bool | None,
    from_memory: bool,
    share_weights: bool,
    no_validate: bool,
    overwrite: bool,
    as_json: bool,
    report: Path | None,
    quiet: bool,
    verbose: int,
) -> None:
    """Compile any models, and validate the results.

    Each MODEL is compiled and validated as in a build. The results go to OUT, or to DIR as a model package,
    which ONNX Runtime and the loader open. Names of dimensions and inputs apply to all models; to one model
    with its name before them: --dim decoder:length=1. If shapes stay open, as for the CPU, --dim and --shape
    only size the dummy inputs; --set static-shapes=true fixes them. --option, --dim and other flags with K=V
    are repeatable.
    """
    if share_weights and len(models) == 1:
        raise click.UsageError("--share-weights is for two models or more.")
    if fallback is not None and package is None:
        raise click.UsageError("--fallback is for a model package: give --package too.")
    place = output or package
    if place is None or (output and package):
        raise click.UsageError("Give either --output or --package.")
    named = name_models(models, output if output and is_file(output, models) else None)
    use_flag_names(named, _HEADLINE)
    validate = {**job.validate, "mode": False} if no_validate else job.validate
    job = dataclasses.replace(
        job,
        embed=embed,
        from_memory=from_memory,
        share_weights=share_weights,
        fallback=fallback,
        validate=validate,
    )
    config = configure(named, provider, job)
    config = dataclasses.replace(config, report=report or config.report)
    verbosity = Verbosity.beside_json(quiet, verbose, as_json=as_json)

    run = partial(run_plan, verbosity=verbosity, title=place.name, as_json=as_json)
    if package is not None:
        written = export(config, package, run, loader=False, overwrite=overwrite)
        if not verbosity.quiet:
            show_written(package, written.files, as_json=as_json)
        return
    compiled = compile_models(config, place, run, overwrite=overwrite)
    if not verbosity.quiet:
        for path in compiled.files:
            echo(f"wrote {path} ({show_size(path.stat().st_size)})", err=as_json)
