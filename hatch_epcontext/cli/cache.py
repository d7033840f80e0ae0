"""``epcontext cache``: shows and cleans the cache of artifacts."""

from __future__ import annotations

import datetime
import re
from pathlib import Path

import click

from hatch_epcontext.cli._common import cache_option, open_store
from hatch_epcontext.cli._output import add_row, echo, show, table
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.shared_cache import SIGNATURES
from hatch_epcontext.errors import ROOT
from hatch_epcontext.jobs.cache.cleaning import Entry, Store
from hatch_epcontext.jobs.requirements import pip_install
from hatch_epcontext.text import count, show_size, to_toml

_LONGEST = datetime.timedelta(days=36500)
_UNITS = {"d": "days", "h": "hours", "w": "weeks"}


def _age(
    ctx: click.Context, param: click.Parameter, value: str | None
) -> datetime.timedelta | None:
    if value is None:
        return None
    found = re.fullmatch(r"(\d{1,5})([dhw])", value)
    if found is None:
        raise click.BadParameter(f"{value!r} is not an age such as 30d, 12h or 4w.")
    age = datetime.timedelta(**{_UNITS[found[2]]: int(found[1])})
    if age > _LONGEST:
        raise click.BadParameter(f"{value!r} is too long.")
    return age


@click.group("cache")
@cache_option
@click.pass_context
def command(ctx: click.Context, cache_dir: Path | None) -> None:
    """Show and clean the cache of artifacts."""
    ctx.obj = open_store(cache_dir)


@command.command()
@click.pass_obj
def info(store: Store) -> None:
    """Show the cache's folder, its artifacts and downloaded models."""
    entries = [*store.entries(), *store.models()]
    echo(f"{store.root}: {_summarize(entries)}")
    if not entries:
        return
    made = table("models", "files", "size", "last used", "artifact")
    for entry in entries:
        used = entry.used.astimezone().strftime("%Y-%m-%d %H:%M")
        names = entry.record.files if entry.record else entry.files or {}
        files = str(len(names)) if names else ""
        models = next(iter(entry.files or ()), "")
        if entry.record:
            models = ", ".join(context.model for context in entry.record.contexts)
        add_row(made, models or "damaged", files, show_size(entry.size), used, entry.key[:12])
    show(made)


@command.command()
@click.option(
    "--older-than",
    callback=_age,
    metavar="AGE",
    help="Remove what was not used for this time: 30d, 12h, 4w.",
)
@click.option("--all", "everything", is_flag=True, help="Remove everything that builds wrote.")
@click.pass_obj
def prune(store: Store, older_than: datetime.timedelta | None, everything: bool) -> None:
    """Remove artifacts and models from elsewhere."""
    if everything == (older_than is not None):
        raise click.UsageError("Choose what to remove: either --older-than or --all.")
    echo(f"removed {_summarize(store.prune(older_than))}")


@command.command()
def new_key() -> None:
    """Make a pair of keys for a shared cache.

    Builds that write to the cache sign with the private key; builds that read from it trust the public key.
    The keys are only printed.
    """
    try:
        from hatch_epcontext.jobs.cache.signing import new_keys
    except ImportError as error:
        raise click.ClickException(
            f"Keys need a package. Run: {pip_install([SIGNATURES])}"
        ) from error
    private, public = new_keys()
    click.echo("Keep this secret, in the environment of the builds that write:")
    click.echo(f"{PREFIX}CACHE_KEY={private}")
    click.echo("\nThis belongs in pyproject.toml:")
    click.echo(f"[{ROOT}.build]\ncache-keys = {to_toml([public])}")


def _summarize(entries: list[Entry]) -> str:
    size = show_size(sum(entry.size for entry in entries))
    models = sum(entry.is_model for entry in entries)
    more = f", {count(models, 'model')} from elsewhere" if models else ""
    return f"{count(len(entries) - models, 'artifact')}{more}, {size}"
