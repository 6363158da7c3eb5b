"""Holds losses, log-probs and advantages of a trainer, and what an engine draws, against public formulas. It says what
was measured, and needs no pipeline. Exit status: 0 all agrees, 1 something differs, 2 wrong usage."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import textwrap
from typing import Any

from . import adapters, engine, engines, report, suite, trainer


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line, and gives its exit status."""
    parser = argparse.ArgumentParser(prog="meander certify", description=__doc__)
    forms = argparse.ArgumentParser(add_help=False)
    forms.add_argument("--format", choices=("table", "markdown", "json"), default="table")
    commands = parser.add_subparsers(dest="command", required=True)
    t = commands.add_parser("trainer", parents=[forms], help="hold losses, log-probs, advantages against the vectors")
    t.add_argument("subject", help=f"FILE.py:FUNCTION, or one of {', '.join(adapters.ADAPTERS)} (the last two =FOLDER)")
    t.add_argument("--as", dest="title", default="", help="the set of vectors; default the one of the function's name")
    t.add_argument("--dtype", default="float64", help="of the arrays: float64, float32, bfloat16")
    t.add_argument("--arrays", choices=("torch", "numpy"), default="",
                   help="what the function gets; default torch, unless its module imports numpy alone")  # fmt: skip
    t.add_argument("--with", dest="given", action="append", default=[], metavar="NAME=VALUE",
                   help="an input that the function does not take, and the value that it has")  # fmt: skip
    e = commands.add_parser("engine", parents=[forms], help="measure what draws samples")
    e.add_argument("subject", help=f"FILE.py:CLASS, or one of {', '.join(engines.ENGINES)}, as NAME=WHERE")
    e.add_argument("--model", default="", help="the folder of its model, from which another program computes")
    e.add_argument("--update", action="append", default=[], metavar="DIR", help="a LoRA to serve; may be repeated")
    commands.add_parser("vectors", parents=[forms], help="list the sets of vectors, with their formulas")
    o = parser.parse_args(arguments)
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else report.WIDTH
    try:
        if o.command == "vectors":
            lines = [f"{s.title:<24} {s.formula} [{s.source}]" for s in suite.load().values()]
            wide = columns if sys.stdout.isatty() else 10**6
            _print("\n".join(textwrap.fill(x, wide, subsequent_indent="  ") for x in lines))
            return 0
        findings = _trainer(o) if o.command == "trainer" else _engine(o)
    except (ValueError, ImportError, OSError) as fault:
        extra = o.subject if o.subject in ("trl", "verl") else "train"
        hint = f"; pip install 'meander-rl[{extra}]' has what meander needs" if isinstance(fault, ImportError) else ""
        hint = "" if "pip install" in str(fault) else hint
        print(f"certify: {fault}{hint}", file=sys.stderr)
        return 2
    _print(report.text(findings, o.format, min(columns, report.WIDTH)))
    return int(report.failed(findings))


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:  # a reader that has enough, such as head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _trainer(o: Any) -> list[report.Finding]:
    sets = suite.load()
    kind, _, folder = o.subject.partition("=")
    if kind in adapters.ADAPTERS:
        judged = list(adapters.ADAPTERS[kind](*([folder] if folder else [])))
    else:
        name, function = adapters.own(o.subject)
        titles = [t for t in sets if t == o.title or not o.title and t.partition("/")[2] == name]
        judged = [(name, titles[0] if titles else o.title, function)]
    given = dict(_setting(text) for text in o.given)
    out: list[report.Finding] = []
    for name, title, function in judged:
        if o.title and title != o.title:
            continue
        if title not in sets:
            raise ValueError(f"--as: {title!r}; must be one of {', '.join(sets)}")
        out += trainer.judge(function, sets[title], o.dtype, given, name, o.arrays)
    if not out:
        raise ValueError(f"--as {o.title}: {kind} has {', '.join(t for _, t, _ in judged)}")
    return out


def _engine(o: Any) -> list[report.Finding]:
    kind, _, where = o.subject.partition("=")
    if kind in engines.ENGINES:
        with engines.ENGINES[kind](where, o.model, o.update) as made:
            return list(engine.judge(made, f"{kind}={where.rstrip('/').rpartition('/')[2]}"))
    name, own = adapters.own(o.subject)
    if o.model or o.update:
        raise ValueError(f"--model, --update: {name} has expected() and update() of its own")
    return list(engine.judge(own(), name))


def _setting(text: str) -> tuple[str, Any]:
    name, is_one, value = text.partition("=")
    if not is_one:
        raise ValueError(f"--with {text}: must be NAME=VALUE")
    try:
        return name, float(value)
    except ValueError:
        return name, value


if __name__ == "__main__":
    sys.exit(main())
