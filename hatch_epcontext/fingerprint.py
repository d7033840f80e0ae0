"""What identifies a job's result: contents, settings and versions; no paths, no times."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any

FORMAT = 3
"""Raised when what a worker makes of the same request, or what it takes for proof, changes."""

_CHUNK = 1 << 20


def file_sha256(path: Path) -> str:
    """The hex sha256 of a file, read in pieces of 1 MiB."""
    with path.open("rb") as file:
        return stream_sha256(file)


def stream_sha256(file: IO[bytes]) -> str:
    """The hex sha256 of what is left in ``file``, read in pieces of 1 MiB."""
    digest = hashlib.sha256()
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
    return digest.hexdigest()


def model_sha256(path: Path, external_data: Iterable[str]) -> str:
    """The hex sha256 of a model: that of its file, or one over it and all files of its external data."""
    names = sorted(external_data)
    own = file_sha256(path)
    if not names:
        return own
    return value_sha256({"model": own, "data": {n: file_sha256(path.parent / n) for n in names}})


def fingerprint(
    models: Iterable[tuple[str, Mapping[str, Any]]],
    target: Mapping[str, Any],
    versions: Mapping[str, str],
) -> str:
    """The hex sha256 that names a job's result.

    ``models``: for each the sha256 of its contents and what its configuration fixes; ``target``: all
    of the target that can change the result; ``versions``: of ONNX Runtime and the EP's package.
    """
    return value_sha256(
        {"format": FORMAT, "models": list(models), "target": target, "versions": versions}
    )


def value_sha256(value: Any) -> str:
    """The hex sha256 of plain values; the order of keys does not count."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
