"""``epcontext validate`` on model packages."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
from click.testing import CliRunner

from hatch_epcontext.cli.app import app
from hatch_epcontext.shipped import METADATA
from tests.cli.conftest import Cli, problems, scaled, zeroed
from tests.conftest import needs_qnn
from tests.models import network, parsed, save, transformer
from tests.projects import make_project

Edit = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package of this tool with a variant for QNN and the source; made once."""
    folder = tmp_path_factory.mktemp("built")
    source = save(network(), folder / "net.onnx")
    command = [
        "compile", source, "-p", "qnn", "-O", "soc_model=60", "--dim", "batch=1",
        "-o", folder / "package.ortpackage",
    ]  # fmt: skip
    result = CliRunner().invoke(app, list(map(str, command)))
    assert result.exit_code == 0, result.output
    return folder / "package.ortpackage"


@pytest.fixture
def package(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "package"))


@pytest.fixture(scope="module")
def built_for_cpu(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package with a variant for the CPU and the source; made once."""
    folder = tmp_path_factory.mktemp("built-for-cpu")
    source = save(network(1), folder / "net.onnx")
    command = ["compile", source, "-p", "cpu", "-o", folder / "package.ortpackage"]
    result = CliRunner().invoke(app, list(map(str, [*command, "--set", "fallback=source"])))
    assert result.exit_code == 0, result.output
    return folder / "package.ortpackage"


@pytest.fixture
def for_cpu(built_for_cpu: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built_for_cpu, tmp_path / "for-cpu"))


def alter(package: Path, edit: Edit) -> Path:
    """The package, with ``edit`` done to its manifest."""
    file = package / "manifest.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    edit(content)
    file.write_text(json.dumps(content), encoding="utf-8")
    return package


def variants(content: dict[str, Any]) -> dict[str, Any]:
    table: dict[str, Any] = content["components"]["net"]["variants"]
    return table


@needs_qnn
def test_each_variant_is_run_and_compared_with_the_source(cli: Cli, package: Path) -> None:
    before = {p: p.read_bytes() for p in package.rglob("*") if p.is_file()}
    first, second = cli("validate", package).stdout.splitlines()
    assert first.startswith(
        "net -> qnn: 1 context of QNNExecutionProvider, for snapdragon-x-elite, nothing left to "
        "the CPU, agrees on synthetic inputs, simulator ("
    )
    assert second == (
        "net -> source: ONNX graph for CPUExecutionProvider, ran, NOT compared "
        "(there is no source to compare with)"
    )
    assert {p: p.read_bytes() for p in package.rglob("*") if p.is_file()} == before


@needs_qnn
@pytest.mark.parametrize(
    ("key", "wrong", "named"),
    [
        ("compatibility_string", "v2:6:2.51.0:5.51.0:73:43:0:0", "v2:6:2.51.0:5.51.0:73:43:0:0"),
        ("ep", "OpenVINOExecutionProvider", "'QNNExecutionProvider'"),
    ],
)
def test_the_manifest_and_the_context_must_agree(
    cli: Cli, package: Path, key: str, wrong: str, named: str
) -> None:
    alter(package, lambda content: variants(content)["qnn"].update({key: wrong}))
    result = cli("validate", package, "--set", "validate=structure", code=1)
    assert problems(result) == [f"{package / 'net' / 'qnn' / 'net_ctx.onnx'}: EPC507"]
    assert named in result.stderr


@needs_qnn
def test_outputs_that_differ_from_the_source_fail(cli: Cli, package: Path) -> None:
    strict = ("--set", "validate.tolerance={atol=0.0, rtol=0.0}")
    result = cli("validate", package, *strict, code=1)
    assert "net -> qnn: FAILED" in result.stdout
    assert f"{package}: net -> qnn: EPC401" in result.stderr.splitlines()
    assert "tool.epcontext" not in result.stderr
    loose = ("--set", "validate.tolerance=false")
    assert "NOT compared" in cli("validate", package, *loose).stdout


@needs_qnn
def test_contexts_that_share_weights_are_not_opened_on_the_simulator(
    cli: Cli, tmp_path: Path
) -> None:
    models = [save(transformer(n), tmp_path / f"m{n}.onnx") for n in (64, 1)]
    out = tmp_path / "out.ortpackage"
    cli("compile", *models, "-o", out, "-p", "qnn", "--share-weights")
    result = cli("validate", out, code=1)
    assert result.stderr.count("EPC404") == 2
    allowed = cli("validate", out, "--set", "validate=auto").stdout
    assert allowed.count("NOT run (only the device itself can open it") == 2


def test_the_source_in_a_package_has_its_constants(cli: Cli, tmp_path: Path) -> None:
    source = save(scaled(), tmp_path / "net.onnx")
    out = tmp_path / "out.ortpackage"
    cli(
        "compile", source, "-o", out, "-p", "cpu", "--constant", "scale=2.5",
        "--set", "fallback=source",
    )  # fmt: skip
    (before,) = (i for i in onnx.load(source).graph.input if i.name == "scale")
    shipped = onnx.load(out / "net" / "source" / "net.onnx").graph
    assert before.name not in [each.name for each in shipped.input]
    first, second = cli("validate", out).stdout.splitlines()
    assert "agrees on synthetic inputs" in first
    assert second.startswith("net -> source: ")


@needs_qnn
def test_a_variant_for_the_cpu_without_the_frozen_inputs_is_compared(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = """
models = [{ path = "models/a.onnx", constants = { scale = 2.5 }, dims = { batch = 1 } }]
fallback = "none"
[tool.epcontext.targets.qnn]
provider = "qnn"
provider-options = { soc_model = "60" }
[tool.epcontext.targets.cpu]
provider = "cpu"
"""
    monkeypatch.chdir(make_project(tmp_path / "app", toml, scaled()))
    cli("export", "-o", tmp_path / "out")
    printed = cli("validate", tmp_path / "out").stdout
    assert "agrees on synthetic inputs, simulator (" in printed


SIZED = """(float[batch, 1, height, 8] x) => (float[batch, k] y) <int64[2] flat = {0, -1}> {
    c = Conv(x, w) f = Reshape(c, flat) r = Relu(f) y = Mul(r, r) }"""


@pytest.mark.parametrize("fallback", ["none", "source"])
def test_open_shapes_have_the_sizes_and_limits_of_the_project(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fallback: str
) -> None:
    toml = f"""
models = [{{ path = "models/a.onnx", dims = {{ height = 8 }}, validate.tolerance.snr = 12.5 }}]
targets.cpu.provider = "cpu"
fallback = "{fallback}"
"""
    model = parsed(SIZED, w=(4, 1, 5, 3))
    monkeypatch.chdir(make_project(tmp_path / "app", toml, model))
    cli("export", "-o", tmp_path / "out")
    assert "FAILED" not in cli("validate", tmp_path / "out").stdout
    assert "FAILED" not in cli("validate", tmp_path / "out", "--dim", "height=9").stdout
    # Smaller than the filter.
    assert "EPC" in cli("validate", tmp_path / "out", "--dim", "height=3", code=1).stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text(encoding="utf-8"))
    about = manifest["components"]["a"]["additional_metadata"][METADATA]
    assert (about["dims"], about["validate"]["tolerance"]["snr"]) == ({"height": 8}, 12.5)


def test_what_cannot_be_run_here_fails_unless_it_is_allowed(cli: Cli, for_cpu: Path) -> None:
    def edit(content: dict[str, Any]) -> None:
        table = variants(content)
        for name, provider, ep in (
            ("cuda", "cuda", "CUDAExecutionProvider"),
            ("unknown", "unknown", "UnknownExecutionProvider"),
        ):
            table[name] = json.loads(json.dumps(table["cpu"])) | {"ep": ep}
            settings = table[name]["additional_metadata"][METADATA]["settings"]
            settings.update(provider=provider, ep=ep)

    package = alter(for_cpu, edit)
    result = cli("validate", package, code=1)
    assert problems(result) == [f"{package}: net -> {name}: EPC404" for name in ("cuda", "unknown")]
    allowed = cli("validate", package, "--set", "validate=auto")
    cpu, source, cuda, unknown = allowed.stdout.splitlines()
    assert "agrees on " in cpu
    assert "ran" in source
    assert "on the CPU only (this ONNX Runtime" in cuda
    assert "NOT run (unknown is not a known provider)" in unknown
    # A slow machine says what it is doing.
    assert [line for line in allowed.stderr.splitlines() if ": validate " not in line] == []
    assert cli("validate", package, "--set", "validate=structure").stdout.count("NOT run") == 4


@needs_qnn
def test_a_missing_library_of_an_ep_is_no_failure_of_the_variant(
    cli: Cli, package: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The workers find this instead of the package.
    blocked = tmp_path / "blocked" / "onnxruntime_qnn"
    blocked.mkdir(parents=True)
    (blocked / "__init__.py").write_text("raise ModuleNotFoundError('blocked')", encoding="utf-8")
    found = filter(None, (str(blocked.parent), os.environ.get("PYTHONPATH")))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(found))
    printed = cli("validate", package, "--set", "validate=auto").stdout
    assert "(the package of QNNExecutionProvider cannot be imported" in printed


ORT, OURS = ("executor_info", "ort"), ("additional_metadata", METADATA)
LIBRARY = {"package": "", "module": "", "registration_name": "x", "path": "/x.so"}


@pytest.mark.parametrize(
    ("where", "value", "reason"),
    [
        (("provider_options", "profiling_file_path"), "/tmp/x.csv", ""),
        (("provider_options", "no_such_option"), "/tmp/x", ""),
        (("provider_options", "no_such_option"), "{user-cache}/../x", ""),
        (("provider_options", "backend_path"), "../x.so", ""),
        (("provider_options", "load_config"), '{"CPU": {"CACHE_DIR": "/tmp/x"}}', ""),
        (("session_options", "ep.cpuexecutionprovider.profiling_file_path"), "C:\\x.csv", ""),
        (("session_options", "session.enable_profiling"), "1", ""),
        (("session_options", "ep.context_file_path"), "x.onnx", ""),
        (("session_options", "session.model_external_initializers_file_folder_path"), "x", ""),
        ((*OURS, "settings", "session_options", "session.optimized_model_filepath"), "x", ""),
        ((*OURS, "load_options", "x"), "{user-cache}/../x", "names a file elsewhere"),
        ((*OURS, "plugin"), LIBRARY, "it names a library elsewhere: /x.so"),
    ],
)
def test_what_names_files_elsewhere_is_not_run(
    cli: Cli, for_cpu: Path, where: tuple[str, ...], value: object, reason: str
) -> None:
    # The source has no settings of ours.
    places, names = (where, ["cpu"]) if where[0] == OURS[0] else ((*ORT, *where), ["cpu", "source"])

    def edit(content: dict[str, Any]) -> None:
        *keys, last = places
        for name in names:
            table = variants(content)[name]
            for key in keys:
                table = table[key]
            table[last] = value

    result = cli("validate", alter(for_cpu, edit), "--set", "validate=auto")
    assert result.stdout.count("NOT run (it") == len(names)
    assert (reason or where[-1]) in result.stdout


@pytest.mark.parametrize("file", ["net/cpu/net_optimized.onnx", "net/source/net.onnx"])
@pytest.mark.parametrize("is_missing", [False, True])
def test_of_a_package_with_a_damaged_file_nothing_is_run(
    cli: Cli, for_cpu: Path, file: str, is_missing: bool
) -> None:
    (for_cpu / file).unlink() if is_missing else save(zeroed(), for_cpu / file)
    for flags in ((), ("--set", "validate=structure"), ("--json", "--set", "validate=auto")):
        result = cli("validate", for_cpu, *flags, code=1)
        assert (result.stdout, problems(result)) == ("", [f"{for_cpu / file}: EPC506"])


def test_a_package_as_json(cli: Cli, for_cpu: Path) -> None:
    cpu, source = json.loads(cli("validate", for_cpu, "--json").stdout)["variants"]
    assert (cpu["component"], cpu["variant"], cpu["ep"]) == ("net", "cpu", "CPUExecutionProvider")
    assert (cpu["problems"], cpu["validation"]["status"]) == ([], "ran")
    assert source["variant"] == "source"


def test_the_folder_is_that_of_the_package(cli: Cli, for_cpu: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (for_cpu.parent, tmp_path / "empty"):
        result = cli("validate", folder, "--set", "validate=structure", code=1)
        assert problems(result) == [f"{folder}: EPC505"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "cpu"), "are for a single file"),
        (("-O", "a=1"), "--set provider-options: EPC007\n    is for a single context model"),
        (("--set", "session-options.a=1"), "--set session-options: EPC007"),
        (("--device", "cpu"), "--set device: EPC007"),
        (("--set", "min-coverage=1"), "--set min-coverage: EPC007"),
        (
            ("--dim", "other=1"),
            "--set dims.other: EPC205\n    no model has the open dimension 'other'",
        ),
        (("--shape", "z=1,2"), "--set shapes.z: EPC205\n    no model has the input 'z'"),
    ],
)
def test_wrong_usage(cli: Cli, for_cpu: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in cli("validate", for_cpu, *arguments, code=2).stderr


@pytest.mark.parametrize("damage", ["no variants", "a model outside", "a link beside a model"])
def test_a_package_with_links_or_without_variants_is_damaged(
    cli: Cli, for_cpu: Path, tmp_path: Path, damage: str
) -> None:
    outside, model = tmp_path / "outside", for_cpu / "net" / "cpu" / "net_optimized.onnx"
    if damage == "no variants":
        alter(for_cpu, lambda content: variants(content).clear())
    elif damage == "a model outside":
        model.rename(outside)
        model.symlink_to(outside)
        (problem,) = problems(cli("inspect", "--verify", for_cpu, code=1))
        assert problem.endswith("EPC508")
    else:
        outside.write_text("of somebody else")
        model.with_name("weights.bin").symlink_to(outside)
    result = cli("validate", for_cpu, "--set", "validate=structure", code=1)
    (problem,) = problems(result)
    assert problem.endswith("EPC508")
    assert ("weights.bin" in result.stderr) == (damage == "a link beside a model")
