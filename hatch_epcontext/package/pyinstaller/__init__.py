# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The hatch-epcontext developers
"""The app names this function where PyInstaller looks for hooks: ``project.entry-points.pyinstaller40``."""

from pathlib import Path


def get_hook_dirs() -> list[str]:
    return [str(Path(__file__).parent)]
