"""``epcontext init``: writes the tables for a project's models."""

from __future__ import annotations

import difflib
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from textwrap import indent

import click

from hatch_epcontext.cli._common import Command, warn
from hatch_epcontext.cli._flag_errors import ExistingPath
from hatch_epcontext.cli._output import echo
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import ConfigError, InspectionError, Kind, Problem
from hatch_epcontext.files import file_sha256, write_atomically
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.text import listing, to_toml
from hatch_epcontext.tools.examining import installed_providers
from hatch_epcontext.tools.initializing import (
    NewModel,
    add_models,
    listed_models,
    new_model,
)
from hatch_epcontext.tools.inspecting import TIMEOUT, inspect_model
from hatch_epcontext.tools.next_steps import NextSteps, next_steps
from hatch_epcontext.tools.project import find_hub_files, find_models, find_samples

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

    Without MODEL: all .onnx files of the project, except in its tests, docs and examples. Sizes that a
    model implies are filled in; it asks for the others on a terminal, and lists them elsewhere. Samples with
    exactly a model's inputs become its validate.inputs. An existing configuration gets the models that it
    does not list; everything else stays as it is.

    A project of hatchling gets the build requirement and the hook, and its wheel leaves out the plain models.
    For other build backends the next steps are printed, as are the lines for the app.
    """
    root = project.resolve()
    _text(root / "pyproject.toml")
    found = [*_read(root, models or tuple(_all(root)), named=bool(models))]
    if not found:
        hub_files = find_hub_files(root)
        raise ConfigError(
            Problem(
                Kind.FILE_NOT_FOUND,
                str(root),
                "has no ONNX models.",
                "\n".join(
                    [
                        "Name them: epcontext init MODEL...",
                        *(f"The code downloads one: epcontext add {each}" for each in hub_files),
                    ]
                ),
            )
        )
    add_tables(root, found, chosen_providers(root, providers), dry_run=dry_run)


def chosen_providers(root: Path, names: tuple[str, ...]) -> list[Provider]:
    """The providers called ``names``, or those that are installed if nothing is configured yet."""
    before = _text(root / "pyproject.toml")
    return [PROVIDERS[name] for name in dict.fromkeys(names)] or _default(before)


def add_tables(
    root: Path, found: list[NewModel], chosen: list[Provider], *, dry_run: bool = False
) -> None:
    """Write the tables of the models ``found`` into ``pyproject.toml``, and show the next steps."""
    file = root / "pyproject.toml"
    before = _text(file)
    listed = _listed_in(root, before)
    found = [model if model.path in listed else _ask(model) for model in found]
    # A file with the line ends of Windows keeps them.
    ends = "\r\n" if "\r\n" in before else "\n"
    after = add_models(root, before.replace("\r\n", "\n"), found, chosen)
    text = after.replace("\n", ends)
    new = [model for model in found if model.path not in listed]
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
        is_complete = not any(model.open_keys for model in new)
        jobs = "; to see the jobs: epcontext build --dry-run" if is_complete else ""
        echo(f"wrote {file}{jobs}")
    _show(next_steps(root, after), new)


def _text(file: Path) -> str:
    """The text of the ``pyproject.toml`` at ``file``; empty for a project of setuptools without one."""
    if file.is_file():
        with file.open(encoding="utf-8", newline="") as opened:
            return opened.read()
    if any((file.parent / name).is_file() for name in ("setup.py", "setup.cfg")):
        return ""
    raise ConfigError(
        Problem(
            Kind.INVALID_PYPROJECT,
            str(file),
            "does not exist.",
            "Create a project first, for example with: hatch new",
        )
    )


def _listed_in(root: Path, text: str) -> dict[str, str]:
    try:
        return listed_models(root, parse(text))
    except ValueError:
        # Adding the models reports the error.
        return {}


def _ask(model: NewModel) -> NewModel:
    """The model with the user's answers for its sizes; an empty answer leaves a dimension open."""
    if not _on_terminal():
        return model
    answers = {
        question: click.prompt(
            f"{model.path}: {question} (Enter leaves it open)",
            default=0,
            show_default=False,
            type=click.IntRange(0),
            err=True,
        )
        for question in model.questions
    }
    return model.answered({question: size for question, size in answers.items() if size})


def _on_terminal() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()


def _show(steps: NextSteps, new: list[NewModel]) -> None:
    unknown = [f"{model.path}: {line}" for model in new for line in model.open_keys]
    real = [
        f"{model.path}: validate.inputs = {to_toml(model.inputs)}"
        for model in new
        if model.inputs is not None
    ]
    name, *others = map(to_toml, steps.models)
    more = f"  # or {', '.join(others)}" if others else ""
    # In a clone without the folder, a traceback shows this line.
    made_by = "  # made by: epcontext export" if steps.exported else ""
    app = [f"from {steps.module} import load{made_by}", f"session = load({name}){more}"]
    _section('Add these lines to the tables of the models, with a number for each "?":', unknown)
    _section("Samples that fit a model, which validate it:", real)
    _section("In the app:", app)
    _section("In the dependencies of the app:", steps.dependencies)
    _section("Note:", steps.notes)


def _section(heading: str, lines: Sequence[str]) -> None:
    if lines:
        echo("")
        echo(heading)
        echo(indent("\n".join(lines), "    "), lines=True)


def _default(text: str) -> list[Provider]:
    """The providers that are installed and offer a device, if nothing is configured yet."""
    try:
        tool = parse(text).get("tool", {})
    except ValueError:
        return []
    if not isinstance(tool, dict) or "epcontext" in tool:
        return []
    states = installed_providers()
    for state in states:
        if not state.devices:
            warn(
                f"{state.provider}: {state.package} is installed, but {state.reason} No target for it."
            )
    usable = [PROVIDERS[state.provider] for state in states if state.devices]
    if not usable:
        warn("no EP is installed here, so the target is cpu; choose others with -p.")
    return usable or [PROVIDERS["cpu"]]


def _all(root: Path) -> list[Path]:
    """The project's models, each once."""
    models, others = find_models(root)
    if others:
        warn(
            f"left out {_listed(root, others)}; name those that the app needs: epcontext init MODEL..."
        )
    kept: dict[tuple[int, str], Path] = {}
    sizes = Counter(path.stat().st_size for path in models)
    for path in models:
        size = path.stat().st_size
        key = (size, file_sha256(path) if sizes[size] > 1 else "")
        if (first := kept.setdefault(key, path)) is not path:
            warn(
                f"left out {_listed(root, [path])}: it is the same file as {_listed(root, [first])}."
            )
    return list(kept.values())


def _listed(root: Path, paths: list[Path]) -> str:
    return listing(path.relative_to(root).as_posix() for path in paths)


def _read(root: Path, models: tuple[Path, ...], *, named: bool) -> Iterator[NewModel]:
    """The facts of the models; models that the user did not name are skipped if they are unusable."""
    samples = find_samples(root)
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
            yield new_model(root, inside.as_posix(), facts, samples, workers)


def _inside(path: Path, root: Path) -> Path | None:
    """The path of ``path`` in the project at ``root``; None if it is outside.

    A link in the project is inside, wherever its target is.
    """
    absolute = path.absolute()
    for folder in absolute.parents:
        inside = absolute.relative_to(folder)
        if folder.resolve() == root and ".." not in inside.parts:
            return inside
    resolved = path.resolve()
    return resolved.relative_to(root) if resolved.is_relative_to(root) else None
