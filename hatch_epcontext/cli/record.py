"""``epcontext record``: keeps some inputs of the project's models from a run of the app."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

import hatch_epcontext
from hatch_epcontext.cli._common import warn
from hatch_epcontext.cli._flag_errors import ExistingPath
from hatch_epcontext.cli._output import echo
from hatch_epcontext.cli._project import project_config
from hatch_epcontext.config.settings import Model
from hatch_epcontext.errors import ConfigError, Kind, Problem
from hatch_epcontext.files import file_sha256, temp_dir
from hatch_epcontext.package.sdist import RECORDED_IGNORE
from hatch_epcontext.recorder import REPORT, SAMPLES, SETTINGS
from hatch_epcontext.text import count, show_size, to_toml

_FOLDER = ".epcontext-samples"

Report = Mapping[str, Any]
"""What the recorder of one process has written."""


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
    # The first of several with one name, which are the shapes of a model.
    chosen: dict[str, Model] = {}
    for model in project_config(project.absolute(), (), models).models:
        chosen.setdefault(model.configured_name, model)
    with temp_dir() as folder:
        code = _run(command, folder, chosen)
        files = folder.glob(f"*/{REPORT}")
        reports: list[Report] = [json.loads(file.read_bytes()) for file in files]
        for note in _notes(reports, list(chosen)):
            warn(note)
        for name, model in chosen.items():
            place = (output or root / _FOLDER).absolute() / name
            if kept := _keep(folder, model, place):
                _print(
                    model, kept, [r["models"][name] for r in reports if name in r["models"]], root
                )
    click.get_current_context().exit(code if code >= 0 else 128 - code)


def _run(command: Sequence[str], folder: Path, models: Mapping[str, Model]) -> int:
    """Run ``command`` with a recorder in ``folder``; returns its exit code, or a signal, negative."""
    program = shutil.which(command[0])
    if program is None:
        message = f"there is no program {command[0]!r}."
        hint = "Write the command as in a shell: epcontext record -- python -m my_app"
        raise ConfigError(Problem(Kind.FILE_NOT_FOUND, "epcontext record", message, hint))
    source = Path(hatch_epcontext.__file__).with_name("recorder.py")
    shutil.copyfile(source, folder / "sitecustomize.py")
    settings = {name: _settings(model) for name, model in models.items()}
    (folder / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(
        [program, *command[1:]], env={**os.environ, "PYTHONPATH": path}
    ) as process:
        while process.returncode is None:
            # The terminal interrupts the app too, which ends by itself.
            with contextlib.suppress(KeyboardInterrupt):
                process.wait()
    return process.returncode


def _settings(model: Model) -> dict[str, Any]:
    """How the recorder recognizes ``model``, and the sizes of inputs that the configuration fixes."""
    # Several shapes differ in their sizes.
    fixed = model.shape_set is None and any(t.settings.static_shapes for t in model.targets)
    exists = model.path.is_file()
    return {
        "size": model.path.stat().st_size if exists else None,
        "sha256": file_sha256(model.path) if exists else None,
        "dims": dict(model.dims) if fixed else {},
        "shapes": dict(model.shapes) if fixed else {},
    }


def _keep(recorded: Path, model: Model, place: Path) -> list[list[Path]]:
    """The steps of the samples of ``model``, some of each process, moved to a new folder at ``place``."""
    folders = recorded.glob(f"*/{model.configured_name}/*")
    in_turn = sorted(folders, key=lambda sample: (int(sample.name), str(sample)))
    samples = [steps for sample in in_turn if (steps := sorted(sample.glob("*.npz")))][:SAMPLES]
    if not samples:
        return []
    more = (place.with_name(f"{place.name}-{number}") for number in itertools.count(2))
    folder = next(path for path in itertools.chain([place], more) if not os.path.lexists(path))
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    (folder / ".gitignore").write_text(RECORDED_IGNORE, encoding="utf-8", newline="\n")
    has_steps = any(len(steps) > 1 for steps in samples)
    for number, steps in enumerate(samples, 1):
        for step, file in enumerate(steps, 1):
            name = f"{number}-{step}.npz" if has_steps else f"{number}.npz"
            steps[step - 1] = Path(shutil.move(file, folder / name))
            steps[step - 1].chmod(0o600)
    return samples


def _print(
    model: Model, samples: Sequence[Sequence[Path]], parts: Sequence[Report], root: Path
) -> None:
    """Print what was kept, and how to validate with it; ``parts``: what processes report of the model."""
    files, folder = [file for steps in samples for file in steps], samples[0][0].parent
    steps = f" with {count(len(files), 'step')}" if len(files) > len(samples) else ""
    runs = count(sum(part["runs"] for part in parts), "run")
    size = show_size(sum(file.stat().st_size for file in files))
    kept = f"kept {count(len(samples), 'sample')}{steps} of {runs} in {folder} ({size})"
    echo(f"{model.configured_name}: {kept}", err=True)
    inside = Path(os.path.realpath(folder))
    if not inside.is_relative_to(root) or model.shape_set is not None:
        echo(
            "    validate.inputs takes folders of the project, for models with one shape", err=True
        )
        return
    states = {name: output for part in parts for name, output in part["states"].items()}
    states |= model.validate.states
    table: dict[str, object] = {"inputs": inside.relative_to(root).as_posix()}
    table |= {"states": states} if states else {}
    echo("    to validate with it, set in the table of the model:", err=True)
    echo(f"        validate = {to_toml(table)}", err=True)
    echo("    It may contain personal data of the app's users: no sdist may contain it.", err=True)


def _notes(reports: Sequence[Report], models: Sequence[str]) -> Iterator[str]:
    """What was not recorded, and why."""
    if not reports:
        yield "the command started no Python that reads PYTHONPATH: no frozen app does, nor Python with -I."
    elif not any(report["imported"] for report in reports):
        yield "the app did not import onnxruntime: does this command run a model, where it is installed?"
    else:
        for name in models:
            parts = [report["models"][name] for report in reports if name in report["models"]]
            runs, misfits = (sum(part[key] for part in parts) for key in ("runs", "other_sizes"))
            if not parts:
                yield f"{name}: the app opened no session on its file, or on what is exported of it."
            elif not runs:
                yield f"{name}: the app opened a session, but did not call its run(): only that is recorded."
            elif misfits:
                left = f"{count(misfits, 'run')} of {runs} had inputs"
                yield f"{name}: {left} of other sizes than dims and shapes, and were left out."
    for report in reports:
        if report["error"]:
            yield f"the recorder failed: {report['error']}"
