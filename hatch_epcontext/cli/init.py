"""``epcontext init``: writes the tables for a project's models."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from hatch_epcontext.cli._common import warn
from hatch_epcontext.cli._output import echo
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import ConfigError, InspectionError, Kind, Problem
from hatch_epcontext.files import write_atomically
from hatch_epcontext.ipc.process import Workers
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.tools.init import NewModel, add_models
from hatch_epcontext.tools.inspect import TIMEOUT, inspect_model
from hatch_epcontext.tools.suggest import suggest

_WRITABLE = [name for name, provider in PROVIDERS.items() if not provider.needs_library]


@click.command()
@click.argument("models", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-p",
    "--provider",
    "providers",
    multiple=True,
    type=click.Choice(_WRITABLE, case_sensitive=False),
    help="A provider to compile for; repeatable. The default is qnn, or cpu where qnn has no packages.",
)
@click.option(
    "--project",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
    help="The folder with the pyproject.toml. The default is the current folder.",
)
@click.option("--dry-run", is_flag=True, help="Show the changes, and write nothing.")
def init(
    models: tuple[Path, ...], providers: tuple[str, ...], project: Path, dry_run: bool
) -> None:
    """Write the tables for models into pyproject.toml.

    Without a MODEL these are all .onnx files of the project. Inputs and open dimensions are read from the
    models. Sizes that the graph or the file implies are filled in; the others are questions in comments. If
    there is a configuration already, models that it does not list are added. Everything else stays as it is.
    """
    root = project.resolve()
    file = root / "pyproject.toml"
    if not file.is_file():
        raise ConfigError(
            Problem(
                Kind.INVALID_PYPROJECT,
                str(file),
                "does not exist.",
                "Create a project first, for example with: hatch new",
            )
        )
    with file.open(encoding="utf-8", newline="") as opened:
        before = opened.read()
    found = [*_read(root, models or tuple(_all(root)), named=bool(models))]
    if not found:
        raise ConfigError(
            Problem(
                Kind.FILE_NOT_FOUND,
                str(root),
                "has no ONNX models.",
                "Name them: epcontext init MODEL...",
            )
        )
    # A file with the line ends of Windows keeps them.
    ends = "\r\n" if "\r\n" in before else "\n"
    chosen = [PROVIDERS[name] for name in dict.fromkeys(providers)] or _default(before)
    after = add_models(root, before.replace("\r\n", "\n"), found, chosen).replace("\n", ends)
    if dry_run:
        lines = difflib.unified_diff(
            before.splitlines(), after.splitlines(), str(file), str(file), lineterm=""
        )
        echo("\n".join(lines), lines=True)
    elif after == before:
        echo(f"{file} has all models already")
    else:
        write_atomically(file, after)
        echo(f"wrote {file}; to see the jobs: epcontext build --dry-run")
        for model in found:
            for question in model.questions if model.path in after else ():
                echo(f"{model.path}: still open: {question}")


def _default(text: str) -> list[Provider]:
    try:
        if "epcontext" in parse(text).get("tool", {}):
            return []
    except ValueError:
        return []
    qnn = PROVIDERS["qnn"]
    return [PROVIDERS["cpu"] if qnn.unavailable(sys.version_info[:2], sys.platform) else qnn]


def _all(root: Path) -> Iterator[Path]:
    """The project's ONNX files, without hidden folders, virtual environments and build outputs."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith(".")
            and name not in ("build", "dist", "node_modules", "__pycache__")
            and not (Path(folder) / name / "pyvenv.cfg").exists()
        )
        yield from (Path(folder) / name for name in sorted(files) if name.endswith(".onnx"))


def _read(root: Path, models: tuple[Path, ...], *, named: bool) -> Iterator[NewModel]:
    """The facts of the models; models that the user did not name are skipped if they are unusable."""
    with Workers(TIMEOUT) as workers:
        for path in models:
            inside = _inside(path, root)
            if inside is None:
                message = f"is not inside the project {root}."
                hint = "Copy it into the project."
                raise ConfigError(Problem(Kind.OUTSIDE_PROJECT, str(path), message, hint))
            try:
                facts = inspect_model(path, workers)
            except InspectionError as error:
                if named:
                    raise
                warn(f"skipped {path}: {error.problems[0].message}")
                continue
            if facts.contexts:
                message = "is a context model already."
                if named:
                    hint = "Name its source model."
                    raise ConfigError(Problem(Kind.COMPILED_MODEL, str(path), message, hint))
                warn(f"skipped {path}: {message}")
                continue
            yield NewModel(inside.as_posix(), facts, suggest(path, facts, workers))


def _inside(path: Path, root: Path) -> Path | None:
    """Where ``path`` is in the project at ``root``; None if it is not inside.

    A link in the project is, also if what it points to is elsewhere.
    """
    absolute = path.absolute()
    for folder in absolute.parents:
        inside = absolute.relative_to(folder)
        if folder.resolve() == root and ".." not in inside.parts:
            return inside
    resolved = path.resolve()
    return resolved.relative_to(root) if resolved.is_relative_to(root) else None
