"""Plans that run with real workers."""

from __future__ import annotations

import re
import shutil
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import helper, numpy_helper

from hatch_epcontext.cache.build import Cache
from hatch_epcontext.cache.store import Store
from hatch_epcontext.config.load import load
from hatch_epcontext.config.pyproject import parse
from hatch_epcontext.errors import BuildError, Kind
from hatch_epcontext.files import record_files
from hatch_epcontext.jobs import job as job_module
from hatch_epcontext.jobs import requirements
from hatch_epcontext.jobs import run as run_module
from hatch_epcontext.jobs import steps as steps_module
from hatch_epcontext.jobs.artifact import Built
from hatch_epcontext.jobs.plan import Job, plan
from hatch_epcontext.jobs.processes.process import Workers
from hatch_epcontext.jobs.run import IncompleteError, build
from hatch_epcontext.providers import PROVIDERS, Provider
from hatch_epcontext.system import Heartbeat
from hatch_epcontext.worker.requests import CheckRequest
from hatch_epcontext.worker.results import Coverage, ValidationStatus
from tests.altered_workers import workers_with
from tests.conftest import needs, needs_qnn
from tests.jobs.conftest import Run
from tests.models import (
    half_for_the_cpu,
    model,
    network,
    parsed,
    save,
    transformer,
    unknown_operator,
    value,
    with_refused,
)

pytestmark = pytest.mark.slow

QNN = """
models = [{ path = "models/a.onnx", dims = { batch = 1 } }]
[targets.qnn]
provider = "qnn"
chip = "snapdragon-x-elite"
"""

CPU = 'targets.cpu.provider = "cpu"\nmodels = ["models/a.onnx"]\n'


def test_a_build_from_the_cache_does_not_even_import_requests(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(CPU)
    monkeypatch.delitem(sys.modules, "hatch_epcontext.worker.requests")
    assert run(CPU).built[0].cached
    assert "hatch_epcontext.worker.requests" not in sys.modules


@needs_qnn
def test_a_context_is_compiled_and_validated_once(run: Run, log: list[str]) -> None:
    first, second = run(QNN), run(QNN)
    assert (first.built[0].cached, second.built[0].cached) == (False, True)
    assert first.built[0].record == second.built[0].record
    assert first.built[0].validations == second.built[0].validations
    validation = first.built[0].validations["a"]
    assert validation.status is ValidationStatus.RAN
    assert validation.cosine is not None
    assert validation.cosine > 0.999
    assert log[0].startswith(
        "a -> qnn (qnn): ok, 4/4 nodes, agrees on synthetic inputs, simulator ("
    )
    assert log[1].endswith("from the cache")


@needs_qnn
def test_a_long_search_says_what_it_does_for_how_long_and_names_each_recipe(
    run: Run, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(with_refused(), project / "models" / "a.onnx")
    monkeypatch.setattr(job_module, "_ANNOUNCED", 0)
    monkeypatch.setattr("hatch_epcontext.jobs.run._LARGE", 0)
    monkeypatch.setattr("hatch_epcontext.jobs.steps._LONG", 0)
    monkeypatch.setattr(Heartbeat, "due", lambda self: True)
    lines: list[str] = []
    with pytest.raises(BuildError, match="EPC302"):
        run(QNN.replace(", dims = { batch = 1 }", ""), workers=Workers(120, progress=lines.append))
    assert lines[0].startswith("reading 1 model of ")
    estimate = (
        r"a -> qnn: about \d+ s for the first recipe, 0 s of it for a run on the simulator of .*"
    )
    assert sum(re.fullmatch(estimate, line) is not None for line in lines) == 1
    known = "(until now: unmodified: 1 node on the CPU)"
    assert lines.count(f"a -> qnn: recipe 2: rewriting {known} ...") == 1
    assert "a -> qnn: recipe 2: rewriting: rewrite begins" in lines


@needs_qnn
def test_a_target_without_a_chip_gets_a_warning(run: Run, log: list[str]) -> None:
    run(QNN.replace('chip = "snapdragon-x-elite"', ""))
    assert 'chip = "snapdragon-x-elite"' in log[-1]


def test_a_target_that_no_model_uses_is_a_warning(run: Run, log: list[str]) -> None:
    toml = CPU.replace('"models/a.onnx"', '{ path = "models/a.onnx", targets = ["cpu"] }')
    toml += 'targets.more = { provider = "cpu", optimization = "all" }\n'
    run(toml)
    assert log[-1] == "tool.epcontext.targets.more: no model uses this target"
    run(toml, {"HATCH_EPCONTEXT_TARGETS": "cpu"})
    assert "no model" not in log[-1]


def test_an_interrupted_build_stops_its_workers(project: Path, tmp_path: Path) -> None:
    save(network(), project / "models" / "a.onnx")
    workers = Workers(120)

    def interrupt(_: str) -> None:
        raise KeyboardInterrupt

    planned = plan(load(project, parse(CPU), {}, {}))
    with pytest.raises(KeyboardInterrupt):
        build(planned, tmp_path, Cache(None, print), interrupt, workers)
    request = CheckRequest(())
    with pytest.raises(BuildError, match="b -> cpu: EPC310"):
        workers.call(request, tmp_path / "another", location="b -> cpu")


def steps(log: list[str], action: str) -> list[str]:
    return [line for line in log if line.endswith(f": {action} ...")]


def requests(log: list[str]) -> dict[str, int]:
    """How many steps of jobs were started, by their action; and forget them."""
    counts = {action: len(steps(log, action)) for action in ("prepare", "compile", "validate")}
    log.clear()
    return {action: number for action, number in counts.items() if number}


@needs_qnn
def test_uncovered_nodes_are_named_and_fail_by_default(
    project: Path, run: Run, log: list[str]
) -> None:
    toml = QNN.replace("dims = { batch = 1 }", 'validate = { inputs = "ones" }')
    save(with_refused(), project / "models" / "a.onnx")
    with pytest.raises(BuildError) as raised:
        run(toml, workers=Workers(120, log.append))
    (problem,) = raised.value.problems
    assert problem.where() == "a -> qnn"
    assert problem.kind is Kind.LOW_COVERAGE
    assert "4 of 5 nodes (80.0%)" in problem.message
    assert "IsInf infinite" in problem.message
    assert requests(log)["compile"]
    # What fails again is not tried again.
    with pytest.raises(BuildError) as raised:
        run(toml, workers=Workers(120, log.append))
    assert requests(log) == {}
    assert "HATCH_EPCONTEXT_NO_CACHE=1 tries it again" in str(raised.value)
    assert raised.value.problems[0].notes == problem.notes
    # A lower bound does not compile again.
    (built,) = run(toml + "min-coverage = 0.6\n", workers=Workers(120, log.append)).built
    assert built.cached
    assert "compile" not in requests(log)


@needs_qnn
def test_a_model_that_cannot_be_compiled_is_refused_before_anything_is_prepared(
    project: Path, run: Run
) -> None:
    toml = QNN.replace("dims = { batch = 1 }", 'validate = { inputs = "ones" }')
    save(half_for_the_cpu(), project / "models" / "a.onnx")
    with pytest.raises(BuildError) as raised:
        run(toml)
    (problem,) = raised.value.problems
    assert problem.kind is Kind.NOT_COMPILABLE
    assert "NonZero" in problem.message
    assert 'cut = { outputs = ["r"] }' in problem.advice()
    (built,) = run(toml + "min-coverage = 0.6\n").built
    (context,) = built.record.contexts
    assert context.coverage is not None
    assert [node.op for node in context.coverage.uncovered] == ["NonZero"]


@needs_qnn
def test_another_tolerance_is_validated_again_without_compiling(run: Run, log: list[str]) -> None:
    run(QNN)
    strict = QNN.replace("dims", "validate = { tolerance = { rtol = 0, atol = 0 } }, dims")
    with pytest.raises(BuildError, match="a -> qnn: validation: EPC401"):
        run(strict)
    with pytest.raises(BuildError, match="a -> qnn: validation: EPC401"):
        run(strict, workers=Workers(120, log.append))
    assert requests(log) == {}
    other = QNN.replace("dims", 'validate = { inputs = "ones" }, dims')
    (built,) = run(other, workers=Workers(120, log.append)).built
    assert built.cached
    assert requests(log).get("compile", 0) == 0
    (built,) = run(QNN, workers=Workers(120, log.append)).built
    assert built.cached
    assert requests(log) == {}


@needs_qnn
def test_a_crash_of_the_ep_is_tried_again(run: Run, tmp_path: Path) -> None:
    crash = tmp_path / "crash"
    crash.touch()
    source = f"""
        import os, pathlib, signal
        from hatch_epcontext.worker.actions import compile
        real = compile.handle
        def handle(request):
            if pathlib.Path({str(crash)!r}).exists(): os.kill(os.getpid(), signal.SIGSEGV)
            return real(request)
        compile.handle = handle
        """
    with workers_with(tmp_path, source) as workers:
        with pytest.raises(BuildError, match="EPC308"):
            run(QNN, workers=workers)
        crash.unlink()
        (built,) = run(QNN, workers=workers).built
    assert not built.cached


@needs_qnn
@pytest.mark.parametrize("crashes", [1, 3, 99])
def test_a_recipe_whose_artifact_crashes_leaves_the_others(
    project: Path, run: Run, tmp_path: Path, crashes: int
) -> None:
    save(parsed("(float[2] x) => (float[2] y) { y = Softplus (x) }"), project / "models" / "a.onnx")
    toml, left = QNN.replace(", dims = { batch = 1 }", ""), tmp_path / "left"
    left.write_text("x" * crashes, "utf-8")
    source = f"""
        import os, pathlib, signal
        from hatch_epcontext.worker.actions import validate
        real, left = validate.handle, pathlib.Path({str(left)!r})
        def handle(request):
            if text := left.read_text():
                left.write_text(text[1:])
                os.kill(os.getpid(), signal.SIGSEGV)
            return real(request)
        validate.handle = handle
        """
    with workers_with(tmp_path, source) as workers:
        if crashes == 99:
            with pytest.raises(BuildError, match="validation: EPC308"):
                run(toml, workers=workers)
            left.write_text("", "utf-8")
        (built,) = run(toml, workers=workers).built
    (preparation,) = built.record.preparations
    # A crash may be transient. An artifact that always crashes is avoided, but that is not stored.
    assert preparation.rewrites == (("apply_text",) if crashes == 3 else ())
    (validated,) = built.validated.values()
    assert not validated.is_accident
    (built,) = run(toml).built
    assert built.cached


@needs_qnn
def test_what_too_little_memory_may_have_caused_is_tried_again(
    project: Path, run: Run, log: list[str]
) -> None:
    # QNN has no float64, whatever memory it has.
    save(
        parsed("(float[2] x) => (double[2] y) { y = Cast <to = 11> (x) }"),
        project / "models" / "a.onnx",
    )
    toml = QNN.replace(", dims = { batch = 1 }", "")
    with pytest.raises(BuildError, match="EPC301") as raised:
        run(toml, workers=Workers(120, memory_limit=16 * 10**9))
    assert len(raised.value.problems[0].causes) == 2
    for requested in (True, False):
        with pytest.raises(BuildError, match="EPC301") as raised:
            run(toml, workers=Workers(120, log.append))
        assert bool(requests(log)) is requested
        (last,) = raised.value.problems[0].causes
        assert last.startswith("Or, at last")


def test_a_comparison_that_must_be_conclusive_is_not_repeated(
    project: Path, run: Run, log: list[str]
) -> None:
    save(parsed("(float[1] x) => (float[1] y) { y = Sub(x, x) }"), project / "models" / "a.onnx")
    toml = CPU.replace('"models/a.onnx"', '{ path = "models/a.onnx", validate = "require" }')
    for _ in range(2):
        log.clear()
        with pytest.raises(BuildError, match="EPC406"):
            run(toml, workers=Workers(120, log.append))
    assert requests(log) == {}
    (built,) = run(CPU, workers=Workers(120, log.append)).built
    assert built.cached
    assert requests(log) == {}


@pytest.mark.parametrize(
    ("validate", "status"),
    [
        ('"auto"', ValidationStatus.STRUCTURE),
        ('"structure"', ValidationStatus.STRUCTURE),
        ("false", ValidationStatus.NOT_VALIDATED),
    ],
)
def test_without_a_way_to_run_only_the_structure_is_checked_and_the_summary_says_so(
    run: Run,
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
    validate: str,
    status: ValidationStatus,
) -> None:
    cannot_run(monkeypatch)
    toml = CPU.replace('"models/a.onnx"', f'{{ path = "models/a.onnx", validate = {validate} }}')
    validation = run(toml).built[0].validations["a"]
    assert (validation.status, validation.agreements) == (status, ())
    assert "NOT" in log[0]
    assert (validation.reason or "") in log[0]
    assert ("cannot run its contexts on this machine" in log[0]) == (validate == '"auto"')
    with pytest.raises(BuildError, match="EPC404"):
        run(toml.replace(validate, '"require"'))


def cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this a build machine on which no provider can run its artifacts."""
    find = job_module.reason_not_to_run

    def reason(provider: Provider) -> str | None:
        return find(provider.changed(runs_on=lambda *_: False))

    monkeypatch.setattr(job_module, "reason_not_to_run", reason)


@pytest.mark.skipif(
    "CUDAExecutionProvider" in onnxruntime.get_available_providers(),
    reason="this ONNX Runtime has CUDA",
)
def test_an_optimized_graph_runs_on_the_cpu_where_its_ep_is_missing(
    run: Run, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = CPU.replace('"cpu"', '"cuda"')
    validation = run(toml).built[0].validations["a"]
    assert (validation.status, len(validation.agreements)) == (ValidationStatus.RAN_ON_CPU, 1)
    assert validation.reason is not None
    assert validation.reason.endswith("has no CUDAExecutionProvider")
    assert f"agrees on synthetic inputs, on the CPU only ({validation.reason})" in log[0]
    # The EP may be installed now: the next build tries again.
    assert run(toml).built[0].cached
    required = toml.replace('"models/a.onnx"', '{ path = "models/a.onnx", validate = "require" }')
    with pytest.raises(BuildError, match="EPC404"):
        run(required)


@needs("onnxruntime_ep_webgpu")
@pytest.mark.skipif(Path("/dev/dri").exists(), reason="this machine may have a GPU for WebGPU")
def test_several_models_of_a_library_without_a_device_have_the_same_reason(
    run: Run, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process validates them, and registers the library once."""
    save(network(8), project / "models" / "b.onnx")
    monkeypatch.setattr("hatch_epcontext.jobs.run._LARGE", 0)
    toml = 'targets.gpu.provider = "webgpu"\nmodels = ["models/a.onnx", "models/b.onnx"]\n'
    lines: list[str] = []
    result = run(toml, workers=Workers(120, progress=lines.append))
    reasons = [v.reason for built in result.built for v in built.validations.values()]
    assert reasons == ["WebGpuExecutionProvider finds no device"] * 2
    assert re.fullmatch(r"reading 2 models of .* for gpu \.\.\.", lines[0])


COREML = """
models = [{ path = "models/a.onnx", dims = { batch = 1 } }]
[targets.mac]
provider = "coreml"
"""


def test_an_optimized_graph_has_the_coverage_of_an_ep_with_known_operators(
    run: Run, project: Path
) -> None:
    (built,) = run(COREML).built
    assert built.record.contexts[0].coverage == Coverage(4, 4, 0)
    assert run(COREML).built[0].cached
    neg = "(float[batch, 2] x) => (float[batch, 2] y) { a = Relu (x) b = Sign (a) y = Tanh (b) }"
    save(parsed(neg), project / "models" / "a.onnx")
    with pytest.raises(BuildError, match=r"takes 2 of 3 nodes \(66.7%\).*Left to the CPU: Sign"):
        run(COREML)
    (built,) = run(f"{COREML}min-coverage = 0.6").built
    coverage = built.record.contexts[0].coverage
    assert coverage is not None
    assert [node.op for node in coverage.uncovered] == ["Sign"]
    # ONNX defines it by operators that the EP takes.
    swish = "(float[batch, 2] x) => (float[batch, 2] y) { a = Relu (x) y = HardSwish (a) }"
    save(parsed(swish), project / "models" / "a.onnx")
    (built,) = run(COREML).built
    assert built.record.contexts[0].coverage == Coverage(3, 3, 0)
    unknown = "(float[batch, 2] x) => (float[batch, 2] y) { y = Sign (x) }"
    save(parsed(unknown), project / "models" / "a.onnx")
    with pytest.raises(
        BuildError, match=r"EPC301\s+CoreMLExecutionProvider takes none of the nodes"
    ):
        run(COREML)


@pytest.mark.parametrize("external", ["false", "true"])
def test_what_an_ep_caches_of_an_optimized_graph_is_named_after_its_content(
    run: Run, project: Path, external: str
) -> None:
    toml = f"{COREML}external-initializers = {external}"
    keys = []
    for factor in (1.0, 2.0, 1.0):
        model = network()
        weight = numpy_helper.to_array(model.graph.initializer[0]) * np.float32(factor)
        name = model.graph.initializer[0].name
        model.graph.initializer[0].CopyFrom(numpy_helper.from_array(weight, name))
        helper.set_model_props(model, {"author": "a", "COREML_CACHE_KEY": "of the source"})
        save(model, project / "models" / "a.onnx")
        (built,) = run(toml).built
        (context,) = built.record.contexts
        shipped = onnx.load(built.folder / context.model_file, load_external_data=False)
        properties = {entry.key: entry.value for entry in shipped.metadata_props}
        assert properties["author"] == "a"
        keys.append(properties["COREML_CACHE_KEY"])
    assert keys[0] == keys[2] != keys[1]
    # onnxruntime takes fewer than 64 letters and digits.
    assert all(re.fullmatch("[0-9a-f]{32}", key) for key in keys)


FROM_CACHE = {"HATCH_EPCONTEXT_FROM_CACHE": "cpu"}


@pytest.mark.parametrize(("which", "version"), [("cpu", "99.0"), ("all", None)])
def test_an_artifact_is_taken_from_the_cache_whatever_is_installed(
    run: Run, monkeypatch: pytest.MonkeyPatch, which: str, version: str | None
) -> None:
    (first,) = run(CPU).built
    monkeypatch.setattr(requirements, "installed", lambda name: version if name in ONNX else None)
    monkeypatch.setattr(steps_module.Steps, "attempt", None)
    environ = {"HATCH_EPCONTEXT_FROM_CACHE": which}
    (built,) = run(CPU, environ).built
    assert built.cached
    # With the versions that compiled it, and not the installed ones.
    assert built.record == first.record
    assert built.validations == first.validations
    with pytest.raises(BuildError, match="EPC311"):
        run(CPU.replace('"models/a.onnx"', '{ path = "models/a.onnx", dims.batch = 2 }'), environ)


ONNX = ("onnxruntime", "onnx", "onnxslim", "numpy")


def test_a_miss_of_a_target_from_the_cache_is_an_error(project: Path, run: Run) -> None:
    with pytest.raises(BuildError, match="EPC311") as raised:
        run(CPU, FROM_CACHE)
    assert "HATCH_EPCONTEXT_TARGETS=cpu" in str(raised.value)
    run(CPU)
    with pytest.raises(BuildError, match="EPC311"):
        run(
            CPU.replace(
                '"models/a.onnx"', '{ path = "models/a.onnx", validate = { inputs = "ones" } }'
            ),
            FROM_CACHE,
        )
    save(network(3), project / "models" / "a.onnx")
    with pytest.raises(BuildError, match="EPC311"):
        run(CPU, FROM_CACHE)


TWO = """
models = ["models/a.onnx", "models/b.onnx"]
[targets.first]
provider = "cpu"
[targets.second]
provider = "cpu"
optimization = "all"
"""


@pytest.fixture
def second_model(project: Path) -> None:
    save(network(3), project / "models" / "b.onnx")


def test_a_failed_preparation_is_an_error_of_each_job(run: Run, project: Path) -> None:
    save(unknown_operator(), project / "models" / "bad.onnx")
    toml = TWO.replace('"models/a.onnx", "models/b.onnx"', '"models/bad.onnx"')
    with pytest.raises(IncompleteError) as raised:
        run(toml)
    assert [failure.target for failure in raised.value.result.failures] == ["first", "second"]
    (problem,) = raised.value.problems
    assert problem.targets == ("first", "second")
    head = "tool.epcontext.models[0] (models/bad.onnx) -> first, second: EPC209"
    assert str(problem).startswith(head)


def overlaps(log: list[str], *actions: str) -> bool:
    """Whether two steps of these kinds ran at the same time."""
    running = 0
    for line in log:
        running += line.endswith(tuple(f": {action} ..." for action in actions))
        running -= any(f": {action} took " in line for action in actions)
        if running > 1:
            return True
    return False


@pytest.mark.usefixtures("second_model")
@pytest.mark.parametrize("exclusive_device", [True, False])
def test_only_one_step_at_once_uses_a_device_for_one_user(
    run: Run, log: list[str], monkeypatch: pytest.MonkeyPatch, exclusive_device: bool
) -> None:
    provider = PROVIDERS["cpu"].changed(exclusive_device=exclusive_device)
    monkeypatch.setitem(PROVIDERS, "cpu", provider)
    on_device = 0.5 if exclusive_device else 60
    seconds = {"prepare": 60, "compile": on_device, "validate": on_device}
    begun = {action: threading.Lock() for action in seconds}
    another = {action: threading.Event() for action in seconds}

    def hold_first(line: str) -> None:
        """Hold the first step of each kind until another one begins, which an exclusive device prevents."""
        log.append(line)
        action = line.removesuffix(" ...").rpartition(": ")[2]
        if action in seconds:
            if begun[action].acquire(blocking=False):
                another[action].wait(seconds[action])
            else:
                another[action].set()

    run("build.jobs = 4\n" + TWO, workers=Workers(120, hold_first))
    assert overlaps(log, "prepare")
    if exclusive_device:
        assert not overlaps(log, "compile", "validate")
    else:
        assert overlaps(log, "compile")
        assert overlaps(log, "validate")
    # Whatever ends first.
    results = [line.partition(" (cpu): ")[0] for line in log if " (cpu): " in line]
    assert results == ["a -> first", "a -> second", "b -> first", "b -> second"]


FAILING = """
models = ["models/bad.onnx", "models/a.onnx"]
targets.cpu.provider = "cpu"
build = { jobs = 1 }
"""


def test_all_jobs_are_run_although_one_fails(project: Path, run: Run) -> None:
    save(unknown_operator(), project / "models" / "bad.onnx")
    with pytest.raises(IncompleteError) as raised:
        run(FAILING)
    result = raised.value.result
    assert [built.job.name for built in result.built] == ["a"]
    assert [failure.models for failure in result.failures] == [("bad",)]


@pytest.mark.parametrize(
    ("at_once", "order"), [(1, ["small", "large", "middle"]), (2, ["large", "middle", "small"])]
)
def test_several_jobs_at_once_begin_with_the_largest_model(
    project: Path, run: Run, monkeypatch: pytest.MonkeyPatch, at_once: int, order: list[str]
) -> None:
    for number, name in enumerate(("small", "middle", "large")):
        weights = numpy_helper.from_array(np.ones((4, 4 + 1000 * number), np.float32), "w")
        x, y = value("x", (1, 4)), value("y", (1, 4 + 1000 * number))
        node = helper.make_node("MatMul", ["x", "w"], ["y"])
        save(model([node], [x], [y], [weights]), project / "models" / f"{name}.onnx")
    begun, both = list[str](), threading.Barrier(at_once)

    def fail(_: object, job: Job) -> Built:
        begun.append(job.name)
        if len(begun) <= at_once:
            both.wait(10)
        raise BuildError

    monkeypatch.setattr(run_module, "run_job", fail)
    names = ", ".join(f'"models/{name}.onnx"' for name in ("small", "large", "middle"))
    with pytest.raises(IncompleteError) as raised:
        run(f'targets.cpu.provider = "cpu"\nmodels = [{names}]\nbuild.jobs = {at_once}\n')
    assert [*sorted(begun[:at_once]), *begun[at_once:]] == order
    reported = [failure.models for failure in raised.value.result.failures]
    assert reported == [("small",), ("large",), ("middle",)], "in the order of the configuration"


def test_two_builds_at_once_compile_a_job_once(
    run: Run, log: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = threading.Event()
    monkeypatch.setattr(Heartbeat, "due", lambda self: True)

    def compiles(line: str) -> None:
        log.append(line)
        if line.endswith(": compile ..."):
            assert waits.wait(60)

    def waiting(line: str) -> None:
        if line == "a -> cpu: waits for another job or build, which compiles the same":
            waits.set()

    workers = [Workers(120, compiles, progress=waiting) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda own: run(CPU, workers=own), workers))
    assert len(steps(log, "compile")) == 1
    assert sorted(result.built[0].cached for result in results) == [False, True]


def test_a_cache_that_is_removed_in_the_middle_costs_nothing_but_itself(
    run: Run, log: list[str], tmp_path: Path
) -> None:
    def remove(line: str) -> None:
        log.append(line)
        if line.endswith((": compile ...", ": validate ...")):
            shutil.rmtree(tmp_path / "cache", ignore_errors=True)

    (built,) = run(CPU, workers=Workers(120, remove)).built
    assert record_files(built.folder) == built.record.files
    assert built.validations["a"].status is ValidationStatus.RAN
    (again,) = run(CPU, workers=Workers(120)).built
    assert not again.cached


SHARED = """
targets.qnn.provider = "qnn"
targets.qnn.chip = "snapdragon-x-elite"
[[models]]
path = "models/prefill.onnx"
share-weights = "lm"
[[models]]
path = "models/decode.onnx"
share-weights = "lm"
"""


@pytest.fixture
def lengths(project: Path) -> None:
    for name, length in (("prefill", 64), ("decode", 1)):
        save(transformer(length), project / "models" / f"{name}.onnx")


@needs_qnn
@pytest.mark.usefixtures("lengths")
def test_a_group_is_one_artifact_and_its_members_are_run_alone(run: Run, log: list[str]) -> None:
    (first,), (second,) = run(SHARED).built, run(SHARED).built
    assert (first.cached, second.cached) == (False, True)
    assert first.validations == second.validations
    assert len(first.record.files) == 3
    for name in ("prefill", "decode"):
        validation = first.validations[name]
        assert (validation.status, len(validation.agreements)) == (ValidationStatus.RAN_ALONE, 1)
        assert validation.reason == (
            "QNNExecutionProvider cannot open contexts that share weights on this machine"
        )
    each = r"8/8 nodes, agrees on synthetic inputs, compiled alone, simulator \(\d+ dB\), "
    line = (
        rf"lm \(prefill \+ decode\) -> qnn \(qnn\): compiled, prefill {each}decode {each}\d+\.\d s"
    )
    assert re.fullmatch(line, log[0])
    # That is stored like any other validation, but is no run of the artifact itself.
    (third,) = run(SHARED, {"HATCH_EPCONTEXT_FROM_CACHE": "all"}).built
    assert third.validations == first.validations
    with pytest.raises(BuildError, match="EPC404"):
        run(SHARED.replace('"lm"', '"lm"\nvalidate = "require"'))


SHAPES = """
[targets.npu]
provider = "qnn"
chip = "snapdragon-x-elite"
[targets.cpu]
provider = "cpu"
[[models]]
name = "net"
path = "models/a.onnx"
shapes = [{ x = [1, 1, 8, 8] }, { x = [4, 1, 8, 8] }]
"""


@needs_qnn
def test_each_shape_of_a_model_is_compiled_and_validated(run: Run, log: list[str]) -> None:
    result = run(SHAPES)
    assert [built.job.location for built in result.built] == [
        "net.1x1x8x8 -> npu",
        "net.4x1x8x8 -> npu",
        "net -> cpu",
    ]
    for built in result.built:
        (validation,) = built.validations.values()
        assert (validation.status, len(validation.agreements)) == (ValidationStatus.RAN, 1)
    shapes = {built.job.name: built.record.contexts[0].inputs[0].shape for built in result.built}
    assert shapes == {
        "net.1x1x8x8": (1, 1, 8, 8),
        "net.4x1x8x8": (4, 1, 8, 8),
        "net": ("batch", 1, 8, 8),
    }
    assert {source.model.name: source.facts.inputs[0].shape for source in result.sources} == shapes
    assert sorted(result.built[0].record.files) == [
        "net.1x1x8x8_ctx.onnx",
        "net.1x1x8x8_ctx_qnn.bin",
    ]
    assert log[1].startswith("net.4x1x8x8 -> npu (qnn): ok, 4/4 nodes, ")
    # A new shape compiles only itself.
    again = run(SHAPES.replace(" }]", " }, { x = [2, 1, 8, 8] }]"))
    assert [built.cached for built in again.built] == [True, True, False, True]


@needs_qnn
def test_the_shapes_of_a_model_share_weights_only_as_a_group(run: Run) -> None:
    toml = SHAPES.replace('name = "net"', 'name = "net"\nshare-weights = "nets"')
    together, alone = run(toml).built
    assert together.job.location == "nets (net.1x1x8x8 + net.4x1x8x8) -> npu"
    assert alone.job.location == "net -> cpu"
    statuses = {name: validation.status for name, validation in together.validations.items()}
    assert statuses == dict.fromkeys(("net.1x1x8x8", "net.4x1x8x8"), ValidationStatus.RAN_ALONE)
    assert sorted(together.record.files) == [
        "net.1x1x8x8_ctx.onnx",
        "net.1x1x8x8_ctx_qnn.bin",
        "net.4x1x8x8_ctx.onnx",
    ]


def test_open_shapes_are_run_with_the_sizes_of_the_dummy_inputs(
    run: Run, project: Path, tmp_path: Path
) -> None:
    toml = CPU.replace('"models/a.onnx"', '{ path = "models/a.onnx", dims = { batch = 3 } }')
    (built,) = run(toml).built
    assert built.record.contexts[0].inputs[0].shape == ("batch", 1, 8, 8)
    session = onnxruntime.InferenceSession(built.folder / "a_optimized.onnx")
    x = np.ones((7, 1, 8, 8), np.float32)
    assert session.run(None, {"x": x})[0].shape == (7, 10)
    np.savez(project / "x.npz", x=np.ones((2, 1, 8, 8), np.float32))
    in_file = toml.replace("dims", 'validate = { inputs = "x.npz" }, dims')
    assert run(in_file).built[0].cached, "a file has its own sizes"
    (fixed,) = run(f"{toml}targets.cpu.static-shapes = true\n").built
    assert fixed.record.contexts[0].inputs[0].shape == (3, 1, 8, 8)


CHIPS = QNN.replace('"snapdragon-x-elite"', '["snapdragon-x-elite", "snapdragon-8-gen-3"]')


@needs_qnn
def test_one_context_for_several_chips_is_run_for_each_chip_alone(run: Run, log: list[str]) -> None:
    (first,), (second,) = run(CHIPS).built, run(CHIPS).built
    assert (first.cached, second.cached) == (False, True)
    assert first.validations == second.validations
    # The contexts for one chip each are only for validation.
    assert sorted(first.record.files) == ["a_ctx.onnx", "a_ctx_qnn.bin"]
    (context,) = first.record.contexts
    assert context.compatibility.split(":")[4:6] == ["73,75", "60,57"]
    validation = first.validations["a"]
    assert (validation.status, len(validation.agreements)) == (ValidationStatus.RAN_ALONE, 1)
    reason = "QNNExecutionProvider cannot open contexts for several chips on this machine"
    assert validation.reason == reason
    assert first.validated["a"].load is None
    assert "compiled, 4/4 nodes, agrees on synthetic inputs, compiled alone, simulator (" in log[0]
    (cached,) = run(CHIPS, {"HATCH_EPCONTEXT_FROM_CACHE": "qnn"}).built
    assert cached.validations == first.validations


@needs_qnn
def test_each_of_several_chips_is_an_artifact_of_its_own(run: Run) -> None:
    run(CHIPS)
    for keys in ('chip = "snapdragon-x-elite"', "provider-options = { soc_model = 57 }"):
        (built,) = run(QNN.replace('chip = "snapdragon-x-elite"', keys)).built
        assert built.cached
        assert built.validations["a"].status is ValidationStatus.RAN


STRICT = "validate = { tolerance = { rtol = 0, atol = 0 } }"
REQUIRED = 'validate = "require"'


@needs_qnn
@pytest.mark.usefixtures("lengths")
@pytest.mark.parametrize(
    ("toml", "error"),
    [
        (SHARED.replace('"lm"', f'"lm"\n{STRICT}'), "-> qnn: validation: EPC401"),
        (SHARED.replace('"lm"', f'"lm"\n{REQUIRED}'), "EPC404"),
        (
            CHIPS.replace("dims =", f"{STRICT}, dims ="),
            r"a -> qnn \(snapdragon-x-elite\): validation: EPC401",
        ),
        (CHIPS.replace("dims =", f"{REQUIRED}, dims ="), "EPC404"),
        (
            SHARED.replace('"snapdragon-x-elite"', '["snapdragon-x-elite", "qcs9100"]'),
            Kind.NOT_SHARED.value,
        ),
    ],
    ids=["group differs", "group runs", "chips differ", "chips run", "group for chips"],
)
def test_what_is_wrong_in_a_group_or_for_several_chips_fails_the_job(
    run: Run, toml: str, error: str
) -> None:
    with pytest.raises(BuildError, match=error) as raised:
        run(toml)
    assert len({problem.kind for problem in raised.value.problems}) == 1


UNKNOWN_EP = """
targets.plugin.provider = "plugin"
targets.plugin.library = "onnxruntime_qnn"
targets.plugin.ep-name = "QNNExecutionProvider"
targets.plugin.device = "any"
targets.plugin.provider-options = { backend_type = "htp", soc_model = 60 }
"""


@needs_qnn
@pytest.mark.usefixtures("lengths")
@pytest.mark.parametrize(
    ("mode", "status"),
    [
        ("false", ValidationStatus.NOT_VALIDATED),
        ('"structure"', ValidationStatus.STRUCTURE),
        ('"auto"', ValidationStatus.STRUCTURE),
    ],
)
def test_nothing_is_compiled_alone_that_is_not_run(
    run: Run,
    mode: str,
    status: ValidationStatus,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if mode == '"auto"':
        reason = "this machine cannot"
        monkeypatch.setattr(job_module, "reason_not_to_run", lambda *_: reason)
    group = SHARED.replace('"lm"', f'"lm"\nvalidate = {mode}')
    for toml in (group, CHIPS.replace("dims =", f"validate = {mode}, dims =")):
        (built,) = run(toml).built
        assert {v.status for v in built.validations.values()} == {status}
    kinds = [entry.kind for entry in Store(tmp_path / "cache").entries()]
    assert kinds.count("artifacts") == 2


@needs_qnn
@pytest.mark.usefixtures("lengths")
def test_a_group_of_an_ep_that_opens_shared_contexts_is_opened_together(run: Run) -> None:
    toml = UNKNOWN_EP + SHARED[SHARED.index("[[models]]") :]
    # An unknown plugin EP is expected to open them. QNN's simulator refuses, or crashes: both happen.
    with pytest.raises(BuildError, match=r"QNN_COMMON_ERROR_NOT_SUPPORTED|SIGSEGV") as raised:
        run(toml)
    assert raised.value.problems[0].where() == "lm (prefill + decode) -> plugin: validation"
    (built,) = run(toml.replace('"lm"', '"lm"\nvalidate = "structure"')).built
    assert {v.status for v in built.validations.values()} == {ValidationStatus.STRUCTURE}
    assert len(built.record.files) == 3
