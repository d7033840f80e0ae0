"""A build's report as a file: JSON, or one self-contained HTML page without scripts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from pathlib import Path

from hatch_epcontext.errors import OutputError
from hatch_epcontext.files import write_atomically
from hatch_epcontext.jobs.coverage import describe_coverage
from hatch_epcontext.jobs.report import FailureReport, JobReport, ModelReport, Report
from hatch_epcontext.jobs.validation import describe_emulation, validation_warnings
from hatch_epcontext.serialize import to_json
from hatch_epcontext.system import check_file, writing
from hatch_epcontext.text import count, pairs, printable, show_size
from hatch_epcontext.worker.results import Validation, ValidationStatus


def write(report: Report, title: str, path: Path) -> None:
    """Write ``report`` to ``path``, as JSON or as a page by its suffix; its folder is made if needed.

    Raises OutputError if that is a file, and not a report.
    """
    check_file(path)
    text = to_json(report) if path.suffix == ".json" else render(report, title)
    with writing("the report", path.parent, str(path), OutputError):
        # Keeps a link.
        write_atomically(path.resolve(), text)


def render(report: Report, title: str) -> str:
    title, generator = _escape(title), _escape(report.generator)
    jobs, failures = report.jobs, report.failures
    sections = {
        "Failed": "".join(map(_failure, failures)),
        "Models by targets": _matrix(report),
        "Compiling and opening": _times(report),
        "Jobs": "".join(map(_job, jobs)),
    }
    main = (f"<section><h2>{name}</h2>{text}</section>" for name, text in sections.items() if text)
    # The generator's mark lets the next report replace this one.
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="generator" content="{generator}">
<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}: models</title>
<style>{Path(__file__).with_suffix(".css").read_text(encoding="utf-8")}</style></head><body>
<header><h1>{title}</h1><p class="quiet">Models compiled by {generator}</p><ul class="tiles">
<li><b>{len(jobs)}</b> built</li><li><b>{sum(job.cached for job in jobs)}</b> from the cache</li>
<li><b>{len(failures)}</b> failed</li><li><b>{show_size(sum(job.size for job in jobs))}</b> artifacts</li>
</ul></header><main>{"".join(main)}</main></body></html>\n"""


def _escape(text: str | None) -> str:
    return html.escape(printable(text or "", lines=True))


def _failure(failure: FailureReport) -> str:
    problems = "".join(
        f"""<p class="quiet">{_escape(problem.where())}: {problem.kind.id}</p>
<p class="message">{_escape(problem.account)}</p><p class="message hint">{_escape(problem.advice())}</p>
<p class="quiet">{"The end of the worker's log:" if problem.log else ""}</p>
<pre tabindex="0">{_escape(problem.log)}</pre>"""
        for problem in failure.problems
    )
    return f"""<article id="job-{_name(failure, "-")}" class="failed">
<h3>{_name(failure)} {_badge("FAILED")}</h3>{problems}</article>"""


def _matrix(report: Report) -> str:
    rows: dict[str, dict[str, str]] = {}
    for job in report.jobs:
        for model in job.models:
            row = rows.setdefault(model.model, {"": _escape(model.model)})
            badge = _badge(model.validation.label, model.validation)
            row[job.target] = f"""<a href="#job-{_name(job, "-")}">{badge}</a>
<small>{describe_coverage(model.coverage)} · {show_size(job.size)}</small>"""
    for failure in report.failures:
        link = f"""<a href="#job-{_name(failure, "-")}">{_badge("FAILED")}</a>"""
        for name in failure.models:
            rows.setdefault(name, {"": _escape(name)})[failure.target] = link
    return _table(rows.values())


def _times(report: Report) -> str:
    opened = [(job, job.times.compile, job.load) for job in report.jobs if job.load is not None]
    longest = max((max(times) for _, *times in opened), default=0)
    figures = [
        f"""<figure><figcaption>{_name(job)}</figcaption>
{_bar("compile", compiling / longest, "before", f"{compiling:.3f} s")}
{_bar("open", opening / longest, "after", f"{opening:.3f} s")}</figure>"""
        for job, compiling, opening in opened
    ]
    note = '<p class="quiet">Seconds on the machine that compiled it, measured once.</p>'
    return "".join([note, *figures]) if figures else ""


def _bar(name: str, share: float, kind: str, text: str) -> str:
    return f"""<div class="bar"><span>{name}</span><span class="track">
<i style="width: {share:.2%}" class="{kind}"></i></span><span class="number">{text}</span></div>"""


def _job(job: JobReport) -> str:
    models = "".join(_model(model, job) for model in job.models)
    files = {name: [f"{show_size(file.size)} {file.sha256}"] for name, file in job.files.items()}
    facts = {
        "size": [show_size(job.size)],
        "cached, compiled in" if job.cached else "compiled in": [f"{job.times.compile:.1f} s"],
        "prepared in": [f"{job.times.prepare:.1f} s"],
        "with": [f"{job.provider}, {pairs(job.versions)}"],
    }
    return f"""<article id="job-{_name(job, "-")}"><h3>{_name(job)}</h3>{_facts(facts)}{models}
<details><summary>{count(len(files), "file")} with sha256</summary>{_facts(files)}</details></article>"""


def _model(model: ModelReport, job: JobReport) -> str:
    validation, prepared, coverage = model.validation, model.preparation, model.coverage
    simulator = "simulator" if validation.simulated else ""
    # Where and when it was run: its validation means little without that.
    run = (
        [simulator, pairs(model.chip), validation.day, pairs(job.versions)]
        if validation.day
        else []
    )
    badge = _badge(" · ".join(filter(None, [validation.label, *run])), validation)
    nodes = coverage.uncovered if coverage else ()
    facts: dict[str, Iterable[str]] = {
        "left to the CPU": [f"{node.op} {node.name} {node.reason or ''}" for node in nodes],
        "source": [f"{show_size(model.source_size)}, sha256 {model.source_sha256[:12]}"],
        "nodes": [f"{prepared.nodes_before}, and {prepared.nodes} after {prepared.simplifier}"],
        "numbers": filter(None, [prepared.precision]),
        "failed before": prepared.failed,
        "compiled with": prepared.options,
        "rewritten": prepared.rewrites,
        "also tried": prepared.tried,
        "synthetic inputs" if validation.synthetic else "given inputs": validation.samples,
        "emulated on the CPU": map(describe_emulation, filter(None, [validation.emulation])),
        "warning": validation_warnings(model.model, validation),
    }
    agreements = _table(
        {
            "output": _escape(each.output),
            "largest difference": f"{each.max_abs:.3g}",
            "cosine": "near zero" if each.cosine is None else f"{each.cosine:.6f}",
            "signal to noise": "equal" if each.snr is None else f"{each.snr:.1f} dB",
            "worst at": f"{each.worst.snr:.1f} dB {_escape(each.worst.text)}" if each.worst else "",
            "result": _escape(": ".join(filter(None, [each.status.value, each.reason]))),
        }
        for each in validation.agreements
    )
    share = coverage and _bar("compiled", coverage.share, "after", describe_coverage(coverage))
    return f"""{f"<h4>{_escape(model.model)}</h4>" if len(job.models) > 1 else ""}
<p>{badge} {_escape(validation.reason or "")}</p>{share or ""}{_facts(facts)}{agreements}"""


def _table(lines: Iterable[Mapping[str, str]]) -> str:
    """A table of lines by column, of HTML: one that is wider than a phone scrolls, also with the keyboard."""
    rows = list(lines)
    columns = dict.fromkeys(column for row in rows for column in row)
    head = "".join(f"<th>{_escape(column)}</th>" for column in columns)
    body = ("".join(f"<td>{row.get(column, '-')}</td>" for column in columns) for row in rows)
    table = f"<thead><tr>{head}</tr></thead><tbody><tr>{'</tr><tr>'.join(body)}</tr></tbody>"
    return f'<div class="wide" tabindex="0"><table>{table}</table></div>' if rows else ""


def _facts(facts: Mapping[str, Iterable[str]]) -> str:
    rows = ((name, text) for name, texts in facts.items() for text in texts)
    parts = (f"<dt>{_escape(name)}</dt><dd>{_escape(text)}</dd>" for name, text in rows)
    return f"<dl>{''.join(parts)}</dl>"


def _badge(text: str, validation: Validation | None = None) -> str:
    rating = "poor"
    if validation and validation.status is not ValidationStatus.NOT_VALIDATED:
        doubtful = validation.sensitive or validation.synthetic or validation.few
        ran = validation.status is ValidationStatus.RAN and validation.compared
        rating = "good" if ran and not doubtful else "fair"
    return f'<span class="badge {rating}">{_escape(text)}</span>'


def _name(job: JobReport | FailureReport, arrow: str = " → ") -> str:
    first = job.models[0]
    name = job.group or (first if isinstance(first, str) else first.model)
    return _escape(f"{name}{arrow}{job.target}")
