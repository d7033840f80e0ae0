"""What an entry of a cache must be, wherever it comes from: its documents, its record, its files.

An entry was written by another build, often on another machine. Nothing in it is used before it is
checked here.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePosixPath

from hatch_epcontext.config.settings import Target
from hatch_epcontext.files import is_portable, is_sha256
from hatch_epcontext.graph.facts import TensorFacts
from hatch_epcontext.jobs.artifact import Record, Source, ValidationRun
from hatch_epcontext.jobs.cache.envelope import DamagedError
from hatch_epcontext.serialize import from_json
from hatch_epcontext.text import listing
from hatch_epcontext.worker.facts import Context, Coverage

LAYOUT = "v4"
"""The folder of this format, below the root of a cache and of a shared one."""

Check = Callable[[Record], None]
"""Raises DamagedError if a record is not what a job wants."""


def entry_name(fingerprint: str) -> str:
    """The name of the document with the record of the artifact of that fingerprint."""
    return f"entries/{fingerprint[:2]}/{fingerprint}.json"


def validation_name(fingerprint: str, key: str) -> str:
    """The name of the document with the validation under ``key``, a hex sha256, of that artifact."""
    return f"validations/{fingerprint}/{key}.json"


def latest_name(settings_key: str) -> str:
    """The name of the document with the fingerprint of the latest artifact with these settings."""
    return f"latest/{settings_key}"


_MAX_DECIBELS = 1e4
"""More than any two different numbers of float64 have between them."""


def read_record(text: str) -> Record:
    """The record in the text of an entry; raises DamagedError if its files or models cannot be right."""
    try:
        record = from_json(text, Record)
    except ValueError:
        raise DamagedError("its record cannot be read") from None
    _check_files(record)
    if any(context.model_file not in record.files for context in record.contexts):
        raise DamagedError("its record has a model without a file")
    if len(record.preparations) != len(record.contexts):
        raise DamagedError("its record has models without a preparation")
    figures = [record.times.prepare, record.times.compile]
    figures += [n for each in record.preparations for n in (each.nodes_before, each.nodes)]
    coverages = [each.coverage for each in record.contexts if each.coverage is not None]
    if not all(map(_is_amount, figures)) or not all(map(_is_possible, coverages)):
        raise DamagedError("its record has a figure that cannot be right")
    return record


def read_validation(text: str) -> ValidationRun:
    """The validation in the text of its document; raises DamagedError if it is none."""
    try:
        run = from_json(text, ValidationRun)
    except ValueError:
        raise DamagedError("its validation cannot be read") from None
    if run.load is not None and not _is_amount(run.load):
        raise DamagedError("its validation has a time that cannot be right")
    for each in run.validation.agreements:
        # Rounding can make a cosine a little larger than 1.
        decibels = [each.snr or 0.0, each.worst.snr if each.worst else 0.0]
        possible = all(abs(number) < _MAX_DECIBELS for number in decibels)
        if not (_is_amount(each.max_abs) and -1.1 < (each.cosine or 0) < 1.1 and possible):
            raise DamagedError(f"its output {each.output} has an agreement that cannot be right")
    return run


def check_for(sources: Sequence[Source], target: Target, versions: Mapping[str, str]) -> Check:
    """A check that a record is that of ``sources`` for ``target``; with ``versions``, compiled by these."""

    def check(record: Record) -> None:
        names = [source.model.name for source in sources]
        if [context.model for context in record.contexts] != names:
            raise DamagedError(f"its record is not that of {listing(names)}")
        if record.product != target.provider.product:
            raise DamagedError(f"its record is not that of a {target.provider.product}")
        if versions and dict(record.versions) != dict(versions):
            raise DamagedError("its record has other versions")
        for source, context in zip(sources, record.contexts, strict=True):
            _check_signature(source, context)

    return check


def _check_signature(source: Source, context: Context) -> None:
    """Another model has other inputs and outputs, and so would an app that feeds it."""
    inputs, outputs = _by_name(source.facts.inputs), _by_name(source.facts.outputs)
    # Outputs that a model declares without all sizes are often declared wrong, also in their rank.
    declared = {name: each for name, each in outputs.items() if each.is_fixed}
    known = tuple(each for each in context.outputs if each.name in declared)
    types = {each.name: each.dtype for each in outputs.values()}
    fits = _fit(context.inputs, inputs) and _fit(known, declared)
    fits = fits and all(types.get(each.name) == each.dtype for each in context.outputs)
    if not fits or {each.name for each in context.outputs} != outputs.keys():
        raise DamagedError(f"its record does not have the inputs and outputs of {context.model}")


def _by_name(tensors: Sequence[TensorFacts]) -> Mapping[str, TensorFacts]:
    return {tensor.name: tensor for tensor in tensors}


def _fit(compiled: Sequence[TensorFacts], source: Mapping[str, TensorFacts]) -> bool:
    """Whether each tensor is in ``source``; a compiled model can know more of its shape."""
    return all(
        (known := source.get(each.name)) is not None
        and known.dtype == each.dtype
        and (not each.is_fixed or known.takes(each.shape))  # type: ignore[arg-type]
        for each in compiled
    )


def _is_amount(number: float) -> bool:
    return 0 <= number < math.inf


def _is_possible(coverage: Coverage) -> bool:
    return coverage.compiled == max(coverage.nodes - len(coverage.uncovered), 0)


def _check_files(record: Record) -> None:
    for name, file in record.files.items():
        if not is_portable(name):
            raise DamagedError("its record has a file outside of the artifact")
        if file.size < 0 or not is_sha256(file.sha256):
            raise DamagedError("its record has a file with an invalid size or hash")
    # File systems may take names for one that differ in case or in how accents are written.
    folded = {unicodedata.normalize("NFC", name).casefold() for name in record.files}
    if len(folded) != len(record.files):
        raise DamagedError("its record has two files of one name")
    folders = {str(parent) for name in folded for parent in PurePosixPath(name).parents}
    if not folders.isdisjoint(folded):
        raise DamagedError("its record has a file and a folder of one name")
