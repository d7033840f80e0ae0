"""``epcontext record``: keeps some inputs of the project's models from a run of the app."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import click

from hatch_epcontext.cli._common import warn
from hatch_epcontext.cli._flag_errors import ExistingPath
from hatch_epcontext.cli._output import echo
from hatch_epcontext.cli._project import project_config
from hatch_epcontext.text import count, show_size, to_toml
from hatch_epcontext.tools import recording as tool
from hatch_epcontext.tools.recording import Recording


@click.command("record", context_settings={"allow_interspersed_args": False})
@click.option(
    "--project",
    type=ExistingPath(file_okay=False),
    default=Path(),
    help="The folder with the pyproject.toml. The default is the current folder.",
)
@click.option("-m", "--model", "models", multiple=True, help="Only this model; repeatable.")
@click.option(
    "-o",
    "--output",
    type=click.Path(file_okay=False, path_type=Path),
    help=f"Where each model gets a folder. The default is {tool.FOLDER} in the project.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    project: Path, models: tuple[str, ...], output: Path | None, command: tuple[str, ...]
) -> None:
    """Run the app, and keep some inputs of its models.

    COMMAND starts the app, as in: epcontext record -- python -m my_app photo.jpg. It runs as always, but the
    project's models run on the CPU. At most 8 samples of each model are kept: those that differ most, with 8
    consecutive steps each for a recurrent model. Only run() of a session is recorded, and only in a Python
    that reads PYTHONPATH.

    The files may contain personal data: only you may read them, and git ignores them. Nothing is
    overwritten. The exit code is that of the app.
    """
    root = project.absolute()
    config = project_config(root, (), models)
    recorded = tool.record(config, command, (output or root / tool.FOLDER).absolute())
    for note in recorded.notes:
        warn(note)
    for each in recorded.recordings:
        _show(each, root)
    if recorded.recordings:
        echo("", err=True)
        echo(_PERSONAL, err=True)
    click.get_current_context().exit(recorded.exit_code)


def _show(found: Recording, root: Path) -> None:
    name = found.model.configured_name
    steps = f" with {count(found.steps, 'step')}" if found.steps > found.samples else ""
    samples = f"{count(found.samples, 'sample')}{steps} of {count(found.runs, 'run')}"
    echo(f"{name}: kept {samples} in {found.folder} ({show_size(found.size)})", err=True)
    inside = _inside(found.folder, root)
    if inside is None or found.model.shape_set is not None:
        reason = (
            "it is outside of the project" if inside is None else "the model has several shapes"
        )
        echo(f"    validate.inputs cannot name this folder: {reason}", err=True)
        return
    table = dict(_table(found, inside))
    echo("    to validate with it, set in the table of the model:", err=True)
    echo(indent(f"validate = {to_toml(table)}", "        "), err=True)


def _table(found: Recording, inside: str) -> Iterator[tuple[str, object]]:
    given = found.model.validate
    if given.mode != "auto":
        yield "mode", given.mode
    yield "inputs", inside
    if states := given.states or found.states:
        yield "states", dict(states)


_PERSONAL = (
    "These files may contain personal data of the app's users. Only you may read them, git ignores them, "
    "and no sdist may contain them."
)


def _inside(folder: Path, root: Path) -> str | None:
    """The path of ``folder`` in the project at ``root``, if it is inside."""
    path, top = os.path.realpath(folder), os.path.realpath(root)
    inside = Path(path).is_relative_to(top)
    return Path(path).relative_to(top).as_posix() if inside else None
