"""``epcontext validate``: validates a context model or a model package."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click

from hatch_epcontext.cli import _common, _settings
from hatch_epcontext.errors import BuildError, Kind, Problem
from hatch_epcontext.jobs.artifact import GENERATED_BY
from hatch_epcontext.jobs.boards import REPORT_FORMAT, BoardReport, describe_run
from hatch_epcontext.jobs.report import describe_validation, validation_warnings
from hatch_epcontext.jobs.report_file import check_report, write_report
from hatch_epcontext.providers import describe_chip
from hatch_epcontext.serialize import to_json
from hatch_epcontext.text import count
from hatch_epcontext.tools.boards import project_models, unpacked
from hatch_epcontext.tools.inspecting import WHEEL
from hatch_epcontext.tools.validating import (
    Reporting,
    ValidatedContext,
    ValidatedVariant,
    validate_context,
    validate_package,
)
from hatch_epcontext.worker.requests import InspectReply
from hatch_epcontext.worker.results import Validation

_HEADLINE = "validation failed"


@_common.command_with_examples(
    "validate",
    "model_ctx.onnx --source model.onnx",
    "model.ortpackage",
    "model.ortpackage --set validate=auto",
    "--package digits_app-1.0.0-py3-none-any.whl --report x-elite.json",
)
@click.argument("path", type=click.Path(exists=True, path_type=Path), required=False)
@click.option(
    "-s", "--source", type=_common.existing_file, help="The source model, to compare with."
)
@_settings.provider_option(required=False)
@click.option(
    "--package",
    metavar="P",
    help="Instead of PATH: a wheel, or one that is installed: its folder, or the name of its package.",
)
@click.option(
    "--report",
    type=_common.new_file,
    metavar="R.json",
    help="Write what this machine's devices make of each target.",
)
@click.option(
    "--sdist",
    type=click.Path(exists=True, path_type=Path),
    help="With --report: the wheel's sdist or project, whose samples are run.",
)
@_settings.setting_flags
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@_common.verbose_option
def command(
    path: Path | None,
    source: Path | None,
    provider: str | None,
    package: str | None,
    report: Path | None,
    sdist: Path | None,
    settings: dict[str, Any],
    as_json: bool,
    verbose: int,
) -> None:
    """Validate a context model or a model package.

    PATH is a context model, or a wheel or the folder of a model package that epcontext wrote. It is valid if
    its files are complete, and a copy in another folder opens without compiling and runs. With --source its
    outputs must agree with the source's on the CPU. An optimized graph needs --provider.

    The variants of a package have their own options, and are compared with its source model, or else its
    first variant for the CPU. What this machine cannot run is an error, unless --set validate=auto accepts
    it. --set validate=structure runs nothing.

    With --report each target that opens on a device of this machine is also timed, and R.json says how it
    agrees: the key validated-on takes it into the next build. Other targets are listed with the reason.
    --device any accepts a simulator, which is not timed.
    """
    if (path is None) == (package is None):
        raise click.UsageError("Give either PATH or --package.")
    if report is not None and report.suffix != ".json":
        raise click.UsageError(f"--report writes .json, and not {report.name}.")
    if sdist is not None and report is None:
        raise click.UsageError("--sdist needs --report.")
    workers = partial(_common.make_workers, verbose)
    if path is not None and not (path.is_dir() or path.suffix == WHEEL):
        if report is not None:
            raise click.UsageError("--report is for a wheel or a model package.")
        _settings.use_flag_names({path.stem: source or path}, _HEADLINE)
        _show_context(validate_context(path, provider, source, settings, workers), as_json=as_json)
        return
    if provider is not None or source is not None:
        message = "--provider and --source are for a single file: a model package has its own."
        raise click.UsageError(message)
    whole = package or str(path)
    _settings.use_flag_names({Path(whole).stem: Path(whole)}, _HEADLINE)
    if report is not None:
        check_report(report)
    with contextlib.ExitStack() as stack:
        is_folder = package is None and path is not None and path.is_dir()
        folder = Path(whole) if is_folder else stack.enter_context(unpacked(whole))
        sources = stack.enter_context(project_models(sdist, workers))
        reporting = Reporting(whole, sources) if report else None
        variants = validate_package(folder, settings, workers, reporting)
        _show_package(whole, variants, report, as_json=as_json)


def _show_context(validated: ValidatedContext, *, as_json: bool) -> None:
    if as_json:
        click.echo(to_json(validated), nl=False)
        return
    parts = _describe_model(validated.model, validated.ep, validated.provider)
    _common.echo(
        f"{validated.path}: {', '.join([*parts, describe_validation(validated.validation)])}"
    )
    _warn(validated.path, validated.validation)


def _show_package(
    name: str, variants: Iterator[ValidatedVariant], report: Path | None, *, as_json: bool
) -> None:
    """Print the ``variants`` of the package ``name`` as they are finished, and write the ``report``.

    Raises BuildError for those that fail; with a report for those that differ, or if none was run.
    """
    finished = list[ValidatedVariant]()
    for variant in variants:
        finished.append(variant)
        if not as_json:
            _common.echo(f"{variant.name}: {', '.join(_describe_variant(variant))}")
            if variant.validation is not None:
                _warn(variant.name, variant.validation)
    if as_json:
        click.echo(to_json({"path": name, "variants": finished}), nl=False)
    problems = [problem for variant in finished for problem in variant.problems]
    if report is not None:
        entries = tuple(variant.entry for variant in finished if variant.entry is not None)
        if not any(entry.run for entry in entries):
            message = "no target was run on this machine, and so there is no report."
            raise BuildError(Problem(Kind.NOT_RUN, name, message), *problems)
        package = Path(name).name
        of_board = BoardReport(REPORT_FORMAT, GENERATED_BY, package, entries)
        write_report(of_board, package, report)
        _common.echo(f"wrote {report}", err=as_json)
        # A context for another chip does not open here.
        problems = [p for variant in finished if variant.run for p in variant.problems]
    BuildError.check(problems)


def _warn(name: str, validation: Validation) -> None:
    for warning in validation_warnings(name, validation):
        _common.warn(warning)


def _describe_variant(variant: ValidatedVariant) -> list[str]:
    if variant.run is None and variant.entry is not None:
        return [f"NOT run ({variant.entry.reason.rstrip('.')})"]
    if variant.run is not None:
        return [describe_run(variant.run)]
    if variant.validation is None or variant.model is None:
        return ["FAILED"]
    parts = _describe_model(variant.model, variant.ep, variant.ep)
    if not variant.model.contexts:
        parts = [f"ONNX graph for {variant.ep}"]
    return [*parts, describe_validation(variant.validation)]


def _describe_model(model: InspectReply, ep: str, provider: str) -> list[str]:
    if not model.contexts:
        return ["optimized graph"]
    parts = [f"{count(len(model.contexts), 'context')} of {ep}"]
    if chip := describe_chip(provider, model.compatibility.get(ep, "")):
        parts.append(f"for {chip}")
    uncovered = ", ".join(f"{number} {name}" for name, number in model.operators.items())
    return [*parts, f"left to the CPU: {uncovered}" if uncovered else "nothing left to the CPU"]
