"""A build's report as a file: JSON, or one self-contained HTML page without scripts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from xml.etree import ElementTree as ET

from hatch_epcontext.errors import OutputError, Problem
from hatch_epcontext.files import write_atomically
from hatch_epcontext.jobs.artifact import Validation, ValidationStatus
from hatch_epcontext.jobs.coverage import describe_coverage
from hatch_epcontext.jobs.report import FailureReport, JobReport, ModelReport, Report
from hatch_epcontext.jobs.validation import describe_emulation, validation_warnings
from hatch_epcontext.serialize import to_json
from hatch_epcontext.system import check_file, writing
from hatch_epcontext.text import count, pairs, printable, show_size
from hatch_epcontext.worker.results import CoverageStatus

_STYLE = Path(__file__).with_name("html_report.css")

_RATINGS = {
    ValidationStatus.RAN: "good",
    ValidationStatus.RAN_ON_CPU: "fair",
    ValidationStatus.RAN_ALONE: "fair",
    ValidationStatus.STRUCTURE: "fair",
    ValidationStatus.NOT_VALIDATED: "poor",
}
"""The style of the badge for each status."""


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
    """The page as HTML."""
    head = _e(
        "head",
        _e("meta", charset="utf-8"),
        # So that the next one may replace it.
        _e("meta", name="generator", content=report.generator),
        _e("meta", name="viewport", content="width=device-width, initial-scale=1"),
        _e("title", f"{title}: models"),
        _e("style", _STYLE.read_text(encoding="utf-8")),
    )
    main = _e("main", *_failures(report), *_matrix(report), *_loading(report), *_jobs(report))
    page = _e("html", head, _e("body", _header(report, title), main), lang="en")
    return "<!DOCTYPE html>\n" + ET.tostring(page, encoding="unicode", method="html") + "\n"


def _e(tag: str, *children: str | ET.Element, **attributes: str) -> ET.Element:
    """An element; ``class_`` is its class, because `class` is a keyword in Python."""
    element = ET.Element(
        tag, {name.rstrip("_"): printable(value) for name, value in attributes.items()}
    )
    for given in children:
        child = printable(given, lines=True) if isinstance(given, str) else given
        if isinstance(child, ET.Element):
            element.append(child)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + child
        else:
            element.text = (element.text or "") + child
    return element


def _header(report: Report, title: str) -> ET.Element:
    cached = sum(job.cached for job in report.jobs)
    tiles = [
        (str(len(report.jobs)), "built"),
        (str(cached), "from the cache"),
        (str(len(report.failures)), "failed"),
        (show_size(sum(job.size for job in report.jobs)), "artifacts"),
    ]
    return _e(
        "header",
        _e("h1", title),
        _e("p", f"Models compiled by {report.generator}", class_="quiet"),
        _e("ul", *(_e("li", _e("b", number), " ", name) for number, name in tiles), class_="tiles"),
    )


def _failures(report: Report) -> Iterator[ET.Element]:
    if report.failures:
        yield _section("Failed", *map(_failed, report.failures))


def _failed(failure: FailureReport) -> ET.Element:
    return _e(
        "article",
        _e("h3", _job_name(failure), " ", _badge("poor", "FAILED")),
        *(part for problem in failure.problems for part in _problem(problem)),
        id=_anchor(failure),
        class_="failed",
    )


def _problem(problem: Problem) -> Iterator[ET.Element]:
    yield _e("p", f"{problem.where()}: {problem.kind.id}", class_="quiet")
    yield _e("p", problem.account, class_="message")
    if advice := problem.advice():
        yield _e("p", advice, class_="message hint")
    if problem.log:
        yield _e("p", "The end of the worker's log:", class_="quiet")
        yield _e("pre", problem.log, tabindex="0")


def _matrix(report: Report) -> Iterator[ET.Element]:
    """All models by all targets."""
    cells: dict[tuple[str, str], ET.Element] = {}
    for job in report.jobs:
        for model in job.models:
            badge = _e("a", _validation_badge(model.validation), href=f"#{_anchor(job)}")
            partial = model.coverage and model.coverage.status is CoverageStatus.PARTIAL
            small = _e(
                "small",
                _e("span", describe_coverage(model.coverage), class_="short" if partial else ""),
                f" · {show_size(job.size)}",
            )
            cells[model.model, job.target] = _e("td", badge, small)
    for failure in report.failures:
        for name in failure.models:
            badge = _e("a", _badge("poor", "FAILED"), href=f"#{_anchor(failure)}")
            cells[name, failure.target] = _e("td", badge)
    if not cells:
        return
    models = list(dict.fromkeys(model for model, _ in cells))
    targets = list(dict.fromkeys(target for _, target in cells))
    rows = [
        _e(
            "tr",
            _e("th", model, scope="row"),
            *(cells.get((model, target), _e("td", "-", class_="quiet")) for target in targets),
        )
        for model in models
    ]
    head = _e("tr", _e("th", "model"), *(_e("th", target, scope="col") for target in targets))
    yield _section("Models by targets", _table(head, rows))


def _loading(report: Report) -> Iterator[ET.Element]:
    """Bars of the times to compile and to open a session, on one scale."""
    opened = [(job, job.load) for job in report.jobs if job.load is not None]
    if not opened:
        return
    longest = max(max(job.times.compile, load) for job, load in opened)
    yield _section(
        "Compiling and opening",
        *(
            _e(
                "figure",
                _e("figcaption", _job_name(job)),
                _bar("compile", job.times.compile, longest, "before"),
                _bar("open", load, longest, "after"),
            )
            for job, load in opened
        ),
        note="Seconds on the machine that compiled it, measured once: compiling, and opening a session on "
        "the result, as the app does.",
    )


def _bar(name: str, seconds: float, longest: float, kind: str) -> ET.Element:
    return _e(
        "div",
        _e("span", name),
        _e(
            "span",
            _e("i", style=f"width: {max(seconds / longest, 0.002):.2%}", class_=kind),
            class_="track",
        ),
        _e("span", f"{seconds:.3f} s", class_="number"),
        class_="bar",
    )


def _jobs(report: Report) -> Iterator[ET.Element]:
    if report.jobs:
        yield _section("Jobs", *map(_job, report.jobs))


def _job(job: JobReport) -> ET.Element:
    cached = " (from the cache)" if job.cached else ""
    times = job.times
    facts = [
        ("provider", job.provider),
        ("size", show_size(job.size)),
        ("compiled", f"in {times.compile:.1f} s, prepared in {times.prepare:.1f} s{cached}"),
        ("with", ", ".join(f"{name} {version}" for name, version in job.versions.items())),
    ]
    if job.saved > 0:
        facts.append(("saved by compiling together", show_size(job.saved)))
    if job.load is not None:
        facts.append(("opened", f"in {job.load:.3f} s"))
    rows = [
        _e("tr", _e("th", name, scope="row"), _number(show_size(file.size)), _hash(file.sha256))
        for name, file in job.files.items()
    ]
    files = _table(_e("tr", _e("th", "file"), _e("th", "size"), _e("th", "sha256")), rows)
    return _e(
        "article",
        _e("h3", _job_name(job)),
        _facts(facts),
        *(
            part
            for model in job.models
            for part in _model(model, job.versions, alone=len(job.models) == 1)
        ),
        _e("details", _e("summary", count(len(rows), "file")), files),
        id=_anchor(job),
    )


def _circumstances(model: ModelReport, versions: Mapping[str, str]) -> Iterator[str]:
    """Where and when a model was run: its validation means little without that."""
    if not model.day:
        return
    if model.validation.simulated:
        yield "simulator"
    if model.chip:
        yield pairs(model.chip)
    yield model.day
    yield from (f"{name} {version}" for name, version in versions.items())


def _model(model: ModelReport, versions: Mapping[str, str], *, alone: bool) -> Iterator[ET.Element]:
    validation, preparation = model.validation, model.preparation
    if not alone:
        yield _e("h4", model.model)
    badge = _validation_badge(
        validation, " · ".join([validation.label, *_circumstances(model, versions)])
    )
    yield _e("p", badge, f" {validation.reason or ''}")
    if model.coverage is not None:
        yield _e(
            "div",
            _e("span", "compiled"),
            _e(
                "span",
                _e("i", style=f"width: {model.coverage.share:.2%}", class_="after"),
                class_="track",
            ),
            _e("span", describe_coverage(model.coverage), class_="number"),
            class_="bar",
        )
        if uncovered := model.coverage.uncovered:
            items = (
                _e("li", _e("code", f"{node.op} {node.name}".rstrip()), f" {node.reason or ''}")
                for node in uncovered
            )
            yield _e(
                "details",
                _e("summary", f"{count(len(uncovered), 'node')} left to the CPU"),
                _e("ul", *items),
                open="open",
            )
    yield _facts(
        [
            ("source", f"{show_size(model.source_size)}, sha256 {model.source_sha256[:12]}"),
            (
                "prepared",
                f"with {preparation.simplifier}: {preparation.nodes_before} nodes, then {preparation.nodes}",
            ),
            *((("numbers", preparation.precision),) if preparation.precision else ()),
            *(("failed before", failed) for failed in preparation.failed),
            *(("compiled with", option) for option in preparation.options),
            *(("rewritten", name) for name in preparation.rewrites),
            *(("also tried", text) for text in preparation.tried),
        ]
    )
    if validation.agreements:
        rows = [
            _e(
                "tr",
                _e("th", each.output, scope="row"),
                _number(f"{each.max_abs:.3g}"),
                _number("near zero" if each.cosine is None else f"{each.cosine:.6f}"),
                _number("equal" if each.snr is None else f"{each.snr:.1f} dB"),
                _number("" if each.worst is None else f"{each.worst.snr:.1f} dB {each.worst.text}"),
                _e("td", f"{each.status.value}{': ' + each.reason if each.reason else ''}"),
            )
            for each in validation.agreements
        ]
        names = (
            "output",
            "largest difference",
            "cosine",
            "signal to noise",
            "worst slice",
            "result",
        )
        yield _table(_e("tr", *(_e("th", name) for name in names)), rows)
    if validation.samples:
        kind = "synthetic inputs" if validation.synthetic else "the given inputs"
        yield _facts([("compared on", f"{kind}: {', '.join(validation.samples)}")])
    doubts = [("warning", text) for text in validation_warnings(model.model, validation)]
    if validation.emulation is not None:
        yield _facts([("emulated on the CPU", describe_emulation(validation.emulation))])
    if doubts:
        yield _facts(doubts)


def _section(heading: str, *children: ET.Element, note: str = "") -> ET.Element:
    notes = [_e("p", note, class_="quiet")] if note else []
    return _e("section", _e("h2", heading), *notes, *children)


def _table(head: ET.Element, rows: Iterable[ET.Element]) -> ET.Element:
    # A table that is wider than a phone scrolls by itself, also with the keyboard.
    table = _e("table", _e("thead", head), _e("tbody", *rows))
    return _e("div", table, class_="wide", tabindex="0")


def _facts(facts: Iterable[tuple[str, str]]) -> ET.Element:
    pairs = (_e("div", _e("dt", name), _e("dd", value)) for name, value in facts)
    return _e("dl", *pairs)


def _number(text: str) -> ET.Element:
    return _e("td", text, class_="number")


def _hash(text: str) -> ET.Element:
    return _e("td", _e("code", text[:16], title=text))


def _badge(kind: str, text: str) -> ET.Element:
    return _e("span", text, class_=f"badge {kind}")


def _validation_badge(validation: Validation, text: str = "") -> ET.Element:
    rating = _RATINGS[validation.status]
    doubtful = validation.sensitive or validation.synthetic or validation.few
    if validation.status is ValidationStatus.RAN and (doubtful or not validation.compared):
        rating = "fair"
    return _badge(rating, text or validation.label)


def _job_name(job: JobReport | FailureReport) -> str:
    return f"{job.group or _models_of(job)[0]} → {job.target}"


def _anchor(job: JobReport | FailureReport) -> str:
    return f"job-{job.group or _models_of(job)[0]}-{job.target}"


def _models_of(job: JobReport | FailureReport) -> tuple[str, ...]:
    if isinstance(job, FailureReport):
        return job.models
    return tuple(model.model for model in job.models)
