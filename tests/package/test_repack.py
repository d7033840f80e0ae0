"""Wheels that other build back ends have written, with the models in them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest

from hatch_epcontext.package import repack


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
