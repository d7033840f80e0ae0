"""``epcontext validate``: validation of an artifact, whoever made it."""

from __future__ import annotations

from pathlib import Path

import click

from hatch_epcontext.build.validation import describe_validation
from hatch_epcontext.cli._common import Verbosity, verbosity_options
from hatch_epcontext.cli._flag_errors import use_flag_names
from hatch_epcontext.cli._flags import loading_flags, provider_option
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.serialize import to_json
from hatch_epcontext.text import count
from hatch_epcontext.tools.configure import JobSettings
from hatch_epcontext.tools.validate import ValidatedContext, validate_context


@click.command("validate")
@click.argument("context", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-s",
    "--source",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="The source model, to compare with. It gets the fixed shapes of CONTEXT.",
)
@provider_option(required=False)
@loading_flags
@click.option("--structure", is_flag=True, help="Check the files only, and run nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
@verbosity_options
def validate(
    context: Path,
    source: Path | None,
    provider: str | None,
    job: JobSettings,
    structure: bool,
    as_json: bool,
    quiet: bool,
    verbose: int,
) -> None:
    """Validate a context model that any tool made.

    CONTEXT is valid if all its files are there, a copy of it in another folder loads without compiling,
    and it runs. With SOURCE its outputs must also agree with those of SOURCE on the CPU.

    CONTEXT names its provider, and options that name a chip must fit it. For an optimized graph give the
    provider. The command fails where CONTEXT cannot be run, unless with --structure.
    """
    use_flag_names({context.stem: source or context}, "validation failed")
    verbosity = Verbosity.beside_json(quiet, verbose, as_json=as_json)
    with verbosity.progress("validating", 1):
        validated = validate_context(
            context, provider, source, job, verbosity.workers, structure_only=structure
        )
    if as_json:
        click.echo(to_json(validated), nl=False)
    elif not quiet:
        parts = [*_describe_contexts(validated), describe_validation(validated.validation)]
        click.echo(f"{context}: {', '.join(parts)}")


def _describe_contexts(validated: ValidatedContext) -> list[str]:
    model = validated.model
    if not model.contexts:
        return ["optimized graph"]
    parts = [f"{count(len(model.contexts), 'context')} of {validated.ep}"]
    compatibility = model.compatibility.get(validated.ep, "")
    if chip := PROVIDERS[validated.provider].compiled_for(compatibility):
        parts.append("for " + ", ".join(f"{name} {value}" for name, value in chip.items()))
    uncovered = ", ".join(f"{number} {name}" for name, number in model.operators.items())
    return [*parts, f"left to the CPU: {uncovered}" if uncovered else "nothing left to the CPU"]
