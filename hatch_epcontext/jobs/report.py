"""The report of a build: a line for each job, and a file: JSON, or one HTML page without scripts."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from string import Template

import hatch_epcontext
from hatch_epcontext.errors import OutputError, Problem
from hatch_epcontext.files import FileRecord, write_atomically
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.artifact import (
    GENERATOR,
    Built,
    Preparation,
    Result,
    Source,
    Times,
)
from hatch_epcontext.jobs.validation import (
    describe_emulation,
    describe_validation,
    validation_warnings,
)
from hatch_epcontext.serialize import to_json
from hatch_epcontext.system import check_file, writing
from hatch_epcontext.text import count, pairs, printable, show_size
from hatch_epcontext.worker.results import (
    Agreement,
    Context,
    Coverage,
    Validation,
    ValidationStatus,
)

_MAX_CHARACTERS = 90
"""Characters of a failed preparation's message in a summary; the report has the whole message."""


@dataclass(frozen=True)
class ModelReport:
    """One model of a job.

    ``source_size``: bytes of the source and its external data.
    ``chip``: what it was compiled for, by name.
    """

    model: str
    source_sha256: str
    source_size: int
    preparation: Preparation
    coverage: Coverage | None
    validation: Validation
    chip: Mapping[str, str]


@dataclass(frozen=True)
class JobReport:
    """One job.

    ``size``: bytes of all its ``files``.
    ``times``: those of the build that compiled it.
    """

    target: str
    provider: str
    cached: bool
    models: tuple[ModelReport, ...]
    times: Times
    size: int
    group: str | None
    files: Mapping[str, FileRecord]
    versions: Mapping[str, str]

    @property
    def load(self) -> float | None:
        """Seconds to open sessions on all its models; None if one was not opened."""
        loads = [m.validation.load for m in self.models if m.validation.load is not None]
        return sum(loads) if len(loads) == len(self.models) else None


@dataclass(frozen=True)
class FailureReport:
    """A failed job: the names of its ``models``, and its problems."""

    target: str
    provider: str
    models: tuple[str, ...]
    group: str | None
    problems: tuple[Problem, ...]


@dataclass(frozen=True)
class Report:
    """All jobs of a build."""

    generator: str
    jobs: tuple[JobReport, ...]
    failures: tuple[FailureReport, ...] = ()


def make_report(result: Result) -> Report:
    """The report of a build: the manifest's facts, and times and failures, which a manifest must not have."""
    by_name = {source.model.name: source for source in result.sources}
    return Report(
        f"{GENERATOR} {hatch_epcontext.__version__}",
        tuple(_report(built, by_name) for built in result.built),
        tuple(
            FailureReport(
                failed.job.target.name,
                failed.job.target.provider.name,
                tuple(model.name for model in failed.job.models),
                failed.job.group,
                failed.problems,
            )
            for failed in result.failures
        ),
    )


def _report(built: Built, sources: Mapping[str, Source]) -> JobReport:
    record = built.artifact.record
    models = zip(built.job.models, record.preparations, record.contexts, strict=True)
    return JobReport(
        target=built.job.target.name,
        provider=built.job.target.provider.name,
        cached=built.cached,
        models=tuple(
            ModelReport(
                model.name,
                sources[model.name].sha256,
                sources[model.name].size,
                preparation,
                context.coverage,
                built.validations[model.name],
                built.job.target.provider.compiled_for(context.compatibility),
            )
            for model, preparation, context in models
        ),
        times=record.times,
        size=built.artifact.size,
        group=built.job.group,
        files=record.files,
        versions=record.versions,
    )


def describe_coverage(coverage: Coverage | None) -> str:
    """The coverage for a summary; an optimized graph has none."""
    if coverage is None:
        return "optimized graph"
    contexts = count(coverage.partitions, "context")
    return f"{coverage.compiled}/{coverage.nodes} nodes in {contexts}"


def summarize(built: Built, sources: Mapping[str, Source]) -> str:
    """A finished job in one line; ``sources``: those of its models, by name."""
    record = built.artifact.record
    parts = []
    for preparation, context in zip(record.preparations, record.contexts, strict=True):
        name = f"{context.model} " if built.job.group else ""
        parts.append(name + ", ".join(_summarize_model(built, preparation, context)))
    size = show_size(built.artifact.size)
    if record.recipe.dequantize:
        before = sum(sources[model.name].size for model in built.job.models)
        size = f"{size}, its quantized source {show_size(before)}"
    parts.append(size)
    loads = [v.load for v in built.validations.values() if v.load is not None]
    if loads:
        parts.append(f"opens in {sum(loads):.3f} s")
    parts.append("from the cache" if built.cached else f"compiled in {record.times.compile:.1f} s")
    return f"{built.job.location} ({built.job.target.provider.name}): {', '.join(parts)}"


def _summarize_model(built: Built, preparation: Preparation, context: Context) -> Iterator[str]:
    if preparation.failed:
        failed = "; ".join(_short(failure) for failure in preparation.failed)
        yield f"prepared with {preparation.simplifier}, because {failed}"
    if preparation.precision:
        is_last = built.artifact.record.recipe.dequantize
        because = ", because nodes are left to the CPU otherwise" if is_last else ""
        yield f"{preparation.precision}{because}"
    if preparation.rewrites:
        yield f"rewritten ({_short('; '.join(preparation.rewrites))})"
    if preparation.options:
        options = ", ".join(preparation.options)
        yield f"compiled with {options}, because without it nodes are left to the CPU"
    yield describe_coverage(context.coverage)
    if chip := built.job.target.provider.compiled_for(context.compatibility):
        yield f"for {pairs(chip)}"
    yield describe_validation(built.validations[context.model])


def _short(text: str) -> str:
    return textwrap.shorten(text.rstrip("."), _MAX_CHARACTERS, placeholder=" ...")


def write_report(report: Report, title: str, path: Path) -> None:
    """Write ``report`` to ``path``, as JSON or as a page by its suffix; its folder is made if needed.

    Raises OutputError if that is a file, and not a report.
    """
    check_file(path)
    text = to_json(report) if path.suffix == ".json" else render_page(report, title)
    with writing("the report", path.parent, str(path), OutputError):
        # Keeps a link.
        write_atomically(path.resolve(), text)


def render_page(report: Report, title: str) -> str:
    """``report`` as a page. The mark of its generator lets the next report replace it."""
    sections: dict[str, list[_Html]] = {
        "Failed": [*map(_failure, report.failures)],
        "Models by targets": _matrix(report),
        "Jobs": [*map(_job, report.jobs)],
    }
    values = {
        "title": title,
        "generator": report.generator,
        "built": len(report.jobs),
        "cached": sum(job.cached for job in report.jobs),
        "failed": len(report.failures),
        "size": show_size(sum(job.size for job in report.jobs)),
        "sections": [_tag("section", _tag("h2", n), e) for n, e in sections.items() if e],
    }
    page = Template(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
    return page.substitute({name: _escaped(value) for name, value in values.items()})


class _Html(str):
    """HTML, which stays as it is inside other HTML; all other text is escaped."""


def _escaped(value: object) -> _Html:
    """``value`` as HTML: a text, a number, or several values."""
    if isinstance(value, _Html):
        return value
    if isinstance(value, Iterable) and not isinstance(value, str):
        return _Html("".join(map(_escaped, value)))
    # Imported here: few builds write a page.
    import html

    return _Html(html.escape(printable("" if value is None else str(value), lines=True)))


def _tag(name: str, *content: object, **attributes: str) -> _Html:
    """An element with ``content``; ``class_`` is its class."""
    texts = (f' {key.rstrip("_")}="{_escaped(text)}"' for key, text in attributes.items())
    return _Html(f"<{name}{''.join(texts)}>{_escaped(content)}</{name}>\n")


def _failure(failure: FailureReport) -> _Html:
    head = _tag("h3", _name(failure), " ", _badge("FAILED"))
    problems = map(_problem, failure.problems)
    return _tag("article", head, problems, id=_name(failure, "-"), class_="failed")


def _problem(problem: Problem) -> list[_Html]:
    log = problem.log and f"The end of the worker's log:\n{problem.log}"
    return [
        _tag("p", f"{problem.where()}: {problem.kind.id}", class_="quiet"),
        _tag("p", problem.account, class_="message"),
        _tag("p", problem.advice(), class_="message hint"),
        _tag("pre", log, tabindex="0"),
    ]


def _matrix(report: Report) -> list[_Html]:
    rows: dict[str, dict[str, object]] = {}
    for job in report.jobs:
        for model in job.models:
            badge = _badge(model.validation.label, model.validation)
            load = "" if job.load is None else f" · opens in {job.load:.3f} s"
            facts = f"{describe_coverage(model.coverage)} · {show_size(job.size)}{load}"
            row = rows.setdefault(model.model, {"": model.model})
            row[job.target] = [_tag("a", badge, href=f"#{_name(job, '-')}"), _tag("small", facts)]
    for failure in report.failures:
        link = _tag("a", _badge("FAILED"), href=f"#{_name(failure, '-')}")
        for name in failure.models:
            rows.setdefault(name, {"": name})[failure.target] = link
    return _table(rows.values())


def _job(job: JobReport) -> _Html:
    files = {name: [f"{show_size(file.size)} {file.sha256}"] for name, file in job.files.items()}
    facts = {
        "compiled in": [f"{job.times.compile:.1f} s{', from the cache' if job.cached else ''}"],
        "with": [f"{job.provider}, {pairs(job.versions)}"],
    }
    summary = _tag("summary", count(len(files), "file"), " with sha256")
    parts = [_facts(facts), [_model(model, job) for model in job.models]]
    details = _tag("details", summary, _facts(files))
    return _tag("article", _tag("h3", _name(job)), parts, details, id=_name(job, "-"))


def _model(model: ModelReport, job: JobReport) -> list[_Html]:
    validation, prepared, coverage = model.validation, model.preparation, model.coverage
    simulator, day = "simulator" if validation.simulated else "", validation.day
    # Where and when it was run: its validation means little without that.
    run = [simulator, pairs(model.chip), day, pairs(job.versions)] if day else []
    badge = _badge(" · ".join(filter(None, [validation.label, *run])), validation)
    nodes = coverage.uncovered if coverage else ()
    facts: dict[str, Iterable[str]] = {
        "left to the CPU": [f"{node.op} {node.name} {node.reason or ''}" for node in nodes],
        "source": [f"{show_size(model.source_size)}, sha256 {model.source_sha256[:12]}"],
        "nodes": [f"{prepared.nodes_before}, and {prepared.nodes} after {prepared.simplifier}"],
        "failed before": prepared.failed,
        "changed": [*filter(None, [prepared.precision]), *prepared.rewrites, *prepared.options],
        "also tried": prepared.tried,
        "synthetic inputs" if validation.synthetic else "given inputs": validation.samples,
        "emulated on the CPU": map(describe_emulation, filter(None, [validation.emulation])),
        "warning": validation_warnings(model.model, validation),
    }
    head = [_tag("h4", model.model)] if len(job.models) > 1 else []
    outputs = _table(map(_agreement, validation.agreements))
    return [*head, _tag("p", badge, " ", validation.reason), _facts(facts), *outputs]


def _agreement(output: Agreement) -> Mapping[str, object]:
    worst = output.worst
    return {
        "output": output.output,
        "largest difference": f"{output.max_abs:.3g}",
        "cosine": "near zero" if output.cosine is None else f"{output.cosine:.6f}",
        "signal to noise": "equal" if output.snr is None else f"{output.snr:.1f} dB",
        "worst at": worst and f"{output.worst_snr:.1f} dB {worst.text}",
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


def _badge(text: str, validation: Validation | None = None) -> _Html:
    rating = "poor"
    if validation and validation.status is not ValidationStatus.NOT_VALIDATED:
        doubtful = validation.sensitive or validation.synthetic or validation.few
        ran = validation.status is ValidationStatus.RAN and validation.compared
        rating = "good" if ran and not doubtful else "fair"
    return _tag("span", text, class_=f"badge {rating}")


def _name(job: JobReport | FailureReport, arrow: str = " → ") -> str:
    first = job.models[0]
    name = job.group or (first if isinstance(first, str) else first.model)
    return f"{name}{arrow}{job.target}"
