"""``epcontext export``: the model package of a project, without a wheel."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from hatch_epcontext.cli import _common, _settings
from hatch_epcontext.tools.compiling import export
from hatch_epcontext.tools.project import Project


@_common.command_with_examples(
    "export",
    "-o src/my_app/epcontext --overwrite",
    "../app --target x-elite -o build/models",
)
@_settings.project_options
@_common.output_option("DIR", "The folder of the model package.")
@click.option(
    "--overwrite",
    is_flag=True,
    help="Replace the whole folder, if it is a model package that epcontext wrote.",
)
@_common.report_option
@_common.verbose_option
def command(
    project: Path,
    targets: tuple[str, ...],
    output: Path,
    overwrite: bool,
    report: Path | None,
    verbose: int,
) -> None:
    """Write the model package of a project.

    PROJECT is the folder with the pyproject.toml; the default is the current folder. Its models are
    compiled and validated, and DIR becomes the folder that a wheel would contain. C, C++ and C# apps can open
    it.

    Nothing is written if a model fails, or if DIR has files of another origin.
    """
    config = _settings.project_config(project.absolute(), targets)
    name = Project.read(config.root).name
    run = partial(_common.run_plan, verbose=verbose, name=name, report=report)
    written = export(config, output, run, loader=True, overwrite=overwrite)
    _common.show_written(output, written.files)
