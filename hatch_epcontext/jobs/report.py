"""The report of a build: its data, and a line for each job."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from hatch_epcontext.files import FileRecord
from hatch_epcontext.frozen import dataclass
from hatch_epcontext.jobs.artifact import GENERATED_BY, Built, FailureReport, Result, Source
from hatch_epcontext.jobs.boards import BoardRun
from hatch_epcontext.jobs.notes import notes
from hatch_epcontext.jobs.recipe import Times
from hatch_epcontext.providers import QUANTIZED
from hatch_epcontext.text import count, show_number
from hatch_epcontext.worker.results import (
    NOTHING,
    Context,
    Coverage,
    Emulation,
    InputValues,
    Preparation,
    Validation,
    ValidationStatus,
)


@dataclass(frozen=True)
class ModelReport:
    """One model of a job.

    ``source_size``: bytes of the source and its external data.
    ``chip``: what it was compiled for, in words. ``load`` and ``day``: the seconds to open it, and when it
    was validated, see `Validated`.
    """

    model: str
    source_sha256: str
    source_size: int
    preparation: Preparation
    coverage: Coverage | None
    validation: Validation
    chip: str
    load: float | None
    day: str
    boards: tuple[BoardRun, ...] = ()


@dataclass(frozen=True)
class JobReport:
    """One job.

    ``size``: bytes of all its ``files``.
    ``times``: those of the build that compiled it, if that is known. ``notes``: rewrites that were wrong and
    left out, and other recipes, each with its result.
    """

    target: str
    provider: str
    cached: bool
    models: tuple[ModelReport, ...]
    times: Times | None
    notes: tuple[str, ...]
    size: int
    group: str | None
    files: Mapping[str, FileRecord]
    versions: Mapping[str, str]

    @property
    def load(self) -> float | None:
        """Seconds to open sessions on all its models; None if one was not opened."""
        loads = [model.load for model in self.models if model.load is not None]
        return sum(loads) if len(loads) == len(self.models) else None


@dataclass(frozen=True)
class Report:
    """All jobs of a build."""

    generator: str
    jobs: tuple[JobReport, ...]
    failures: tuple[FailureReport, ...] = ()


def make_report(result: Result) -> Report:
    """The report of a build: the manifest's facts, and times and failures, which a manifest must not have."""
    by_name = {source.model.name: source for source in result.sources}
    return Report(
        GENERATED_BY,
        tuple(_report(built, by_name, result.boards) for built in result.built),
        result.failures,
    )


def _report(
    built: Built,
    sources: Mapping[str, Source],
    boards: Mapping[tuple[str, str], tuple[BoardRun, ...]],
) -> JobReport:
    record, winner, validated = built.record, built.attempt, built.validated
    target, provider = built.job.target.name, built.job.target.provider
    models = zip(
        built.job.models, record.preparations, built.search.contexts_of(winner), strict=True
    )
    lines = (*winner.dropped, *notes(built.search, winner))
    return JobReport(
        target=target,
        provider=provider.name,
        cached=built.cached,
        models=tuple(
            ModelReport(
                model.name,
                sources[model.name].sha256,
                sources[model.name].size,
                preparation,
                context.coverage,
                validated[model.name].validation,
                provider.describe(provider.compiled_for(context.compatibility)),
                validated[model.name].load,
                validated[model.name].day,
                boards.get((model.name, target), ()),
            )
            for model, preparation, context in models
        ),
        times=winner.times,
        notes=tuple(dict.fromkeys(lines)),
        size=record.size,
        group=built.job.group,
        files=record.files,
        versions=record.versions,
    )


def describe_coverage(coverage: Coverage | None) -> str:
    """The coverage for a summary; most optimized graphs have none."""
    if coverage is None:
        return "optimized graph"
    contexts = f" in {coverage.partitions} contexts" if coverage.partitions > 1 else ""
    return f"{coverage.compiled}/{coverage.nodes} nodes{contexts}"


def describe_validation(validation: Validation, *, with_reason: bool = True) -> str:
    """The validation in a few words; the report has the numbers. Tables have no room for a reason."""
    reason = f" ({validation.reason})" if validation.reason and with_reason else ""
    if validation.status is ValidationStatus.NOT_VALIDATED:
        return "NOT validated (validate = false)"
    if validation.status is ValidationStatus.STRUCTURE:
        return f"structure checked, NOT run{reason}"
    snr = validation.snr if validation.simulated or validation.emulation else None
    decibels = "" if snr is None else f" ({snr:.0f} dB)"
    but = "" if validation.differs else ", NOT compared"
    parts = [f"ran{but}{reason if validation.status is ValidationStatus.RAN else ''}"]
    if validation.compared:
        number = count(len(validation.samples), "given input")
        reference = "" if validation.integers is None else " with its float form"
        but = ", but is SENSITIVE" if validation.sensitive else ""
        on = "synthetic inputs" if validation.synthetic else number
        parts = [f"agrees{reference} on {on}{but}{'' if validation.simulated else decibels}"]
    others = [a.status.value for a in validation.agreements if a not in validation.compared]
    parts += (f"{count(n, 'output')} {status}" for status, n in Counter(others).items())
    if validation.status is ValidationStatus.RAN_ON_CPU:
        parts.append(f"on the CPU only{reason}")
    if validation.status is ValidationStatus.RAN_ALONE:
        parts.append("compiled alone")
    if bits := max((values.bits for values in validation.inputs), default=0):
        parts.append(f"integers in {bits} bits")
    if largest := max((values.in_floats for values in validation.inputs), default=0.0):
        parts.append(f"integers in floats up to {show_number(largest)}")
    if validation.simulated:
        parts.append(f"simulator{decibels}")
    return ", ".join(parts)


def describe_emulation(emulation: Emulation) -> str:
    """What the number format of the EP makes of the model, for a summary."""
    if not emulation.samples:
        needs = "that needs a build, fixed shapes and less than 1 GB of weights"
        return f"{emulation.format} NOT emulated ({needs})"
    ratio = emulation.nearest and emulation.nearest.snr
    snr = "equal" if ratio is None else f"at least {ratio:.0f} dB"
    if ratio == NOTHING:
        snr = "no numbers"
    return f"{emulation.format} emulated on {count(emulation.samples, 'input')}, {snr}"


def summarize_answers(built: Built) -> str:
    """One line for a language model whose answers were compared."""
    snr = min(answer.snr for answer in built.answers)
    what = f"{count(len(built.answers), 'prompt')} as on the CPU ({snr:.0f} dB)"
    model, target = built.job.models[0].configured_name, built.job.target.name
    return f"{model} -> {target}: onnxruntime-genai answers {what}"


def describe_values(values: InputValues) -> str:
    """Which values of an input were compared, and where the EP's arithmetic ends."""
    low, high = map(show_number, (values.low, values.high))
    compared = (
        f"{values.name!r} was compared from {low} to {high}"
        if low != high
        else f"{values.name!r} was {low}"
    )
    if not values.most:
        return compared
    end = f"computes integers in {values.bits} bits"
    if values.in_floats:
        # Only integers of 32 bits and more are so large.
        bits, largest = values.bits or 32, show_number(values.in_floats)
        end = f"ends integers of {bits} bits in floats at {largest}"
    what = "sums with other values" if values.several else "values"
    beyond = f"{what} above {show_number(values.most)}"
    if -values.least not in (0, values.most, values.most + 1):
        beyond += f", or below {show_number(values.least)},"
    return f"{compared}; the EP {end}: {beyond} are not supported"


def validation_warnings(name: str, validation: Validation) -> Iterator[str]:
    """What the validation of the model ``name`` leaves open, in lines."""
    where = "(validate.inputs or --inputs)"
    for agreement in validation.inconclusive:
        hint = f"; give real inputs {where}" if validation.synthetic else ""
        reason = f"is inconclusive, because {agreement.reason}{hint}"
        yield f"{name}: the comparison of the output {agreement.output!r} {reason}"
    integers = validation.integers
    if integers is not None and integers.snr is not None and integers.snr < QUANTIZED.snr:
        yield (
            f"{name}: it agrees with its float form, and the int8 file on the CPU differs from it by "
            f"{integers.snr:.0f} dB, because its quantization is coarse; compare the answers of both "
            "in the app"
        )
    yield from (f"{name}: {warning}" for warning in validation.warnings)
    for values in validation.inputs:
        if values.expected:
            yield f"{name}: {describe_values(values)}, and may give wrong answers"
    emulation = validation.emulation
    reasons = [agreement.reason for agreement in validation.compared if agreement.reason]
    if emulation is not None and emulation.reason and not reasons:
        # The number format was not measured, so this only warns.
        reasons = [emulation.reason]
    real = f". Compare with real ones {where}"
    for reason in dict.fromkeys(reasons):
        hint = real if validation.synthetic else ""
        yield f"{name}: other inputs may give wrong answers: {reason}{hint}"


def summarize(built: Built, seconds: float) -> str:
    """A job that took ``seconds``, in one line with what a user must know; the report has the rest."""
    record, validations = built.record, built.validations
    is_ok = all(
        v.status is ValidationStatus.RAN and v.compared and not v.sensitive
        for v in validations.values()
    )
    parts = ["ok" if is_ok else "compiled"]
    for preparation, context in zip(record.preparations, record.contexts, strict=True):
        name = f"{context.model} " if built.job.group else ""
        validation = describe_validation(validations[context.model])
        parts.append(name + ", ".join([*_summarize_model(preparation, context), validation]))
    parts.append("from the cache" if built.cached else f"{seconds:.1f} s")
    return f"{built.job.location} ({built.job.target.provider.name}): {', '.join(parts)}"


def _summarize_model(preparation: Preparation, context: Context) -> Iterator[str]:
    yield describe_coverage(context.coverage)
    if preparation.precision:
        yield preparation.precision
    if preparation.rewrites:
        of = f" of {count(preparation.replaced, 'node')}" if preparation.replaced else ""
        yield f"{count(len(preparation.rewrites), 'rewrite')}{of}"
    if preparation.options:
        yield f"with {', '.join(preparation.options)}"
