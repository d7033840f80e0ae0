"""``epcontext record``: keeps some inputs of the project's models from a run of the app."""

from __future__ import annotations

import os
from pathlib import Path

import click

from hatch_epcontext.cli._common import warn
from hatch_epcontext.cli._flag_errors import ExistingPath
from hatch_epcontext.cli._output import echo
from hatch_epcontext.cli._project import project_config
from hatch_epcontext.text import count, show_size, to_toml
from hatch_epcontext.tools import recording as tool

_FOLDER = ".epcontext-samples"


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
    help=f"Where each model gets a folder. The default is {_FOLDER} in the project.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(
    project: Path, models: tuple[str, ...], output: Path | None, command: tuple[str, ...]
) -> None:
    """Run the app, and keep some inputs of its models.

    COMMAND starts the app, as in: epcontext record -- python -m my_app photo.jpg. It runs as always, but the
    project's models run on the CPU. At most 8 samples of each model are kept: the first, and a random choice
    of the others, with 8 consecutive steps each for a recurrent model. Only run() of a session is recorded,
    and only in a Python that reads PYTHONPATH.

    The files may contain personal data: only you may read them, and git ignores them. Nothing is
    overwritten. The exit code is that of the app.
    """
    root = project.resolve()
    config = project_config(project.absolute(), (), models)
    recorded = tool.record(config, command, (output or root / _FOLDER).absolute())
    for note in recorded.notes:
        warn(note)
    for recording in recorded.recordings:
        model, folder, files = recording.model, recording.folder, recording.files
        steps = f" with {count(len(files), 'step')}" if len(files) > recording.samples else ""
        samples = f"{count(recording.samples, 'sample')}{steps} of {count(recording.runs, 'run')}"
        size = show_size(sum(file.stat().st_size for file in files))
        echo(f"{model.configured_name}: kept {samples} in {folder} ({size})", err=True)
        inside = Path(os.path.realpath(folder))
        if not inside.is_relative_to(root) or model.shape_set is not None:
            echo(
                "    validate.inputs takes folders of the project, for models with one shape",
                err=True,
            )
            continue
        states = {**recording.states, **model.validate.states}
        table = {
            "inputs": inside.relative_to(root).as_posix(),
            **({"states": states} if states else {}),
        }
        echo("    to validate with it, set in the table of the model:", err=True)
        echo(f"        validate = {to_toml(table)}", err=True)
    if recorded.recordings:
        echo("", err=True)
        echo(
            "These files may contain personal data of the app's users. Only you may read them, git ignores "
            "them, and no sdist may contain them.",
            err=True,
        )
    click.get_current_context().exit(recorded.exit_code)
