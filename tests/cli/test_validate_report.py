"""``epcontext validate --report``: what this machine makes of the targets of a wheel."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from hatchling.plugin.manager import PluginManager

from hatch_epcontext.files import file_sha256
from tests.cli.conftest import Cli, problems, zeroed
from tests.conftest import needs_qnn
from tests.models import save
from tests.projects import make_project

pytestmark = [needs_qnn, pytest.mark.one_cache]

TOML = """
models = [{ path = "models/a.onnx", dims = { batch = 1 }, validate.inputs = "samples" }]
[tool.epcontext.targets.npu]
provider = "qnn"
chip = "snapdragon-x-elite"
[tool.epcontext.targets.cpu]
provider = "cpu"
"""

SHAPE = (1, 1, 8, 8)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with its wheel and its sdist in ``dist``; made once."""
    folder = make_project(tmp_path_factory.mktemp("boards") / "app", TOML)
    (folder / "samples").mkdir()
    for number in range(4):
        values = np.random.default_rng(number).standard_normal(SHAPE).astype("float32")
        np.savez(folder / "samples" / f"{number}.npz", x=values)
    for builder in (SdistBuilder, WheelBuilder):
        made = builder(str(folder), plugin_manager=PluginManager())
        assert list(made.build(directory=str(folder / "dist"), versions=["standard"]))
    return folder


@pytest.fixture
def wheel(project: Path) -> Path:
    (wheel,) = (project / "dist").glob("*.whl")
    return wheel


@pytest.fixture
def sdist(project: Path) -> Path:
    (sdist,) = (project / "dist").glob("*.tar.gz")
    return sdist


def entries(report: Path) -> dict[str, Any]:
    content = json.loads(report.read_text(encoding="utf-8"))
    assert content["format"] == 1
    return {entry["target"]: entry for entry in content["entries"]}


def test_a_report_names_machine_files_and_verdicts(
    cli: Cli, wheel: Path, sdist: Path, project: Path, tmp_path: Path
) -> None:
    report = tmp_path / "r.json"
    command = ("validate", "--package", wheel, "--sdist", sdist, "--report", report)
    result = cli(*command, "--device", "any")
    npu, cpu = (entries(report)[target] for target in ("npu", "cpu"))
    shutil.unpack_archive(wheel, tmp_path / "wheel", "zip")
    folder = tmp_path / "wheel" / "my_app" / "epcontext" / "a" / "npu"
    hashes = {name: recorded["sha256"] for name, recorded in npu["files"].items()}
    assert hashes == {file.name: file_sha256(file) for file in folder.iterdir()}
    assert len(hashes) == 2
    source = file_sha256(project / "models" / "a.onnx")
    assert npu["reference"]["a.onnx"]["sha256"] == cpu["reference"]["a.onnx"]["sha256"] == source
    run = npu["run"]
    assert (run["verdict"], run["chip"]) == ("agrees", "snapdragon-x-elite")
    assert set(run["versions"]) >= {"onnxruntime", "onnxruntime-qnn"}
    assert (run["samples"], run["synthetic"]) == (4, False)
    assert "a -> npu: agrees on the simulator of snapdragon-x-elite\n" in result.stdout
    # The time of a simulator is not that of the chip.
    assert (run["simulated"], run["latency"], run["load"]) == (True, None, None)
    run = cpu["run"]
    assert (run["verdict"], run["simulated"]) == ("agrees", False)
    assert run["chip"]
    assert "onnxruntime-qnn" not in run["versions"]
    assert run["runs"] > 0
    assert 0 < run["latency"] < run["load"] * 1000
    assert " ms\n" in result.stdout


def test_the_next_build_takes_the_report_without_compiling(
    cli: Cli,
    wheel: Path,
    sdist: Path,
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again = Path(shutil.copytree(project, tmp_path / "again"))
    report = again / "reports" / "board.json"
    report.parent.mkdir()
    command = ("validate", "--package", wheel, "--sdist", sdist, "--report", report)
    cli(*command, "--device", "any")
    monkeypatch.setenv("HATCH_EPCONTEXT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(again)
    cli("build")
    pyproject = again / "pyproject.toml"
    text = pyproject.read_text("utf-8")
    named = text.replace("\nmodels = ", '\nvalidated-on = "reports"\nmodels = ')
    pyproject.write_text(named, encoding="utf-8")
    made = cli("export", "-o", "out").stderr
    assert made.count("from the cache") == 2
    assert "a -> npu: agrees on the simulator of snapdragon-x-elite (reports/board.json)" in made
    content = json.loads((again / "out" / "manifest.json").read_text("utf-8"))
    about = [
        variant["additional_metadata"]["hatch-epcontext"]
        for variant in content["components"]["a"]["variants"].values()
    ]
    runs = entries(report)
    assert [known["boards"] for known in about] == [[runs[n]["run"]] for n in ("npu", "cpu")]
    on_cpu = f"agrees on {runs['cpu']['run']['chip']}, "
    inspected = cli("inspect", "out").stdout
    assert "\na for npu: agrees on the simulator of snapdragon-x-elite\n" in inspected
    assert f"\na for cpu: {on_cpu}" in inspected
    _, _, npu, cpu = cli("inspect", "out", "--markdown").stdout.splitlines()
    assert npu.startswith("| a | npu | snapdragon-x-elite | ")
    assert npu.endswith(" dB) | agrees on the simulator of snapdragon-x-elite |")
    assert cpu.endswith(" ms |")
    # The build's own verdict stays.
    assert [known["validation"]["status"] for known in about] == ["ran", "ran"]
    assert cli("validate", "out").exit_code == 0

    def packed(builder: type[SdistBuilder | WheelBuilder]) -> Path:
        (path,) = builder(str(Path().absolute()), plugin_manager=PluginManager()).build(
            directory=str(tmp_path / "dist"), versions=["standard"]
        )
        return Path(path)

    first = packed(WheelBuilder).read_bytes()
    shutil.unpack_archive(packed(SdistBuilder), tmp_path / "sdist")
    monkeypatch.chdir(next((tmp_path / "sdist").iterdir()))
    assert Path("reports/board.json").is_file()
    assert packed(WheelBuilder).read_bytes() == first

    save(zeroed(), Path("models/a.onnx"))
    made = cli("build").stderr
    assert made.count("reports/board.json does not count: it is about another source") == 2


def test_a_simulator_counts_only_as_any_device(cli: Cli, wheel: Path, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    result = cli("validate", "--package", wheel, "--report", report)
    assert "a -> npu: NOT run (QNNExecutionProvider only simulates its device here" in result.stdout
    made = entries(report)
    assert (made["npu"]["run"], made["cpu"]["run"]["verdict"]) == (None, "not-compared")
    assert "--device any" in made["npu"]["reason"]


def test_an_installed_wheel_is_found_by_its_import_package(
    cli: Cli, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.unpack_archive(wheel, tmp_path / "site", "zip")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    folder = tmp_path / "site" / "my_app"
    reports = [tmp_path / f"{number}.json" for number in range(3)]
    for name, report in zip(("my_app", folder, folder / "epcontext"), reports, strict=True):
        cli("validate", "--package", name, "--report", report)
    files = [entries(report)["cpu"]["files"] for report in reports]
    assert files[0] == files[1] == files[2]
    assert "agrees on" in (printed := cli("validate", "--package", "my_app").stdout)
    assert cli("validate", wheel).stdout == printed


def test_a_target_that_differs_is_a_result(cli: Cli, project: Path, tmp_path: Path) -> None:
    # The app's samples are beyond what float16 can represent.
    large = tmp_path / "large"
    large.mkdir()
    for number in range(4):
        np.savez(large / f"{number}.npz", x=np.full(SHAPE, 1e30, "float32") * (number + 1))
    (wheel,) = (project / "dist").glob("*.whl")
    report = tmp_path / "r.json"
    command = ("validate", "--package", wheel, "--report", report, "--device", "any")
    result = cli(*command, "--inputs", large, code=1)
    assert "a -> npu: EPC40" in result.stderr
    assert entries(report)["npu"]["run"]["verdict"] == "differs"


def test_a_report_replaces_only_an_unchanged_one(cli: Cli, wheel: Path, tmp_path: Path) -> None:
    report = tmp_path / "r.json"
    command = ("validate", "--package", wheel, "--report", report)
    cli(*command)
    cli(*command)
    report.write_text(report.read_text("utf-8").replace("agrees", "differs") + " ", "utf-8")
    assert problems(cli(*command, code=1)) == [f"{report}: EPC501"]


def test_another_project_than_that_of_the_wheel_is_refused(
    cli: Cli, wheel: Path, project: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(project, tmp_path / "other"))
    save(zeroed(), other / "models" / "a.onnx")
    command = ("validate", "--package", wheel, "--report", tmp_path / "r.json", "--sdist", other)
    result = cli(*command, code=1)
    assert problems(result) == [f"{wheel}: EPC506"]
    assert not (tmp_path / "r.json").exists()


def test_a_wheel_with_another_file_is_refused(cli: Cli, wheel: Path, tmp_path: Path) -> None:
    changed = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as before, zipfile.ZipFile(changed, "w") as after:
        for info in before.infolist():
            content = before.read(info)
            if info.filename.endswith(".onnx"):
                content = content[:-1] + bytes([content[-1] ^ 1])
            after.writestr(info, content)
    command = ("validate", "--package", changed, "--report", tmp_path / "r.json")
    assert {p.rpartition(": ")[2] for p in problems(cli(*command, code=1))} == {"EPC506"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "Give either PATH or --package."),
        (("--package", "json"), 1, "EPC505"),
        (("--package", "no_such_package"), 1, "does not exist"),
        (("--sdist", "."), 2, "--sdist needs --report."),
        (("--report", "r.html"), 2, "--report writes .json"),
        (("--report", "r.json", "--device", "npu"), 2, "--set device: EPC007"),
        (("--report", "r.json", "--set", "validate.tolerance.snr=1"), 2, "EPC007"),
        (("--report", "r.json", "--set", "validate=structure"), 1, "EPC404"),
        (("--report", "r.json", "--sdist", "README.md"), 1, "no sdist"),
    ],
)
def test_wrong_usage(
    cli: Cli, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...], code: int, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("README.md").write_text("no archive", encoding="utf-8")
    if "--report" in arguments or "--sdist" in arguments:
        arguments = ("--package", str(wheel), *arguments)
    assert message in cli("validate", *arguments, code=code).stderr
