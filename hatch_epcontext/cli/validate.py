"""``epcontext validate``: proof of an artifact, whoever made it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hatch_epcontext import validation
from hatch_epcontext.artifact import Proof
from hatch_epcontext.cli.flags import LOADING, SETTING, SHAPES, Flags, provider_option, with_options
from hatch_epcontext.cli.running import Voice, voice_options, workplace
from hatch_epcontext.cli.tables import configuration
from hatch_epcontext.cli.told import told_in_flags
from hatch_epcontext.plan import plan
from hatch_epcontext.protocol import DescribeReply
from hatch_epcontext.providers import Provider
from hatch_epcontext.report import proven
from hatch_epcontext.requirements import check_environment
from hatch_epcontext.structure import to_json


@dataclass(frozen=True)
class Validation:
    """The answer of ``--json``."""

    path: str
    provider: str
    ep: str
    model: DescribeReply
    validation: Proof


def _command(
    context: Path,
    source: Path | None,
    provider: str | None,
    structure: bool,
    as_json: bool,
    quiet: bool,
    verbose: int,
    **given: Any,
) -> None:
    """Prove a context model that anybody made.

    Its files are there, beside CONTEXT; it loads as something precompiled, from a copy elsewhere; it runs,
    and agrees with what SOURCE answers on the CPU.

    The provider is what CONTEXT says, and options of a chip have to be those of which it was made. For an
    optimized graph name the provider. It fails where CONTEXT cannot be run, unless with --structure.
    """
    model = validation.read(context)
    found = validation.provider_of(context, model, provider)
    flags = Flags(provider=found.name, optimization=None, **given)
    named = {context.stem: source or context}
    voice = Voice.of(quiet, verbose, as_json=as_json)
    with told_in_flags(named, "it is not proven"), workplace() as staging:
        planned = plan(configuration({"model": source or context}, flags))
        (job,) = planned.jobs
        validation.check_chip(context, model, job)
        proof = Proof("structure")
        if not structure:
            check_environment(planned.config.targets, planned.requirements)
            with voice.progress("validating", 1):
                proof = validation.prove(
                    context,
                    model,
                    job,
                    staging,
                    voice.workers(planned.config.timeout),
                    has_source=source is not None,
                )
    if as_json:
        answer = Validation(str(context), found.name, found.ep, model, proof)
        click.echo(to_json(answer), nl=False)
    elif not quiet:
        click.echo(f"{context}: {', '.join([*_described(model, found), proven(proof)])}")


def _described(model: DescribeReply, provider: Provider) -> list[str]:
    if not model.contexts:
        return ["optimized graph"]
    noun = "context" if len(model.contexts) == 1 else "contexts"
    parts = [f"{len(model.contexts)} {noun} of {provider.ep}"]
    compatibility = model.compatibility.get(provider.ep, "")
    if made_for := provider.compiled_for(compatibility):
        parts.append("for " + ", ".join(f"{name} {value}" for name, value in made_for.items()))
    left = ", ".join(f"{count} {name}" for name, count in model.operators.items())
    return [*parts, f"left to the CPU: {left}" if left else "nothing left to the CPU"]


validate = click.command("validate")(
    with_options(
        _command,
        click.argument("context", type=click.Path(exists=True, dir_okay=False, path_type=Path)),
        click.option(
            "-s",
            "--source",
            type=click.Path(exists=True, dir_okay=False, path_type=Path),
            help="The model of which it was made, to compare with; its shapes are fixed as CONTEXT has "
            "them.",
        ),
        provider_option(required=False),
        *LOADING,
        *SHAPES,
        SETTING,
        click.option("--structure", is_flag=True, help="Check the files only, and run nothing."),
        click.option("--json", "as_json", is_flag=True, help="Print everything as JSON."),
        voice_options,
    )
)
