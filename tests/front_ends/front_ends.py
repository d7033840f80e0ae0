"""The front ends that are tested, each with its commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Commands = tuple[str, ...]
"""Commands that do the same, each in a copy of the project, where those around ``&&`` follow one another.

``OUT`` is a folder for what is built, ``SDIST`` the project's sdist, and ``PYTHON`` the interpreter of an
environment with all that builds without isolation need.
"""


@dataclass(frozen=True, kw_only=True)
class FrontEnd:
    """A front end, in a fixed version, so that the page does not change by itself.

    ``packages``: what is installed to try it. ``ways``: the commands by way; it does not offer the
    others. ``python``: by way, what runs Python in the environment that it installs into. ``place``: how
    many words of a command stand before a flag, None for all. ``sources``: TOML with which it finds the
    packages in ``INDEX``, the URL of an index, or in ``LINKS``, that of a folder; most take both from
    environment variables. ``for_dynamic_version``: TOML that it needs where a plugin sets the version.
    """

    name: str
    packages: tuple[str, ...]
    ways: Mapping[str, Commands]
    python: Mapping[str, str] = field(default_factory=dict)
    place: int | None = 1
    sources: str = ""
    for_dynamic_version: str = ""

    @property
    def heading(self) -> str:
        """The name and the version, as in the page."""
        return self.packages[0].replace("==", " ")

    def flagged(self, command: str, flag: str) -> str:
        """``command`` with ``flag``."""
        words = command.split()
        place = len(words) if self.place is None else self.place
        return " ".join([*words[:place], flag, *words[place:]])


FRONT_ENDS = (
    FrontEnd(
        name="pip",
        packages=("pip==26.3",),
        ways={
            "wheel": ("pip wheel --no-deps -w OUT .",),
            "sdist": ("pip wheel --no-deps -w OUT SDIST",),
            "install": ("pip install .",),
            "editable": ("pip install -e .",),
            "no isolation": ("pip wheel --no-build-isolation --no-deps -w OUT .",),
        },
        python={"install": "python", "editable": "python"},
    ),
    FrontEnd(
        name="build",
        packages=("build==1.6.1",),
        ways={
            "wheel": ("python -m build -w -o OUT",),
            "sdist": ("python -m build -o OUT",),
            "no isolation": ("python -m build -n -w -o OUT",),
        },
        place=3,
    ),
    FrontEnd(
        name="uv",
        packages=("uv==0.13.9",),
        ways={
            "wheel": ("uv build --wheel -o OUT",),
            "sdist": ("uv build -o OUT",),
            "install": ("uv venv -q && uv pip install .", "uv sync --no-editable"),
            "editable": ("uv sync", "uv venv -q && uv pip install -e ."),
            "no isolation": ("uv build --no-build-isolation --python PYTHON --wheel -o OUT",),
        },
        python=dict.fromkeys(("install", "editable"), "uv run --no-sync python"),
    ),
    FrontEnd(
        name="hatch",
        packages=("hatch==1.18.2",),
        ways={
            "wheel": ("hatch build -t wheel OUT",),
            "sdist": ("hatch build OUT",),
            "install": ("hatch env create plain", "hatch -e plain run python -V"),
            "editable": ("hatch env create", "hatch run python -V"),
            "no isolation": ("hatchling build -t wheel -d OUT",),
        },
        python={"install": "hatch -e plain run python", "editable": "hatch run python"},
    ),
    FrontEnd(
        name="pdm",
        # Newer versions of its dependencies break this one.
        packages=("pdm==2.29.3", "hishel<2", "unearth<0.19"),
        ways={
            "wheel": ("pdm build --no-sdist -d OUT",),
            "sdist": ("pdm build -d OUT",),
            "install": ("pdm install --no-editable",),
            "editable": ("pdm install",),
            "no isolation": ("pdm use -q -f PYTHON && pdm build --no-isolation --no-sdist -d OUT",),
        },
        python=dict.fromkeys(("install", "editable"), "pdm run python"),
        place=None,
        sources='[[tool.pdm.source]]\nname = "pypi"\ntype = "find_links"\nurl = "LINKS"\n',
    ),
    FrontEnd(
        name="poetry",
        packages=("poetry==2.5.1",),
        ways={
            "wheel": ("poetry build -f wheel -o OUT",),
            "sdist": ("poetry build -o OUT",),
            "editable": ("poetry install",),
        },
        python={"editable": "poetry run python"},
        sources='[[tool.poetry.source]]\nname = "wheelhouse"\nurl = "INDEX"\npriority = "primary"\n',
        for_dynamic_version='[tool.poetry]\nversion = "0"\n',
    ),
)
