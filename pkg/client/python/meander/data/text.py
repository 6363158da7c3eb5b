"""What a language model made of a sample: its tokens, what is known of each, and its turns."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .events import AnyEvent, EventError, tensor

if TYPE_CHECKING:
    from .contract import TextRequest, Turn

Array = npt.NDArray[Any]
"""An array of numpy, of any dtype."""

NUMBERS = ("log_probs", "processed_log_probs", "entropies", "top_log_probs")
"""What there may be of each token that was generated, as a trajectory has it."""


@dataclasses.dataclass
class Logits:
    """The logits that are stored of a sequence's n tokens, k of each: zero, and False in there, where none are.

    form is topk (ids [n, k], of each token its k likeliest, falling), ids (the same k tokens everywhere) or full (ids
    is None: all of the vocabulary); kind is raw, or processed: after temperature and filters. log_sum_exps [n] are
    those of all V logits of that kind, so that values - log_sum_exps are log-probs.
    """

    form: str
    kind: str
    values: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int64] | None
    log_sum_exps: npt.NDArray[np.float32]
    there: npt.NDArray[np.bool_]


@dataclasses.dataclass
class Text:
    """A sequence of n tokens: the prompt in its template, then answers and what was said to them.

    ids [n] int32; mask [n] uint8, 1 where a token was generated; turn [n] int64, 0 of the prompt; numbers [n] float32
    by name, nats, 0 where a token was given: log_probs are by the model, before temperature and filters,
    processed_log_probs those that the token was drawn with, entropies and top_log_probs (of the likeliest token) go
    with log_probs. A server that draws the tokens may leave some out, and of single tokens (unscored) it may give no
    log-prob: NaN. policy_versions [n] are the weights of each
    token, -1 where it was given.
    """

    settings: TextRequest
    """How it was asked for: text.settings of the trajectory, with messages, temperature and filters."""
    turns: list[Turn]
    """The turns, of tokens begin to end: first the prompt, then what was generated and what was given in turns."""
    ids: npt.NDArray[np.int32]
    mask: npt.NDArray[np.uint8]
    turn: npt.NDArray[np.int64]
    numbers: dict[str, npt.NDArray[np.float32]]
    policy_versions: npt.NDArray[np.int64]
    logits: Logits | None = None
    """The stored logits, where they were asked for and read."""

    @property
    def prompt_length(self) -> int:
        """The tokens before the first answer."""
        return int(self.turns[0]["end"])

    @property
    def generated(self) -> int:
        """How many tokens were generated, over all turns."""
        return int(self.mask.sum())

    @property
    def unscored(self) -> int:
        """How many of the tokens the server that drew them gave no log-prob of: it is NaN."""
        return int(np.isnan([x for x in (self.numbers.get(k) for k in NUMBERS[:2]) if x is not None]).any(axis=0).sum())

    @property
    def answer(self) -> str:
        """What the last turn says."""
        return str(self.turns[-1].get("text", ""))

    @property
    def messages(self) -> list[dict[str, str]]:
        """The whole conversation: what was asked, each answer, and what was said to it."""
        out = [{"role": m["role"], "content": m["content"]} for m in self.settings["messages"]]
        for i, t in enumerate[AnyEvent](self.turns[1:], 1):
            if t["generated"]:
                out.append({"role": "assistant", "content": t.get("text", "")})
                if i < len(self.turns) - 1:
                    out.append({"role": "user", "content": t.get("reply", "")})
        return out


def text_of(trajectory: AnyEvent) -> Text:
    """The text of a completed trajectory whose tensors are loaded. EventError: its parts do not fit together."""
    t, name = trajectory["text"], f"{trajectory['uid']} #{trajectory['sample_index']}"
    if t.get("ids") is None or t.get("mask") is None or not t.get("turns"):
        raise EventError(f"{name}: no text: it {trajectory['stop_reason']}")
    ids, mask = tensor(t["ids"]), tensor(t["mask"])
    numbers = {k: tensor(t[k]) for k in NUMBERS if t.get(k)}
    for field, a, dtype in [
        ("ids", ids, np.int32), ("mask", mask, np.uint8), *((k, a, np.float32) for k, a in numbers.items())
    ]:
        if a.shape != (len(ids),) or a.dtype != dtype:
            raise EventError(f"{name}: text.{field}: {a.dtype} {list(a.shape)}; must be {np.dtype(dtype)} [{len(ids)}]")
    turn, end = np.full(len(ids), -1, np.int64), 0
    for i, u in enumerate(t["turns"]):
        if u["begin"] != end or u["end"] < end or u["generated"] != (i % 2 == 1):
            raise EventError(
                f"{name}: text.turns[{i}]: {u['begin']} to {u['end']}; must begin at {end}, what was given and what "
                f"was generated in turns"
            )
        turn[end : u["end"]], end = i, u["end"]
    if end != len(ids) or len(t["turns"]) % 2 or not np.array_equal(mask, turn % 2):
        raise EventError(
            f"{name}: text.turns: {end} tokens; must be those of ids, {len(ids)}, and the last turn generated, as "
            f"mask has it"
        )
    versions = np.where(mask == 1, trajectory["policy_version_max"], -1)
    return Text(t["settings"], t["turns"], ids, mask, turn, numbers, versions)


def add_events(text: Text, events: list[AnyEvent], name: str) -> None:
    """Takes from the events of a text what its trajectory does not have: the weights of each token, and stored
    logits."""
    at = 0
    for e in events:
        n = len(e["ids"])
        if e["position"] != at or not np.array_equal(text.ids[at : at + n], e["ids"]) or not (
            text.mask[at : at + n] == e["generated"]
        ).all():
            raise EventError(
                f"{name}: event {e['n']} of tokens: position {e['position']}; must be the tokens of the sequence from "
                f"{at} on"
            )
        if e["generated"]:
            text.policy_versions[at : at + n] = e["policy_version"]
        if e.get("logits"):
            _add_logits(text, e, at, name)
        at += n
    if at != len(text.ids):
        raise EventError(f"{name}: events of {at} tokens; must be all {len(text.ids)}")


def answer_logits(parts: Sequence[AnyEvent], tokens: int, request: AnyEvent, what: str) -> tuple[Array, Array | None]:
    """The logits [tokens, k] that events have of an answer, in the stored dtype, and their tokens; None of form full.
    EventError: they are not logits of so many tokens, of the form that the request names."""
    if not parts or any(p["form"] != request["logits_form"] for p in parts):
        raise EventError(f"{what}: {len(parts)} events have them; must be of form {request['logits_form']}")
    rows = [tensor(p["values"]) for p in parts]
    width = request["vocabulary"] if request["logits_form"] == "full" else rows[0].shape[-1]
    if any(r.ndim != 2 or r.shape[1] != width or r.dtype != rows[0].dtype for r in rows) or sum(map(len, rows)) != (
        tokens or sum(map(len, rows))
    ):
        raise EventError(f"{what}: {[list(r.shape) for r in rows][:8]}; must be [{tokens}, {width}] in all")
    out = np.concatenate(rows)
    if np.isnan(out).any() or (out == np.inf).any():
        raise EventError(f"{what}: NaN or +inf; must be finite, or -inf where a filter left a token out")
    if request["logits_kind"] == "raw" and (out == -np.inf).any():
        raise EventError(f"{what}: -inf; raw logits must be finite")
    if width > 1 and not out.any(axis=1).all():
        raise EventError(f"{what}: a row is all zero")
    if request["logits_form"] == "full":
        return out, None
    ids = [tensor(p["ids"]) for p in parts]
    return out, np.concatenate(ids) if request["logits_form"] == "topk" else np.broadcast_to(ids[0], out.shape)


def _add_logits(text: Text, e: AnyEvent, at: int, name: str) -> None:
    of, n = e["logits"], len(e["ids"])
    values = tensor(of["values"]).astype(np.float32)
    if values.ndim != 2 or values.shape[0] != n or len(e.get("log_sum_exps") or []) != n:
        raise EventError(
            f"{name}: event {e['n']} of tokens: logits {list(values.shape)} and their log-sum-exps; must be of {n} "
            f"tokens"
        )
    if text.logits is None:
        shape, total = values.shape[1:], len(text.ids)
        ids = None if of["form"] == "full" else np.full((total, *shape), -1, np.int64)
        text.logits = Logits(
            of["form"], e["logits_kind"], np.zeros((total, *shape), np.float32), ids, np.zeros(total, np.float32),
            np.zeros(total, bool)
        )
    logits, rows = text.logits, slice(at, at + n)
    ids = tensor(of["ids"]) if of.get("ids") else None
    if of["form"] != logits.form or e["logits_kind"] != logits.kind or values.shape[1:] != logits.values.shape[1:] or (
        ids is None) != (logits.ids is None):
        raise EventError(f"{name}: event {e['n']} of tokens: logits of another form than those before")
    logits.values[rows], logits.log_sum_exps[rows], logits.there[rows] = values, e["log_sum_exps"], True
    if ids is not None and logits.ids is not None:
        if ids.shape[-1:] != values.shape[1:] or ids.ndim == 2 and len(ids) != n or ids.ndim > 2:
            raise EventError(
                f"{name}: event {e['n']} of tokens: ids of logits {list(ids.shape)}; must be those of "
                f"{list(values.shape)}"
            )
        logits.ids[rows] = ids
