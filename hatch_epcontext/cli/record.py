"""``epcontext record``: keeps some inputs of the project's models from a run of the app."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from hatch_epcontext import recorder
from hatch_epcontext.cli._common import echo, warn
from hatch_epcontext.cli._settings import project_config
from hatch_epcontext.files import file_sha256, temp_dir
from hatch_epcontext.package.sdist import RECORDED_IGNORE
from hatch_epcontext.text import count, to_toml


@click.command("record", context_settings={"allow_interspersed_args": False})
@click.option("--compiled-shapes", is_flag=True, help="Show the app the sizes that are compiled.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(command: tuple[str, ...], compiled_shapes: bool) -> None:
    """Run the app, and keep some inputs of its models.

    COMMAND starts the app, as in: epcontext record -- python -m my_app photo.jpg. The models of the project
    in the current folder run on the CPU. Each process keeps at most 8 samples of a model in
    .epcontext-samples: the first, and a random choice of the others, with 8 consecutive frames each for a
    recurrent model. Only run() is recorded, in a Python that reads PYTHONPATH.

    A larger batch is kept as several samples of the compiled size. With --compiled-shapes, get_inputs() and
    get_outputs() of sessions return the sizes in dims and shapes, or the first of several, as on an NPU; any
    size still runs.

    The files may contain personal data: only you may read them, and git ignores them. The exit code is that
    of the app.
    """
    models: dict[str, dict[str, Any]] = {}
    # Of several sizes the first, which `load` opens; where all targets leave them open, none.
    for model in project_config(Path().absolute()).models:
        sizes = {"dims": dict(model.dims), "shapes": dict(model.shapes)}
        models.setdefault(
            model.configured_name,
            {
                "sha256": file_sha256(model.path) if model.path.is_file() else None,
                "show": compiled_shapes,
                **(sizes if model.static_shapes else {key: {} for key in sizes}),
            },
        )
    recorded = Path(".epcontext-samples")
    if recorded.exists():
        raise click.UsageError(f"{recorded} exists, and nothing is overwritten: move it away.")
    if (program := shutil.which(command[0])) is None:
        raise click.UsageError(f"there is no program {command[0]!r}.")
    with temp_dir() as folder:
        code = _run([program, *command[1:]], folder, models)
        lines = (folder / recorder.STATES).read_text(encoding="utf-8").splitlines()
        for name in models:
            samples = {file.stem.rpartition("-")[0] for file in (folder / name).glob("*.npz")}
            if not samples:
                warn(
                    f"{name}: the app did not call run() of a session on it or its exported variants."
                )
                continue
            recorded.mkdir(mode=0o700, exist_ok=True)
            shutil.move(folder / name, recorded)
            (recorded / name / ".gitignore").write_text(RECORDED_IGNORE, encoding="utf-8")
            states = {key: value for model, key, value in map(json.loads, lines) if model == name}
            table = {"inputs": f"{recorded}/{name}", **({"states": states} if states else {})}
            kept = f"kept {count(len(samples), 'sample')}. In the table of the model, set"
            echo(f"{name}: {kept}\n    validate = {to_toml(table)}", err=True, lines=True)
    click.get_current_context().exit(code if code >= 0 else 128 - code)


def _run(command: list[str], folder: Path, models: Mapping[str, dict[str, Any]]) -> int:
    """Run ``command`` with a recorder in ``folder``; returns its exit code, or a signal, negative."""
    for name in models:
        (folder / name).mkdir()
    (folder / recorder.SETTINGS).write_text(json.dumps(models), encoding="utf-8")
    (folder / recorder.STATES).touch()
    shutil.copyfile(recorder.__file__, folder / "sitecustomize.py")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as process:
        while process.returncode is None:
            # The terminal interrupts the app too, which ends by itself.
            with contextlib.suppress(KeyboardInterrupt):
                process.wait()
    return process.returncode
