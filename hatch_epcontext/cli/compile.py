"""``epcontext compile``: compiles any models, into any folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from hatch_epcontext.cli import _common, _settings
from hatch_epcontext.text import show_size
from hatch_epcontext.tools.compiling import check_output, compile_models, is_package
from hatch_epcontext.tools.configure import SHARED, configure, name_models

_HEADLINE = "compiling failed, nothing is written"


@_common.command_with_examples(
    "compile",
    "model.onnx -o model_ctx.onnx -p qnn --set chip=snapdragon-x-elite --dim batch=1",
    "prefill.onnx decode.onnx -o out -p qnn --share-weights",
    "model.onnx -o model.ortpackage -p qnn --set chip=snapdragon-x-elite",
)
@_settings.models_argument(type_=click.Path(exists=True, path_type=Path))
@_common.output_option(
    "OUT", "The context model (.onnx), a model package (.ortpackage), or a folder."
)
@_settings.provider_option()
@_settings.setting_flags
@_settings.switch("--embed", {"embed": True}, "The blob inside the context model.")
@_settings.switch(
    "--from-memory",
    {"from-memory": True},
    "Let the compiler read and write memory only, with the blob inside the context model.",
)
@_settings.switch(
    "--share-weights", {"share-weights": SHARED}, "Compile all models into one sidecar."
)
@_settings.switch("--no-validate", {"validate.mode": False}, "Run nothing, not even on the CPU.")
@click.option("--overwrite", is_flag=True, help="Replace files; of folders only epcontext's own.")
@_common.report_option
@_common.verbose_option
def command(
    models: tuple[Path, ...],
    output: Path,
    provider: str,
    settings: dict[str, Any],
    overwrite: bool,
    report: Path | None,
    verbose: int,
) -> None:
    """Compile any models, and validate the results.

    Each MODEL is compiled and validated as in a build. A folder of onnxruntime-genai becomes a model package,
    with what is compiled beside it. Names of dimensions and inputs apply to all models; to
    one model with its name before them: --dim decoder:length=1. If shapes stay open, as for the CPU, --dim
    and --shape only size the dummy inputs; --set static-shapes=true fixes them. A model package has the
    source models too, unless all machines run what is compiled; --set fallback=none leaves them out.
    """
    if len(models) == 1 and settings.get("share-weights"):
        raise click.UsageError("--share-weights is for two models or more.")
    named = name_models(models, output)
    _settings.use_flag_names(named, _HEADLINE)
    check_output(output, named.values())
    config = configure(named, provider, settings)
    run = partial(_common.run_plan, verbose=verbose, name=output.name, report=report)
    compiled = compile_models(config, output, run, overwrite=overwrite)
    if is_package(output):
        _common.show_written(output, compiled.files)
        return
    for path in compiled.files:
        _common.echo(f"wrote {path} ({show_size(path.stat().st_size)})")
