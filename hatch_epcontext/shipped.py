"""What the package and the loader, which is copied into apps, both know: the loader repeats all of it."""

from __future__ import annotations

from typing import Literal

Device = Literal["npu", "gpu", "cpu", "any"]

SOURCE = "source"
"""The name of a model's last target, which is the source model on the CPU."""

USER_CACHE = "{user-cache}"
"""In an option: the app's own folder inside the user's cache folder."""

METADATA = "hatch-epcontext"
"""The key of this package's part of ``additional_metadata`` in the manifest."""

OPTION_FILE = "{file}"
"""In an option: the folder of files that options name."""

OPTION_FILES = "files"
"""The name of the folder of files that options name, in that of the target."""

PREPARED = "prepared"
"""The folder of the prepared model in that of its target, and its key in the manifest."""

CPU_EP = "CPUExecutionProvider"
