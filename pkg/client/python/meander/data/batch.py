"""What a trainer gets: samples, groups, and batches as arrays."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import struct
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .events import SETTINGS, TRANSITIONS, AnyEvent, EventError, check_uses, tensor
from .memory import empty
from .micro import Completing, Micro
from .states import NAMES as STATES
from .states import States, pinned
from .text import Text
from ..maths.transition import Kernel, step_kernel

if TYPE_CHECKING:
    import torch

    from .contract import Advantage, Member, Step, Tensor, Trajectory

Array = npt.NDArray[Any]
"""An array of numpy, of any dtype."""


@dataclasses.dataclass
class Sample:
    """One sample of a group: its member in the advantage event, its trajectory, and the steps of the attempt that
    counts; their fields are in meander.contract."""

    member: Member
    trajectory: Trajectory | None
    steps: list[Step]
    conditioning: dict[str, Array] = dataclasses.field(default_factory=dict)
    """The encoded texts that the trajectory names, where they were kept: float32 [tokens, width], masks uint8
    [tokens]."""
    text: Text | None = None
    """The text, if the sample is one and completed."""
    unread: bool = False
    """Whether its steps and encoded texts are left to be read: see Batch.micro."""

    @property
    def facts(self) -> AnyEvent:
        """What its trajectory says; nothing where it has none."""
        return self.trajectory or {}

    @property
    def advantage(self) -> float | None:
        """The advantage of the whole sample; None: it has none, as where it failed."""
        return self.member["advantage"]

    @property
    def trained(self) -> list[Step]:
        """The stochastic steps: those that have a log-prob. Of a sample whose steps are not read, what its trajectory
        says of them."""
        if self.text or not self.unread:
            return [] if self.text else [s for s in self.steps if s["log_prob"] is not None]
        t = self.facts
        said: list[Any] = [
            {"step_index": i, "log_prob": p, "timestep": t["timesteps"][i], "sigma": t["sigmas"][i],
             "sigma_next": t["sigmas"][i + 1]}
            for i, p in enumerate(t.get("log_probs") or ()) if p is not None
        ]  # fmt: skip
        return said

    @property
    def ode(self) -> bool:
        """Whether it is an ordinary image all of whose steps are ode."""
        t = self.facts
        steps = [] if t.get("scheduled_sampling") else t.get("transitions") or []
        return bool(steps) and not any(TRANSITIONS.get(of, {"stochastic": True}).get("stochastic") for of in steps)

    @property
    def clean(self) -> bool:
        """Whether all steps are ode and the last latents are stored: a loss of clean latents trains on these alone."""
        return self.ode and len(self.facts["transitions"]) in self.facts["latent_step_indices"]

    @property
    def lacks(self) -> str:
        """Why a sample with an advantage has nothing to train on; empty if it has."""
        if self.text:
            return "" if self.text.generated else "an answer without tokens"
        scores = self.facts.get("log_probs") or () if self.unread else map(itemgetter("log_prob"), self.steps)
        if any(p is not None for p in scores) or self.clean:
            return ""
        return "no stochastic step" + ", and no last latents (return_step_indices)" * self.ode

    @property
    def state_bytes(self) -> int:
        """What its stored states take, at most about."""
        t = self.facts
        return 4 * math.prod(t.get("latents_shape") or [0]) * max(1, len(t.get("latent_step_indices") or ()))

    def kept(self) -> dict[int, list[Tensor]]:
        """The tensors of the states that were read, by index; the same state may be kept with two steps."""
        out = dict[int, list[Any]]()
        for step in self.steps:
            for k in step["latents"] or []:
                out.setdefault(k["index"], []).append(k["tensor"])
            if step.get("checkpoint"):
                out.setdefault(step["step_index"], []).append(step["checkpoint"])
        return out

    def latents(self, index: int) -> Array:
        """Returns the state before step index, or after the last step: [S, C] float32. F16 and BF16 are widened
        exactly."""
        if stored := self.kept().get(index):
            return tensor(stored[0]).astype(np.float32)
        t = self.facts
        raise EventError(
            f"{t.get('uid')} #{self.member['sample_index']}: latents {index} were not kept; ask for them with "
            f"return_step_indices"
        )

    def track(self, index: int, name: str) -> Array:
        """Returns one track of the state before step index, or after the last step, in the track's own shape: a view of
        latents."""
        begin, shape = _place(self.facts.get("tracks") or [], name)
        return self.latents(index).reshape(-1)[begin : begin + math.prod(shape)].reshape(shape)

    def kernel(self, step_index: int) -> Kernel:
        """Returns the transition of a step."""
        for step in self.steps:
            if step["step_index"] == step_index:
                return step_kernel(step)
        raise EventError(f"sample {self.member['sample_index']} has no event of step {step_index}")


@dataclasses.dataclass
class Group:
    """A closed group with all its samples, by sample_index. cursor is its position in the stream, if it was
    streamed."""

    advantage: Advantage
    """The result of the group, as stored: see contract.Advantage."""
    samples: list[Sample]
    cursor: str = ""
    stages: dict[str, Group] = dataclasses.field(default_factory=dict)
    """Of samples with several stages: the group of each stage that lanes made and that was read, by its name. A member
    there has the stage's advantage, its round and the mean reward of the samples that it leads to."""

    def stage(self, name: str) -> Group:
        """The group of a stage that is trained. KeyError: there is none."""
        from .staged import check_trained

        try:
            check_trained(self.advantage, name)
            return dataclasses.replace(self.stages[name], cursor=self.cursor)
        except EventError as e:
            raise KeyError(str(e)) from None

    @property
    def uid(self) -> str:
        """The name of the group in its run: that of its prompt."""
        return str(self.advantage["uid"])

    @property
    def kind(self) -> str:
        """The kind of its samples: text, image, or stages."""
        if self.stages:
            return "stages"
        return "text" if any(s.facts.get("text") for s in self.samples) else "image"

    @property
    def trained(self) -> list[Sample]:
        """The samples that have an advantage and something to train on: stochastic steps, or last latents where all
        steps are ode, or generated tokens. Those of several stages are the samples that have an advantage."""
        return [s for s in self.samples if s.advantage is not None and not self.lacks(s)]

    def lacks(self, s: Sample) -> str:
        """Why a sample with an advantage is not trained on; empty if it is."""
        if self.stages:
            return ""
        return "no stochastic step, in a validation" if self.advantage.get("validation") and s.clean else s.lacks


class RatioOff(ValueError):
    """Log-probs recomputed with the weights that made the batch differ from those of the batch."""


@dataclasses.dataclass(frozen=True)
class Ratio:
    """How far the ratios exp(new - old) are from 1: the largest distance, and the distance of each trained step by its
    index.

    For texts a turn counts as a step, with the mean distance of its tokens; worst is the largest distance of a token.
    Log-probs of images are means over all elements; those of tokens are not, and where a hidden state is
    ill-conditioned float32 makes a single token ten times less exact, or more.
    """

    max_abs: float
    """The largest distance of a step, or of a turn of texts."""
    per_step: dict[int, float]
    """The distance of each step, or turn, by its index."""
    tolerance: float
    """The distance that is still ok."""
    worst: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether all steps are within the tolerance, and all tokens within ten times that."""
        return self.max_abs <= self.tolerance and self.worst <= 10 * self.tolerance


class Batch(Mapping[str, Any]):
    """Whole groups of images as arrays: B samples with an advantage, W trained steps each, latents of S tokens and C
    channels. Those of texts are a TextBatch, which says what is otherwise.

    | name | shape | |
    |---|---|---|
    | latents, next_latents | [B, W, S, C] float32 | the states before and behind each trained step |
    | log_probs | [B, W] float64 | of the sampler, nats: means over S x C |
    | sigmas, next_sigmas, timesteps | [B, W] float32 | timesteps = 1000 sigma |
    | step_indices | [B, W] int64 | |
    | noise_std, std_dev_t, x_coefficient, v_coefficient | [B, W] float64 | see Kernel |
    | mask | [B, W] bool | False where a sample has fewer trained steps than W |
    | advantages | [B, W] float64 | |
    | cfg_scales | [B, W] float64 | the scale of classifier-free guidance in each step; 1: without |
    | rewards | [B] float64 | |
    | uid, weights_digest, cfg_rule | [B] str | |
    | sample_index, policy_version, group_index | [B] int64 | group_index counts the groups of the batch |
    | round | [B] int64 | of a stage: the round that the sample is of, from 1 |
    | each setting that is one value | [B] | by its name in schemas/README.md, such as noise_seed (uint64) |
    | prompt_embeds, negative_prompt_embeds | [B, L, D] float32 | where kept (return_conditioning), zero padded |
    | prompt_embeds_mask, negative_prompt_embeds_mask | [B, L] int64 | |

    Of samples whose steps are all ode, clean is True, final_latents [B, S, C] float32 are the states after the last
    step, and advantages are [B, 1]. What else is of trained steps is not there, and asking for it says so.

    torch() gives the states in the dtype that was stored, without a copy; as arrays, F16 and BF16 are widened exactly.

    A setting is 0 or empty where a sample has none; but prompt_2 and prompt_3 are the prompt there, and frames are 1.
    The states behind a step and before the next one are held once, where trained steps follow one another: writing to
    one writes to both. Encoded texts are held once per group, of a stage once per sample; asking for them by name
    repeats them. `conditioning` has them so, [G, L, D]. Samples are sorted by uid and sample_index, so that equal
    groups give equal batches, in whatever order they closed.

    groups and samples are what the arrays are made of; left_out says why others of the batch are not among them, by
    uid, or uid and number of the sample. name is the batch id, empty without; cursor is where reading
    goes on behind the batch.
    """

    unit = "step"
    """What per_step of a Ratio counts."""
    why_off = "other weights, another guidance, other text embeddings or a lower precision than the sampler's"
    """What a ratio that is off may come from."""

    source: Completing | None = None
    """What reads the steps of samples, where they are not read yet."""
    thread: Any = None
    """What runs coroutines of the source for micro-batches that are not awaited (thread.run), where there is one."""
    rows: Array | None = None
    """Of a micro-batch: which rows of the batch it has, int64 [B]."""
    last = True
    """Whether it is the last micro-batch of its batch, or whole."""

    def __init__(
        self, groups: Sequence[Group], name: str = "", cursor: str = "", *, pin: bool = False,
        part: tuple[Batch, Sequence[int]] | None = None,
    ):
        """part: the batch that has the groups' samples, too, and at which rows."""
        self.name, self.cursor, self.pin = name, cursor, pin
        self.left_out: dict[str, str] = {}
        self.groups = sorted(groups, key=lambda g: g.uid)
        self._rows = [(i, g, s) for i, g in enumerate(self.groups) for s in g.trained]
        self.samples = [s for _, _, s in self._rows]
        self.unread = any(s.unread for s in self.samples)
        self.states: States | None = None
        self.clean = any(s.clean for s in self.samples)
        self._part = part if part is not None and len(part[1]) == len(self.samples) else None
        self.arrays = self._collate()
        self._part = None
        alike = [part for g in self.groups for part in _alike(g)]
        self.conditioning = _conditioning(alike)
        of = {id(s): k for k, part in enumerate(alike) for s in part}
        self.prompt_index: Array = np.array([of[id(s)] for s in self.samples], np.int64)
        """Of each sample the row of conditioning that is of its texts, int64 [B]."""

    def __getitem__(self, key: str) -> Any:
        if self.states is not None and key in STATES:
            return self.states.array(key)
        if key in self.conditioning:
            return self.conditioning[key][self.prompt_index]
        if self.clean and key not in self.arrays and key in _TRAINED:
            raise KeyError(
                f"{key}: all steps of these samples are ode, so no step is trained; a loss of final_latents is, such "
                f"as diffusion_nft"
            )
        if self.unread and key not in self.arrays:
            raise KeyError(f"{key}: it is not read; micro(n) reads it for n samples, or read the batch with whole=True")
        return self.arrays[key]

    def __iter__(self) -> Iterator[str]:
        yield from STATES if self.states is not None else ()
        yield from self.arrays
        yield from self.conditioning

    def __len__(self) -> int:
        return len(list(iter(self)))

    def micro(self, n: int = 0, rows: Sequence[int] | None = None, *, ahead: int = 1, pin: bool = False) -> Micro:
        """Iterates over batches of n samples each, or of one group each where n is 0: `async for`, or `for` with a
        client of meander.sync. Where the batch was read with whole=False, steps are fetched then, so that no more
        states are held than those of the micro-batch in use and of those `ahead` of it; those with less than 1 MiB of
        states are read together, until they have as much.

        rows are those of this batch to take, in this order; all of them unless given. A micro-batch has its rows
        sorted, and says in its `rows` which they are. pin: its states are in pinned memory, which a GPU copies from
        beside the computation.

        The iteration raises Gone and EventError as client.group does.
        """
        return Micro(self, n, rows, ahead, pin)

    def of_groups(self, groups: Sequence[Group], pin: bool = False, rows: Sequence[int] | None = None) -> Batch:
        """Returns a batch like this one of other groups, whose samples are these rows of it if they are given; pin: its
        states are in pinned memory."""
        return Batch(groups, self.name, self.cursor, pin=pin, part=None if rows is None else (self, rows))

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """Where there are log-probs."""
        return self["mask"]

    @property
    def size(self) -> int:
        """B, the samples."""
        return len(self.samples)

    @property
    def tracks(self) -> list[str]:
        """The names of the tracks of a state, such as video and sound, in order; empty: it has one part."""
        return [t["name"] for t in _tracks(self.samples[0])] if self.samples else []

    def place(self, name: str) -> slice:
        """Where a track is among the S x C elements of a state. KeyError: no such track."""
        begin, shape = _place(_tracks(self.samples[0]) if self.samples else [], name)
        return slice(begin, begin + math.prod(shape))

    def track_advantages(self, name: str) -> npt.NDArray[np.float64]:
        """Returns the advantages [B, W] of the trained steps for one track: those of its credit, 0 where other tracks
        alone have one; without such credits those of the batch. They need no steps that are read. KeyError: no such
        track."""
        self.place(name)
        if not self.credits:
            return self["advantages"]
        out = np.zeros(self["advantages"].shape)
        for i, (g, s) in enumerate((g, s) for g in self.groups for s in g.trained):
            for c in g.advantage.get("credits") or ():
                if c.get("track") != name:
                    continue
                place = str(s.member.get("stage") or c["stage"]), s.member["sample_index"]
                steps = {(x["stage"], x["sample_index"]): x["advantages"] for x in c.get("steps") or ()}
                value = c["values"][place[1] // (c.get("every") or 1)] or 0.0
                out[i, : 1 if self.clean else int(self.mask[i].sum())] = steps.get(place) or value
        return out

    def track(self, name: str) -> dict[str, Array]:
        """Returns one track of the states: latents and next_latents [B, W, ...] in the track's own shape, views of
        those of the batch, and its share of log_probs [B, W], of which log_prob_sums add up to the step's. KeyError: no
        such track."""
        at, names = _tracks(self.samples[0]) if self.samples else [], self.tracks
        begin, shape = _place(at, name)
        out = {
            key: _flat(self[key])[..., begin : begin + math.prod(shape)].reshape(*self.mask.shape, *shape)
            for key in ("latents", "next_latents")
        }
        for key, field in (("log_probs", "log_prob"), ("log_prob_sums", "log_prob_sum")):
            out[key] = np.zeros(self.mask.shape)
            for b, s in enumerate(self.samples):
                for w, step in enumerate[AnyEvent](s.trained):
                    out[key][b, w] = step["tracks"][names.index(name)][field]
        return out

    @property
    def credits(self) -> list[tuple[str, str]]:
        """The stages and tracks ("": all of the stage) that have advantages of their own; empty: each advantage is of
        the whole sample."""
        return list(dict.fromkeys(
            (c["stage"], c.get("track") or "") for g in self.groups for c in g.advantage.get("credits") or ()
        ))  # fmt: skip

    def credit(self, stage: str, track: str = "") -> npt.NDArray[np.float64]:
        """Returns the advantages [B] of one stage and track. KeyError: a group of the batch has none."""
        out = []
        for g in self.groups:
            found = [
                c for c in g.advantage.get("credits") or ()
                if (c["stage"], c.get("track") or "") == (stage, track)
            ]  # fmt: skip
            if g.trained and not found:
                raise KeyError(f"{g.uid}: no credit of stage {stage!r}, track {track!r}")
            for s in g.trained:  # each sample of the stage leads to so many members
                out.append(found[0]["values"][s.member["sample_index"] // (found[0].get("every") or 1)])
        return np.array(out, np.float64)

    def check_whole(self, reader: str) -> None:
        """EventError: stages or tracks have advantages of their own, and a reader takes one for the whole sample."""
        if of := ", ".join(f"{stage} {track}".strip() for stage, track in self.credits):
            raise EventError(
                f"batch {self.name}: credits: {of} have advantages of their own, which {reader} does not use; ask for "
                f"no credit rule, or train with what computes them"
            )

    def digest(self) -> str:
        """Returns a SHA-256 over the content: samples with their settings, weights, log-probs, tokens and media,
        rewards and advantages, and the statuses of the other samples. Equal batches have equal digests, even if the
        same weights have another version: times, names of processes and policy_version are left out. The lines are
        those of schemas.BatchDigest."""
        h = hashlib.sha256(b"meander batch 4\n")
        for g in self.groups:
            h.update(f"{g.uid} {g.advantage['estimator']}\n".encode())
            for s in g.samples:
                t, m = s.facts, s.member
                facts = _content(t), *(t.get(k) or "-" for k in ("schedule_digest", "weights_digest"))
                media = ",".join(x["digest"] for x in t.get("media") or ()) or "-"
                numbers = _bits([m["reward"]]), _bits([m["advantage"]]), _bits(m.get("step_advantages") or ())
                line = (m["sample_index"], t.get("stage") or "-", m["status"], *facts, media, *numbers)
                h.update((" ".join(map(str, line)) + "\n").encode())
            for c in g.advantage.get("credits") or ():
                h.update(f"{c['stage']} {c.get('track') or '-'} {_bits(c['values'])}\n".encode())
        return h.hexdigest()

    def recompute_log_prob(self, velocity: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Returns the log-probs [B, W] under other velocities [B, W, S, C], which are guided as in the sampler; 0 where
        mask is False."""
        v = np.asarray(velocity)
        if v.shape != self["latents"].shape:
            raise ValueError(f"velocity: shape {list(v.shape)}; must be {list(self['latents'].shape)}, as latents")
        out = np.zeros(self.mask.shape)
        for b, s in enumerate(self.samples):
            for w, step in enumerate(s.trained):
                k, kind = s.kernel(step["step_index"]), s.facts["log_prob_kind"]
                out[b, w] = k.log_prob(self["latents"][b, w], v[b, w], self["next_latents"][b, w], kind)
        return out

    def ratio(self, log_probs: npt.ArrayLike, tolerance: float = 1e-5) -> Ratio:
        """Returns how far log-probs [B, W] are from the sampler's, as ratios. NaN counts as infinitely far."""
        off = self._distances(log_probs)
        per_step = {
            int(i): float(off[(self["step_indices"] == i) & self.mask].max())
            for i in np.unique(self["step_indices"][self.mask])
        }
        return Ratio(float(off.max(initial=0)), per_step, tolerance)

    def _distances(self, log_probs: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Returns how far each ratio is from 1; 0 where there is no log-prob."""
        new = np.asarray(log_probs, np.float64)
        if new.shape != self["log_probs"].shape:
            raise ValueError(f"log_probs: shape {list(new.shape)}; must be {list(self['log_probs'].shape)}")
        off = np.abs(np.exp(np.where(self.mask, new - self["log_probs"], 0)) - 1)
        return np.where(np.isnan(off), np.inf, off)

    def check(self, log_probs: npt.ArrayLike, tolerance: float = 1e-5) -> Ratio:
        """Returns the ratio of log-probs that were recomputed with the weights that made the batch. RatioOff: it is not
        1."""
        r = self.ratio(log_probs, tolerance)
        if not r.ok:
            parts = ", ".join(f"{self.unit} {i}: {d:.3g}" for i, d in r.per_step.items())
            worst = f"; the furthest token {r.worst:.3g}" if r.worst else ""
            raise RatioOff(
                f"the ratio is {r.max_abs:.3g} from 1, more than {tolerance:g} ({parts}{worst}): {self.why_off}"
            )
        return r

    def torch(self, device: Any = None, names: Sequence[str] | None = None) -> dict[str, torch.Tensor]:
        """Returns the arrays (all that are numeric, or the named ones) as torch tensors, of the same dtypes and on the
        same memory; latents and next_latents in the dtype that was stored. Seeds become int64 with the same bits."""
        import torch

        out = {}
        for name in names or [n for n in self if n in STATES or self[n].dtype.kind in "fiub"]:
            if self.states is not None and name in STATES:
                out[name] = self.states.tensor(name).to(device)
                continue
            a = self[name]
            out[name] = torch.from_numpy(a.view(np.int64) if a.dtype == np.uint64 else a).to(device)
        return out

    def dataproto(self) -> dict[str, dict[str, Any]]:
        """Returns the batch under the names that verl's diffusion trainer reads: {batch, non_tensor_batch, meta_info},
        in numpy.

        all_latents is [B, W+1, S, C]: the trained steps must follow one another, as in a window.
        """
        self.check_whole("verl's diffusion trainer")
        steps = self["step_indices"]
        if not self["mask"].all() or (np.diff(steps, axis=1) != 1).any():
            raise ValueError(
                "all_latents: the trained steps must follow one another, in equal number; take latents and next_latents"
            )
        batch = {
            "all_latents": np.concatenate([self["latents"], self["next_latents"][:, -1:]], axis=1),
            "all_timesteps": self["timesteps"],
            "rollout_log_probs": self["log_probs"].astype(np.float32),
            "old_log_probs": self["log_probs"].astype(np.float32),
            "response_mask": self["mask"].astype(np.int64),
            "advantages": self["advantages"].astype(np.float32),
            "returns": self["advantages"].astype(np.float32),
            "rm_scores": self["rewards"].astype(np.float32)[:, None],
            **{name: self[name] for name in self.conditioning},
        }
        other = {
            "uid": self["uid"].astype(object), "raw_prompt": self["prompt"].astype(object),
            "raw_negative_prompt": self["negative_prompt"].astype(object),
            "sample_index": self["sample_index"], "global_steps": self["policy_version"],
        }
        return {
            "batch": batch, "non_tensor_batch": other,
            "meta_info": {"batch": self.name, "cursor": self.cursor, "digest": self.digest()}
        }

    def _collate(self) -> dict[str, Array]:
        """Builds the arrays of the samples and their trained steps; {} without samples. ValueError: a text, or latents
        of different sizes."""
        rows = [(g, s, s.trajectory) for _, g, s in self._rows if s.trajectory is not None]
        if not rows:
            return {}
        if text := next((g.uid for g, s, _ in rows if s.text), ""):
            raise ValueError(f"{text}: a text; a batch of images must have images alone: take TextBatch")
        shape = tuple(rows[0][2]["latents_shape"])
        for g, s, t in rows if self._part is None else ():
            check_uses(t, USES, "a batch")
            if tuple(t["latents_shape"]) != shape:
                raise ValueError(
                    f"{g.uid}: latents {t['latents_shape']}, of other groups {list(shape)}; the samples of a batch "
                    f"must be of one size"
                )
            if _tracks(s) != _tracks(rows[0][1]):
                has = _tracks(rows[0][1])
                raise ValueError(f"{g.uid}: tracks {_tracks(s)}; must be those of the other groups, {has}")
        out: dict[str, Array]
        if self.clean:
            if others := [g.uid for g, s, _ in rows if not s.clean]:
                raise ValueError(
                    f"{others[0]}: stochastic steps, of other groups none; a batch must have samples of one kind"
                )
            out = {"advantages": np.array([[s.advantage] for _, s, _ in rows], np.float64)}
            if not self.unread:
                out["final_latents"] = np.stack([s.latents(len(t["transitions"])) for _, s, t in rows])
            return out | self._facts()
        trained: list[Sequence[AnyEvent]] = [s.trained for _, s, _ in rows]
        b, w = len(rows), max(map(len, trained))
        names = {k: v for k, v in _STEP.items() if not (self.unread and k in _OF_STEPS)}
        fields = itemgetter(*(field for field, _ in names.values()))
        out = {name: np.zeros((b, w), dtype) for name, (_, dtype) in names.items()}
        out |= {"mask": np.zeros((b, w), bool), "advantages": np.zeros((b, w)), "cfg_scales": np.ones((b, w))}
        for i, (_, s, t) in enumerate(rows):
            scales, n = scales_of(t), len(trained[i])
            for name, numbers in zip(names, zip(*map(fields, trained[i]))):
                out[name][i, :n] = numbers
            out["cfg_scales"][i, :n] = [scales[step["step_index"]] for step in trained[i]]
            out["mask"][i, :n] = True
            each = s.member.get("step_advantages")  # of its whole path; what branched off has the last steps of it
            out["advantages"][i, :n] = each[-n:] if each else s.advantage
        if not self.unread:
            kernels = [[step_kernel(step) for step in steps] for steps in trained]
            for name in ("x_coefficient", "v_coefficient"):
                out[name] = np.zeros((b, w))
                for i, of in enumerate(kernels):
                    out[name][i, : len(of)] = [getattr(k, name) for k in of]
            self.states = self._read_states(trained, w, shape)
        return out | self._facts()

    def _read_states(self, trained: Sequence[Sequence[AnyEvent]], w: int, shape: tuple[int, ...]) -> States:
        at = [[step["step_index"] for step in steps] for steps in trained]
        kept = [s.kept() for s in self.samples]
        for s, steps, has in zip(self.samples, at, kept, strict=True):
            for index in (i for step in steps for i in (step, step + 1)):
                if index not in has:
                    s.latents(index)  # raises
        return States(at, w, shape, kept, pinned if self.pin else empty)

    def _facts(self) -> dict[str, Array]:
        """Builds the arrays with one value for each sample."""
        if self._part is not None:
            whole, at = self._part
            out = {name: whole.arrays[name][at] for name in _FACTS if name in whole.arrays}
            out["group_index"] = np.array([i for i, _, _ in self._rows], np.int64)
            return out
        rows = [(i, g, s, s.trajectory) for i, g, s in self._rows if s.trajectory is not None]
        out = {}
        for name, (field, dtype) in (_SAMPLE | ({} if rows[0][2].text else _IMAGE)).items():
            if absent := _ABSENT.get(name):
                out[name] = np.array([t.get(field) or absent(t) for _, _, _, t in rows], dtype)
                continue
            zero = np.zeros((), dtype).item()
            out[name] = np.array([t.get(field) or zero for _, _, _, t in rows], dtype)
        out["uid"] = np.array([g.uid for _, g, _, _ in rows])
        out["rewards"] = np.array([s.member["reward"] for _, _, s, _ in rows], np.float64)
        out["sample_index"] = np.array([s.member["sample_index"] for _, _, s, _ in rows], np.int64)
        out["group_index"] = np.array([i for i, _, _, _ in rows], np.int64)
        if any("round" in s.member for _, _, s, _ in rows):
            out["round"] = np.array([s.member.get("round", 1) for _, _, s, _ in rows], np.int64)
        return out


def _tracks(s: Sample) -> list[AnyEvent]:
    """The tracks of the states of a sample, in order; empty: they have one part."""
    return s.facts.get("tracks") or []


def _place(tracks: Sequence[AnyEvent], name: str) -> tuple[int, tuple[int, ...]]:
    """Where a track begins in a state, and its shape. KeyError: there is none of that name."""
    begin = 0
    for t in tracks:
        if t["name"] == name:
            return begin, tuple(t["shape"])
        begin += t["elements"]
    names = ", ".join(t["name"] for t in tracks)
    raise KeyError(f"track {name!r}; must be one of {names or 'none: a state has one part'}")


def _flat(states: Array) -> Array:
    """A view of states [B, W, S, C] as [B, W, S x C]."""
    return states.reshape(*states.shape[:2], -1)


_STEP: dict[str, tuple[str, Any]] = {
    "log_probs": ("log_prob", np.float64), "sigmas": ("sigma", np.float32), "next_sigmas": ("sigma_next", np.float32),
    "timesteps": ("timestep", np.float32), "step_indices": ("step_index", np.int64),
    "noise_std": ("noise_std", np.float64),
    "std_dev_t": ("std_dev_t", np.float64),
}
_OF_STEPS = ("noise_std", "std_dev_t", "x_coefficient", "v_coefficient")  # which trajectories do not have
_TRAINED = {*STATES, *_STEP, *_OF_STEPS, "mask", "cfg_scales"}  # what there is of trained steps alone
_SAMPLE: dict[str, tuple[str, Any]] = {
    "prompt": ("prompt", np.str_), "weights_digest": ("weights_digest", np.str_),
    "policy_version": ("policy_version_max", np.int64), "sample_seed": ("sample_seed", np.uint64),
}
_DTYPES: dict[type, Any] = {int: np.int64, float: np.float64, bool: np.bool_, str: np.str_}
_IMAGE: dict[str, tuple[str, Any]] = {
    "cfg_rule": ("cfg_rule", np.str_),
    **{name: (name, np.uint64 if name.endswith("_seed") else _DTYPES[of]) for name, of in SETTINGS.items()},
}
_FACTS = (*_SAMPLE, *_IMAGE, "uid", "rewards", "sample_index", "round")  # what _facts builds, but for group_index
_ABSENT: dict[str, Callable[[AnyEvent], Any]] = {
    "prompt_2": lambda t: t["prompt"], "prompt_3": lambda t: t["prompt"], "frames": lambda _: 1,
}
"""What a setting is where a sample does not have it, if not 0 or empty."""
USES = {
    *SETTINGS, "cfg_scales", "sigmas", "transitions", "start", "stop", "step_seeds", "scheduled_sampling",
    "conditions", "arguments", "network_timesteps",
}  # fmt: skip
"""The settings that a batch has, as arrays, in its steps or in the trajectories of its samples: a sample with another
is refused."""


def scales_of(trajectory: AnyEvent) -> list[float]:
    """The scale of classifier-free guidance of each step of the schedule, 1 without. EventError: they are not there."""
    steps, scales = len(trajectory["transitions"]), trajectory.get("cfg_scales") or []
    if len(scales) != steps and (scales or trajectory["true_cfg_scale"] > 1):
        raise EventError(f"{trajectory['uid']}: cfg_scales: {len(scales)}; must be those of the {steps} steps")
    return scales or [1.0] * steps


def _bits(values: Sequence[float | None]) -> str:
    """The IEEE 754 bits of numbers, as digest has them."""
    return ",".join("-" if v is None else struct.pack(">d", v).hex() for v in values) or "-"


def _content(trajectory: AnyEvent) -> str:
    """What digest has of the steps of a sample: its log-probs, of a text the digests of its tokens and log-probs."""
    if (text := trajectory.get("text")) is None:
        return _bits(trajectory.get("log_probs") or ())
    held: list[Any] = [text.get(k) for k in ("ids", "mask", "log_probs", "processed_log_probs")]
    sums = (t["ref"]["digest"] if t.get("ref") else hashlib.sha256(t["data"]).hexdigest() for t in held if t)
    return ",".join(sums) or "-"


def _alike(group: Group) -> list[list[Sample]]:
    """The samples of a group by what their texts are: those of a stage have each their own, else all have one."""
    return [[s] for s in group.trained] if any("round" in s.member for s in group.samples) else [group.samples]


def _conditioning(alike: Sequence[Sequence[Sample]]) -> dict[str, Array]:
    """Returns the encoded texts of samples that have the same, zero padded to the longest; empty unless all have
    them."""
    by_part = [next((s.conditioning for s in part if s.conditioning), {}) for part in alike]
    out: dict[str, Array] = {}
    for name in by_part[0] if by_part else ():
        if not all(name in c for c in by_part):
            continue
        longest = max(c[name].shape[0] for c in by_part)
        first = by_part[0][name]
        padded = np.zeros(
            (len(by_part), longest, *first.shape[1:]), np.int64 if name.endswith("_mask") else np.float32
        )
        for i, c in enumerate(by_part):
            if c[name].shape[1:] != first.shape[1:]:
                raise ValueError(
                    f"{alike[i][0].facts.get('uid')}: {name} {list(c[name].shape)}, of other groups "
                    f"{list(first.shape)}; must be as wide"
                )
            padded[i, : len(c[name])] = c[name]
        out[name] = padded
    return out


Keep = Callable[[Group], str | Awaitable[str]]
"""Says why a group is left out of the batches; empty if it is not. It may be async."""


def fresh(
    min_policy_version: int = 0, max_age: float = 0, weights_digest: str = "", max_policy_span: int | None = None
) -> Keep:
    """Returns a rule that leaves out groups that are too far from the policy: made with weights older than
    min_policy_version or with another digest, closed more than max_age seconds ago (0: any time), or with samples of
    more than max_policy_span versions (newest - oldest + 1)."""
    import time

    def rule(group: Group) -> str:
        a = group.advantage
        oldest, newest = a["policy_version_min"], a["policy_version_max"]
        if oldest < min_policy_version:
            return f"policy version {oldest}; wanted are {min_policy_version} and newer"
        if max_policy_span is not None and newest - oldest + 1 > max_policy_span:
            span = newest - oldest + 1
            return f"policy versions {oldest} to {newest} are a span of {span}; must be at most {max_policy_span}"
        if max_age and time.time() - a["closed"] / 1e9 > max_age:
            return f"closed {time.time() - a['closed'] / 1e9:.0f} s ago; wanted are at most {max_age:g} s"
        others = {s.trajectory["weights_digest"] for s in group.samples if s.trajectory} - {weights_digest}
        if weights_digest and others:
            return f"weights {others.pop():.16}; wanted are {weights_digest:.16}"
        return ""

    return rule
