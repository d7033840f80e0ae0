"""Tries each open model on each target, and writes the tables in benchmarks/RESULTS.md from the results.

    pip install -e . --group bench
    python -m benchmarks.survey run --results survey.json
    python -m benchmarks.survey run --results survey.json --target openvino   # on an Intel processor
    python -m benchmarks.survey table --results survey.json

Each try is a command of its own, which cannot stop the run: `epcontext compile`, with what the list says
and nothing else. Results are written after each try. A run that is started again goes on where it
ended: only what ``--again`` names is tried again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, get_args

from benchmarks.models import TITLES, ZOO, OpenModel, fetch
from benchmarks.project import TARGETS, toml

PAGE = Path(__file__).resolve().parent / "RESULTS.md"

TIMEOUT = 300.0
"""Seconds for a try."""

Outcome = Literal["whole", "partial", "optimized", "refused", "timeout"]
"""``"refused"`` is any error; ``"optimized"``: the target compiles nothing ahead of time."""


@dataclass(frozen=True)
class Try:
    """The result of one model on one target; times in seconds, None where there is none.

    ``why``: why it is not whole, as the error says it. ``nodes``: those of the prepared graph, and
    ``compiled`` those of them that are inside contexts. ``snr``: the smallest ratio of signal to noise of all
    outputs in decibels, None if none was compared, or if all are ``equal``.
    ``rules``: the rewrites that changed it.
    ``accepts_less``: whether the error names ``min-coverage`` as a way to go on.
    """

    model: str
    target: str
    outcome: Outcome
    seconds: float
    kind: str = ""
    why: str = ""
    nodes: int | None = None
    compiled: int | None = None
    contexts: int | None = None
    compile: float | None = None
    open: float | None = None
    validation: str = ""
    snr: float | None = None
    equal: bool = False
    rules: Sequence[str] = ()
    accepts_less: bool = False


class Results:
    """The tries in a JSON file, which is complete after each of them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        stored = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        self.tries = {(fields["model"], fields["target"]): Try(**fields) for fields in stored}

    def add(self, done: Try) -> None:
        """Write ``done``, instead of an earlier try of the same."""
        self.tries[done.model, done.target] = done
        text = json.dumps([asdict(done) for done in self.tries.values()], indent=1)
        beside = self._path.with_suffix(".new")
        beside.write_text(f"{text}\n", encoding="utf-8")
        beside.replace(self._path)


@dataclass(frozen=True)
class Attempt:
    """One model on one target: ``path`` is its file; ``cache`` is the tool's."""

    model: OpenModel
    target: str
    path: Path
    cache: Path
    timeout: float

    def run(self) -> Try:
        """Compile and validate it; where nodes are left to the CPU, what there is of it."""
        first = self._try(())
        if not first.accepts_less:
            return first
        # What was compiled is in the cache: only validation is new.
        rest = self._try(("--set", "min-coverage=0"))
        seconds = first.seconds + rest.seconds
        if rest.outcome != "partial":
            return replace(rest, seconds=seconds)
        return replace(rest, seconds=seconds, kind=first.kind, why=first.why)

    def _try(self, flags: Sequence[str]) -> Try:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, "report.json")
            command = [*self._command(), "--output", folder, "--report", str(report), *flags]
            printed = run_limited(command, self.timeout, self.cache)
            text = report.read_text(encoding="utf-8") if report.is_file() else ""
        seconds = time.perf_counter() - start
        if printed is None:
            why = f"not done in {self.timeout:.0f} s"
            return Try(self.model.name, self.target, "timeout", seconds, why=why)
        return outcome(self.model.name, self.target, seconds, replace(printed, report=text))

    def _command(self) -> Iterator[str]:
        model = self.model
        keys = {**TARGETS[self.target], **model.keys.get(self.target, {})}
        start = "from hatch_epcontext.cli import main; main()"
        yield from (sys.executable, "-c", start, "compile", str(self.path), "--overwrite")
        yield from ("--provider", str(keys.pop("provider")))
        for name, value in dict(keys.pop("provider-options", {})).items():
            yield from ("--option", f"{name}={value}")
        for flag, values in (("--dim", model.dims), ("--constant", model.constants)):
            for name, value in values.items():
                yield from (flag, f"{name}={value}")
        for name, sizes in model.shapes.items():
            yield from ("--shape", f"{name}={','.join(map(str, sizes))}")
        for name, value in keys.items():
            yield from ("--set", f"{name}={toml(value)}")


@dataclass(frozen=True)
class Printed:
    """The report of a command, and what it printed as errors."""

    report: str
    stderr: str


def run_limited(command: Sequence[str], seconds: float, cache: Path) -> Printed | None:
    """Run ``command`` with the tool's cache in ``cache``; None if it was stopped after ``seconds``."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        env={**os.environ, "HATCH_EPCONTEXT_CACHE_DIR": str(cache)},
    )
    try:
        return Printed(*process.communicate(timeout=seconds))
    except subprocess.TimeoutExpired:
        # The tool then ends its workers. It may ignore SIGINT, as in the background of a shell.
        process.terminate()
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
        return None


def outcome(model: str, target: str, seconds: float, printed: Printed) -> Try:
    """What a command's output says of ``model`` on ``target``."""
    try:
        report = json.loads(printed.report)
    except ValueError:
        return _without_report(model, target, seconds, printed.stderr)
    if not report["jobs"]:
        problem = report["failures"][0]["problems"][0]
        why = problem["message"]
        return Try(
            model,
            target,
            "refused",
            seconds,
            problem["kind"],
            why,
            accepts_less=_LOWER in printed.stderr,
        )
    (job,) = report["jobs"]
    (facts,) = job["models"]
    coverage, validation = facts["coverage"] or {}, facts["validation"]
    passed = ("agrees", "sensitive")
    agreements = validation["agreements"]
    compared = [agreement for agreement in agreements if agreement["status"] in passed]
    ratios = [agreement["snr"] for agreement in compared if agreement["snr"] is not None]
    others = [
        f"{agreement['output']} is {agreement['status']}: {agreement['reason']}"
        for agreement in agreements
        if agreement["status"] != "agrees"
    ]
    result: Outcome = "optimized"
    if coverage:
        result = "partial" if coverage["uncovered"] else "whole"
    return Try(
        model,
        target,
        result,
        seconds,
        nodes=coverage.get("nodes"),
        compiled=coverage.get("compiled"),
        contexts=coverage.get("partitions"),
        compile=job["times"]["compile"] if job["times"] else None,
        open=facts["load"],
        validation=validation["status"],
        snr=min(ratios, default=None),
        equal=bool(compared) and not ratios,
        rules=facts["preparation"]["rewrites"],
        why="; ".join(others),
    )


_LOWER = "--set min-coverage="
"""What an error suggests where a part can be compiled."""


def _without_report(model: str, target: str, seconds: float, stderr: str) -> Try:
    """A command that printed only an error: a model that does not fit its configuration, or a crash."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    for number, line in enumerate(lines):
        if kind := re.search(r": (EPC\d+)$", line):
            why = next(iter(lines[number + 1 :]), "")
            less = _LOWER in stderr
            return Try(model, target, "refused", seconds, kind[1], why, accepts_less=less)
    return Try(model, target, "refused", seconds, why=lines[-1] if lines else "no output")


def run(arguments: argparse.Namespace) -> None:
    """Try what is not in the results yet."""
    results = Results(arguments.results)
    asked = [
        (model, target)
        for target in arguments.target or TARGETS
        for model in ZOO
        if target in model.targets and (not arguments.model or model.name in arguments.model)
    ]
    waiting = [
        (model, target)
        for model, target in asked
        if (known := results.tries.get((model.name, target))) is None
        or known.outcome in (arguments.again or ())
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (arguments.models or Path(temporary, "models")).resolve()
        for number, (model, target) in enumerate(waiting, 1):
            (source,) = fetch(folder, [model])
            # A cache of its own: the times are those of a cold build, as in every other try.
            with tempfile.TemporaryDirectory() as cache:
                done = Attempt(model, target, source.path, Path(cache), arguments.timeout).run()
            results.add(done)
            print(f"{number}/{len(waiting)} {model.name} on {target}: {describe(done)}", flush=True)


def describe(done: Try) -> str:
    """A try in one line."""
    parts = [done.outcome, f"{done.seconds:.1f} s"]
    if done.nodes is not None:
        parts.append(f"{done.compiled} of {done.nodes} nodes in {done.contexts}")
    parts += [text for text in (done.validation, done.kind, done.why) if text]
    return ", ".join(parts)


_LONGEST = 220
"""Characters of an error in the table."""


def tables(tries: Mapping[tuple[str, str], Try]) -> str:
    """The tables of all targets that were tried, as Markdown."""
    return "\n\n".join(
        _table(target, [tries[key] for key in _keys(target) if key in tries])
        for target in TARGETS
        if any(target == tried for _, tried in tries)
    )


def _keys(target: str) -> Iterator[tuple[str, str]]:
    return ((model.name, target) for model in ZOO)


def _table(target: str, tries: Sequence[Try]) -> str:
    counts = Counter(done.outcome for done in tries)
    summary = ", ".join(f"{counts[name]} {name}" for name in get_args(Outcome) if counts[name])
    return "\n".join(
        [
            f"### {TITLES[target]}",
            "",
            f"{len(tries)} models: {summary}.",
            "",
            "| model | outcome | nodes in contexts | compile | open | agreement | why |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *map(_row, tries),
        ]
    )


def _row(done: Try) -> str:
    titles = {model.name: model.title for model in ZOO}
    nodes = "" if done.nodes is None else f"{done.compiled} of {done.nodes} in {done.contexts}"
    ran = done.outcome in ("whole", "partial", "optimized")
    cells = (
        titles[done.model],
        done.outcome,
        nodes,
        "" if done.compile is None else f"{done.compile:.2f} s",
        "" if done.open is None else f"{done.open:.3f} s",
        "equal" if done.equal else "" if done.snr is None else f"{done.snr:.0f} dB",
        _why(done)
        if done.why
        else ("" if not ran or done.validation == "ran" else done.validation),
    )
    return f"| {' | '.join(cells)} |"


def _why(done: Try) -> str:
    text = " ".join(done.why.split()).replace("|", "\\|")
    text = f"{text[: _LONGEST - 4]} ..." if len(text) > _LONGEST else text
    return f"{text} ({done.kind})" if done.kind else text


_GENERATED = re.compile(r"(<!-- begin: the survey -->\n).*?(<!-- end: the survey -->)", re.DOTALL)


def table(arguments: argparse.Namespace) -> None:
    """Write the tables into the page."""
    text = tables(Results(arguments.results).tries)
    page = arguments.page.read_text(encoding="utf-8")
    new = _GENERATED.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page)
    arguments.page.write_text(new, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    runs = commands.add_parser("run", help="try the models, and write the results")
    runs.set_defaults(run=run)
    runs.add_argument("--models", type=Path, help="a folder that keeps the downloaded packages")
    runs.add_argument("--target", action="append", choices=TARGETS, help="only this; repeatable")
    runs.add_argument("--model", action="append", help="only this model; repeatable")
    runs.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds for a try")
    runs.add_argument(
        "--again",
        action="append",
        choices=get_args(Outcome),
        help="try again what had this outcome; repeatable",
    )
    writes = commands.add_parser("table", help="write the tables into benchmarks/RESULTS.md")
    writes.set_defaults(run=table)
    writes.add_argument("--page", type=Path, default=PAGE, help="the page")
    for command in (runs, writes):
        command.add_argument("--results", type=Path, required=True, help="the JSON file of results")
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
