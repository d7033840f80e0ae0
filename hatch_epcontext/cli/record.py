"""``epcontext record``: keeps some inputs of the project's models from a run of the app."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from hatch_epcontext import recorder
from hatch_epcontext.cli._common import echo, warn
from hatch_epcontext.cli._settings import project_config
from hatch_epcontext.config.settings import Model
from hatch_epcontext.files import file_sha256, temp_dir
from hatch_epcontext.package.sdist import RECORDED_IGNORE
from hatch_epcontext.text import MAX_NAMED, count, listing, to_toml


@click.command("record", context_settings={"allow_interspersed_args": False})
@click.option("--compiled-shapes", is_flag=True, help="Show the app the sizes that are compiled.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def command(command: tuple[str, ...], compiled_shapes: bool) -> None:
    """Run the app, and keep some inputs of its models.

    COMMAND starts the app, as in: epcontext record -- python -m my_app photo.jpg. The models of the project
    in the current folder run on the CPU. Each process keeps at most 8 samples of a model in
    .epcontext-samples: the first, and a random choice of the others, with 8 consecutive frames each for a
    recurrent model. Only run() is recorded, in a Python that reads PYTHONPATH.

    Printed are the sizes that the app fed, as the dims or shapes to write, and where they differ from those
    in the table. Samples of other sizes than the most frequent are in <name>-other-sizes.

    A larger batch is kept as several samples of the compiled size. With --compiled-shapes, get_inputs() and
    get_outputs() of sessions return the sizes in dims and shapes, or the first of several, as on an NPU; any
    size still runs.

    The files may contain personal data: only you may read them, and git ignores them. The exit code is that
    of the app.
    """
    config = project_config(Path().absolute())
    models: dict[str, dict[str, Any]] = {}
    # Of several sizes the first, which `load` opens; where all targets leave them open, none.
    for model in config.models:
        sizes = {"dims": dict(model.dims), "shapes": dict(model.shapes)}
        settings = {
            "sha256": file_sha256(model.path) if model.path.is_file() else None,
            "show": compiled_shapes,
            **(sizes if model.static_shapes else {key: {} for key in sizes}),
        }
        models.setdefault(model.configured_name, settings)
    recorded = Path(".epcontext-samples")
    if recorded.exists():
        raise click.UsageError(f"{recorded} exists, and nothing is overwritten: move it away.")
    if (program := shutil.which(command[0])) is None:
        raise click.UsageError(f"there is no program {command[0]!r}.")
    with temp_dir() as folder:
        code = _run([program, *command[1:]], folder, models)
        lines = (folder / recorder.RUNS).read_text(encoding="utf-8").splitlines()
        for name in models:
            runs = [run for model, *run in map(json.loads, lines) if model == name]
            if not any((folder / name).glob("*.npz")):
                warn(
                    f"{name}: the app did not call run() of a session on it or its exported variants."
                )
                continue
            recorded.mkdir(mode=0o700, exist_ok=True)
            shutil.move(folder / name, recorded)
            (recorded / name / ".gitignore").write_text(RECORDED_IGNORE, encoding="utf-8")
            _show(recorded / name, runs, [m for m in config.models if m.configured_name == name])
    click.get_current_context().exit(code if code >= 0 else 128 - code)


def _show(samples: Path, runs: Sequence[Any], models: Sequence[Model]) -> None:
    """Print the keys to write for a model, of which there is one of ``models`` for each of its sizes.

    Samples of other sizes than the most frequent are moved away: a model is validated with those it takes.
    """
    name, counts, of_samples = samples.name, Counter[str](), dict[str, str]()
    states: dict[str, str] = {}
    wrong = Counter[str]()
    for shapes, own_states, names in runs:
        states |= own_states
        sizes = json.dumps(_sizes(shapes))
        counts[sizes] += 1
        of_samples |= dict.fromkeys(names, sizes)
        wrong[sizes] += not any(_takes(model, shapes) for model in models)
    (most, number), *others = counts.most_common()
    kept = {file: file.stem.rpartition("-")[0] for file in samples.glob("*.npz")}
    for file, sample in kept.items():
        if of_samples[sample] != most:
            folder = samples.with_name(f"{name}-other-sizes")
            folder.mkdir(mode=0o700, exist_ok=True)
            shutil.copy(samples / ".gitignore", folder)
            file.rename(folder / file.name)
    keys = [f"{key} = {to_toml(value)}" for key, value in json.loads(most).items() if value]
    if others and keys:
        rest = listing((_text(sizes) for sizes, _ in others), MAX_NAMED)
        keys.append(f"# in {number} of {count(len(runs), 'run')}; else {rest}")
    table = {"inputs": samples.as_posix(), **({"states": states} if states else {})}
    keys.append(f"validate = {to_toml(table)}")
    lines = "\n".join(f"    {line}" for line in keys)
    kept_text = f"kept {count(len({*kept.values()}), 'sample')}. In the table of the model, set"
    echo(f"{name}: {kept_text}\n{lines}", err=True, lines=True)
    if wrong.total():
        fed = listing(map(_text, +wrong), MAX_NAMED)
        warn(
            f"{name}: {wrong.total()} of {count(len(runs), 'run')} had other sizes than the table, and "
            f"would not use what is compiled: {fed}."
        )


def _sizes(shapes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The sizes of open dimensions in one run, as ``dims`` and ``shapes``."""
    dims = {
        name: size
        for own, fed in shapes.values()
        for name, size in zip(own, fed, strict=False)
        if isinstance(name, str)
    }
    return {"dims": dims, "shapes": {n: fed for n, (own, fed) in shapes.items() if None in own}}


def _takes(model: Model, shapes: Mapping[str, Any]) -> bool:
    """Whether ``model`` is compiled for the shapes of one run, or leaves them open."""
    values = [SimpleNamespace(name=name, shape=own) for name, (own, _) in shapes.items()]
    sizes = {"dims": model.dims, "shapes": model.shapes}
    compiled = recorder.compiled_shapes(values, sizes) if model.static_shapes else {}
    return all(
        not isinstance(size, int) or size == length
        for name, shape in compiled.items()
        for size, length in zip(shape, shapes[name][1], strict=False)
    )


def _text(sizes: str) -> str:
    """The sizes that `_sizes` returned, in words."""
    values = json.loads(sizes)
    return ", ".join(
        f"{name} = {to_toml(v)}" for table in values.values() for name, v in table.items()
    )


def _run(command: list[str], folder: Path, models: Mapping[str, dict[str, Any]]) -> int:
    """Run ``command`` with a recorder in ``folder``; returns its exit code, or a signal, negative."""
    for name in models:
        (folder / name).mkdir()
    (folder / recorder.SETTINGS).write_text(json.dumps(models), encoding="utf-8")
    (folder / recorder.RUNS).touch()
    shutil.copyfile(recorder.__file__, folder / "sitecustomize.py")
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as process:
        while process.returncode is None:
            # The terminal interrupts the app too, which ends by itself.
            with contextlib.suppress(KeyboardInterrupt):
                process.wait()
    return process.returncode
