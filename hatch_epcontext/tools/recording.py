"""Run an app, and keep some of the inputs that it feeds to the project's models."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hatch_epcontext
from hatch_epcontext.config.settings import Config, Model
from hatch_epcontext.errors import ConfigError, Kind, Problem
from hatch_epcontext.files import file_sha256, temp_dir
from hatch_epcontext.package.sdist import RECORDED_IGNORE
from hatch_epcontext.recorder import REPORT, SAMPLES, SETTINGS
from hatch_epcontext.text import count


@dataclass(frozen=True)
class Recording:
    """The samples of a model: ``files`` are all steps, in ``folder``; ``runs`` are those that the app made.

    ``states``: the inputs to which the app feeds an output of the run before.
    """

    model: Model
    folder: Path
    samples: int
    files: tuple[Path, ...]
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
    # The first of several with one name, which are the shapes of a model.
    models: dict[str, Model] = {}
    for model in config.models:
        models.setdefault(model.configured_name, model)
    with temp_dir() as folder:
        source = Path(hatch_epcontext.__file__).with_name("recorder.py")
        shutil.copyfile(source, folder / "sitecustomize.py")
        settings = {name: _settings(model) for name, model in models.items()}
        (folder / SETTINGS).write_text(json.dumps(settings), encoding="utf-8")
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        environ = {**os.environ, "PYTHONPATH": path}
        with subprocess.Popen([program, *command[1:]], env=environ) as process:
            while process.returncode is None:
                # The terminal interrupts the app too, which ends by itself.
                with contextlib.suppress(KeyboardInterrupt):
                    process.wait()
        code = process.returncode
        reports = {
            file.parent: json.loads(file.read_bytes()) for file in folder.glob(f"*/{REPORT}")
        }
        recordings = [
            recording
            for name, model in models.items()
            if (recording := _keep(model, reports, output / name))
        ]
        notes = _notes(list(reports.values()), list(models))
        return Recorded(code if code >= 0 else 128 - code, tuple(recordings), tuple(notes))


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


def _keep(model: Model, reports: Mapping[Path, Mapping[str, Any]], place: Path) -> Recording | None:
    """Move the samples of ``model`` that the processes of the app kept to a new folder at ``place``."""
    name = model.configured_name
    of_processes = [sorted(f.glob(f"{name}/*"), key=lambda s: int(s.name)) for f in reports]
    # Some samples of each process.
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*of_processes))
    samples = [steps for s in in_turn if s and (steps := sorted(s.glob("*.npz")))][:SAMPLES]
    if not samples:
        return None
    more = (place.with_name(f"{place.name}-{number}") for number in itertools.count(2))
    folder = next(path for path in itertools.chain([place], more) if not os.path.lexists(path))
    place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700)
    (folder / ".gitignore").write_text(RECORDED_IGNORE, encoding="utf-8", newline="\n")
    files = []
    for number, steps in enumerate(samples, 1):
        for step, file in enumerate(steps, 1):
            suffix = f"-{step}" if any(len(steps) > 1 for steps in samples) else ""
            files.append(Path(shutil.move(file, folder / f"{number}{suffix}.npz")))
            files[-1].chmod(0o600)
    parts = [report["models"][name] for report in reports.values() if name in report["models"]]
    runs = sum(part["runs"] for part in parts)
    states = {key: output for part in parts for key, output in part["states"].items()}
    return Recording(model, folder, len(samples), tuple(files), runs, states)


def _notes(reports: Sequence[Mapping[str, Any]], models: Sequence[str]) -> Iterator[str]:
    """What was not recorded, and why."""
    if not reports:
        yield (
            "the command started no Python that reads PYTHONPATH: a frozen app does not, nor does Python "
            "with -I, -E or -S."
        )
    elif not any(report["imported"] for report in reports):
        yield (
            "the app did not import onnxruntime. Is it installed in the app's environment, and does this "
            "command run a model?"
        )
    else:
        for name in models:
            parts = [report["models"][name] for report in reports if name in report["models"]]
            runs, misfits = (sum(p[key] for p in parts) for key in ("runs", "other_sizes"))
            if not parts:
                yield (
                    f"{name}: the app opened no session on it. The recorder recognizes a model by its "
                    f"file's contents, or in a package of this project by the manifest."
                )
            elif not runs:
                yield (
                    f"{name}: the app opened a session, but did not call its run(). Only that is recorded, "
                    "not run_async(), run_with_iobinding() or run_with_ort_values()."
                )
            elif misfits:
                yield (
                    f"{name}: {count(misfits, 'run')} of {runs} had inputs whose sizes differ from dims "
                    "and shapes, and were left out."
                )
    for report in reports:
        if report["error"]:
            yield f"the recorder failed: {report['error']}"
