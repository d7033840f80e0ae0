from __future__ import annotations

import shutil
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from tests.cli.conftest import Cli, problems
from tests.conftest import needs, needs_qnn
from tests.language_models import make_folder
from tests.models import network, parsed, save

QNN = ("-p", "qnn", "--set", "chip=snapdragon-x-elite")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@needs_qnn
def test_one_model_is_compiled_into_one_file_and_its_sidecar(
    cli: Cli, source: Path, out: Path
) -> None:
    printed = cli("compile", source, "-o", out / "net_ctx.onnx", *QNN, "--dim", "batch=1")
    assert (
        "net -> qnn (qnn): ok, 4/4 nodes, agrees on synthetic inputs, simulator (" in printed.stderr
    )
    assert printed.stdout.count("wrote ") == 2
    assert names(out) == ["net_ctx.onnx", "net_ctx_qnn.bin"]
    assert cli("inspect", out / "net_ctx.onnx", "--verify").output.endswith("verified: 1 file\n")


def test_the_cpu_provider_writes_an_optimized_graph(cli: Cli, source: Path, out: Path) -> None:
    x = np.ones((2, 1, 8, 8), np.float32)
    np.savez(source.parent / "x.npz", x=x)
    arguments = (
        *("--inputs", source.parent / "x.npz", "--set", "optimization=extended"),
        *("--shape", "x=2,1,8,8"),
    )
    cli("compile", source, "-o", out / "o.onnx", "-p", "CPUExecutionProvider", *arguments)
    session = onnxruntime.InferenceSession(out / "o.onnx")
    assert session.get_inputs()[0].shape == ["batch", 1, 8, 8]
    assert session.run(None, {"x": x})[0].shape == (2, 10)
    fixed = ("-p", "cpu", *arguments, "--set", "static-shapes=true", "--set", "share-weights=false")
    cli("compile", source, "-o", out / "o.onnx", *fixed, "--overwrite")
    session = onnxruntime.InferenceSession(out / "o.onnx")
    assert session.get_inputs()[0].shape == [2, 1, 8, 8]
    assert session.run(None, {"x": x})[0].shape == (2, 10)


def test_without_validation_no_model_is_run_on_the_cpu(cli: Cli, tmp_path: Path, out: Path) -> None:
    made = parsed(
        "(float[1, 3] x, int64[1] at) => (float[1, 3] y) { row = Gather (table, at) y = Mul (row, x) }",
        table=(2, 3),
    )
    save(made, tmp_path / "a.onnx")
    np.savez(tmp_path / "beyond.npz", x=np.ones((1, 3), np.float32), at=[9])
    arguments = (tmp_path / "a.onnx", "-o", out, "-p", "cpu", "--inputs", tmp_path / "beyond.npz")
    assert "EPC209" in cli("compile", *arguments, code=1).stderr
    cli("compile", *arguments, "--no-validate")
    assert names(out) == ["a_optimized.onnx"]


def test_several_shapes_are_written_into_a_folder(cli: Cli, source: Path, out: Path) -> None:
    shapes = ("--set", "shapes=[{ x = [1, 1, 8, 8] }, { x = [2, 1, 8, 8] }]")
    arguments = ("-p", "cpu", *shapes, "--set", "static-shapes=true", "--no-validate")
    cli("compile", source, "-o", out, *arguments)
    assert names(out) == ["net.1x1x8x8_optimized.onnx", "net.2x1x8x8_optimized.onnx"]
    result = cli("compile", source, "-o", out / "o.onnx", *arguments, code=2)
    assert problems(result) == [f"{out / 'o.onnx'}: EPC005"]


def test_all_problems_name_their_flags(cli: Cli, source: Path, out: Path) -> None:
    printed = cli(
        "compile", source, "-o", out, "-p", "qnn", "-O", "soc_modle=60", "-O", "htp_arch=999",
        "--set", 'session-options."session.nothing"=1', "--dim", "batch=-1", "--set", "min-coverage=2",
        "--inputs", source.parent / "missing.npz", code=2,
    ).stderr  # fmt: skip
    for line in (
        "--set provider-options.soc_modle: EPC013",
        "--set provider-options.htp_arch: EPC014",
        '--set session-options."session.nothing": EPC013',
        f"{source}: --set dims.batch: EPC005",
        "--set min-coverage: EPC005",
        f"{source}: --set validate.inputs: EPC021",
        "    Add --set allow-unknown-options=true",
    ):
        assert line in printed.splitlines()
    assert "tool.epcontext" not in printed
    assert 'Did you mean "soc_model"?' in printed
    assert not out.exists()


@needs_qnn
def test_an_open_dimension_is_an_error_with_the_flag_that_fixes_it(
    cli: Cli, source: Path, out: Path
) -> None:
    result = cli("compile", source, "-o", out, "-p", "qnn", code=1)
    assert problems(result) == [f"{source}: --set dims: EPC204"]
    assert "\n    Add --set dims.batch=1\n" in result.stderr
    printed = cli("compile", save(network(None), source), "-o", out, "-p", "qnn", code=1).stderr
    assert "\n    Add --set shapes.x=...\n" in printed
    other = save(network("n"), source.parent / "other.onnx")
    printed = cli("compile", save(network(), source), other, "-o", out, "-p", "qnn", code=1).stderr
    assert "\n    Add --set 'dims.\"net:batch\"=1'\n" in printed
    assert printed.endswith("\n    Add --set 'dims.\"other:n\"=1'\n")
    assert not out.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("-p", "nothing"), "--provider: EPC008"),
        (("-p", "cpu", "--dim", "batch"), '"batch" is not key=value'),
        (("-p", "cpu", "--set", "editable=1"), '"editable" is not a key that can be set'),
        (("-p", "cpu", "--share-weights"), "--share-weights is for two models or more"),
        (("-p", "cpu", "--embed"), "--set embed: EPC007"),
        ((), "Missing option '-p'"),
        (("-p", "qnn", "-O", "soc_model=61"), "--set provider-options.soc_model: EPC014"),
        (("-p", "qnn", "--set", "chip=x-elite"), "--set chip: EPC005"),
        (("-p", "cpu", "--set", "fallback=none"), "is for a model package"),
        (("-p", "qnn", "--set", "from-memory=1"), "--set from-memory: EPC003"),
    ],
)
def test_wrong_usage(
    cli: Cli, source: Path, out: Path, arguments: tuple[str, ...], message: str
) -> None:
    assert message in cli("compile", source, "-o", out, *arguments, code=2).stderr
    assert not out.exists()


not_linux = pytest.mark.skipif(sys.platform != "linux", reason="the provider has packages for it")


@pytest.mark.parametrize(
    ("arguments", "id_"),
    [
        pytest.param(
            ("openvino", "--device", "npu"), "EPC106", marks=needs("onnxruntime_ep_openvino")
        ),
        # Its simulator is one of an NPU only: see microsoft/winml-cli#829 for one that took that instead.
        pytest.param(("qnn", "--device", "gpu"), "EPC106", marks=needs_qnn),
        pytest.param(("directml", "--set", "optimization=all"), "EPC103", marks=not_linux),
    ],
)
def test_a_missing_device_or_package_is_an_error(
    cli: Cli, source: Path, out: Path, arguments: tuple[str, ...], id_: str
) -> None:
    result = cli("compile", source, "-o", out, "--dim", "batch=1", "-p", *arguments, code=1)
    assert [problem.rpartition(" ")[2] for problem in problems(result)] == [id_]
    assert "HATCH_EPCONTEXT" not in result.stderr
    assert not out.exists()


def test_set_takes_any_other_key(cli: Cli, source: Path, out: Path) -> None:
    strict = "validate.tolerance={atol=0.0, rtol=0.0, cosine=1.0}"
    settings = ("--set", strict, "--set", "external-initializers=true")
    cli("compile", source, "-o", out, "-p", "cpu", "--constant", "nothing=1", *settings, code=1)
    cli("compile", source, "-o", out, "-p", "cpu", *settings)
    assert names(out) == ["net_optimized.data", "net_optimized.onnx"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("-p", "cpu"), "what compiles for the cpu provider reads and writes files."),
        (("-p", "tensorrt"), "what compiles for the tensorrt provider reads and writes files."),
        (("-p", "qnn", "--set", "embed=false"), "there is embed = false."),
        (("-p", "qnn", "--set", "external-initializers=true"), "external-initializers = true."),
    ],
)
def test_what_excludes_compiling_from_memory(
    cli: Cli, source: Path, out: Path, flags: tuple[str, ...], message: str
) -> None:
    printed = cli("compile", source, "-o", out, "--from-memory", *flags, code=2).stderr
    assert "\n--set from-memory: EPC" in printed
    assert message in printed


def test_a_timeout_names_the_flag_that_raises_it(cli: Cli, source: Path, out: Path) -> None:
    arguments = ("-o", out, "-p", "cpu", "--set", "build.timeout=0.01")
    result = cli("compile", source, *arguments, code=1)
    (problem,) = problems(result)
    assert problem.endswith("EPC309")
    printed = result.stderr
    assert printed.endswith("\n    Add --set build.timeout=0.02\n")


@needs_qnn
def test_one_context_for_several_chips(cli: Cli, source: Path, out: Path) -> None:
    arguments = ("compile", source, "-p", "qnn", "--dim", "batch=1", "-o", out)
    printed = cli(*arguments, "--set", 'chip=["snapdragon-x-elite", "snapdragon-8-gen-3"]')
    assert "agrees on synthetic inputs, compiled alone, simulator (" in printed.stderr
    assert names(out) == ["net_ctx.onnx", "net_ctx_qnn.bin"]
    context = out / "net_ctx.onnx"
    shown = cli("inspect", context).stdout
    assert "compiled for: snapdragon-x-elite, snapdragon-8-gen-3\n" in shown
    printed = cli("validate", context, code=1)
    assert problems(printed) == [f"{context}: EPC404"]
    structure = cli(
        "validate",
        context,
        "--set",
        "validate=structure",
        "--set",
        'chip=["snapdragon-x-elite", "snapdragon-8-gen-3"]',
    ).stdout
    assert structure.endswith("structure checked, NOT run\n")
    printed = cli("validate", context, "--set", "validate=structure", "-O", "soc_model=60", code=1)
    assert problems(printed) == [f"{context}: EPC507"]


@needs_qnn
def test_a_model_package_has_the_manifest_and_the_source(cli: Cli, source: Path, out: Path) -> None:
    out = out.with_suffix(".ortpackage")
    arguments = ("compile", source, "-o", out, *QNN, "--dim", "batch=1")
    printed = cli(*arguments)
    assert printed.stdout.startswith(f"wrote {out} (3 files, ")
    assert names(out) == ["manifest.json", "net"]
    assert names(out / "net" / "qnn") == ["net_ctx.onnx", "net_ctx_qnn.bin"]
    assert (out / "net" / "source" / "net.onnx").read_bytes() == source.read_bytes()
    assert problems(cli(*arguments, code=1)) == [f"{out}: EPC501"]
    assert "from the cache" in cli(*arguments, "--overwrite").stderr


@needs_qnn
def test_a_changed_file_of_an_option_is_compiled_again(
    cli: Cli, source: Path, out: Path, tmp_path: Path
) -> None:
    affinity = tmp_path / "affinity.json"
    arguments = [
        *("compile", source, "-o", out / "a.onnx", *QNN, "--dim", "batch=1"),
        *("--no-validate", "-O", f"op_affinity={affinity}"),
    ]
    affinity.write_text('{"op_type": {"MatMul": "cpu"}}')
    refused = cli(*arguments, code=1).stderr
    assert 'unless op_affinity names a file with {"op_type": {"MatMul": "htp"}}' in refused
    affinity.write_text('{"op_type": {"MatMul": "htp"}}')
    assert "4/4 nodes, " in cli(*arguments).stderr


@needs_qnn
def test_a_file_that_counts_at_load_time_is_shipped_and_no_path_is_written(
    cli: Cli, source: Path, out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = out.with_suffix(".ortpackage")
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "own.bin").write_bytes(b"table")
    monkeypatch.chdir(tmp_path)
    arguments = [
        *("compile", source, "-o", out, "--dim", "batch=1", "-p", "plugin"),
        *("--library", "onnxruntime_qnn", "--set", "ep-name=QNNExecutionProvider"),
        *("-O", "backend_type=htp", "-O", "soc_model=60", "-O", "table=tables/own.bin"),
    ]
    cli(*arguments)
    (shipped,) = out.rglob("own.bin")
    assert shipped.read_bytes() == b"table"
    shutil.move(out, tmp_path / "moved")
    manifest = (tmp_path / "moved" / "manifest.json").read_text(encoding="utf-8")
    assert "/tables" not in manifest
    assert f"{{file}}/{shipped.parent.name}/own.bin" in manifest
    cli("validate", tmp_path / "moved")


def test_a_language_model_becomes_a_model_package(cli: Cli, tmp_path: Path) -> None:
    folder, package = make_folder(tmp_path / "llama-3.2"), tmp_path / "llama.ortpackage"
    error = cli("compile", folder, "-o", tmp_path / "out", "-p", "qnn", code=2).stderr
    assert f"{folder}: EPC007" in error
    assert "is a language model, a folder of onnxruntime-genai" in error
    assert "Give an output that ends with .ortpackage." in error
    error = cli("compile", folder, "-o", package, "-p", "tensorrt", code=2).stderr
    assert f"{folder}: EPC007\n    names tensorrt, and a folder" in error
    cli("compile", folder, "-o", package, "-p", "cpu")
    assert (package / "llama-3.2" / "tokenizer.json").is_file()
    error = cli("bench", folder, "-p", "cpu", code=2).stderr
    assert "is a language model, and this command is for single models" in error
    error = cli("compile", folder / "model.onnx", "-o", package, "-p", "cpu", code=2).stderr
    assert f"{folder / 'model.onnx'}: EPC029" in error
