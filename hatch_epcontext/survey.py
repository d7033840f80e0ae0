"""What an environment has for compiling models, and what is wrong with it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from hatch_epcontext.cache import Store
from hatch_epcontext.config import load
from hatch_epcontext.errors import BuildError, EpcontextError
from hatch_epcontext.plan import plan
from hatch_epcontext.process import Workers
from hatch_epcontext.protocol import SurveyReply, SurveyRequest
from hatch_epcontext.providers import FLAVOURS, PROVIDERS, Provider
from hatch_epcontext.pyproject import parse
from hatch_epcontext.requirements import TOOLS, check_environment, installed

TIMEOUT = 120.0
"""Seconds for loading one EP's library."""


@dataclass(frozen=True)
class ProviderState:
    """``package``: what it comes with and its version, or ""; ``devices`` or else ``why`` not."""

    provider: str
    package: str
    devices: tuple[str, ...]
    why: str


@dataclass(frozen=True)
class Survey:
    """``flavours``: of ONNX Runtime, and ``tools``, with their versions; ``project``: what is to be said
    of the one in the folder; ``problems``: what has to be mended.
    """

    flavours: Mapping[str, str]
    tools: Mapping[str, str]
    providers: tuple[ProviderState, ...]
    cache: str
    artifacts: int
    project: str
    problems: tuple[str, ...]


def survey(project: Path, store: Store, environ: Mapping[str, str]) -> Survey:
    """Look at this environment, at ``store`` and at the project in the folder ``project``."""
    flavours = _versions(FLAVOURS)
    tools = _versions(requirement.split(">=")[0] for requirement in TOOLS)
    told, problems = _project(project, environ)
    # What a project lacks has been told with it.
    if not problems:
        try:
            check_environment((), TOOLS)
        except EpcontextError as error:
            problems += [f"{problem.what}\n{problem.fix}" for problem in error.problems]
        if not flavours:
            names = " or ".join(FLAVOURS[:2])
            problems.append(f"No ONNX Runtime is installed: take {names}, or another one.")
    with tempfile.TemporaryDirectory(
        prefix="hatch-epcontext-", ignore_cleanup_errors=True
    ) as temporary:
        states = [_state(each, bool(flavours), Path(temporary)) for each in PROVIDERS.values()]
    return Survey(
        flavours,
        tools,
        tuple(states),
        str(store.root),
        len(store.entries()),
        told,
        tuple(problems),
    )


def _versions(names: Iterable[str]) -> dict[str, str]:
    return {name: version for name in names if (version := installed(name))}


def _state(provider: Provider, has_runtime: bool, scratch: Path) -> ProviderState:
    package = _package(provider)
    if provider.needs_library:
        return ProviderState(provider.name, "", (), "is what the configuration names.")
    if not package or not has_runtime:
        wanted = " and ".join(provider.requirements or (provider.flavours[0],))
        return ProviderState(provider.name, "", (), f"{wanted} is not installed.")
    try:
        reply: SurveyReply = Workers(TIMEOUT).call(
            SurveyRequest(provider.name),
            scratch / provider.name,
            where=provider.name,
        )
    except BuildError as error:
        return ProviderState(provider.name, package, (), error.problems[0].what)
    return ProviderState(provider.name, package, reply.devices, reply.why)


def _package(provider: Provider) -> str:
    """What is installed of what the provider comes with, and its version; "" if nothing is."""
    names = [provider.plugin.package] if provider.plugin else list(provider.flavours)
    names += [name for rivals in provider.rivals for name in sorted(rivals) if name not in names]
    found = (f"{name} {version}" for name in names if (version := installed(name)))
    return next(found, "")


def _project(folder: Path, environ: Mapping[str, str]) -> tuple[str, list[str]]:
    """What is to be said of the project in ``folder``, and what is wrong with it."""
    file = folder / "pyproject.toml"
    if not file.is_file():
        return "There is no pyproject.toml here.", []
    try:
        tool = parse(file.read_text(encoding="utf-8")).get("tool", {})
        table = tool.get("epcontext")
        hooks = tool.get("hatch", {}).get("build", {})
        everywhere = hooks.get("hooks", {}).get("epcontext")
        wheel = hooks.get("targets", {}).get("wheel", {}).get("hooks", {}).get("epcontext")
    except (ValueError, AttributeError) as error:
        return f"{file} cannot be read.", [f"{file}: {error}"]
    if table is None and wheel is None and everywhere is None:
        return "The project here does not use hatch-epcontext.", []
    if wheel is None and everywhere is None:
        missing = "Add [tool.hatch.build.targets.wheel.hooks.epcontext] to pyproject.toml."
        return "The hook is not switched on.", [
            f"[tool.epcontext] is there, and no hook. {missing}"
        ]
    try:
        planned = plan(load(folder, table, wheel or everywhere or {}, environ))
        check_environment(planned.config.targets, planned.requirements)
    except EpcontextError as error:
        return "The hook is switched on.", [str(error)]
    noun = "job" if len(planned.jobs) == 1 else "jobs"
    return f"The hook is switched on, with {len(planned.jobs)} {noun}.", []
