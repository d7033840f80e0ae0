"""The report of a build as a file: JSON, or one HTML page without scripts."""

from __future__ import annotations

import hashlib
import html
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template

from hatch_epcontext.errors import Kind, OutputError, Problem
from hatch_epcontext.files import known_text, write_atomically
from hatch_epcontext.jobs.artifact import FailureReport
from hatch_epcontext.jobs.boards import BoardReport, describe_run
from hatch_epcontext.jobs.report import (
    JobReport,
    ModelReport,
    Report,
    describe_coverage,
    describe_emulation,
    describe_validation,
    describe_values,
    validation_warnings,
)
from hatch_epcontext.serialize import to_json
from hatch_epcontext.system import check_folder, writing
from hatch_epcontext.text import pairs, printable, show_size
from hatch_epcontext.worker.results import Agreement, Validation, ValidationStatus

_CHECKSUM = re.compile(
    r'(<meta name="checksum" content="|^  "checksum": ")[0-9a-f]{64}(?=")', re.MULTILINE
)
"""Where a report has the sha256 of its text, in which the digits of this one are zeros."""

_UNKNOWN = "0" * 64


def check_report(path: Path) -> None:
    """Raise OutputError if ``path`` cannot be written, or if there is anything but an unchanged report.

    A link may lead to nothing: its target is written.
    """
    target = Path(os.path.realpath(path))
    check_folder(target.parent)
    text = (known_text(target) or "").replace("\r\n", "\n")
    is_own = _CHECKSUM.search(text) is not None and _with_checksum(text) == text
    if os.path.lexists(target) and not is_own:
        message = "exists already, and is not a report, or was changed."
        hint = "Choose another name, or move it away."
        raise OutputError(Problem(Kind.FILE_EXISTS, str(path), message, hint))


def write_report(report: Report | BoardReport, title: str, path: Path) -> None:
    """Write ``report`` to ``path``, as JSON or, of a build, as a page by its suffix; its folder is made if
    needed.

    Raises OutputError as `check_report` does: a file may have appeared since.
    """
    if isinstance(report, Report) and path.suffix != ".json":
        text = render_page(report, title)
    else:
        text = to_json(report).replace("{\n", f'{{\n  "checksum": "{_UNKNOWN}",\n', 1)
    check_report(path)
    with writing("the report", path.parent, str(path), OutputError):
        # Keeps a link.
        write_atomically(Path(os.path.realpath(path)), _with_checksum(text))


def _with_checksum(text: str) -> str:
    blank = _CHECKSUM.sub(rf"\g<1>{_UNKNOWN}", text, count=1)
    digest = hashlib.sha256(blank.encode("utf-8", "backslashreplace")).hexdigest()
    return _CHECKSUM.sub(rf"\g<1>{digest}", text, count=1)


def render_page(report: Report, title: str) -> str:
    """``report`` as a page."""
    failed, built = [*map(_failure, report.failures)], [*map(_job, report.jobs)]
    sections = {"Failed": failed, "Models by targets": _matrix(report), "Jobs": built}
    values = {
        "title": title,
        "generator": report.generator,
        "checksum": _UNKNOWN,
        "built": len(report.jobs),
        "cached": sum(job.cached for job in report.jobs),
        "failed": len(report.failures),
        "size": show_size(sum(job.size for job in report.jobs)),
        "sections": [_tag("section", _tag("h2", n), e) for n, e in sections.items() if e],
    }
    page = Template(Path(__file__).with_name("report.html").read_text(encoding="utf-8"))
    return page.substitute({name: _escaped(value) for name, value in values.items()})


class _Html(str):
    """HTML, which stays as it is inside other HTML; all other text is escaped."""


def _escaped(value: object) -> _Html:
    """``value`` as HTML: a text, a number, or several values."""
    if isinstance(value, _Html):
        return value
    if isinstance(value, Iterable) and not isinstance(value, str):
        return _Html("".join(map(_escaped, value)))
    return _Html(html.escape(printable("" if value is None else str(value), lines=True)))


def _tag(name: str, *content: object, **attributes: str) -> _Html:
    """An element with ``content``; ``class_`` is its class."""
    texts = (f' {key.rstrip("_")}="{_escaped(text)}"' for key, text in attributes.items())
    return _Html(f"<{name}{''.join(texts)}>{_escaped(content)}</{name}>\n")


def _failure(failure: FailureReport) -> _Html:
    head = _tag("h3", _name(failure), " ", _badge("FAILED"))
    problems = [_tag("p", problem.text(), class_="message") for problem in failure.problems]
    return _tag("article", head, problems, id=_name(failure, "-"), class_="failed")


def _matrix(report: Report) -> list[_Html]:
    rows: dict[str, dict[str, object]] = {}
    for job in report.jobs:
        for model in job.models:
            # What a simulator takes says nothing about the device.
            is_known = job.load is not None and not model.validation.simulated
            load = f" · opens in {job.load:.3f} s" if is_known else ""
            facts = f"{describe_coverage(model.coverage)} · {show_size(job.size)}{load}"
            link = _tag("a", _badge_of(model.validation), href=f"#{_name(job, '-')}")
            row = rows.setdefault(model.model, {"": model.model})
            row[job.target] = [link, _tag("small", facts)]
    for failure in report.failures:
        link = _tag("a", _badge("FAILED"), href=f"#{_name(failure, '-')}")
        for name in failure.models:
            rows.setdefault(name, {"": name})[failure.target] = link
    return _table(rows.values())


def _job(job: JobReport) -> _Html:
    times, cached = job.times, ", from the cache" if job.cached else ""
    facts: dict[str, Iterable[str]] = {
        "compiled in": [f"{times.compile:.1f} s{cached}"] if times else [],
        "with": [f"{job.provider}, {pairs(job.versions)}"],
        "files": (f"{n}, {show_size(f.size)}, sha256 {f.sha256}" for n, f in job.files.items()),
        "notes": job.notes,
    }
    models = [_model(model, job) for model in job.models]
    return _tag("article", _tag("h3", _name(job)), _facts(facts), models, id=_name(job, "-"))


def _model(model: ModelReport, job: JobReport) -> list[_Html]:
    validation, prepared, coverage = model.validation, model.preparation, model.coverage
    # Where and when it was run: its validation means little without that.
    run = (model.chip, model.day, pairs(job.versions)) if model.day else ()
    nodes = coverage.uncovered if coverage else ()
    facts: dict[str, Iterable[str]] = {
        "left to the CPU": [f"{node.op} {node.name} {node.reason or ''}" for node in nodes],
        "source": [f"{show_size(model.source_size)}, sha256 {model.source_sha256[:12]}"],
        "nodes": [f"{prepared.nodes_before}, and {prepared.nodes} after {prepared.simplifier}"],
        "changed": [*filter(None, [prepared.precision]), *prepared.rewrites, *prepared.options],
        "synthetic inputs" if validation.synthetic else "given inputs": validation.samples,
        "inputs": map(describe_values, validation.inputs),
        "on hardware": map(describe_run, model.boards),
        "emulated on the CPU": map(describe_emulation, filter(None, [validation.emulation])),
        "warning": validation_warnings(model.model, validation),
    }
    head = [_tag("h4", model.model)] if len(job.models) > 1 else []
    verdict = _tag("p", _badge_of(validation, *run), " ", validation.reason)
    return [*head, verdict, _facts(facts), *_table(map(_agreement, validation.agreements))]


def _agreement(output: Agreement) -> Mapping[str, object]:
    return {
        "output": output.output,
        "largest difference": f"{output.max_abs:.3g}",
        "cosine": "near zero" if output.cosine is None else f"{output.cosine:.6f}",
        "signal to noise": "equal" if output.snr is None else f"{output.snr:.1f} dB",
        "worst at": output.worst and f"{output.worst_snr:.1f} dB {output.worst.text}",
        "result": ": ".join(filter(None, [output.status.value, output.reason])),
    }


def _table(lines: Iterable[Mapping[str, object]]) -> list[_Html]:
    """A table of lines by column: one that is wider than a phone scrolls, also with the keyboard."""
    rows = list(lines)
    columns = dict.fromkeys(column for row in rows for column in row)
    head = _tag("thead", _tag("tr", (_tag("th", column) for column in columns)))
    cells = ([_tag("td", row.get(column, "-")) for column in columns] for row in rows)
    table = _tag("table", head, _tag("tbody", (_tag("tr", row) for row in cells)))
    return [_tag("div", table, class_="wide", tabindex="0")] if rows else []


def _facts(facts: Mapping[str, Iterable[str]]) -> _Html:
    rows = ((name, text) for name, texts in facts.items() for text in texts)
    return _tag("dl", ([_tag("dt", name), _tag("dd", text)] for name, text in rows))


def _badge_of(validation: Validation, *more: str) -> _Html:
    doubtful = validation.sensitive or validation.synthetic or validation.few
    ran = validation.status is ValidationStatus.RAN and validation.compared
    rating = "good" if ran and not doubtful else "fair"
    if validation.status is ValidationStatus.NOT_VALIDATED:
        rating = "poor"
    label = describe_validation(validation, with_reason=False)
    return _badge(" · ".join(filter(None, [label, *more])), rating)


def _badge(text: str, rating: str = "poor") -> _Html:
    return _tag("span", text, class_=f"badge {rating}")


def _name(job: JobReport | FailureReport, arrow: str = " → ") -> str:
    first = job.models[0]
    name = job.group or (first if isinstance(first, str) else first.model)
    return f"{name}{arrow}{job.target}"
