"""``epcontext compile``: context models of any models, where the user wants them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import click

from hatch_epcontext.build import cache_of
from hatch_epcontext.cli.flags import Flags, job_flags, models_argument
from hatch_epcontext.cli.running import (
    Voice,
    report_options,
    run_plan,
    voice_options,
    warn,
    workplace,
)
from hatch_epcontext.cli.tables import configuration, names_of
from hatch_epcontext.cli.told import told_in_flags
from hatch_epcontext.config import Config
from hatch_epcontext.plan import plan
from hatch_epcontext.publish import places, publish, refuse_existing, refuse_sources
from hatch_epcontext.structure import show_size

HEADLINE = "nothing is written, because not every model could be compiled and proven"


@click.command("compile")
@models_argument
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    metavar="OUT",
    help="The context model (a name that ends with .onnx, for a single MODEL), or a folder.",
)
@job_flags
@click.option(
    "--embed/--no-embed",
    default=None,
    help="The compiled blob inside the context model, or beside it (which is so if left out).",
)
@click.option(
    "--share-weights",
    is_flag=True,
    help="Compile the models together, with one sidecar for all.",
)
@click.option("--no-validate", is_flag=True, help="Do not load, run and compare what was made.")
@click.option("--overwrite", is_flag=True, help="Replace files that are there.")
@report_options
@voice_options
def compile_(
    models: tuple[Path, ...],
    output: Path,
    flags: Flags,
    embed: bool | None,
    share_weights: bool,
    no_validate: bool,
    overwrite: bool,
    as_json: bool,
    report: Path | None,
    quiet: bool,
    verbose: int,
) -> None:
    r"""Compile any models, and prove the result.

    Each MODEL is compiled for the provider and proven as in a build, and what is made goes to OUT. Names of
    dimensions and inputs are of all models; before one that is of a single model stands the model's name and
    a colon: --dim decoder:length=1.

    \b
    epcontext compile model.onnx -o model_ctx.onnx -p qnn -O soc_model=60 --dim batch=1
    epcontext compile prefill.onnx decode.onnx -o out -p qnn --share-weights
    """
    file = output.suffix == ".onnx" and not output.is_dir()
    if file and len(models) > 1:
        raise click.UsageError("OUT has to be a folder for several models.")
    if share_weights and len(models) == 1:
        raise click.UsageError("--share-weights is for two models or more.")
    named = names_of(models, output if file else None)
    with told_in_flags(named, HEADLINE), workplace() as staging:
        config = configuration(
            named, flags, embed=embed, share_weights=share_weights, validate=not no_validate
        )
        config = dataclasses.replace(config, report=report or config.report)
        if not overwrite:
            refuse_existing(_expected(config, output, file=file))
        voice = Voice.of(quiet, verbose, as_json=as_json)
        result = run_plan(
            plan(config),
            staging,
            cache_of(config, staging, warn),
            voice,
            output.name,
            as_json=as_json,
        )
        folder, name = (output.parent, output.name) if file else (output, None)
        files = places(result.built, folder, name)
        refuse_sources(files, result.sources)
        publish(files, overwrite=overwrite)
    if not voice.quiet:
        for path in files:
            click.echo(f"wrote {path} ({show_size(path.stat().st_size)})", err=as_json)


def _expected(config: Config, output: Path, *, file: bool) -> list[Path]:
    """Those of the files to come whose names are known before anything is compiled."""
    if file:
        return [output]
    return [
        output / target.provider.result_file(model.name)
        for model in config.models
        for target in model.targets
    ]
