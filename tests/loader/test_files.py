"""Damaged, missing and foreign files."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from hatch_epcontext.shipped import METADATA
from tests.loader.shipped import CPU, Shipper, component, damage, variant
from tests.models import network, save


def test_a_broken_model_is_a_failure_and_the_next_target_is_tried(
    ship: Shipper, caplog: pytest.LogCaptureFixture
) -> None:
    app = ship(cpu=CPU)
    damage(ship.folder / "a/cpu/a_optimized.onnx")
    session = app.load("a")
    assert app.target_of(session) == "source"
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "a on cpu: failed, InvalidProtobuf" in warning.getMessage()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("missing", "is missing"),
        ("a folder", "bytes, and"),
        ("truncated", "bytes, and"),
        ("longer", "bytes, and"),
        ("altered", "was changed: its sha256 differs from the recorded one"),
        ("without its folder", ""),
    ],
)
@pytest.mark.parametrize("name", ["a/cpu/a_optimized.onnx", "a/cpu/weights.bin"])
def test_a_damaged_file_is_named(ship: Shipper, how: str, reason: str, name: str) -> None:
    (ship.folder / "a/cpu").mkdir(parents=True)
    (ship.folder / "a/cpu/weights.bin").write_bytes(b"weights of a model")
    app = ship(cpu=CPU)
    if how == "without its folder":
        name = "a/cpu/a_optimized.onnx"
        shutil.rmtree(ship.folder / "a/cpu")
        (ship.folder / "a/cpu").touch()
    else:
        damage(ship.folder / name, how)
    cpu, source = app.explain("a", verify=how == "altered")
    assert cpu.outcome == "failed"
    assert cpu.reason.startswith(f"{name} ")
    assert reason in cpu.reason
    assert source.outcome == "opened"
    if how != "altered":
        with pytest.raises(app.LoadError, match=f"{name} .*{reason}"), app.path("a"):
            pass


def test_a_file_of_another_target_does_not_matter(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    damage(ship.folder / "a/source/a.onnx", "missing")
    assert app.target_of(app.load("a", verify=True)) == "cpu"
    with pytest.raises(app.LoadError, match=r"a/source/a\.onnx is missing"):
        app.load("a", target="source")


def test_models_that_share_a_folder_are_checked_apart(ship: Shipper) -> None:
    folder = ship.folder / "group/cpu"
    for name in ("a", "b"):
        save(network(), folder / f"{name}.onnx")
    (folder / "a.bin").write_bytes(b"shared weights")
    app = ship.write(
        {
            name: component({"cpu": variant("group/cpu", f"{name}.onnx")}, name)
            for name in ("a", "b")
        }
    )
    assert app.models() == ["a", "b"]
    damage(ship.folder / "group/cpu/b.onnx", "truncated")
    assert app.target_of(app.load("a")) == "cpu"
    with pytest.raises(app.LoadError, match=r"group/cpu/b\.onnx has"):
        app.load("b")
    damage(ship.folder / "group/cpu/a.bin", "missing")
    with pytest.raises(app.LoadError, match=r"group/cpu/a\.bin is missing"):
        app.load("a")


def test_a_file_that_the_manifest_does_not_record_is_missing(ship: Shipper) -> None:
    app = ship(npu=variant("a/npu", "another.onnx"))
    npu, _ = app.explain("a")
    assert npu.outcome == "failed"
    assert npu.reason.startswith("a/npu/another.onnx is missing in ")


def test_a_package_that_changes_is_read_again(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    assert [attempt.target for attempt in app.explain("a")] == ["cpu", "source"]
    manifest = json.loads((ship.folder / "manifest.json").read_text("utf-8"))
    manifest["components"]["another"] = manifest["components"].pop("a")
    del manifest["components"]["another"]["additional_metadata"]
    ship.manifest(manifest)
    assert app.models() == ["another"]
    (ship.folder / "manifest.json").unlink()
    with pytest.raises(app.LoadError, match=r"manifest\.json cannot be read"):
        app.models()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_a_pipe_in_the_place_of_a_file_is_not_read(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    manifest = json.loads((ship.folder / "manifest.json").read_text("utf-8"))
    name = "a/cpu/a_optimized.onnx"
    manifest["additional_metadata"][METADATA]["files"][name]["size"] = 0
    ship.manifest(manifest)
    for file in (name, "manifest.json"):
        (ship.folder / file).unlink()
        os.mkfifo(ship.folder / file)
        if file == name:
            assert app.explain("a", verify=True)[0].reason == f"{name} is no regular file"
    with pytest.raises(app.LoadError, match=r"manifest\.json cannot be read"):
        app.models()


def flipped(file: Path, positions: Iterable[int]) -> Iterator[int]:
    """Each position, while one bit of the byte there is flipped."""
    content = file.read_bytes()
    for position in positions:
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        yield position
    file.write_bytes(content)


def test_verify_finds_every_flipped_byte(ship: Shipper) -> None:
    """Every second byte of the manifest, each of a small file, and some of a model."""
    weights = ship.folder / "a/cpu/weights.bin"
    weights.parent.mkdir(parents=True)
    weights.write_bytes(bytes(range(64)))
    app = ship(cpu=CPU)
    files = [ship.folder / "manifest.json", weights, ship.folder / "a/cpu/a_optimized.onnx"]
    files.append(ship.folder / "__init__.py")
    distances = {".json": 2, ".bin": 1, ".onnx": 200, ".py": 2000}
    count = 0
    for file in files:
        size, distance = file.stat().st_size, distances[file.suffix]
        for _ in flipped(file, [*range(0, size, distance), size - 1]):
            app._read.cache_clear()
            with pytest.raises(app.LoadError):
                app.load("a", target="cpu", verify=True)
            count += 1
    app._read.cache_clear()
    assert app.target_of(app.load("a", verify=True)) == "cpu"
    assert count > 900


def test_verify_refuses_what_the_manifest_does_not_list(ship: Shipper) -> None:
    app = ship(cpu=CPU)
    for name in ("a/cpu/weights.bin", "a/cpu/below/more.bin"):
        extra = ship.folder / name
        extra.parent.mkdir(exist_ok=True)
        extra.write_bytes(b"not listed")
        assert app.target_of(app.load("a")) == "cpu"
        (attempt, _) = app.explain("a", verify=True)
        assert attempt.reason == f"{name} is not in the manifest, and cannot be verified"
        extra.unlink()
