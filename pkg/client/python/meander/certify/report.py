"""Findings as a table, as Markdown for an issue thread, and as JSON."""

from __future__ import annotations

import collections
import dataclasses
import json
import textwrap
from collections.abc import Iterable, Sequence


@dataclasses.dataclass
class Finding:
    """One thing that was measured of a subject: what it is about, which aspect of it, and what was seen."""

    subject: str
    about: str
    aspect: str
    state: str
    """agrees; differs: in a way that says explains; unexplained; not judged; or measured: a property without a right
    value."""
    says: str
    """What was measured, in words."""
    off: float | None = None
    """The largest difference, as a share of the largest magnitude or of 1."""
    allowed: float | None = None
    """How far off a correct program may be."""

    @property
    def numbers(self) -> str:
        """The difference and what is allowed, in short."""
        return "" if self.off is None else f"{self.off:.1e} of {self.allowed:.0e}"


_COLUMNS = ("subject", "about", "aspect", "state", "what was measured", "off, of allowed")

WIDTH = 118
"""The columns of a table, where the terminal has as many."""


def text(findings: Sequence[Finding], form: str = "table", columns: int = WIDTH) -> str:
    """All findings in a form: table, markdown or json."""
    if form == "json":
        return "\n".join(json.dumps(dataclasses.asdict(f)) for f in findings)
    rows = [(f.subject, f.about, f.aspect, f.state, f.says, f.numbers) for f in findings]
    if form == "markdown":
        lines = [_COLUMNS, ("---",) * len(_COLUMNS), *(tuple(c.replace("|", "\\|") for c in r) for r in rows)]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)
    out, last = [], ""
    for r in rows:
        if r[0] != last:
            out.append(r[0])
            last = r[0]
        head = f"  {r[1]:<21} {r[2]:<22} {r[3]:<11} "
        said = r[4] + (f"  [{r[5]}]" if r[5] else "")
        if columns < len(head) + 40:  # what was measured has lines of its own
            out.append(textwrap.fill("  ".join(r[1:4]), columns, initial_indent="  ", subsequent_indent="  "))
            head = "    "
        out.append(textwrap.fill(said, columns, initial_indent=head, subsequent_indent=" " * len(head)))
    counts = collections.Counter(f.state for f in findings)
    return "\n".join([*out, "", ", ".join(f"{n} {state}" for state, n in counts.most_common())])


def failed(findings: Iterable[Finding]) -> bool:
    """Whether anything differs, explained or not."""
    return any(f.state in ("differs", "unexplained") for f in findings)
