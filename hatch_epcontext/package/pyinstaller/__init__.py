# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The hatch-epcontext developers
"""Where PyInstaller finds the hook that collects the models beside this folder.

The app names this function in its ``pyproject.toml``:

    [project.entry-points.pyinstaller40]
    hook-dirs = "my_app.epcontext.__pyinstaller:get_hook_dirs"
"""

from __future__ import annotations

from pathlib import Path


def get_hook_dirs() -> list[str]:
    """The folder with the hook."""
    return [str(Path(__file__).parent)]
