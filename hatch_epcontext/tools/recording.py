"""Run an app, and keep some of the inputs that it feeds to the project's models."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hatch_epcontext
from hatch_epcontext.config.settings import Config, Model
from hatch_epcontext.errors import ConfigError, Kind, Problem
from hatch_epcontext.files import file_sha256, temp_dir
from hatch_epcontext.package.sdist import RECORDED_IGNORE
from hatch_epcontext.text import count, listing
from hatch_epcontext.worker.recorder import REPORT, SAMPLES, SETTINGS

FOLDER = ".epcontext-samples"
"""The folder in the project for recorded samples."""


@dataclass(frozen=True)
class Recording:
    """The samples of a model, in ``folder``: their number, that of all their steps, and their bytes.

    ``runs`` are those that the app made. ``states``: the inputs to which the app feeds an output of the run
    before.
    """

    model: Model
    folder: Path
    samples: int
    steps: int
    size: int
    runs: int
    states: Mapping[str, str]


@dataclass(frozen=True)
class Recorded:
    """The recordings; ``notes``: what was not recorded, and why; ``exit_code``: the app's, as in a shell."""

    exit_code: int
    recordings: tuple[Recording, ...]
    notes: tuple[str, ...]


def record(config: Config, command: Sequence[str], output: Path) -> Recorded:
    """Run ``command``, and write what it feeds to the models of ``config`` below the folder ``output``.

    Each model gets a new folder there. Only this user may read it, and git ignores it. Raises ConfigError if
    there is no such program, and OSError if it cannot be started or the folder cannot be written.
    """
    program = shutil.which(command[0])
    if program is None:
        message = f"there is no program {command[0]!r}."
        hint = "Write the command as in a shell: epcontext record -- python -m my_app"
        raise ConfigError(Problem(Kind.FILE_NOT_FOUND, "epcontext record", message, hint))
    models = {each.configured_name: each for each in reversed(config.models)}
    models = dict(reversed(models.items()))
    with temp_dir() as folder:
        source = Path(hatch_epcontext.__file__).parent / "worker" / "recorder.py"
        shutil.copyfile(source, folder / "sitecustomize.py")
        settings = {"models": [_settings(each) for each in models.values()]}
        (folder / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
        exit_code = _run([program, *command[1:]], folder)
        reports = [
            (file.parent, json.loads(file.read_bytes())) for file in folder.glob(f"*/{REPORT}")
        ]
        recordings = tuple(
            found
            for model in models.values()
            if (found := _keep(model, reports, output / model.configured_name))
        )
        kept = {each.model.configured_name for each in recordings}
        notes = _notes([each for _, each in reports], [name for name in models if name not in kept])
        return Recorded(exit_code, recordings, tuple(notes))


def _settings(model: Model) -> dict[str, Any]:
    """How the recorder recognizes ``model``, and the sizes of inputs that the configuration fixes."""
    # Several shapes differ in their sizes.
    fixed = model.shape_set is None and any(t.settings.static_shapes for t in model.targets)
    exists = model.path.is_file()
    return {
        "name": model.configured_name,
        "size": model.path.stat().st_size if exists else None,
        "sha256": file_sha256(model.path) if exists else None,
        "dims": dict(model.dims) if fixed else {},
        "shapes": dict(model.shapes) if fixed else {},
    }


def _run(command: Sequence[str], folder: Path) -> int:
    """Run ``command`` with ``folder`` on Python's path; its exit code, as in a shell."""
    path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}) as process:
        try:
            while True:
                try:
                    code = process.wait()
                    break
                except KeyboardInterrupt:
                    # The terminal interrupts the app too, which ends by itself.
                    continue
        except BaseException:
            process.terminate()
            raise
    return code if code >= 0 else 128 - code


def _keep(
    model: Model, reports: Sequence[tuple[Path, Mapping[str, Any]]], place: Path
) -> Recording | None:
    """Move the samples of ``model`` that the processes of the app kept to a new folder at ``place``."""
    name = model.configured_name
    found = [_samples(folder / name) for folder, _ in reports]
    # Some samples of each process.
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*found))
    samples = [each for each in in_turn if each][:SAMPLES]
    if not samples:
        return None
    target = next(each for each in _free(place) if not os.path.lexists(each))
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    target.mkdir(mode=0o700)
    (target / ".gitignore").write_text(RECORDED_IGNORE, encoding="utf-8", newline="\n")
    are_sequences = any(len(steps) > 1 for steps in samples)
    size = 0
    for number, steps in enumerate(samples, 1):
        for step, file in enumerate(steps, 1):
            size += file.stat().st_size
            shutil.move(file, target / f"{number}{f'-{step}' if are_sequences else ''}.npz")
    abouts = [report["models"][name] for _, report in reports if name in report["models"]]
    return Recording(
        model,
        target,
        len(samples),
        sum(map(len, samples)),
        size,
        sum(each["runs"] for each in abouts),
        {key: value for each in abouts for key, value in each["states"].items()},
    )


def _samples(folder: Path) -> list[list[Path]]:
    """The files of each sample in ``folder``, in the order of the steps."""
    found: defaultdict[int, dict[int, Path]] = defaultdict(dict)
    for file in folder.glob("*.npz"):
        sample, step = map(int, file.stem.split("-"))
        found[sample][step] = file
    return [[steps[step] for step in sorted(steps)] for _, steps in sorted(found.items())]


def _free(place: Path) -> Iterator[Path]:
    yield place
    yield from (place.with_name(f"{place.name}-{number}") for number in itertools.count(2))


def _notes(reports: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> Iterator[str]:
    """What was not recorded, and why; ``missing``: the models without any sample."""
    if not reports:
        yield (
            "the command started no Python that reads PYTHONPATH: a frozen app does not, nor does Python "
            "with -I, -E or -S."
        )
        return
    if not any(each["onnxruntime"] for each in reports):
        yield (
            "the app did not import onnxruntime. Is it installed in the app's environment, and does this "
            "command run a model?"
        )
        return
    opened = {name for each in reports for name in each["models"]}
    if unopened := [name for name in missing if name not in opened]:
        others = sorted({other for each in reports for other in each["others"]})
        seen = f" The app opened {listing(others, 5)}." if others else ""
        yield (
            f"{listing(unopened)}: the app opened no session on it. The recorder recognizes a model by its "
            f"file's contents, or in a package of this project by the manifest.{seen}"
        )
    for name in dict.fromkeys(name for each in reports for name in each["models"]):
        abouts = [each["models"][name] for each in reports if name in each["models"]]
        runs = sum(each["runs"] for each in abouts)
        if not runs:
            yield f"{name}: the app opened a session, but did not call its run()."
        if misfits := sum(each["other_sizes"] for each in abouts):
            yield (
                f"{name}: {count(misfits, 'run')} of {runs} had inputs whose sizes differ from dims and "
                "shapes, and were left out."
            )
    for each in reports:
        for method, number in each["unseen"].items():
            yield f"{count(number, 'call')} of {method}() not recorded: only run() is."
        if each["error"]:
            yield f"the recorder failed: {each['error']}"
