"""``epcontext cache``: shows and cleans the cache of artifacts."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click

from hatch_epcontext.cache.store import Entry, EntryKind
from hatch_epcontext.cli._common import echo, open_store, show_table
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.errors import ROOT
from hatch_epcontext.text import count, show_size, to_toml

_NOUNS: dict[EntryKind, str] = {
    "artifacts": "artifact",
    "models": "downloaded model",
    "cut": "cut model",
    "searches": "record",
    "facts": "record",
    "refs": "record",
    "index": "record",
    "sent": "record",
}
"""What a kind of entries is called; those without files are only counted."""


@click.group("cache")
def command() -> None:
    """Show and clean the cache of artifacts."""


@command.command()
def info() -> None:
    """Show the cache's folder, its artifacts and models, and what apps of this user have compiled."""
    store = open_store()
    entries = store.entries()
    echo(f"{store.root}: {_summarize(entries)}")
    rows = []
    for entry in (entry for entry in entries if _NOUNS[entry.kind] != "record"):
        files = ", ".join(entry.files)
        used = _show_time(entry.used)
        rows.append((_NOUNS[entry.kind], files, show_size(entry.size), used, entry.key[:12]))
    rows += _compiled_by_apps()
    if rows:
        show_table(("kind", "files", "size", "last used", "key"), rows)


def _show_time(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _compiled_by_apps() -> Iterator[tuple[str, str, str, str, str]]:
    """A row for each context that an app of this user has compiled for itself: see ``_recompile.py``."""
    import platformdirs

    records: list[Path] = []
    # Without a home folder.
    with contextlib.suppress(RuntimeError):
        records += Path(platformdirs.user_cache_dir()).glob("*/compiled/*/files.json")
    for record in sorted(records):
        folder = record.parent
        try:
            files = {
                file.name: file.stat().st_size
                for file in sorted(folder.iterdir())
                if file != record
            }
            used = _show_time(folder.stat().st_mtime)
        except OSError:
            # Its app removes it just now.
            continue
        kind = f"compiled by {folder.parents[1].name}"
        yield kind, ", ".join(files), show_size(sum(files.values())), used, folder.name[:12]


@command.command()
@click.option(
    "--older-than",
    type=click.IntRange(0, 9999),
    metavar="DAYS",
    help="Remove what was not used for so many days.",
)
@click.option("--all", "everything", is_flag=True, help="Remove everything that builds wrote.")
def prune(older_than: int | None, everything: bool) -> None:
    """Remove what builds stored: artifacts, models, and what they learned of them."""
    if everything == (older_than is not None):
        raise click.UsageError("Choose what to remove: either --older-than or --all.")
    echo(f"removed {_summarize(open_store().prune(older_than))}")


@command.command()
def new_key() -> None:
    """Make a pair of keys for a shared cache.

    Builds that write to the cache sign with the private key; builds that read from it trust the public key.
    The keys are only printed.
    """
    from hatch_epcontext.cache.signing import new_keys

    try:
        private, public = new_keys()
    except ImportError as error:
        raise click.ClickException(str(error)) from error
    click.echo("Keep this secret, in the environment of the builds that write:")
    click.echo(f"{PREFIX}SHARED_CACHE_KEY={private}")
    click.echo("\nThis belongs in pyproject.toml:")
    click.echo(f"[{ROOT}.build]\nshared-cache-keys = {to_toml([public])}")


def _summarize(entries: list[Entry]) -> str:
    numbers = Counter(_NOUNS[entry.kind] for entry in entries)
    counts = (count(numbers[noun], noun) for noun in dict.fromkeys(["artifact", *sorted(numbers)]))
    return ", ".join([*counts, show_size(sum(entry.size for entry in entries))])
