"""What ``epcontext companions`` needs: the metadata of a project, and earlier wheels of a companion."""

from __future__ import annotations

import contextlib
import html
import http
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import InvalidVersion, Version

from hatch_epcontext.config.pyproject import FILE
from hatch_epcontext.errors import ConfigError, Kind, Problem, RequirementError
from hatch_epcontext.files import file_sha256, temp_dir
from hatch_epcontext.jobs.web import download
from hatch_epcontext.package.companions import Companion, content_of
from hatch_epcontext.package.wheel import ProjectMetadata

_MAX_WHEEL = 1 << 34
"""The most bytes of a published wheel."""

_TIMEOUT = 30
"""Seconds for the page of an index."""

_LINK = re.compile(r"""<a\s[^>]*?href=["']([^"']+)["']""", re.IGNORECASE)

# In another process: back ends run code of the project.
_PREPARE = """
import sys, hatch_epcontext.backend
hatch_epcontext.backend.prepare_metadata_for_build_wheel(sys.argv[1])
"""


def project_metadata(root: Path, table: Mapping[str, Any], *, by_hatch: bool) -> ProjectMetadata:
    """What METADATA of the project in ``root`` says; ``table`` is its ``[project]``.

    Raises RequirementError if only the build back end knows it, and cannot be asked.
    """
    if by_hatch or "optional-dependencies" in table:
        from hatchling.builders.wheel import WheelBuilder

        names = ("name", "dependencies", "optional-dependencies")
        static = {"version": "0", **{name: table[name] for name in names if name in table}}
        builder = WheelBuilder(str(root), config=None if by_hatch else {"project": static})
        return ProjectMetadata.read(builder.config.core_metadata_constructor(builder.metadata))
    with temp_dir() as folder:
        command = [sys.executable, "-c", _PREPARE, str(folder)]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        for file in folder.glob("*.dist-info/METADATA"):
            return ProjectMetadata.read(file.read_text(encoding="utf-8"))
    message = "only the build back end knows the extras of the project, and it does not say them."
    hint = "Install what [build-system] requires into this environment."
    log = (done.stdout + done.stderr)[-2000:]
    raise RequirementError(
        Problem(Kind.MISSING_REQUIREMENT, str(root / FILE), message, hint, log=log)
    )


def published_version(wheel: Path, companion: Companion, published: str) -> str | None:
    """The published version that has the models of ``wheel``; None if they are new.

    ``published``: a folder of wheels, or the URL of an index. Of it the version of ``wheel`` is compared, and
    the newest. Raises DownloadError, OSError, and ConfigError if that version is there with other models.
    """
    own, wheels = Version(companion.version), _published(companion.name, published)
    for version in dict.fromkeys((own, *sorted(wheels, reverse=True)[:1])):
        if version in wheels and _is_same(wheel, companion, wheels[version]):
            return str(version)
    if own in wheels:
        message = f"version {own} of {companion.name} is published with other models."
        hint = "Pin a new version in the extra."
        raise ConfigError(Problem.at(companion.key, Kind.INVALID_COMPANION, message, hint))
    return None


def _is_same(wheel: Path, companion: Companion, place: str) -> bool:
    url, fragment = urldefrag(place)
    # As indexes write it; it saves a download.
    if fragment == f"sha256={file_sha256(wheel)}":
        return True
    with temp_dir() as folder:
        earlier = Path(url)
        if _is_url(url):
            earlier = folder / wheel.name
            download(url, earlier, _MAX_WHEEL, lambda *_: None)
        return content_of(earlier, companion) == content_of(wheel, companion)


def _published(name: str, published: str) -> dict[Version, str]:
    """Where the published wheels of the distribution ``name`` are, by version."""
    if _is_url(published):
        page = f"{published.rstrip('/')}/{name}/"
        links = [urljoin(page, html.unescape(link)) for link in _LINK.findall(_page(page))]
    else:
        links = [str(file) for file in Path(published).iterdir()]
    wheels = {}
    for link in links:
        with contextlib.suppress(InvalidWheelFilename, InvalidVersion):
            file = unquote(urldefrag(link).url.replace("\\", "/").rpartition("/")[2])
            its, version, *_ = parse_wheel_filename(file)
            if its == canonicalize_name(name):
                wheels[version] = link
    return wheels


def _is_url(text: str) -> bool:
    return text.startswith(("https://", "http://"))


def _page(url: str) -> str:
    """The page at ``url``; empty if there is none, because nothing was published."""
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT) as reply:  # noqa: S310, checked
            return str(reply.read().decode(errors="replace"))
    except urllib.error.HTTPError as error:
        if error.code == http.HTTPStatus.NOT_FOUND:
            return ""
        raise
