"""What this worker is doing, for the message of a build that has to stop it."""

from __future__ import annotations

from pathlib import Path

_files: list[Path] = []


def report_to(file: Path) -> None:
    """From now on `step` writes to ``file``."""
    _files[:] = [file]


def step(text: str) -> None:
    """Say what begins now, such as ``"opening the source model on the CPU"``."""
    for file in _files:
        file.write_text(text, encoding="utf-8")
