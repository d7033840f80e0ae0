"""Writes what is made from the package itself: ``python docs/generate.py``.

That is the pages about the configuration, the providers and the command line, and the JSON schema of the
configuration inside the package.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

import click

from hatch_epcontext import schema, tables
from hatch_epcontext.cli.app import app
from hatch_epcontext.providers import PROVIDERS, Option, Provider
from hatch_epcontext.structure import described, show, toml_key

FOLDER = Path(__file__).parent

INTRODUCTION = """\
# Execution providers

<!-- Made from the registry by docs/generate.py. -->

What is known of each execution provider (EP), and what was tried with it. A provider is written as its name
here, as ONNX Runtime's name of the EP, or as another spelling of either, in any case.

EPs accept unknown options and impossible values in silence. Here they are errors, with a suggestion. If an
EP is newer than this page, `allow-unknown-options = true` in the target's table takes its options as they
are. `true`, `false` and numbers become the strings that the EP wants, and so do tables where an option
takes JSON.

An option counts when the model is compiled, when a session is opened, or both. All may stand in
`provider-options`; what only counts when a session is opened may also stand in `load-options`, and what
does not is not shipped. An address in the app's memory, such as that of a stream, can only be given by the
app: `load(name, provider_options={...})`.
"""

TRIED = """\
| provider | what it makes | installs | tried | on the hardware |
| --- | --- | --- | --- | --- |
"""

_SYSTEMS = {"linux": "Linux", "win32": "Windows", "darwin": "macOS"}
_SCOPES = {"compile": "compile", "load": "load", "both": "compile, load"}
_PRODUCTS = {"context": "EP contexts", "optimized": "optimized graphs"}


def providers() -> str:
    """The page about all providers."""
    parts = [INTRODUCTION, TRIED + "\n".join(map(_row, PROVIDERS.values())) + "\n"]
    return "\n".join([*parts, *("\n".join(_section(each)) for each in PROVIDERS.values())])


def _row(provider: Provider) -> str:
    cells = (
        f"[`{provider.name}`](#{provider.name})",
        f"{_PRODUCTS[provider.product]} for {provider.title}",
        _installs(provider),
        provider.verified,
        provider.hardware,
    )
    return f"| {' | '.join(cells)} |"


def _installs(provider: Provider) -> str:
    return ", ".join(f"`{name}`" for name in (provider.flavours[0], *provider.requirements))


def _section(provider: Provider) -> Iterator[str]:
    yield f"## {provider.name}\n"
    made = _PRODUCTS[provider.product]
    yield f"{made[0].upper()}{made[1:]} for {provider.title}.\n"
    yield "| | |\n| --- | --- |"
    for name, told in _facts(provider):
        yield f"| {name} | {told} |"
    yield ""
    for note in provider.notes:
        yield f"- {note}"
    if provider.notes:
        yield ""
    if provider.options:
        yield "| option | takes | default | counts for | |\n| --- | --- | --- | --- | --- |"
        for name, option in provider.options.items():
            yield _option(name, option)
        yield ""
    for heading, table in (
        ("Options of older releases, which the EP ignores", provider.retired),
        ("Options that are not the user's to set", provider.managed),
    ):
        if table:
            yield f"{heading}:\n"
            yield from (f"- `{name}`: {told}" for name, told in table.items())
            yield ""
    if provider.sources:
        yield f"Sources: {'; '.join(provider.sources)}.\n"


def _facts(provider: Provider) -> Iterator[tuple[str, str]]:
    if provider.ep:
        yield "ONNX Runtime calls it", f"`{provider.ep}`"
    if provider.aliases:
        yield "also written", ", ".join(f"`{name}`" for name in provider.aliases)
    yield "runs on", ", ".join(f"`{name}`" for name in provider.flavours)
    if provider.requirements:
        yield "installs", ", ".join(f"`{name}`" for name in provider.requirements)
    if provider.systems:
        yield "has packages for", ", ".join(_SYSTEMS[name] for name in provider.systems)
    if provider.requirements:
        yield "needs Python", f"{'.'.join(map(str, provider.python))} or newer"
    if provider.needs:
        yield "needs", provider.needs
    yield "`device`", ", ".join(f'`"{device}"`' for device in provider.devices)
    if provider.product == "context":
        yield "`share-weights`", "yes" if provider.shares_weights else "no"
    if provider.virtual_devices:
        yield "`virtual-devices`", "yes"
    yield "fixed shapes", "needed" if provider.static_shapes else "not needed"
    if provider.profiles:
        yield "`profiles`", "yes"
    bounds = provider.tolerance
    yield "tolerance", f"atol {bounds.atol:g}, rtol {bounds.rtol:g}, cosine {bounds.cosine:g}"
    yield "tried", provider.verified
    yield "on the hardware", provider.hardware


def _option(name: str, option: Option) -> str:
    default = f"`{option.default}`" if option.default else ""
    cells = (f"`{name}`", option.allowed, default, _SCOPES[option.scope], option.doc)
    return f"| {' | '.join(cells)} |"


CONFIGURATION = """\
# Configuration

<!-- Made from the tables' dataclasses by docs/generate.py. -->

All keys of `[tool.epcontext]`. Those that are not here are errors, and so are wrong types and impossible
values: all at once, each with its dotted key, what was found, and what is allowed. Editors and
`validate-pyproject` get the same from the JSON schema that the package ships (`epcontext schema`).

The hook itself is switched on by Hatch's own table, which may be empty:
`[tool.hatch.build.targets.wheel.hooks.epcontext]`.
"""

_ABOUT = {
    "`[tool.epcontext]`": """\
With `provider` this is the short form: one target, named after its provider, whose keys stand here beside
these.""",
    "`[tool.epcontext.targets.<name>]`": """\
A named place models are compiled for.""",
    "`[[tool.epcontext.models]]`": """\
A model. {narrowable} of its targets may stand here too, and narrow them: tables are merged, other values
replaced, and each counts for those targets whose provider knows it.""",
    "`tolerance`": """\
An output passes when `|out - ref| <= atol * max(1, max|ref|) + rtol * |ref|` everywhere and its cosine
similarity with the reference is at least `cosine`; that is not asked of an output which is so near to zero
that its direction is rounding (an error below `atol / 100`, root mean square).""",
    "`profiles`": """\
Shapes of one input, such as `profiles = [{ image = { min = [1, 3, 8, 8], opt = [4, 3, 8, 8],
max = [8, 3, 8, 8] } }]`.""",
}


def configuration() -> str:
    """The page about all keys."""
    narrowable = _names(tables.NarrowableTable)
    of_targets = _names(tables.TargetTable)
    told = {
        "`[tool.epcontext]`": (
            tables.RootTable,
            [
                "provider",
                *(n for n in _names(tables.RootTable) if n not in of_targets),
                "min_coverage",
            ],
        ),
        "`[tool.epcontext.targets.<name>]`": (
            tables.TargetTable,
            ["provider", *(name for name in of_targets if name != "provider")],
        ),
        "`[[tool.epcontext.models]]`": (
            tables.ModelTable,
            [name for name in _names(tables.ModelTable) if name not in narrowable],
        ),
        "`tolerance`": (tables.ToleranceTable, _names(tables.ToleranceTable)),
        "`profiles`": (tables.ProfileTable, _names(tables.ProfileTable)),
    }
    parts = [CONFIGURATION]
    for heading, (table, names) in told.items():
        listed = ", ".join(f"`{toml_key(name)}`" for name in narrowable)
        about = _ABOUT[heading].replace("{narrowable}", listed)
        parts.append(
            f"## {heading}\n\n{about}\n\n| key | takes | if left out | |\n| --- | --- | --- | --- |"
        )
        fields = {field.name: field for field in dataclasses.fields(table)}
        hints = get_type_hints(table)
        for name in dict.fromkeys(names):
            doc = fields[name].metadata["doc"]
            takes = _takes(hints[name])
            parts.append(
                f"| `{toml_key(name)}` | {takes} | {_left_out(fields[name])} | {doc} |".replace(
                    "|  |", "| |"
                )
            )
        parts.append("")
    return "\n".join(parts)


def _names(table: type[Any]) -> list[str]:
    return [field.name for field in dataclasses.fields(table)]


def _takes(hint: Any) -> str:
    *others, last = described(hint).replace("|", "\\|").split(" or ")
    return f"{', '.join(others)} or {last}" if others else last


def _left_out(field: dataclasses.Field[Any]) -> str:
    if field.metadata.get("required"):
        return "required"
    if told := field.metadata["left_out"]:
        return str(told)
    if field.default in (None, dataclasses.MISSING, ()):
        return ""
    return f"`{show(field.default)}`"


COMMANDS = """\
# Command line

<!-- Made from the commands' help by docs/generate.py. -->

`pip install "hatch-epcontext[cli]"` brings `epcontext`. It calls what the hook calls.
"""


def commands() -> str:
    """The page about all commands: what each says of itself."""
    return "\n".join([COMMANDS, *_help(app, "epcontext", None)])


def _help(command: click.Command, name: str, parent: click.Context | None) -> Iterator[str]:
    context = click.Context(
        command,
        parent,
        name.rsplit(" ", 1)[-1],
        terminal_width=100,
        max_content_width=100,
        help_option_names=["-h", "--help"],
    )
    yield f"## {name}\n\n```text\n{command.get_help(context)}\n```\n"
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from _help(found, f"{name} {each}", context)


def main() -> None:
    """Write all of them."""
    for name, page in (
        ("providers", providers()),
        ("configuration", configuration()),
        ("commands", commands()),
    ):
        (FOLDER / f"{name}.md").write_text(page, encoding="utf-8", newline="\n")
    schema.FILE.write_text(schema.text(), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
