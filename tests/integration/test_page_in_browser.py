"""The HTML report of a real build with failures, in a browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.jobs.plan import plan
from hatch_epcontext.jobs.report import make_report
from hatch_epcontext.jobs.report_file import write_report
from hatch_epcontext.jobs.run import IncompleteError, build, open_cache
from tests.models import network, save, unknown_operator

BROWSER = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))), None)
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium on this machine"),
]

TOML = """
[targets.cpu]
provider = "cpu"
[targets.a-target-with-quite-a-long-name]
provider = "cpu"
optimization = "all"
[[models]]
path = "models/a.onnx"
[[models]]
path = "models/b.onnx"
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        # As root, in a container, Chromium has no sandbox.
        launched = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def file(project: Path, tmp_path: Path) -> Path:
    """The page of a build in which two jobs of four failed."""
    save(network(), project / "models" / "a.onnx")
    save(unknown_operator(), project / "models" / "b.onnx")
    config = load(project, parse(TOML), {})
    staging = tmp_path / "staging"
    staging.mkdir()
    with pytest.raises(IncompleteError) as raised:
        build(plan(config), staging, open_cache(config, print), print)
    path = tmp_path / "report.html"
    write_report(make_report(raised.value.result), "my-app 1.0", path)
    return path


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_has_no_errors_at_any_width(browser: Browser, file: Path, width: int) -> None:
    shown: Page = browser.new_page(viewport={"width": width, "height": 800})
    errors: list[str] = []
    shown.on("console", lambda message: errors.append(message.text))
    shown.on("pageerror", lambda error: errors.append(str(error)))
    shown.on(
        "request",
        lambda request: errors.append(request.url) if "file:" not in request.url else None,
    )
    shown.goto(file.as_uri())
    assert errors == []
    assert shown.title() == "my-app 1.0: models"
    assert shown.locator("h2").all_inner_texts() == [
        "Failed",
        "Models by targets",
        "Jobs",
    ]
    assert shown.locator("article.failed").count() == 2
    # Synthetic inputs prove less.
    assert shown.locator("td .badge.fair").count() == 2
    # Only parts that scroll by themselves are wider than the screen.
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    shown.get_by_role("link", name="FAILED").first.click()
    assert shown.url.endswith("#b-cpu")
    assert shown.get_by_text("a_optimized.onnx").last.is_visible()
    shown.close()
