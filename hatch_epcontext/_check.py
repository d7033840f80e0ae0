# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The hatch-epcontext developers
"""Says what ``load`` does with each target on this machine, for ``check(...)`` of the loader beside it.

A copy of ``hatch_epcontext/_check.py`` in hatch-epcontext, under the MIT licence.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from hatch_epcontext.loader import Opener, Request, Variant


class Expectation(NamedTuple):
    """What becomes of a target, and why. ``unknown``: only opening it shows that."""

    target: str
    answer: Literal["opens", "cannot", "unknown"]
    reason: str

    def __str__(self) -> str:
        return f"{self.target}: {self.answer}, {self.reason}"


def expect(
    loader: Any, candidates: Sequence[tuple[list[Variant], Any]], request: Request
) -> list[Expectation]:
    """What ``load`` does with each of these ``candidates`` in turn, if none before it is opened.

    ``loader`` is the module beside this one. Registers the EPs' libraries, and opens no session.
    """
    expectations: dict[str, Expectation] = {}
    for variants, method in candidates:
        expectation = _expect(loader, method, variants[0], request)
        earlier = expectations.get(expectation.target)
        # The second one of a target compiles it here, if what is shipped does not open.
        if earlier is None or (earlier.answer, expectation.answer) == ("cannot", "unknown"):
            expectations[expectation.target] = expectation
    return list(expectations.values())


def _expect(loader: Any, method: Any, variant: Variant, request: Request) -> Expectation:
    try:
        if variant.problem is not None:
            raise variant.problem  # noqa: TRY301
        if not variant.fits(request):
            raise loader.SkipTargetError("none of its shapes is large enough")  # noqa: TRY301
        opener = loader.Opener(variant, request)
        if method is loader.Opener.open_shipped:
            answer, reason = _of_shipped(loader, opener)
        else:
            opener.check()
            with opener.lock:
                opener.find_devices()
            answer, reason = "unknown", "it is compiled on this machine, once"
    except Exception as error:
        # Of any kind: `load` gets it too.
        return Expectation(variant.target, "cannot", str(error) or type(error).__name__)
    return Expectation(variant.target, answer, reason)


def _of_shipped(loader: Any, opener: Opener) -> tuple[Literal["opens", "unknown"], str]:
    """Whether what is shipped opens; raises what ``load`` would."""
    variant, request, ort = opener.variant, opener.request, opener.ort
    variant.package.on_disk(variant, verify=request.verify)
    opener.check()
    on_cpu = variant.ep == loader.CPU_EP and not opener.fallbacks
    is_simulated = False
    if variant.plugin or variant.ep not in ort.get_available_providers():
        with opener.lock:
            device = opener.find_devices()[0]
            opener._add_devices(ort.SessionOptions(), {})  # noqa: SLF001
        is_simulated = device.device.type.name.lower() != variant.device != "any"
    # There a simulator may be unable to read the path.
    if not on_cpu and (not is_simulated or sys.platform == "win32"):
        return "unknown", f"only opening it shows what {variant.ep} does"
    is_source = variant.target == loader.SOURCE
    if request.session_options is not None or (request.provider_options and not is_source):
        return "unknown", "only opening it shows what the app's own options do"
    if reason := _changed(loader, opener, is_simulated=is_simulated):
        return "unknown", reason
    return "opens", f"{variant.ep} on {'a simulator' if is_simulated else 'cpu'}"


def _changed(loader: Any, opener: Opener, *, is_simulated: bool) -> str:
    """Why a file need not open as it did in the build, or an empty text."""
    variant, package = opener.variant, opener.variant.package
    # In the build the source ran beside what was compiled of it.
    every = (variant, *itertools.chain.from_iterable(package.models.values()))
    same = (v for v in every if v.component == variant.component and "compiled_with" in v.about)
    built = next(same, variant)
    if loader.get(built.about, "validation", dict, {}).get("status") != "ran":
        return "the build did not open it"
    for name, version in loader.texts(built.about, "compiled_with").items():
        # Of onnxruntime any distribution may be installed.
        is_plugin = name == built.plugin.get("package")
        here = _version(name) if is_plugin else opener.ort.__version__
        if here != version and (is_simulated or _numbers(here) < _numbers(version)):
            return f"it was compiled with {name} {version}, and {here or 'none'} is installed"
    # A file that was changed may have the same size.
    text: str = loader.damage(package.root, package.files_of(variant), verify=True)
    return text


def _version(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
