"""``epcontext compile``: compiles any models, into any folder."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from hatch_epcontext.cli._common import (
    command_with_examples,
    echo,
    output_option,
    report_option,
    run_plan,
    show_written,
    verbose_option,
)
from hatch_epcontext.cli._settings import (
    models_argument,
    provider_option,
    setting_flags,
    switch,
    use_flag_names,
)
from hatch_epcontext.text import show_size
from hatch_epcontext.tools.compiling import check_output, compile_models, is_package
from hatch_epcontext.tools.configure import SHARED, configure, name_models

_HEADLINE = "compiling failed, nothing is written"


@command_with_examples(
    "compile",
    "model.onnx -o model_ctx.onnx -p qnn --set chip=snapdragon-x-elite --dim batch=1",
    "prefill.onnx decode.onnx -o out -p qnn --share-weights",
    "model.onnx -o model.ortpackage -p qnn --set chip=snapdragon-x-elite",
)
@models_argument(type_=click.Path(exists=True, path_type=Path))
@output_option("OUT", "The context model (.onnx), a model package (.ortpackage), or a folder.")
@provider_option()
@setting_flags
@switch("--embed", {"embed": True}, "The blob inside the context model.")
@switch(
    "--from-memory",
    {"from-memory": True},
    "Let the compiler read and write memory only, with the blob inside the context model.",
)
@switch("--share-weights", {"share-weights": SHARED}, "Compile all models into one sidecar.")
@switch("--no-validate", {"validate.mode": False}, "Run nothing, not even on the CPU.")
@click.option("--overwrite", is_flag=True, help="Replace files; of folders only epcontext's own.")
@report_option
@verbose_option
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
    use_flag_names(named, _HEADLINE)
    check_output(output, named.values())
    config = configure(named, provider, settings)
    run = partial(run_plan, verbose=verbose, name=output.name, report=report)
    compiled = compile_models(config, output, run, overwrite=overwrite)
    if is_package(output):
        show_written(output, compiled.files)
        return
    for path in compiled.files:
        echo(f"wrote {path} ({show_size(path.stat().st_size)})")
