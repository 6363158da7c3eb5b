"""Samples of several stages: the builder of their prompts, and batches whose stages have arrays of their own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from .batch import Array, Batch, Group
from .events import AnyEvent, Event, EventError, by_name
from .textbatch import batch_of

_NAME = re.compile("[A-Za-z0-9_-]{1,32}")
_RESERVED = ("main", "prompt", "metadata")
_PLACE = re.compile(r"\{\{|\}\}|\{([^{}]*)\}|([{}])")
_TEXTS = ("prompt", "negative_prompt", "prompt_2", "prompt_3")  # the fields that are templates


def stage(
    name: str, prompt: str = "", *, credit: Mapping[str | tuple[str, str], float] | None = None,
    images: Mapping[str, str] | None = None, interaction: str | Mapping[str, Any] = "", **fields: Any,
) -> Event:  # fmt: skip
    """One stage of stages(): its name, the template of its text (default "{prompt}"), and fields of a Prompt for its
    lane, such as model="signs", steps=4, text={...}, or children=2 and frozen=True.

    images are conditions that earlier stages make: {"image": "draft"}. interaction names who makes the stage in the
    place of a lane, or has its settings, too. credit is what the stage is trained for: weights of rewards by their
    names, or by name and track, as in {("loudness", "sound"): 1}; without it the reward of the sample.

    ValueError: the name cannot be one.
    """
    if not _NAME.fullmatch(name) or name in _RESERVED:
        raise ValueError(
            f"stage: {name!r}; must be 1 to 32 characters of A-Z a-z 0-9 _ -, and none of {', '.join(_RESERVED)}"
        )
    if re.search(r"-\d+$", name):
        raise ValueError(f"stage: {name!r}; must not end in a number: so does a later round of a stage")
    out: Event = {"name": name, **({"prompt": prompt} if prompt else {}), **by_name(fields)}
    if isinstance(out.get("rollout"), Mapping):
        out["rollout"] = by_name(out["rollout"])
    if interaction:
        out["interaction"] = {"name": interaction} if isinstance(interaction, str) else dict(interaction)
    if images:
        given = list(out.get("conditions") or ())
        out["conditions"] = given + [{"name": k, "stage": of} for k, of in sorted(images.items())]
    if credit is not None:
        out["credit"] = [
            {"reward": of, "weight": float(weight)} if isinstance(of, str)
            else {"reward": of[0], "track": of[1], "weight": float(weight)} for of, weight in credit.items()
        ]  # fmt: skip
    return out


def stages(*of: Event, rounds: int = 1) -> Event:
    """The fields of a prompt whose samples run stages one after the other, of which rounds repeat all, for
    client.publish:

        client.publish("demo", "12+30=?", group_size=8, reward=[{"name": "glyph", "ground_truth": "42"}], **stages(
            stage("think", model="sums"),
            stage("paint", 'a blue sign that says "{think.text}"', model="signs", steps=4),
        ))

    ValueError: a stage comes twice, or a template or an image names what is not there, or comes later without rounds.
    Intake checks this and more again.
    """
    names = [s["name"] for s in of]
    if twice := next((n for i, n in enumerate(names) if n in names[:i]), ""):
        raise ValueError(f"stage {twice}: must come at most once")
    for i, s in enumerate(of):
        templates = [s.get(field) for field in _TEXTS] + [m.get("content") for m in s.get("messages") or ()]
        for text in filter(None, templates):
            for place in places(text, s["name"]):
                _check_place(place, s["name"], of, i, rounds)
        for c in s.get("conditions") or ():
            if "stage" in c:
                _check_earlier(c["stage"], f"stage {s['name']}: condition {c['name']}", of, i, rounds)
    return {"stages": list(of), **({"rounds": rounds} if rounds != 1 else {})}


def places(template: str, name: str = "") -> Iterator[str]:
    """What stands in the braces of a template. ValueError: a brace that is alone."""
    for m in _PLACE.finditer(template):
        if m[2]:
            raise ValueError(f"stage {name}: {template!r:.80}: a {m[2]} alone; must be doubled, or around a name")
        if m[1] is not None:
            yield m[1]


def _check_place(place: str, name: str, of: Sequence[Event], i: int, rounds: int) -> None:
    source, _, what = place.partition(".")
    if place == "prompt" or source == "metadata" and what:
        return
    if what != "text":
        raise ValueError(f"stage {name}: {{{place}}}; must be {{prompt}}, {{metadata.KEY}} or {{STAGE.text}}")
    _check_earlier(source, f"stage {name}: {{{place}}}", of, i, rounds)


def _check_earlier(source: str, what: str, of: Sequence[Event], i: int, rounds: int) -> None:
    names = [s["name"] for s in of]
    known = names if rounds > 1 else names[:i]
    if source not in known:
        later = "; a later stage needs rounds" if source in names[i:] else ""
        before = ", ".join(known) or "the stages before it: none is"
        raise ValueError(f"{what}: {source!r}; must be one of {before}{later}")


class StagedBatch(Batch):
    """Whole groups of samples with several stages: stage("paint") is the Batch of a stage of images, stage("think") the
    TextBatch of one of texts, each with its own samples and advantages. The batch itself has what holds for whole
    samples: rewards, advantages [B] float64, uid, sample_index, group_index. credit("think") has the advantages of a
    stage for these samples."""

    def __init__(self, groups: Sequence[Group], name: str = "", cursor: str = "", log_prob_kind: str = "raw"):
        self.log_prob_kind = log_prob_kind
        self._stages: dict[str, Batch] = {}
        super().__init__(groups, name, cursor)

    def of_groups(self, groups: Sequence[Group], pin: bool = False, rows: Sequence[int] | None = None) -> StagedBatch:
        """Returns a batch like this one of other groups."""
        return StagedBatch(groups, self.name, self.cursor, self.log_prob_kind)

    def micro(self, *_: Any, **__: Any) -> Any:
        """Is of a stage. TypeError."""
        raise TypeError(f"micro: stages have it: batch.stage({(self.stages or ['NAME'])[-1]!r}).micro(n)")

    @property
    def stages(self) -> list[str]:
        """The names of the stages that are trained, in order."""
        return trained(self.groups[0].advantage) if self.groups else []

    def stage(self, name: str) -> Batch:
        """The batch of a stage: of images, or of texts. KeyError: there is no such stage, or it is not trained."""
        if name not in self._stages:
            groups = [g.stage(name) for g in self.groups]
            out = batch_of(groups, self.name, self.cursor, self.log_prob_kind, self.source)
            out.thread, out.left_out = self.thread, self.left_out
            self._stages[name] = out
        return self._stages[name]

    def __getitem__(self, key: str) -> Any:
        if key not in self.arrays and self.stages:
            raise KeyError(f"{key}: stages have it: batch.stage({self.stages[-1]!r})[{key!r}]")
        return self.arrays[key]

    @property
    def mask(self) -> Any:
        """[B] bool: all samples."""
        return np.ones(self.size, bool)

    def digest(self) -> str:
        """A SHA-256 over those of the stages that were read."""
        found = {name: self.stage(name).digest() for name in self.stages if all(name in g.stages for g in self.groups)}
        return hashlib.sha256(repr(sorted(found.items())).encode()).hexdigest()

    def _collate(self) -> dict[str, Array]:
        rows = [(i, g, s.member) for i, g in enumerate(self.groups) for s in g.trained]
        return {
            "rewards": np.array([m["reward"] for _, _, m in rows], np.float64),
            "advantages": np.array([m["advantage"] for _, _, m in rows], np.float64),
            "uid": np.array([g.uid for _, g, _ in rows]),
            "sample_index": np.array([m["sample_index"] for _, _, m in rows], np.int64),
            "group_index": np.array([i for i, _, _ in rows], np.int64),
        }


def ran(advantage: AnyEvent) -> list[str]:
    """The stages that ran for samples of a group, in order; none: its prompt has no stages, or nothing was made."""
    return list(dict.fromkeys(split(r["stage"])[0] for m in advantage["members"] for r in m.get("stages") or ()))


def trained(advantage: AnyEvent) -> list[str]:
    """The stages of a group that have advantages."""
    return list(dict.fromkeys(c["stage"] for c in advantage.get("credits") or ())) if ran(advantage) else []


def check_trained(advantage: AnyEvent, name: str) -> None:
    """EventError: a group has no such stage, or does not train it."""
    _refuse(str(advantage["uid"]), name, ran(advantage), trained(advantage))


def check_planned(group: AnyEvent, name: str) -> None:
    """check_trained by the record of a group (contract.GroupRecord), before it has a result."""
    if not group.get("error"):  # of one that was refused less is known
        of = group["group"].get("stages") or []
        trains = [s["name"] for s in of if not (s.get("frozen") or s["kind"] == "interaction")]
        _refuse(group["uid"], name, [s["name"] for s in of], trains)


def _refuse(uid: str, name: str, every: Sequence[str], trains: Sequence[str]) -> None:
    if name in trains:
        return
    where = f"{uid}: stage {name!r}"
    if not every:
        raise EventError(f"{where}: its prompt has no stages: read it without a stage")
    why = "is frozen or of an interaction, so it has no advantages" if name in every else "is not there"
    raise EventError(f"{where} {why}; must be one of {', '.join(trains) or 'none: no stage is trained'}")


def view(advantage: AnyEvent, name: str) -> Any:
    """The result of a group as that of one stage: its members are the trajectories of the stage, of all rounds, with
    the advantages of the stage and the mean reward of the samples that they lead to. Samples that ended before the
    stage ran are not in it. A stage whose tracks have advantages of their own has their mean."""
    mine = [c for c in advantage.get("credits") or () if c["stage"] == name]
    every = (mine[0].get("every") or 1) if mine else 1
    values = [None if v[0] is None else sum(v) / len(v) for v in zip(*(c["values"] for c in mine))]
    steps = {(s["stage"], s["sample_index"]): s["advantages"]
             for c in mine if not c.get("track") for s in c.get("steps") or ()}  # fmt: skip
    places: dict[tuple[int, int], list[Event]] = {}
    for m in advantage["members"]:
        for ran in m.get("stages") or ():
            of, round = split(ran["stage"])
            if of == name:
                places.setdefault((ran["sample_index"], round), []).append({**m, **ran})
    members = []
    for (index, round), leaves in sorted(places.items()):
        value = values[index // every] if index // every < len(values) else None
        rewards = [m["reward"] for m in leaves if m["reward"] is not None]
        members.append({
            "sample_index": index, "stage": leaves[0]["stage"], "round": round, "advantage": value,
            "trajectory_seq": leaves[0]["trajectory_seq"],
            "reward": sum(rewards) / len(rewards) if rewards else None,
            "status": "scored" if value is not None else leaves[0]["status"],
            "step_advantages": steps.get((leaves[0]["stage"], index)),
        })  # fmt: skip
    tracks = [c for c in mine if c.get("track")]
    return {**advantage, "members": members, "credits": tracks, "leaves": advantage["members"]}


def split(token: str) -> tuple[str, int]:
    """The name of a stage and its round, from 1: think-2 is round 2 of think."""
    name, _, round = token.rpartition("-")
    return (name, int(round)) if name and round.isdigit() else (token, 1)
