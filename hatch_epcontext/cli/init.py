"""``epcontext init``: the tables for a project's models."""

from __future__ import annotations

import difflib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import click

from hatch_epcontext import inspection
from hatch_epcontext.cli.running import warn
from hatch_epcontext.errors import ConfigError, InspectionError, Problem
from hatch_epcontext.files import replace
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.pyproject import parse
from hatch_epcontext.scaffold import NewModel, scaffold

WRITABLE = [name for name, provider in PROVIDERS.items() if not provider.needs_library]


@click.command()
@click.argument("models", nargs=-1, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "-p",
    "--provider",
    "providers",
    multiple=True,
    type=click.Choice(WRITABLE, case_sensitive=False),
    help="A provider to compile for; repeatable. qnn if left out, or cpu where qnn has no packages.",
)
@click.option(
    "--project",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
    help="The folder with the pyproject.toml; this one if left out.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be changed, and change nothing.")
def init(
    models: tuple[Path, ...], providers: tuple[str, ...], project: Path, dry_run: bool
) -> None:
    """Write the tables for models into pyproject.toml.

    Without a MODEL that is for all .onnx files of the project. Inputs and open dimensions are read from the
    models. Where there is a configuration already, models that it does not list are added. Everything else
    stays as it is.
    """
    root = project.resolve()
    file = root / "pyproject.toml"
    if not file.is_file():
        raise ConfigError(
            Problem(str(file), "is not there.", "Begin a project first, such as with: hatch new")
        )
    with file.open(encoding="utf-8", newline="") as opened:
        before = opened.read()
    found = [*_read(root, models or tuple(_all(root)), named=bool(models))]
    if not found:
        raise ConfigError(
            Problem(str(root), "has no ONNX models.", "Name them: epcontext init MODEL...")
        )
    # A file of Windows' keeps its line ends.
    ends = "\r\n" if "\r\n" in before else "\n"
    chosen = [PROVIDERS[name] for name in dict.fromkeys(providers)] or _default(before)
    after = scaffold(root, before.replace("\r\n", "\n"), found, chosen).replace("\n", ends)
    if dry_run:
        lines = difflib.unified_diff(
            before.splitlines(), after.splitlines(), str(file), str(file), lineterm=""
        )
        click.echo("\n".join(lines))
    elif after == before:
        click.echo(f"{file} has all of it already")
    else:
        replace(file, after)
        click.echo(f"wrote {file}; see what will be built: epcontext build --dry-run")


def _default(text: str) -> list[Provider]:
    try:
        if "epcontext" in parse(text).get("tool", {}):
            return []
    except ValueError:
        return []
    qnn = PROVIDERS["qnn"]
    return [PROVIDERS["cpu"] if qnn.unavailable(sys.version_info[:2], sys.platform) else qnn]


def _all(root: Path) -> Iterator[Path]:
    """The ONNX files of the project, but for those in hidden folders, environments and build outputs."""
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
    """What the models say; of those that were not named, only source models count."""
    for path in models:
        inside = path.resolve()
        if not inside.is_relative_to(root):
            raise ConfigError(
                Problem(
                    str(path), f"is not inside the project {root}.", "Copy it into the project."
                )
            )
        try:
            facts = inspection.inspect(path).model
            assert facts is not None
        except InspectionError as error:
            if named:
                raise
            warn(f"passed over {path}: {error.problems[0].what}")
            continue
        if facts.contexts:
            if named:
                raise ConfigError(
                    Problem(str(path), "is a context model already.", "Name its source model.")
                )
            warn(f"passed over {path}: it is a context model already")
            continue
        yield NewModel(inside.relative_to(root).as_posix(), facts)
