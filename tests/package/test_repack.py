"""Wheels that other build back ends have written, with the models in them."""

from __future__ import annotations

import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest

from hatch_epcontext.package import repack

FILES = {"METADATA": "Metadata-Version: 2.1\nName: app\nVersion: 1.0\n", "WHEEL": "", "RECORD": ""}
WHEEL = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


@pytest.mark.parametrize(
    ("size", "is_random", "is_deflated"),
    [(10_000_001, True, False), (10_000_001, False, True), (1_000, True, True)],
)
def test_large_files_that_hardly_shrink_are_stored(
    tmp_path: Path, size: int, is_random: bool, is_deflated: bool
) -> None:
    file = tmp_path / "weights.data"
    file.write_bytes(np.random.default_rng(0).bytes(size) if is_random else bytes(size))
    kind = zipfile.ZIP_DEFLATED if is_deflated else zipfile.ZIP_STORED
    assert repack._added("weights.data", file).compress_type == kind


@pytest.mark.parametrize(
    ("sizes", "is_faster"),
    [([2_500_000, 2_500_000], True), ([2_500_000, 2_400_000], False), ([], False)],
)
def test_many_bytes_are_added_to_a_finished_wheel(
    tmp_path: Path, sizes: list[int], is_faster: bool
) -> None:
    files = [tmp_path / str(number) for number in range(len(sizes))]
    for file, size in zip(files, sizes, strict=True):
        file.write_bytes(bytes(size))
    assert repack.is_faster(files) == is_faster


def test_what_other_threads_deflate_is_what_zipfile_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel, rng = tmp_path / "app-1.0-py3-none-any.whl", np.random.default_rng(0)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in {**FILES, "WHEEL": WHEEL}.items():
            archive.writestr(f"app-1.0.dist-info/{name}", text)
    contents = {
        f"app/{number}.onnx": rng.integers(0, 1 + number, 300_000 * number, np.uint8).tobytes()
        for number in range(5)
    }
    files = {name: tmp_path / Path(name).name for name in contents}
    for name, file in files.items():
        file.write_bytes(contents[name])
    sizes = {}
    with zipfile.ZipFile(tmp_path / "own.zip", "w", zipfile.ZIP_DEFLATED) as own:
        for name, content in contents.items():
            own.writestr(name, content)
            sizes[name] = own.getinfo(name).compress_size
    threads, read = set[int](), repack._Deflated.read

    def recorded(file: Path) -> tuple[bytes, repack._Deflated]:
        threads.add(threading.get_ident())
        return read(file)

    monkeypatch.setattr(repack._Deflated, "read", recorded)
    # What it would deflate itself would be damaged.
    monkeypatch.setattr(zipfile, "_get_compressor", lambda *_: None)
    (tmp_path / "new").mkdir()
    new = repack.FinishedWheel(wheel, "another").write(tmp_path / "new", files)
    assert threads
    assert threading.get_ident() not in threads
    with zipfile.ZipFile(new) as archive:
        assert {name: archive.read(name) for name in files} == contents
        assert {name: archive.getinfo(name).compress_size for name in files} == sizes
