from __future__ import annotations

import json
from pathlib import Path

import pytest

from hatch_epcontext.config.location import LAYOUT
from tests.cli.conftest import Cli
from tests.models import save, unknown_operator


def test_models_are_built_into_the_cache(cli: Cli, app_project: Path) -> None:
    before = set(app_project.rglob("*"))
    first = cli("build", app_project)
    assert first.stderr.count("ok, optimized graph, agrees on synthetic inputs") == 4
    assert first.stdout == ""
    assert cli("build", app_project).stderr.count("from the cache") == 4
    assert set(app_project.rglob("*")) == before


def test_a_dry_run_compiles_nothing(cli: Cli, app_project: Path, user_cache: Path) -> None:
    printed = cli("build", app_project, "--dry-run").stdout
    assert printed.count(" -> ") == 4
    assert "requires: onnxruntime" in printed
    # Only what it read of the models is known now.
    kinds = {path.name for path in (user_cache / LAYOUT).iterdir()}
    assert kinds - {"index"} == {"facts"}
    jobs = ("a -> one", "a -> two", "b -> one", "b -> two")
    assert printed.splitlines()[1:5] == [f"{job}  cpu" for job in jobs]


def test_a_dry_run_needs_no_compiler(cli: Cli, app_project: Path) -> None:
    with (app_project / "pyproject.toml").open("a", encoding="utf-8") as toml:
        toml.write('[tool.epcontext.targets.npu]\nprovider = "vitisai"\n')
    result = cli("build", app_project, "--dry-run")
    assert "a -> npu" in result.stdout
    assert "epcontext: the models are not read: " in result.stderr


def test_a_report_is_html_or_json_and_replaced(cli: Cli, app_project: Path, tmp_path: Path) -> None:
    page, file, toml = (
        tmp_path / "new" / "r.html",
        tmp_path / "r.json",
        app_project / "pyproject.toml",
    )
    for name, head in ((app_project.name, ""), ("my-app", '[project]\nname = "my-app"\n')):
        toml.write_text(head + toml.read_text("utf-8"), encoding="utf-8")
        cli("build", app_project, "--report", page, "--target", "one")
        text = page.read_text(encoding="utf-8")
        assert "agrees on synthetic inputs" in text
        assert f"<h1>{name}</h1>" in text
        flags = ("build", app_project, "--target", "one", "--report", file)
        assert f"report: {file}" in cli(*flags).stderr
        jobs = json.loads(file.read_text(encoding="utf-8"))["jobs"]
        assert [job["models"][0]["model"] for job in jobs] == ["a", "b"]


def test_without_being_asked_the_report_is_in_the_cache(
    cli: Cli, app_project: Path, tmp_path: Path, user_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = user_cache / LAYOUT / "reports" / f"{app_project.name}.json"
    for command in (("build",), ("export", "-o", tmp_path / "out")):
        printed = cli(command[0], app_project, *command[1:], "--target", "one").stderr
        assert printed.count("report: ") == printed.count(f"report: {file}\n") == 1
        jobs = json.loads(file.read_text(encoding="utf-8"))["jobs"]
        assert [job["models"][0]["model"] for job in jobs] == ["a", "b"]
    monkeypatch.setenv("HATCH_EPCONTEXT_NO_CACHE", "1")
    assert "report: " not in cli("build", app_project, "--target", "one").stderr


def test_a_report_that_cannot_be_written_is_an_error_before_anything_is_compiled(
    cli: Cli,
    app_project: Path,
    tmp_path: Path,
    user_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    page, table = tmp_path / "mine.html", tmp_path / "mine.json"
    page.write_text("<!DOCTYPE html>\n<html>mine: hatch-epcontext 1</html>", encoding="utf-8")
    manifest = {"metadata": {"generator": "hatch-epcontext 1"}}
    table.write_text(json.dumps(manifest, indent=2), encoding="utf-8")
    loop, folder = tmp_path / "loop.html", tmp_path / "folder.html"
    loop.symlink_to(loop.name)
    folder.mkdir()
    before = page.read_bytes(), table.read_bytes()
    for place in (page / "r.html", page, table, loop):
        result = cli("build", app_project, "--target", "one", "--report", place, code=1)
        assert "EPC501" in result.stderr
    monkeypatch.setenv("HATCH_EPCONTEXT_REPORT", str(folder))
    assert "EPC501" in cli("build", app_project, "--target", "one", code=1).stderr
    monkeypatch.delenv("HATCH_EPCONTEXT_REPORT")
    assert (page.read_bytes(), table.read_bytes()) == before
    model = app_project / "models" / "a.onnx"
    result = cli("build", app_project, "--target", "one", "--report", model, code=2)
    assert "a.onnx must end in .html or .json." in result.stderr
    assert not list(user_cache.rglob("record.json"))


def test_the_report_has_failed_and_successful_jobs(
    cli: Cli, app_project: Path, tmp_path: Path
) -> None:
    save(unknown_operator(), app_project / "models" / "b.onnx")
    page, file = tmp_path / "r.html", tmp_path / "r.json"
    for place in (page, file):
        cli("build", app_project, "--report", place, "--target", "one", code=1)
    report = json.loads(file.read_text(encoding="utf-8"))
    assert [job["models"][0]["model"] for job in report["jobs"]] == ["a"]
    (failure,) = report["failures"]
    assert (failure["models"], failure["target"]) == (["b"], "one")
    assert "cannot be run on the CPU" in failure["problems"][0]["message"]
    assert "cannot be run on the CPU" in page.read_text(encoding="utf-8")
    printed = cli("build", app_project, "--target", "one", code=1).stderr
    assert "b -> one (cpu): FAILED" in printed.splitlines()


def test_verbose_prints_what_workers_do(cli: Cli, app_project: Path) -> None:
    printed = cli("build", app_project, "-v", "--target", "one").stderr.splitlines()
    assert "a -> one: compile ..." in printed
    assert "a -> one: validation: validate ..." in printed
    assert any(line.startswith("a -> one (cpu): ok, optimized graph") for line in printed)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--target", "thre"), '--target: EPC009\n    "thre" is not a target.'),
        (("--nothing",), "No such option"),
        (("elsewhere",), "unexpected extra argument"),
    ],
)
def test_wrong_usage(cli: Cli, app_project: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in cli("build", app_project, *arguments, code=2).stderr


def test_an_unknown_target_of_a_variable_names_the_variable(
    cli: Cli, app_project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HATCH_EPCONTEXT_TARGETS", "thre")
    monkeypatch.setenv("HATCH_EPCONTEXT_FROM_CACHE", "four")
    printed = cli("build", app_project, code=2).stderr
    assert "HATCH_EPCONTEXT_TARGETS: EPC009" in printed
    printed = cli("build", app_project, "--target", "five", code=2).stderr
    assert "HATCH_EPCONTEXT_FROM_CACHE: EPC009" in printed
    assert "--target: EPC009" in printed
