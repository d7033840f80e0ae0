"""``epcontext validate``: validates a context model or a model package."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import click

from hatch_epcontext.cli._common import echo, existing_file, make_workers, verbose_option, warn
from hatch_epcontext.cli._settings import provider_option, setting_flags, use_flag_names
from hatch_epcontext.errors import BuildError
from hatch_epcontext.jobs.report import describe_validation, validation_warnings
from hatch_epcontext.providers import find
from hatch_epcontext.serialize import to_json
from hatch_epcontext.text import count
from hatch_epcontext.tools.validating import ValidatedVariant, validate_context, validate_package
from hatch_epcontext.worker.requests import InspectReply
from hatch_epcontext.worker.results import Validation

_HEADLINE = "validation failed"

# Click keeps the lines of a paragraph that begins with a backspace.
_EXAMPLES = """\b
Examples:
  epcontext validate model_ctx.onnx --source model.onnx
  epcontext validate model.ortpackage
  epcontext validate model.ortpackage --set validate=auto
"""


@click.command("validate", epilog=_EXAMPLES)
@click.argument("path", type=click.Path(exists=True, path_type=Path))
@click.option("-s", "--source", type=existing_file, help="The source model, to compare with.")
@provider_option(required=False)
@setting_flags
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@verbose_option
def command(
    path: Path,
    source: Path | None,
    provider: str | None,
    settings: dict[str, Any],
    as_json: bool,
    verbose: int,
) -> None:
    """Validate a context model or a model package.

    PATH is a context model, or the folder of a model package that epcontext wrote. It is valid if its files
    are complete, and a copy in another folder opens without compiling and runs. With --source its outputs
    must agree with the source's on the CPU. An optimized graph needs --provider.

    The variants of a package have their own options, and are compared with its source model, or else its
    first variant for the CPU. What this machine cannot run is an error, unless --set validate=auto accepts
    it. --set validate=structure runs nothing.
    """
    use_flag_names({path.stem: source or path}, _HEADLINE)
    workers = partial(make_workers, verbose)
    if not path.is_dir():
        validated = validate_context(path, provider, source, settings, workers)
        if as_json:
            click.echo(to_json(validated), nl=False)
        else:
            parts = _describe_model(validated.model, validated.ep, validated.provider)
            echo(f"{path}: {', '.join([*parts, describe_validation(validated.validation)])}")
            _warn(str(path), validated.validation)
        return
    if provider is not None or source is not None:
        message = "--provider and --source are for a single file: a model package has its own."
        raise click.UsageError(message)

    variants = list[ValidatedVariant]()
    for variant in validate_package(path, settings, workers):
        variants.append(variant)
        if not as_json:
            echo(f"{variant.name}: {', '.join(_describe_variant(variant))}")
            if variant.validation is not None:
                _warn(variant.name, variant.validation)
    if as_json:
        click.echo(to_json({"path": str(path), "variants": variants}), nl=False)
    if problems := [problem for variant in variants for problem in variant.problems]:
        raise BuildError(*problems)


def _warn(name: str, validation: Validation) -> None:
    for warning in validation_warnings(name, validation):
        warn(warning)


def _describe_variant(variant: ValidatedVariant) -> list[str]:
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
    known = find(provider)
    chip = known.compiled_for(model.compatibility.get(ep, "")) if known else {}
    if known and chip:
        parts.append(f"for {known.describe(chip)}")
    uncovered = ", ".join(f"{number} {name}" for name, number in model.operators.items())
    return [*parts, f"left to the CPU: {uncovered}" if uncovered else "nothing left to the CPU"]
