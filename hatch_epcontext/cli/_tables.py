"""The tables that ``epcontext init`` and ``add`` write, and what they print."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import indent, shorten
from typing import Any

import click

from hatch_epcontext.cli._common import Command, echo, failed_jobs, warn
from hatch_epcontext.config.environ import PREFIX
from hatch_epcontext.config.pyproject import parse, write
from hatch_epcontext.errors import BuildError, Problem
from hatch_epcontext.package.wheel import MAX_SIZE
from hatch_epcontext.providers import DISTRIBUTIONS, PROVIDERS
from hatch_epcontext.system import Terminated
from hatch_epcontext.text import MAX_NAMED, listing, show_size
from hatch_epcontext.tools.adding import NewModel, Pyproject, add_models, left_to_do, one_line
from hatch_epcontext.tools.environment import examine
from hatch_epcontext.tools.project import Project

_WRITABLE = [name for name, provider in PROVIDERS.items() if not provider.needs_library]

_MAX_REASON = 120
"""Characters of the reason why a target fails."""


def tables_options(command: Command) -> Command:
    """``--provider`` and ``--dry-run``."""
    dry_run = click.option("--dry-run", is_flag=True, help="Show the changes, and write nothing.")
    provider = click.option(
        "-p",
        "--provider",
        "providers",
        multiple=True,
        type=click.Choice(_WRITABLE, case_sensitive=False),
        help="A provider to compile for; repeatable. The default is all that are installed and offer a "
        "device.",
    )
    return provider(dry_run(command))


def new_targets(
    pyproject: Pyproject, providers: tuple[str, ...], target: Mapping[str, Any]
) -> dict[str, Mapping[str, Any]]:
    """The keys of each new target of the project, ``target``, by its provider; none if it has targets.

    Of several providers only those that have chips with names get a chip.
    """
    if pyproject.table is not None:
        return {}
    names = providers or tuple(_usable())
    without = {key: value for key, value in target.items() if key != "chip"}
    return {name: target if len(names) == 1 or PROVIDERS[name].chips else without for name in names}


def add_tables(
    pyproject: Pyproject,
    models: Sequence[NewModel],
    targets: Mapping[str, Mapping[str, Any]],
    *,
    dry_run: bool,
    trial: bool = False,
) -> None:
    """Write the tables of ``models`` and of new ``targets``, and show what is left to do.

    With ``trial`` the models are compiled first.
    """
    file, before = str(pyproject.file), pyproject.text
    new = [model for model in models if model.path not in pyproject.listed]
    stopped = None
    if trial and new:
        existing = pyproject.project.table("tool", "epcontext", "targets").values()
        if "cpu" not in [table.get("provider") for table in existing if isinstance(table, dict)]:
            targets = {**targets, "cpu": targets.get("cpu", {})}
        new, stopped = _try(pyproject, add_models(pyproject, new, targets)[0], new)
    after, config = add_models(pyproject, new, targets)
    questions = [f"{model.path}: {line}" for model in new for line in model.questions]
    if dry_run:
        changed = before.splitlines(), after.splitlines()
        echo("\n".join(difflib.unified_diff(*changed, file, file, lineterm="")), lines=True)
    elif after == before:
        echo(f"{file} stays as it is")
    else:
        write(pyproject.file, after, pyproject.raw)
        # Before all sizes are known, there are only errors to see.
        echo(
            f"wrote {file}" + ("" if questions else "; to see the jobs: epcontext build --dry-run")
        )
    heading = 'The tables of the models need these lines, with a number for each "?":'
    for title, advice in (
        ("Models:", [_describe(m) for m in new if m.outcomes or m.facts.external_data]),
        (heading, questions),
        ("Note:", _size_notes(pyproject.root, new)),
        *left_to_do(Project(pyproject.root, parse(after)), config),
    ):
        if advice:
            echo(f"\n{title}", lines=True)
            echo(indent("\n".join(advice), "    "), lines=True)
    if stopped is not None:
        raise stopped


def _size_notes(root: Path, models: Iterable[NewModel]) -> list[str]:
    """What to do if the models are too large for one wheel."""
    files = {root / model.path for model in models}
    files |= {(root / m.path).with_name(name) for m in models for name in m.facts.external_data}
    size = sum(file.stat().st_size for file in files if file.is_file())
    limit = (
        f"The models have {show_size(size)}, and package indexes take {show_size(MAX_SIZE)} a file."
    )
    remedy = "Targets and source models can have wheels of their own: see the key companion."
    return [limit, remedy] if size > MAX_SIZE else []


def _describe(model: NewModel) -> str:
    """``model`` with the files of its data, and for which targets it works."""
    data = model.facts.external_data
    path = f"{model.path}, with its data in {listing(data)}" if data else model.path
    works = f"{path}: works for {listing(model.works)}" if model.outcomes else path
    return "; ".join(filter(None, (works, model.failures)))


def _try(
    pyproject: Pyproject, text: str, new: Sequence[NewModel]
) -> tuple[list[NewModel], BaseException | None]:
    """Those of the ``new`` models of ``text`` that work for some of its targets; and what stopped the trial.

    Raises BuildError if the configuration is new, and none works.
    """
    others = (f"{PREFIX}TARGETS", f"{PREFIX}FROM_CACHE")
    environ = {name: value for name, value in os.environ.items() if name not in others}
    config = pyproject.load(text, environ)
    stopped: BaseException | None = None
    finished, all_problems = list[NewModel](), list[Problem]()
    try:
        for model in new:
            # A model with several shapes is several of the configuration.
            models = tuple(m for m in config.models if pyproject.path_of(m) == model.path)
            problems = failed_jobs(replace(config, models=models, unused=()))
            reasons: dict[str, str] = {}
            for name, target in ((m.name, target) for m in models for target in m.targets):
                problem = problems.get((name, target.name))
                reason = shorten(one_line(problem.message), _MAX_REASON) if problem else ""
                reasons[target.name] = reasons.get(target.name) or reason
            all_problems += problems.values()
            finished.append(replace(model, outcomes=reasons))
    except (KeyboardInterrupt, Terminated) as error:
        stopped = error
    working = [model for model in finished if model.works]
    if stopped is not None:
        left = listing((model.path for model in new[len(finished) :]), MAX_NAMED)
        warn(f"stopped; epcontext init --try compiles what is left: {left}")
        if not working:
            raise stopped
    if pyproject.table is None and not working:
        raise BuildError(*all_problems)
    for model in (model for model in finished if not model.works):
        sizes = f"its sizes are unknown: {'; '.join(model.questions)}" if model.questions else ""
        warn(f"{model.path} is left out: {sizes or model.failures}")
    return working, stopped


def _usable() -> list[str]:
    """The providers that are installed and offer a device here, or else that of the CPU."""
    states = [state for state in examine()[1] if state.package]
    # A start goes through the targets in their order.
    states.sort(key=lambda s: (s.provider == "cpu", PROVIDERS[s.provider].product != "context"))
    for state in states:
        provider = PROVIDERS[state.provider]
        # Who has the plain ONNX Runtime may want none of its EPs.
        if not state.devices and (provider.plugin or provider.distributions[0] != DISTRIBUTIONS[0]):
            warn(
                f"{state.provider}: {state.package} is installed, but {state.reason} No target for it."
            )
    usable = [state.provider for state in states if state.devices]
    if not usable:
        warn("no EP is installed here, so the target is cpu; choose others with -p.")
    return usable or ["cpu"]
