"""``epcontext init``: writes the tables for a project's models."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import click

from hatch_epcontext.cli._common import Command, warn
from hatch_epcontext.cli._flag_errors import ExistingPath
from hatch_epcontext.cli._output import echo
from hatch_epcontext.config.pyproject import FILE, parse, try_parse
from hatch_epcontext.errors import ConfigError, InspectionError, Kind, Problem
from hatch_epcontext.files import write_atomically
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.text import listing
from hatch_epcontext.tools.examining import provider_states
from hatch_epcontext.tools.initializing import NewModel, add_models, listed_models, new_model
from hatch_epcontext.tools.inspecting import TIMEOUT
from hatch_epcontext.tools.next_steps import next_steps
from hatch_epcontext.tools.project import Project, find_models

_WRITABLE = [name for name, provider in PROVIDERS.items() if not provider.needs_library]


def tables_options(command: Command) -> Command:
    """``--provider``, ``--project`` and ``--dry-run``."""
    dry_run = click.option("--dry-run", is_flag=True, help="Show the changes, and write nothing.")
    project = click.option(
        "--project",
        type=ExistingPath(file_okay=False),
        default=Path(),
        help="The folder with the pyproject.toml. The default is the current folder.",
    )
    provider = click.option(
        "-p",
        "--provider",
        "providers",
        multiple=True,
        type=click.Choice(_WRITABLE, case_sensitive=False),
        help="A provider to compile for; repeatable. The default is all that are installed and offer a "
        "device, or else cpu.",
    )
    return provider(project(dry_run(command)))


@click.command("init")
@click.argument("models", nargs=-1, type=ExistingPath(dir_okay=False))
@tables_options
def command(
    models: tuple[Path, ...], providers: tuple[str, ...], project: Path, dry_run: bool
) -> None:
    """Write the tables for models into pyproject.toml.

    Without MODEL: all .onnx files of the project, except in its tests, docs and examples. Sizes that a model
    or its metadata implies are filled in; the others are questions in a comment. An existing configuration
    gets the models that it does not list; everything else stays as it is.

    A project of hatchling gets the build requirement and the hook. For other build backends the next steps
    are printed, as are the lines for the app.
    """
    root = project.resolve()
    _text(root / FILE)
    new = [*_read(root, models)]
    if not new:
        message, hint = "has no ONNX models.", "Name them: epcontext init MODEL..."
        raise ConfigError(Problem(Kind.FILE_NOT_FOUND, str(root), message, hint))
    add_tables(root, new, chosen_providers(root, providers), dry_run=dry_run)


def chosen_providers(root: Path, names: tuple[str, ...]) -> list[Provider]:
    """The providers called ``names``, or those that are installed if nothing is configured yet."""
    if names:
        return [PROVIDERS[name] for name in dict.fromkeys(names)]
    values = try_parse(_text(root / FILE))
    if values is None or "epcontext" in Project(root, values).table("tool"):
        return []
    states = [state for state in provider_states() if state.package]
    # A start tries the targets in their order.
    states.sort(key=lambda s: (s.provider == "cpu", PROVIDERS[s.provider].product != "context"))
    for state in states:
        if not state.devices:
            warn(
                f"{state.provider}: {state.package} is installed, but {state.reason} No target for it."
            )
    usable = [PROVIDERS[state.provider] for state in states if state.devices]
    if not usable:
        warn("no EP is installed here, so the target is cpu; choose others with -p.")
    return usable or [PROVIDERS["cpu"]]


def add_tables(
    root: Path, models: list[NewModel], chosen: list[Provider], *, dry_run: bool
) -> None:
    """Write the tables of ``models`` into ``pyproject.toml``, and show the next steps."""
    file = root / FILE
    before = _text(file)
    # A file with the line ends of Windows keeps them.
    ends = "\r\n" if "\r\n" in before else "\n"
    after = add_models(root, before.replace("\r\n", "\n"), models, chosen)
    text = after.replace("\n", ends)
    listed = listed_models(root, parse(before).get("tool", {}).get("epcontext"))
    unknown = [f"{m.path}: {line}" for m in models if m.path not in listed for line in m.open_keys]
    if dry_run:
        lines = difflib.unified_diff(
            before.splitlines(), text.splitlines(), str(file), str(file), lineterm=""
        )
        echo("\n".join(lines), lines=True)
    elif text == before:
        echo(f"{file} has all models already")
    else:
        # A link stays a link.
        write_atomically(file.resolve(), text)
        # Before all sizes are known, there are only errors to see.
        echo(f"wrote {file}" + ("" if unknown else "; to see the jobs: epcontext build --dry-run"))
    heading = 'The tables of the models need these lines, with a number for each "?":'
    for title, advice in ((heading, unknown), *next_steps(root, after)):
        if advice:
            echo(f"\n{title}", lines=True)
            echo(indent("\n".join(advice), "    "), lines=True)


def _text(file: Path) -> str:
    """The text of the ``pyproject.toml`` at ``file``; empty for a project of setuptools without one."""
    if file.is_file():
        with file.open(encoding="utf-8", newline="") as opened:
            return opened.read()
    if any((file.parent / name).is_file() for name in ("setup.py", "setup.cfg")):
        return ""
    message, hint = "does not exist.", "Create a project first, for example with: hatch new"
    raise ConfigError(Problem(Kind.INVALID_PYPROJECT, str(file), message, hint))


def _read(root: Path, named: tuple[Path, ...]) -> Iterator[NewModel]:
    """The facts of the models; those that the user did not name are skipped if they are unusable."""
    models, others = (named, []) if named else find_models(root)
    if others:
        left_out = listing(path.relative_to(root).as_posix() for path in others)
        warn(f"left out {left_out}; name those that the app needs: epcontext init MODEL...")
    with Workers(TIMEOUT) as workers:
        for path in models:
            inside = _inside(path, root)
            if inside is None:
                message = f"is not inside the project {root}."
                hint = "Copy it into the project."
                raise ConfigError(Problem(Kind.OUTSIDE_PROJECT, str(path), message, hint))
            try:
                model = new_model(root, inside.as_posix(), workers)
            except (InspectionError, ConfigError) as error:
                if named:
                    raise
                warn(f"skipped {path}: {error.problems[0].message}")
            else:
                yield model


def _inside(path: Path, root: Path) -> Path | None:
    """The path of ``path`` in the project at ``root``; None if it is outside.

    A link in the project is inside, wherever its target is.
    """
    paths = [path.parent.resolve() / path.name, path.resolve()]
    if ".." not in path.parts:
        paths.append(path.absolute())
    return next((p.relative_to(root) for p in paths if p.is_relative_to(root)), None)
