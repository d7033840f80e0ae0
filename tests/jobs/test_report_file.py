"""The HTML report as text; the integration tests open it in a browser."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections import Counter
from collections.abc import Callable
from enum import Enum
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hatch_epcontext.errors import Kind, OutputError, Problem
from hatch_epcontext.graph.facts import NodeFacts
from hatch_epcontext.jobs.artifact import FailureReport
from hatch_epcontext.jobs.report import Report, make_report
from hatch_epcontext.jobs.report_file import render_page, write_report
from hatch_epcontext.text import printable
from hatch_epcontext.worker.results import (
    Agreement,
    AgreementStatus,
    Coverage,
    InputValues,
    Validation,
    ValidationStatus,
)
from tests.results import Artifact, configured, resulting


@pytest.fixture
def report(project: Path, artifact: Artifact) -> Report:
    """A job with one uncovered node, and a failed one."""
    whole = make_report(resulting(configured(project), artifact))
    (job,) = whole.jobs
    (model,) = job.models
    model = dataclasses.replace(
        model,
        coverage=Coverage(
            3, 2, 1, (NodeFacts("where", "NonZero", "its shape depends on the data"),)
        ),
        validation=Validation(ValidationStatus.RAN, (Agreement("y", 0.00125, 0.9995),)),
    )
    problem = Problem(
        Kind.WORKER_CRASHED,
        "b -> npu",
        "it <crashed> & burned.",
        "Do this.",
        log="first line\nlast line",
    )
    failure = FailureReport("npu", "qnn", ("b",), None, (problem,))
    jobs = (dataclasses.replace(job, models=(model,)),)
    return dataclasses.replace(whole, jobs=jobs, failures=(failure,))


def text_of(html: str) -> str:
    body = html[html.index("<body>") :]
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def test_it_shows_finished_and_failed_jobs_in_one_file(report: Report, tmp_path: Path) -> None:
    write_report(report, "my-app 1.0", tmp_path / "reports" / "r.html")
    html = (tmp_path / "reports" / "r.html").read_text(encoding="utf-8")
    assert html.startswith("<!DOCTYPE html>")
    text = text_of(html)
    assert "my-app 1.0 Models compiled by hatch-epcontext" in text
    assert "agrees on synthetic inputs 2/3 nodes" in text
    assert "NonZero where its shape depends on the data" in text
    assert "0.00125 0.999500" in text
    assert "opens in 0.200 s" in text
    assert "it &lt;crashed&gt; &amp; burned. Do this." in text
    assert "| first line\n    | last line</p>" in html
    assert not re.search(r"<(script|link|img)|url\(|@import|https?:", html)
    links = re.findall(r'href="#([^"]+)"', html)
    assert sorted(links) == ["a-cpu", "b-npu"]
    assert all(f'id="{link}"' in html for link in links)


def test_the_time_of_a_simulator_is_not_shown_as_the_devices(report: Report) -> None:
    (job,) = report.jobs
    (model,) = job.models
    simulated = dataclasses.replace(model.validation, simulated=True)
    model = dataclasses.replace(model, validation=simulated)
    jobs = (dataclasses.replace(job, models=(model,)),)
    page = render_page(dataclasses.replace(report, jobs=jobs), "my-app")
    assert "simulator" in page
    assert "opens in" not in page


def first_line(text: str) -> str:
    return f"my notes\n{text}"


def last_line(text: str) -> str:
    return f"{text}my notes\n"


def in_the_middle(text: str) -> str:
    return text.replace("NonZero", "my notes")


def other_generator(text: str) -> str:
    return text.replace("hatch-epcontext ", "my-generator ")


@pytest.mark.parametrize("suffix", [".html", ".json"])
@pytest.mark.parametrize("edit", [first_line, last_line, in_the_middle, other_generator])
def test_only_an_unchanged_report_is_replaced(
    report: Report, tmp_path: Path, suffix: str, edit: Callable[[str], str]
) -> None:
    path = tmp_path / f"r{suffix}"
    write_report(report, "first", path)
    # As git writes it on Windows.
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    write_report(report, "second", path)
    text = edit(path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")
    # Also if the file appears during the build: it is written last.
    with pytest.raises(OutputError, match="is not a report, or was changed"):
        write_report(report, "third", path)
    assert path.read_text(encoding="utf-8") == text


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege")
def test_a_link_to_a_report_or_to_nothing_is_kept(report: Report, tmp_path: Path) -> None:
    (tmp_path / "reports").mkdir()
    link, target = tmp_path / "latest.html", tmp_path / "reports" / "r.html"
    link.symlink_to(target)
    for title in ("first", "second"):
        write_report(report, title, link)
        assert link.is_symlink()
        assert f"<h1>{title}</h1>" in target.read_text(encoding="utf-8")
    target.write_text("mine", encoding="utf-8")
    with pytest.raises(OutputError):
        write_report(report, "third", link)
    assert target.read_text(encoding="utf-8") == "mine"


def test_a_build_of_nothing_has_a_page_too() -> None:
    assert "0 built" in text_of(render_page(Report("hatch-epcontext", ()), "a"))


def badges(report: Report) -> set[str]:
    return set(re.findall(r'class="badge (\w+)"', render_page(report, "a")))


def test_green_is_for_real_inputs_that_are_not_sensitive(report: Report) -> None:
    (job,) = report.jobs
    agreement = Agreement("y", 0.001, 0.9995)
    sensitive = dataclasses.replace(agreement, status=AgreementStatus.SENSITIVE)

    def rated(agreement: Agreement, *, synthetic: bool, number: int = 4) -> set[str]:
        samples = tuple("abcd"[:number])
        validation = Validation(ValidationStatus.RAN, (agreement,), None, samples, synthetic)
        models = (dataclasses.replace(job.models[0], validation=validation),)
        return badges(Report("g", (dataclasses.replace(job, models=models),)))

    assert rated(agreement, synthetic=False) == {"good"}
    assert rated(agreement, synthetic=True) == {"fair"}
    assert rated(sensitive, synthetic=False) == {"fair"}
    assert rated(agreement, synthetic=False, number=3) == {"fair"}


def test_the_badge_says_where_and_when(report: Report) -> None:
    (job,) = report.jobs
    inputs = (InputValues("user", -7, 2000, True, most=2.0**31 - 1, bits=32),)
    validation = Validation(ValidationStatus.RAN, simulated=True, inputs=inputs)
    chip, day = "snapdragon-x-elite", "2026-11-23"
    model = dataclasses.replace(job.models[0], validation=validation, chip=chip, day=day)
    job = dataclasses.replace(job, models=(model,), versions={"onnxruntime-qnn": "2.7.0"})
    text = text_of(render_page(Report("g", (job,)), "a"))
    assert "simulator · snapdragon-x-elite · 2026-11-23 · onnxruntime-qnn 2.7.0" in text
    assert " was compared from -7 to 2000; the EP computes integers in 32 bits" in text


@pytest.mark.parametrize("status", ValidationStatus)
def test_only_compared_outputs_agree(report: Report, status: ValidationStatus) -> None:
    (job,) = report.jobs
    models = (dataclasses.replace(job.models[0], validation=Validation(status)),)
    text = text_of(render_page(Report("g", (dataclasses.replace(job, models=models),)), "a"))
    assert "agrees" not in text


class Elements(HTMLParser):
    """The elements of a page, and its text, as a browser finds them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.attributes |= {name for name, _ in attrs}
        self.text += "".join(value or "" for _, value in attrs)

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize(
    "name",
    [
        "</script><script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "' onmouseover='alert(1)",
        "</style><style>body { display: none }</style>",
        "]]><!--",
        "&lt;b&gt;&#60;script&#62;",
        "\x1b]0;owned\x07\u202e\ud800\0",
        "[red]",
    ],
)
def test_names_are_text_whatever_they_contain(report: Report, name: str) -> None:
    hostile, plain = (
        Elements(render_page(with_text(report, text), text)) for text in (name, "plain")
    )
    assert hostile.tags == plain.tags
    assert hostile.attributes == plain.attributes
    assert printable(name) in hostile.text
    assert not set("\x1b\x07\u202e\ud800\0") & set(hostile.text)


def with_text(value: Any, text: str) -> Any:
    """``value`` with ``text`` in the place of every text in it."""
    if isinstance(value, Enum):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{n: with_text(v, text) for n, v in fields.items()})
    if isinstance(value, tuple):
        return tuple(with_text(part, text) for part in value)
    if isinstance(value, dict):
        return dict.fromkeys([text], *(with_text(part, text) for part in list(value.values())[:1]))
    return text if isinstance(value, str) else value
