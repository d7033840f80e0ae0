"""The page about a build, as text: what a browser makes of it is in the integration tests."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from hatch_epcontext import page, report
from hatch_epcontext.artifact import Artifact, Proof
from hatch_epcontext.errors import Problem
from hatch_epcontext.protocol import Agreement, Coverage, NodeFacts
from hatch_epcontext.report import FailureReport, Report
from tests.results import configured, resulting


@pytest.fixture
def made(project: Path, artifact: Artifact) -> Report:
    """A job with one node left over, and one that failed."""
    whole = report.make(resulting(configured(project), artifact))
    (job,) = whole.jobs
    (model,) = job.models
    model = dataclasses.replace(
        model,
        coverage=Coverage(
            3, 2, 1, (NodeFacts("where", "NonZero", "its shape depends on the data"),)
        ),
        validation=Proof("run", (Agreement("y", 0.00125, 0.9995),)),
    )
    problem = Problem("b -> npu", "it <crashed> & burned.", "Do this.", "first line\nlast line")
    failure = FailureReport("npu", "qnn", ("b",), None, (problem,))
    jobs = (dataclasses.replace(job, models=(model,)),)
    return dataclasses.replace(whole, jobs=jobs, failures=(failure,))


def text_of(html: str) -> str:
    body = html[html.index("<body>") :]
    return " ".join(re.sub(r"<[^>]+>", " ", body).split())


def test_it_tells_what_was_built_and_what_failed(made: Report) -> None:
    html = page.render(made, "my-app 1.0")
    told = text_of(html)
    assert "my-app 1.0 Models compiled by hatch-epcontext" in told
    assert "ran and agrees 2/3 nodes in 1 context" in told
    assert "NonZero where its shape depends on the data" in told
    assert "0.00125 0.999500" in told
    assert "4.0 times faster source 0.800 s compiled 0.200 s" in told
    assert "it &lt;crashed&gt; &amp; burned. Do this." in told
    assert "first line\nlast line</pre>" in html


def test_it_is_one_file_that_fetches_nothing(made: Report) -> None:
    html = page.render(made, "my-app 1.0")
    assert not re.search(r"<(script|link|img)|url\(|@import|https?:", html)


def test_it_is_the_same_for_the_same_report(made: Report) -> None:
    assert page.render(made, "a") == page.render(made, "a")


def test_each_link_leads_somewhere(made: Report) -> None:
    html = page.render(made, "a")
    links = re.findall(r'href="#([^"]+)"', html)
    assert sorted(links) == ["job-a-cpu", "job-b-npu"]
    assert all(f'id="{link}"' in html for link in links)


def test_a_build_of_nothing_has_a_page_too() -> None:
    assert "0 built" in text_of(page.render(Report("hatch-epcontext", ()), "a"))


@pytest.mark.parametrize("how", ["run", "cpu", "alone", "structure", "none"])
def test_only_what_ran_and_was_compared_is_said_to_agree(made: Report, how: str) -> None:
    (job,) = made.jobs
    models = (dataclasses.replace(job.models[0], validation=Proof(how)),)
    told = text_of(page.render(Report("g", (dataclasses.replace(job, models=models),)), "a"))
    assert "agrees" not in told


def test_it_is_written_where_it_is_wanted(made: Report, tmp_path: Path) -> None:
    page.write(made, "a", tmp_path / "reports" / "r.html")
    text = (tmp_path / "reports" / "r.html").read_text(encoding="utf-8")
    assert text == page.render(made, "a")
    assert text.startswith("<!DOCTYPE html>")
