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
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
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
        is_shipped = method is loader.Opener.open_shipped
        look = partial(_look_at_shipped if is_shipped else _look_at_prepared, loader)
        attempt, known = loader.open_variant(look, variants, request)
        expectation = Expectation(
            attempt.target, known.answer if known else "cannot", attempt.reason
        )
        earlier = expectations.get(attempt.target)
        # The second one of a target compiles it here, if what is shipped does not open.
        if earlier is None or (earlier.answer, expectation.answer) == ("cannot", "unknown"):
            expectations[attempt.target] = expectation
    return list(expectations.values())


# Instead of a session they return what is known without one.


def _look_at_prepared(loader: Any, opener: Opener) -> tuple[SimpleNamespace, str]:
    module = loader.beside("_recompile")
    cached = module.adapt_and_find(loader, opener)
    if cached.written is None:
        module.check_can_compile(loader, cached)
    return SimpleNamespace(answer="unknown"), "it is compiled on this machine, once"


def _look_at_shipped(loader: Any, opener: Opener) -> tuple[SimpleNamespace, str]:
    """What is known of a variant, and the reason; raises what opening it would."""
    variant, request, ort = opener.variant, opener.request, opener.ort
    variant.package.on_disk(variant, verify=request.verify)
    opener.check()
    if variant.plugin or variant.ep not in ort.get_available_providers():
        with opener.lock:
            opener.find_devices()
            opener._add_devices(ort.SessionOptions(), {})  # noqa: SLF001
    unknown = SimpleNamespace(answer="unknown")
    if opener.fallbacks or variant.ep != loader.CPU_EP:
        # Some EPs load their libraries only when a session is opened, also simulators.
        reason = f"only opening it shows what {variant.ep} does"
        with contextlib.suppress(Exception):
            reason += _older_ep(variant)
        return unknown, reason
    is_source = variant.target == loader.SOURCE
    if request.session_options is not None or (request.provider_options and not is_source):
        return unknown, "only opening it shows what the app's own options do"
    reason = "the manifest does not say how the build opened it"
    # What `load` does not read decides about no error.
    with contextlib.suppress(Exception):
        reason = _changed(loader, opener)
    return (
        (unknown, reason) if reason else (SimpleNamespace(answer="opens"), f"{variant.ep} on cpu")
    )


def _changed(loader: Any, opener: Opener) -> str:
    """Why a file that the CPU opened in the build need not open here, or an empty text."""
    variant, package, here = opener.variant, opener.variant.package, opener.ort.__version__
    # In the build the source ran beside what was compiled of it.
    every = itertools.chain.from_iterable(package.models.values())
    same = [v for v in every if v.component == variant.component]
    of_build = same if variant.target == loader.SOURCE else [variant]
    ran = [v for v in of_build if (v.about.get("validation") or {}).get("status") == "ran"]
    if not ran:
        return "the build did not open it"
    if variant.settings.get("optimization") == "all":
        return 'optimization = "all" is for the processor of the build machine'
    # A library that the project names is called by its import package.
    plugins = {v.plugin.get("package", "").replace("_", "-") for v in ran}
    for name, version in ((n, text) for v in ran for n, text in v.about["compiled_with"].items()):
        is_runtime = name.startswith("onnxruntime") and name not in plugins
        if is_runtime and _numbers(here) < _numbers(version):
            return f"the build had {name} {version}, and {here} is installed"
    folder = (package.root / variant.file).parent.resolve()
    for name in (files := package.files_of(variant)):
        # onnxruntime rejects external data behind a link that leaves the model's folder.
        if not (package.root / name).resolve().is_relative_to(folder):
            return f"{name} is a link to another folder"
    # A file that was changed may have the same size. With `verify` it was compared before.
    text: str = loader.damage(package.root, files, verify=not opener.request.verify)
    return text


def _older_ep(variant: Variant) -> str:
    """That the EP's package is of an earlier minor release than the one that compiled, or an empty text.

    Such a release refuses the context: seen with each of onnxruntime-qnn 2.4 to 2.7.
    """
    package = variant.plugin["package"]
    here, built = importlib.metadata.version(package), variant.about["compiled_with"][package]
    if _numbers(here)[:2] >= _numbers(built)[:2]:
        return ""
    return f"; {package} {built} compiled it, and {here} is installed"


def _numbers(version: str) -> list[int]:
    """The first three numbers of ``version``, to compare releases."""
    return [int(number) for number in re.findall(r"\d+", version)[:3]]
