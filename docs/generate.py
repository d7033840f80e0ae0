"""Writes what is generated from the package itself: ``python docs/generate.py``.

These are the pages about the configuration, the providers, the command line and the Python API, the recipes
that a build tries and what EPs compute wrong, and the JSON schema of the configuration,
which is inside the package.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard, get_type_hints

import click

from hatch_epcontext import api as python_api
from hatch_epcontext.cli.app import app
from hatch_epcontext.config import json_schema, tables
from hatch_epcontext.config.environ import PREFIX, VARIABLES
from hatch_epcontext.graph.number_format import Fault
from hatch_epcontext.graph.rewrites import REWRITES, UNROLLS
from hatch_epcontext.graph.rewrites.indexing import REASONS
from hatch_epcontext.jobs.stages import STAGES, Stage
from hatch_epcontext.providers import PROVIDERS, Option, Provider
from hatch_epcontext.serialize import describe_type
from hatch_epcontext.text import pairs, show, toml_key

FOLDER = Path(__file__).parent


def _row(*cells: str) -> str:
    return f"|{'|'.join(f' {cell} ' if cell else ' ' for cell in cells)}|"


def _table(heading: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """The lines of a table."""
    names = list(heading)
    yield _row(*names)
    yield _row(*("---" for _ in names))
    for row in rows:
        yield _row(*row)


def _linked(text: str) -> str:
    """``text`` with links instead of the paths of pages."""
    return re.sub(r"`docs/([a-z-]+\.md)(#[a-z-]+)?`", r"[\1](\1\2)", text)


PROVIDERS_INTRODUCTION = """\
# Execution providers

<!-- Generated from hatch_epcontext.providers by docs/generate.py. -->

The `provider` of a target is a name of this page, or ONNX Runtime's name of the EP, in any case.

| system | what was tested |
| --- | --- |
| Linux, x86-64 | All tests run there: QNN on its simulator, OpenVINO and ONNX Runtime on the CPU. |
| Windows, x86-64 | Only under Wine: the example is built and opened, with QNN's simulator. |
| Linux and Windows on Arm | Not tested. Contexts for their chips are compiled elsewhere. |
| macOS | Not tested. QNN has no packages for it. |

## Options

EPs silently accept unknown options, those of older releases, and impossible values. For a build these are
errors. If your EP is newer than this page, set `allow-unknown-options = true` for the target.

Write `true`, `false`, numbers, lists and tables as in TOML: a build turns them into strings for the EP.
`provider-options` has all options, and `load-options` those for loading only. [ONNX Runtime's
documentation](https://onnxruntime.ai/docs/execution-providers/) of the EP says what each option means.

The path of a *file* is relative to the project's folder, or absolute. If its contents change, the model is
compiled again. If the option counts for loading too, the file is shipped, and must be in the project.

## Overview
"""

HARDWARE = """
Who has the hardware can change *not verified on hardware*. Build the wheel of the example project, or another
one, on any machine, and validate it where the hardware is:

```sh
epcontext validate --package digits_app-1.0.0-py3-none-any.whl --report x-elite.json
```

Then [send the report](https://github.com/hatch-epcontext/hatch-epcontext/issues/new?template=board.yml).
[On a board](validation.md#on-a-board) says what it contains, and how your project uses it.
"""

DEFAULTS = """
## Defaults

The first `device` is the default. `static-shapes` changes whether shapes are open or fixed, and
`validate.tolerance` the [limits](validation.md#the-comparison). *Also* are keys that not every provider has.
"""

CHIPS = """
## Chips

A name of this table can be the `chip` of a target; a list of names is for one context for all of them.
*From* is who publishes its numbers (the EP in `kSocInfos`). *Compiled* are the small models that were tested
without it: *all* are floats and quantized ones; *quantized* means that the EP refuses floats.
"""

_SYSTEMS = {"linux": "Linux", "win32": "Windows", "darwin": "macOS"}
_SCOPES = {
    "compile": "Options for compiling",
    "both": "Options for compiling and loading",
    "load": "Options for loading",
}
_PRODUCTS = {"context": "EP contexts", "optimized": "optimized graphs"}


def providers() -> str:
    """The page about all providers."""
    columns = ("provider", "what it makes", "tested", "on hardware")
    overview = _table(columns, map(_overview, PROVIDERS.values()))
    keys = _table(
        ("provider", "`device`", "[shapes](shapes.md)", "`snr`, `cosine`", "also"),
        map(_keys_of, PROVIDERS.values()),
    )
    sections = (line for each in PROVIDERS.values() for line in _section(each))
    chips = _table(("`chip`", "numbers", "from", "compiled"), _chips())
    return "\n".join(
        [PROVIDERS_INTRODUCTION, *overview, HARDWARE, DEFAULTS, *keys, CHIPS, *chips, "", *sections]
    )


def _chips() -> Iterator[tuple[str, ...]]:
    for provider in PROVIDERS.values():
        for name, chip in provider.chips.items():
            if chip.source:
                yield f"`{name}`", pairs(chip.facts), chip.source, chip.compiled


def _overview(provider: Provider) -> tuple[str, ...]:
    return (
        f"[`{provider.name}`](#{provider.name})",
        f"{_PRODUCTS[provider.product]} for {provider.title}",
        provider.verified,
        provider.hardware,
    )


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _section(provider: Provider) -> Iterator[str]:
    yield f"## {provider.name}\n"
    yield from (f"- {name}: {value}" for name, value in _facts(provider))
    yield from (f"- {note}" for note in provider.notes)
    yield ""
    for scope, heading in _SCOPES.items():
        alike: dict[str, list[str]] = {}
        for name, option in provider.options.items():
            if option.scope == scope:
                alike.setdefault(_values(option), []).append(name)
        if alike:
            yield f"{heading}:\n"
            yield from (f"- {_code(names)}: {values}" for values, names in alike.items())
            yield ""
    if provider.sources:
        yield f"Options from: {', '.join(provider.sources)}.\n"


def _facts(provider: Provider) -> Iterator[tuple[str, str]]:
    if provider.ep:
        yield "ONNX Runtime's name", _code([provider.ep])
    yield "Runs on", _code(provider.distributions)
    if provider.requirements:
        python = f" (Python {'.'.join(map(str, provider.python))} or newer)"
        yield "Installs", _code(provider.requirements) + python
    if provider.systems:
        yield "Systems", ", ".join(_SYSTEMS[name] for name in provider.systems)
    if provider.needs:
        yield "Needs", provider.needs


def _keys_of(provider: Provider) -> tuple[str, ...]:
    others = {
        "share-weights": provider.shares_weights,
        "profiles": bool(provider.profiles),
    }
    limits = provider.tolerance
    return (
        f"`{provider.name}`",
        _code(provider.devices),
        _shapes(provider),
        f"{limits.snr:g}, {limits.cosine:g}",
        _code(name for name, has in others.items() if has),
    )


def _shapes(provider: Provider) -> str:
    if provider.static_shapes:
        return "always fixed"
    if not provider.open_shapes_on:
        return "fixed"
    if set(provider.open_shapes_on) == set(provider.devices):
        return "open"
    return f"open on {_code(provider.open_shapes_on)}"


def _values(option: Option) -> str:
    """What an option takes."""
    kinds = {
        "bool": "true or false",
        "int": f"number from {option.minimum}" if option.minimum else "number",
        "json": "table",
        "text": "string",
    }
    return ", ".join(option.choices) or kinds.get(option.kind, option.kind)


def _wrong_results() -> str:
    """The section about the number formats and faults of EPs."""
    lines = []
    for path in sorted((FOLDER.parent / "benchmarks").glob("faults-*.json")):
        provider = PROVIDERS[path.stem.partition("-")[2]]
        found = json.loads(path.read_text(encoding="utf-8"))
        format_ = provider.number_format(provider.devices[0], found["options"])
        assert format_ is not None
        statuses = Counter(case.get("status") for case in found["cases"].values())
        options = ", ".join(f"{name} {value}" for name, value in found["options"].items())
        lines.append(
            f"### {provider.name}\n\nSeen with {found['seen']} ({options}). Of "
            f"{len(found['cases'])} graphs it computes {statuses['wrong']} wrong, and refuses "
            f"{statuses['refused']}: `benchmarks/{path.name}` has all of them.\n"
        )
        lines.append(
            f"It computes in {format_.name}. Results end at {format_.largest:g}, and those of "
            f"{_code(sorted(format_.sums))} at {format_.largest_of_sums:g}. Kernels that are less "
            f"exact than the format: {_code(sorted(format_.inexact))}.\n"
        )
        headings = ("operator", "where", "what it does", "rewrite")
        lines += _table(headings, _faults(format_.faults))
    return "\n".join(lines)


_FEW = 8
"""The most operators that a row lists."""


def _rewrites() -> str:
    """The table of the rewrites, and of what they are for."""
    rows = []
    for rewrite in (*REWRITES, *UNROLLS):
        operators = rewrite.operators
        named = sorted(operators) if isinstance(operators, frozenset) else []
        shown = _code(named) if 0 < len(named) <= _FEW else "many"
        doc = (inspect.getdoc(rewrite.rule) or "").split("\n\n")[0]
        text = " ".join(doc.replace("``", "`").split()).split(" Raises ")[0].removesuffix(".")
        rows.append((f"`{rewrite.name}`", shown, text))
    return "\n".join(_table(("rewrite", "of", "by"), rows))


_SEVERAL = "several"
"""What the tables of ``benchmarks.operators`` call graphs of several nodes."""


def _operators() -> str:
    """The section about ONNX's own tests: a row for each operator, for the plain EP and a build."""
    lines = []
    for path in sorted((FOLDER.parent / "benchmarks").glob("operators-*.json")):
        rows = json.loads(path.read_text(encoding="utf-8"))
        sums = Counter[str]()
        for row in rows.values():
            sums.update({"tests": row["tests"], "plain": row["plain"], **row["ends"]})
        lines.append(
            f"### {path.stem.partition('-')[2]}\n\nOf {sums['tests']:,} tests the plain EP compiles "
            f"{sums['plain']} whole and right, a build {sums['right']:,}; the results of "
            f"{sums['folds']} more are constants.\n"
        )
        named = (
            "operator",
            "tests",
            "the plain EP",
            "a build",
            "constant",
            "through",
            "why not all",
        )
        lines += _table(named, (_operator(name, row) for name, row in rows.items()))
    return "\n".join(lines)


def _operator(name: str, row: Mapping[str, Any]) -> tuple[str, ...]:
    ends, counts = row["ends"], (row["tests"], row["plain"])
    done = [str(count or "") for count in (*counts, ends.get("right"), ends.get("folds"))]
    rewrites = Counter(row["rewrites"]).most_common(3)
    reasons = [] if name == _SEVERAL else [REASONS[name]] if name in REASONS else row["reasons"]
    why = "; ".join(reasons) if ends.get("right", 0) + ends.get("folds", 0) < row["tests"] else ""
    shown = f"`{name}`" if name != _SEVERAL else "(several)"
    return shown, *done, _code([rewrite for rewrite, _ in rewrites]), why.replace("|", r"\|")


def _architectures() -> str:
    """The table of language models with random weights."""
    path = FOLDER.parent / "benchmarks" / "architectures.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    all_ends = found["architectures"]
    rows = ((f"`{name}`", *map(_end, ends.values())) for name, ends in all_ends.items())
    headings = ("`model.type`", *next(iter(all_ends.values())))
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return "\n".join((*_table(headings, rows), "", f"With {versions}."))


def _end(end: Mapping[str, Any]) -> str:
    """How the build of one architecture for one target ended."""
    if "builder" in end:
        return "no folder"
    if id_ := end.get("refused"):
        return f"[{id_}](errors.md#{id_.lower()})"
    nodes = ", ".join(dict.fromkeys(end["nodes"]))
    answers = f", {end['answers']} dB" if "answers" in end else ""
    return f"{nodes}{answers}" if nodes else "shipped"


def _faults(faults: Iterable[Fault]) -> Iterator[tuple[str, ...]]:
    """A row for the faults of an operator with one description; operators with equal rows share one."""
    nodes: dict[tuple[str, str, str | None], list[str]] = {}
    for fault in faults:
        key = fault.operator, fault.text.replace("|", "\\|"), fault.rewrite
        nodes.setdefault(key, []).append(_where(fault))
    alike: dict[tuple[str, str, str], list[str]] = {}
    for (operator, text, rewrite), where in nodes.items():
        joined = "; or ".join(filter(None, dict.fromkeys(where))).replace("; or exponent", " or")
        alike.setdefault((joined, text, f"`{rewrite}`" if rewrite else ""), []).append(operator)
    for cells, operators in alike.items():
        yield (_code(operators), *cells)


def _where(fault: Fault) -> str:
    where = [f"exponent {fault.exponent:.4g}"] if fault.exponent is not None else []
    if fault.computed and fault.operand:
        where.append("where it is no single stored number")
    if fault.behind:
        where.append(f"directly after {_code(sorted(fault.behind))}")
    for name, values in fault.attributes:
        allowed = [f"`{value}`" if value else "missing" for value in sorted(values, reverse=True)]
        where.append(f"`{name}` {' or '.join(allowed)}")
    return ", ".join(where)


CONFIGURATION = """\
# Configuration

<!-- Generated from hatch_epcontext.config.tables by docs/generate.py. -->

A build reports all unknown keys, wrong types and impossible values at once, each with an [id](errors.md).
Editors and `validate-pyproject` use the JSON schema that `epcontext schema` prints.
It is in draft 7, so that the schema of `pyproject.toml`, such as SchemaStore's, can refer to it as
`tool.epcontext`.

Hatch's own table switches the hook on, and can be empty: `[tool.hatch.build.hooks.epcontext]`, or for
wheels only `[tool.hatch.build.targets.wheel.hooks.epcontext]`.

Most projects need only these keys: of a target `provider`, [`chip`](providers.md#chips),
[`platforms`](targets.md#the-wheels-tag) and [`min-coverage`](what-compiles.md); of a model `path`,
[`dims` and `shapes`](shapes.md), [`constants`](shapes.md#inputs-that-never-change), [`targets`](targets.md)
and [`validate.inputs`](validation.md#your-own-inputs).
"""

_ABOUT: Mapping[str, str] = {
    "[tool.epcontext.targets.<name>]": """\
A target. A model can have other values for it: each key is also allowed in
`[tool.epcontext.models.targets.<name>]`, see [targets](targets.md#a-target-of-a-model).""",
    "cut": """\
The [part of a model](shapes.md#a-part-of-a-model) that is kept. At least one of the keys is needed.""",
    "validate": """\
How a model is [validated](validation.md). Only the mode can replace the table:
`validate = "require"`.""",
    "tolerance": """\
The [limits](validation.md#the-comparison) of `validate.tolerance`. A limit of an output wins over that of all
outputs.""",
    "quantize": """\
How a model of floats is [quantized](shapes.md#quantize-a-model). `quantize = false` for a target of a
model switches it off.""",
    "profiles": """\
Shapes of one input, such as
`profiles = [{ image = { min = [1, 3, 8, 8], opt = [4, 3, 8, 8], max = [8, 3, 8, 8] } }]`.""",
}

_ENVIRONMENT = """\
A build prints each variable that is set. For each key of `build` and `wheel` there is one that wins over it:
{of_keys}. An empty value switches off {empty}. Lists have commas between their items, and `1` and `0` stand
for true and false."""


def configuration() -> str:
    """The page about all keys and variables."""
    shown: Mapping[str, type[Any]] = {
        "[tool.epcontext]": tables.RootTable,
        "[tool.epcontext.build]": tables.BuildTable,
        "[tool.epcontext.wheel]": tables.WheelTable,
        "[tool.epcontext.targets.<name>]": tables.TargetTable,
        "[[tool.epcontext.models]]": tables.ModelTable,
        "cut": tables.CutTable,
        "validate": tables.ValidateTable,
        "tolerance": tables.ToleranceTable,
        "quantize": tables.QuantizeTable,
        "profiles": tables.ProfileTable,
    }
    lines = [CONFIGURATION]
    for heading, table in shown.items():
        lines.append(f"## `{heading}`\n")
        if about := _ABOUT.get(heading):
            lines.append(about + "\n")
        lines += [*_table(("key", "takes", "if missing", "meaning"), _keys(table)), ""]
    of_keys = {name: each for name, each in VARIABLES.items() if each.table}
    empty = (name for name, each in of_keys.items() if each.is_secret)
    about = _ENVIRONMENT.format(
        of_keys=_code(PREFIX + name for name in of_keys),
        empty=_code(PREFIX + name for name in empty),
    )
    lines.append(f"## Environment variables\n\n{about}\n")
    variables = (
        (f"`{PREFIX}{name}`", _takes(variable.type), variable.doc)
        for name, variable in VARIABLES.items()
        if not variable.table
    )
    lines += [*_table(("variable", "takes", "meaning"), variables), ""]
    return "\n".join(lines)


def _keys(table: type[Any]) -> Iterator[tuple[str, ...]]:
    hints = get_type_hints(table)
    for field in dataclasses.fields(table):
        doc = _linked(tables.declaration_of(field).doc)
        yield f"`{toml_key(field.name)}`", _takes(hints[field.name]), _if_missing(field), doc


def _takes(type_: Any) -> str:
    text = re.sub(r"\ba (?:whole )?(?=\w)", "", describe_type(type_))
    *others, last = text.replace("|", "\\|").split(" or ")
    return f"{', '.join(others)} or {last}" if others else last


def _if_missing(field: dataclasses.Field[Any]) -> str:
    if tables.declaration_of(field).required:
        return "required"
    if text := json_schema.when_missing(field):
        return text
    if field.default in (None, dataclasses.MISSING, (), ""):
        return ""
    return f"`{show(field.default)}`"


COMMANDS = """\
# Command line

<!-- Generated from the commands' help by docs/generate.py. -->

`pip install "hatch-epcontext[cli]"` installs the commands. `schema`, `cache` (for `new-key` with the extra
`remote-cache`), and `inspect` of a wheel or a model package need nothing else. All others need a compiler
too, from one of the extras `qnn`, `openvino`, `tensorrt-rtx`, `gpu` and `cpu`: `"hatch-epcontext[cli,qnn]"`.

{commands}

The exit code is 0 for success, 1 if something failed, and 2 for wrong usage or an invalid configuration.

Completion in the shell: `eval "$(_EPCONTEXT_COMPLETE=bash_source epcontext)"` in `~/.bashrc`, and
`zsh_source` in `~/.zshrc`.

## Flags of several commands

`--set KEY=VALUE` sets any [key](configuration.md) of a target, a model or the build, in TOML, such as
`--set min-coverage=0.9` and `--set build.timeout=600`. Text needs no quotes. `-O a=b` is short for
`--set provider-options.a=b`, and so are `--dim`, `--shape`, `--constant`, `--inputs`, `--device` and
`--library` for their keys. Of several values of a key the last one counts.

```text
{flags}
```
"""

_WIDTH = 100
_OF_SEVERAL = 2
"""A flag that so many commands have in the same words is described once."""


def commands() -> str:
    """The page about all commands, with their own help."""
    rows = (
        (f"[`epcontext {name}`](#epcontext-{name})", each.get_short_help_str(_WIDTH))
        for name, each in app.commands.items()
    )
    shared = _shared_options()
    formatter = click.HelpFormatter(width=_WIDTH)
    formatter.write_dl([_record(each) for each in shared.values()])
    introduction = COMMANDS.replace(
        "{commands}", "\n".join(_table(("command", "what it does"), rows))
    ).replace("{flags}", formatter.getvalue().rstrip())
    help_texts = (_help(each, f"epcontext {name}", shared) for name, each in app.commands.items())
    return "\n".join([introduction, *itertools.chain.from_iterable(help_texts)])


def _context(command: click.Command, name: str) -> click.Context:
    return click.Context(command, info_name=name, terminal_width=_WIDTH, max_content_width=_WIDTH)


def _shared_options() -> dict[tuple[str, ...], click.Option]:
    """The flags that several commands have with the same help, by their names."""
    found: dict[tuple[tuple[str, ...], str | None], list[click.Option]] = {}
    for command in app.commands.values():
        for each in filter(_is_option, command.params):
            found.setdefault((tuple(each.opts), each.help), []).append(each)
    several = [same[0] for same in found.values() if len(same) >= _OF_SEVERAL]
    names = Counter(tuple(each.opts) for each in several)
    return {tuple(each.opts): each for each in several if names[tuple(each.opts)] == 1}


def _record(option: click.Option) -> tuple[str, str]:
    """A flag and its help, whatever a single command requires."""
    each = copy.copy(option)
    each.required = False
    record = each.get_help_record(_context(app, "epcontext"))
    assert record is not None
    return record


def _is_option(param: click.Parameter) -> TypeGuard[click.Option]:
    return isinstance(param, click.Option)


def _help(
    command: click.Command, name: str, shared: Mapping[tuple[str, ...], click.Option]
) -> Iterator[str]:
    own = copy.copy(command)
    alike = {
        tuple(each.opts)
        for each in filter(_is_option, command.params)
        if (known := shared.get(tuple(each.opts))) and known.help == each.help
    }
    own.params = [each for each in command.params if tuple(each.opts) not in alike]
    own.add_help_option = False
    if own.help:
        # The list of commands has its first line.
        own.help = own.help.partition("\n\n")[2] or own.help
    yield f"## {name}\n\n```text\n{own.get_help(_context(own, name))}\n```\n"
    if alike:
        yield f"Also: {_code(names[-1] for names in shared if names in alike)}.\n"
    if isinstance(command, click.Group):
        for each, found in command.commands.items():
            # The list above has all there is about the others.
            if found.params or found.get_short_help_str(_WIDTH) != found.help:
                yield from _help(found, f"{name} {each}", shared)


API = """\
# Python API

<!-- Generated from hatch_epcontext.api by docs/generate.py. -->

`hatch_epcontext.api` compiles and validates models from Python. No other module is stable.
"""


def api() -> str:
    """The page about the functions, results and errors that programs import."""
    members = [getattr(python_api, name) for name in python_api.__all__]
    functions = [each for each in members if inspect.isfunction(each)]
    raised = [each for each in members if _is_error(each)]
    results = [each for each in members if each not in functions and each not in raised]
    about = "\n".join(_markdown(inspect.getdoc(python_api) or "").splitlines()[2:])
    lines = [API, f"{about}\n"]
    for function in functions:
        lines.append(f"## {function.__name__}\n\n```python\n{_signature(function)}\n```\n")
        lines.append(f"{_markdown(inspect.getdoc(function) or '')}\n")
    names = _code(result.__name__ for result in results)
    lines.append(f"## Results\n\nEditors and `help(Report)` show what each has: {names}.\n")
    lines.append("## Exceptions\n")
    rows = ((f"`{each.__name__}`", _bases(each), _first_line(each)) for each in raised)
    lines += [*_table(("exception", "is a", "meaning"), rows), ""]
    return "\n".join(lines)


def _is_error(member: Any) -> bool:
    return inspect.isclass(member) and issubclass(member, Exception)


def _bases(error: type[Any]) -> str:
    return _code(base.__name__ for base in error.__bases__)


def _first_line(member: Any) -> str:
    return _markdown(inspect.getdoc(member) or "").splitlines()[0]


def _signature(function: Any) -> str:
    """The signature of a function, with one parameter in each line."""
    lines, keyword_only = [], False
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not keyword_only:
            lines.append("    *,")
            keyword_only = True
        default = (
            "" if parameter.default is parameter.empty else f" = {_default(parameter.default)}"
        )
        lines.append(f"    {parameter.name}: {parameter.annotation}{default},")
    returns = signature.return_annotation
    return "\n".join([f"{function.__name__}(", *lines, f") -> {returns}"])


def _default(value: Any) -> str:
    return show(value) if isinstance(value, str) else repr(value)


def _markdown(docstring: str) -> str:
    """A docstring as Markdown: names in double backticks, descriptions of parameters, and examples."""
    paragraphs = []
    for paragraph in docstring.split("\n\n"):
        if paragraph.startswith(">>> "):
            paragraphs.append(f"```python\n{_example(paragraph)}\n```")
        else:
            # A line that begins with the names of parameters begins the description of these.
            text = re.sub(r"\n(?=``\w+``(, ``\w+``)*: )", "\n- ", f"\n{paragraph}")
            lines = (line if line.startswith("- ") else f"  {line}" for line in text.split("\n"))
            paragraphs.append("\n".join(lines if "\n- " in text else text.split("\n")).strip())
    return _linked(re.sub(r"``([^`\n]+)``", r"`\1`", "\n\n".join(paragraphs)))


def _example(paragraph: str) -> str:
    """A doctest as code in ruff's format, with its output in comments."""
    lines: list[str] = []
    for line in paragraph.splitlines():
        code = line[4:].split("  # doctest")[0]
        if line.startswith("... "):
            lines[-1] += f"\n{code}"
        else:
            lines.append(code if line.startswith(">>> ") else f"# {line}")
    return "\n".join(map(_on_one_line, lines))


def _on_one_line(statement: str) -> str:
    """``statement`` without its line breaks, if it fits, and no trailing comma keeps them."""
    joined = re.sub(r"\(\n +", "(", statement).replace("\n)", ")")
    return joined if "\n" not in joined and ",)" not in joined and len(joined) <= 100 else statement


def what_compiles() -> str:
    """The page about what an EP can compile, with the stages of a search, and the faults of EPs."""
    rows, before = list[tuple[str, str]](), list[Stage]()
    for stage in STAGES:
        is_same = before and before[-1].applies is stage.applies
        again = " (again)" if any(stage.propose is other.propose for other in before) else ""
        applies = "Always" if stage.applies is None else _doc(stage.applies)
        rows.append(("" if is_same else applies, _doc(stage.propose) + again))
        before.append(stage)
    table = "\n".join(_table(("if", "recipe"), rows))
    return _filled(
        "what-compiles",
        {
            "stages": table,
            "rewrites": _rewrites(),
            "operators": _operators(),
            "faults": _wrong_results(),
        },
    )


def language_models() -> str:
    """The page about language models, with the table of what was built."""
    return _filled("language-models", {"architectures": _architectures()})


def _filled(name: str, parts: Mapping[str, str]) -> str:
    """The page ``name`` with the generated ``parts`` at their comments."""
    page = (FOLDER / f"{name}.md").read_text(encoding="utf-8")
    for part, text in parts.items():
        page = re.sub(
            rf"(<!-- {part}: .*?-->\n).*?(\n<!-- end -->)",
            lambda match, text=text: f"{match[1]}\n{text}\n{match[2]}",  # type: ignore[misc]
            page,
            flags=re.DOTALL,
        )
    return page


def _doc(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").rstrip(".")


PAGES = {
    "api": api,
    "providers": providers,
    "configuration": configuration,
    "commands": commands,
    "what-compiles": what_compiles,
    "language-models": language_models,
}
"""The generated pages, by their names without ``.md``."""


def main() -> None:
    """Write all pages and the schema."""
    for name, page in PAGES.items():
        (FOLDER / f"{name}.md").write_text(page(), encoding="utf-8", newline="\n")
    json_schema.FILE.write_text(json_schema.text(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
