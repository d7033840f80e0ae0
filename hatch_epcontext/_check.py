# SPDX-License-Identifier: MIT
# Copyright (c) 2026 The hatch-epcontext developers
"""Says what ``load`` does with each target on this machine, for ``check(...)`` of the loader beside it.

A copy of ``hatch_epcontext/_check.py`` in hatch-epcontext, under the MIT licence.
"""

from __future__ import annotations

import contextlib
import itertools
import re
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
    if variant.plugin or variant.ep not in ort.get_available_providers():
        with opener.lock:
            opener.find_devices()
            opener._add_devices(ort.SessionOptions(), {})  # noqa: SLF001
    if opener.fallbacks or variant.ep != loader.CPU_EP:
        # Some EPs load their libraries only when a session is opened, also simulators.
        return "unknown", f"only opening it shows what {variant.ep} does"
    is_source = variant.target == loader.SOURCE
    if request.session_options is not None or (request.provider_options and not is_source):
        return "unknown", "only opening it shows what the app's own options do"
    reason = "the manifest does not say how the build opened it"
    # What `load` does not read decides about no error.
    with contextlib.suppress(Exception):
        reason = _changed(loader, opener)
    return ("unknown", reason) if reason else ("opens", f"{variant.ep} on cpu")


def _changed(loader: Any, opener: Opener) -> str:
    """Why a file that the CPU opened in the build need not open here, or an empty text."""
    variant, package = opener.variant, opener.variant.package
    # In the build the source ran beside what was compiled of it.
    every = itertools.chain.from_iterable(package.models.values())
    same = [v for v in every if v.component == variant.component]
    of_build = same if variant.target == loader.SOURCE else [variant]
    ran = [v for v in of_build if (v.about.get("validation") or {}).get("status") == "ran"]
    if not ran:
        return "the build did not open it"
    # Of onnxruntime any distribution may be installed.
    others = {v.plugin.get("package") for v in ran}
    compiled = [v.about["compiled_with"] for v in ran]
    needed = [text for table in compiled for name, text in table.items() if name not in others]
    here = opener.ort.__version__
    for version in needed:
        if _numbers(here) < _numbers(version):
            return f"the build had onnxruntime {version}, and {here} is installed"
    folder = (package.root / variant.file).parent.resolve()
    for name in (files := package.files_of(variant)):
        # onnxruntime refuses external data behind a link that leaves the model's folder.
        if not (package.root / name).resolve().is_relative_to(folder):
            return f"{name} is a link to another folder"
    # A file that was changed may have the same size.
    text: str = loader.damage(package.root, files, verify=True)
    return text


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
