"""``epcontext init``: writes the tables for a project's models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from hatch_epcontext.cli._common import advice_for_folder, existing_file, warn
from hatch_epcontext.cli._settings import short_flags, use_flag_names, use_lines
from hatch_epcontext.cli._tables import add_tables, new_targets, tables_options
from hatch_epcontext.config.paths import is_genai_folder
from hatch_epcontext.errors import ConfigError, InspectionError, Kind, Problem
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.tools import adding
from hatch_epcontext.tools.configure import for_model, split
from hatch_epcontext.tools.inspecting import TIMEOUT


@click.command("init")
@click.argument("models", nargs=-1, type=existing_file, metavar="[MODEL...]")
@tables_options
@click.option("--try", "trial", is_flag=True, help="Compile the models, and write what works.")
@short_flags
def command(
    models: tuple[Path, ...],
    providers: tuple[str, ...],
    settings: dict[str, Any],
    dry_run: bool,
    trial: bool,
) -> None:
    """Write the tables for models into pyproject.toml.

    Without MODEL: all .onnx files of the project in the current folder, except in its tests, docs and
    examples. A batch gets the size 1, as a guess; a comment asks for other sizes.
    An existing configuration gets the models that it does not list; everything else stays as it is.

    A project of hatchling gets the build requirement and the hook, any other one hatch_epcontext.backend
    around its own build back end. The lines for the app are printed.

    --dim NAME=SIZE fixes the dimension of each model that has it, and --dim MODEL:NAME=SIZE that of one
    model. epcontext record shows the sizes that your app feeds.

    With --try each model is compiled once for each target. It gets the targets that work, with the reason
    why others fail. The target cpu is added, and a model for which no target works is left out. If you stop
    it, the models that were compiled until then are written; run it again for the others.
    """
    pyproject = adding.Pyproject(Path.cwd())
    use_flag_names({}, "nothing is written")
    target, of_models = split(settings)
    adding.check_targets(pyproject, providers, target)
    new = [*_read(pyproject, models)]
    names = [model.plain_name for model in new]
    if pyproject.table is None:
        use_flag_names({m.path: Path(m.path) for m in new}, "nothing is written")
    else:
        use_lines(pyproject.root)
    adding.check_names(new, of_models)
    new = [
        replace(model, settings=model.own(for_model(name, names, of_models)))
        for model, name in zip(new, names, strict=True)
    ]
    if not new:
        message, hint = "has no ONNX models.", "Name them: epcontext init MODEL..."
        raise ConfigError(Problem(Kind.FILE_NOT_FOUND, str(pyproject.root), message, hint))
    targets = new_targets(pyproject, providers, target)
    add_tables(pyproject, new, targets, dry_run=dry_run, trial=trial)


def _read(pyproject: adding.Pyproject, named: tuple[Path, ...]) -> Iterator[adding.NewModel]:
    """The facts of the models; those that are unusable are skipped, unless the user named them."""
    root = pyproject.root
    files = named or tuple(adding.project_files(root, ".onnx"))
    language = dict.fromkeys(f.parent for f in files if is_genai_folder(f.parent))
    for folder in language:
        advice = advice_for_folder(Path(os.path.relpath(folder, root)).as_posix())
        warn(f"{folder} is a language model, and is left out. {advice}")
    with Workers(TIMEOUT) as workers:
        for path in (file for file in files if file.parent not in language):
            # A link in the project is inside, wherever its target is.
            inside = path.parent.resolve() / path.name
            if not inside.is_relative_to(root):
                message = f"is not inside the project {root}."
                hint = "Copy it into the project."
                raise ConfigError(Problem(Kind.OUTSIDE_PROJECT, str(path), message, hint))
            location = inside.relative_to(root).as_posix()
            try:
                model = adding.new_model(root, location, workers)
            except (InspectionError, ConfigError) as error:
                if named:
                    raise
                warn(f"skipped {path}: {error.problems[0].message}")
            else:
                yield model
