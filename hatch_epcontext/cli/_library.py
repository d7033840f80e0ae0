"""The output of ``epcontext doctor --library``."""

from __future__ import annotations

import json
from collections.abc import Iterator

from hatch_epcontext.cli._flag_errors import FlagNames
from hatch_epcontext.cli._output import add_row, echo, show, table
from hatch_epcontext.errors import Kind, Problem
from hatch_epcontext.providers import PROVIDERS
from hatch_epcontext.text import listing, to_toml
from hatch_epcontext.tools.plugin_library import LibraryDiagnosis, StepStatus, Trial, Verdict
from hatch_epcontext.worker.requests import EpDevice

_SAME = ("library_path", "version")
"""Metadata of an EP itself, not of a device."""


def show_library(found: LibraryDiagnosis) -> None:
    """Print all facts of a library, and the table that uses it."""
    packages, runtime = (
        ", ".join(f"{name} {version}" for name, version in versions.items())
        for versions in (found.packages, found.distributions)
    )
    echo(f"ONNX Runtime: {runtime}")
    echo(f"library: {found.library}{f' ({packages})' if packages else ''}")
    if found.devices:
        echo(f"registered as {found.registered_as}; it offers:")
    _show_devices(found)
    if found.ep is not None:
        _show_tried(found)
    if found.trials:
        _show_trials(found)
    _show_problems(found)
    echo(f"verdict: {_sentence(found)}")
    if found.table is not None:
        echo("This target uses it, in the pyproject.toml of an app:")
        echo(f"\n{found.table}", lines=True)
        if not found.module:
            echo("\nThe app has to register the library before it calls load:", lines=True)
            path = json.dumps(found.library)
            echo(
                f'onnxruntime.register_execution_provider_library("{found.registered_as}", {path})'
            )


def _show_devices(found: LibraryDiagnosis) -> None:
    for device in found.devices:
        virtual = "virtual " if found.virtual else ""
        vendor = device.vendor or "unknown vendor"
        echo(f"  {device.ep} on {virtual}{device.kind} ({vendor}){_of_ep(device)}")
        facts = {**device.metadata, **device.ep_metadata}
        for name, value in facts.items():
            if name not in _SAME:
                echo(f"    {name} = {value!r}")


def _of_ep(device: EpDevice) -> str:
    version = device.ep_metadata.get("version")
    of = f" by {device.ep_vendor}" if device.ep_vendor else ""
    return f", version {version}{of}" if version else of


def _show_tried(found: LibraryDiagnosis) -> None:
    options = f" with {to_toml(dict(found.options))}" if found.options else ""
    echo(f"tried: {found.ep} on {found.device}{options}")
    if others := sorted({each.ep for each in found.devices} - {str(found.ep)}):
        echo(f"  Not tried: {listing(others)}. Choose with --ep-name.")
    if found.provider is not None:
        product = PROVIDERS[found.provider].product
        does = "checks its options" if product == "context" else "ships optimized graphs instead"
        echo(f'  hatch-epcontext has a provider for this EP, which {does}: "{found.provider}".')
    elif {each.ep for each in found.devices} == {found.registered_as}:
        echo("  The EP has the name that it is registered under: choose another with --ep-name.")
    if found.virtual:
        echo("  Virtual devices compile for hardware that this machine does not have.")


def _show_trials(found: LibraryDiagnosis) -> None:
    made = table("graph", "source model on the EP", "compiled", "opened without compiling")
    for each in found.trials:
        add_row(made, each.graph, *(step.text or "-" for step in each.steps))
    show(made)
    for words, some in (
        ("takes", {op: numbers for op, numbers in found.operators.items() if not numbers[1]}),
        ("takes some", {op: n for op, n in found.operators.items() if all(n)}),
        ("leaves to the CPU", {op: n for op, n in found.operators.items() if not n[0]}),
    ):
        if some:
            echo(f"{words}: {', '.join(_numbered(op, *numbers) for op, numbers in some.items())}")


def _numbered(op: str, taken: int, left: int) -> str:
    return f"{op} ({taken} of {taken + left})" if taken and left else op


def _show_problems(found: LibraryDiagnosis) -> None:
    graphs: dict[tuple[str, str, str], list[str]] = {}
    for each in found.trials:
        for problem in _failures(each):
            # Other advice is for the models of a project.
            has_limit = problem.kind is Kind.WORKER_TIMEOUT
            advice = problem.advice(FlagNames({})) if has_limit else ""
            shown = (problem.message, advice, _own_log(problem))
            graphs.setdefault(shown, []).append(each.graph)
    if not graphs and not found.problems:
        return
    echo("problems:")
    for problem in found.problems:
        _show_lines(problem.message, problem.advice(FlagNames({})), _own_log(problem))
    for (message, advice, log), names in graphs.items():
        _show_lines(f"{', '.join(names)}: {message}", advice, log)


def _failures(trial: Trial) -> Iterator[Problem]:
    """The problems of the steps that failed, each once."""
    seen = set()
    for step in trial.steps:
        for problem in step.problems if step.status is StepStatus.FAILED else ():
            first = problem.message.split("\n")[0]
            if first not in seen:
                seen.add(first)
                yield problem


def _own_log(problem: Problem) -> str:
    """The log without Python's stack, which only shows this package."""
    return (problem.log or "").partition("\nCurrent thread ")[0].rstrip()


def _show_lines(message: str, advice: str, log: str) -> None:
    first, *lines = message.splitlines()
    echo(f"  - {first}")
    for line in (*lines, *advice.splitlines()):
        echo(f"    {line}")
    for line in log.splitlines():
        echo(f"    | {line}")


def _sentence(found: LibraryDiagnosis) -> str:
    ship = (
        "Ship the source model, or its optimized graph with the provider cpu: this EP compiles it on the "
        "user's machine."
    )
    compiled = any(each.compiled.status is StepStatus.DONE for each in found.trials)
    faulty = f"{found.ep} writes EP contexts" if compiled else f"{found.ep} does not compile"
    return {
        Verdict.WORKS: f"{found.ep} writes EP contexts. They open with compiling disabled in a fresh "
        "process, and give the CPU's answers.",
        Verdict.NOT_RUN: f"{found.ep} writes EP contexts. This machine cannot open them.",
        Verdict.FAULTY: f"{faulty}, and something failed: see the problems.",
        Verdict.NO_CONTEXTS: f"{found.ep} writes no EP contexts: it cannot compile ahead of time. {ship}",
        Verdict.NO_NODES: f"{found.ep} supports no node of these graphs, and so it writes no EP contexts. "
        "Perhaps it needs options (--option). --verbose prints its log.",
        Verdict.UNUSABLE: "the library cannot be used here.",
    }[found.verdict]
