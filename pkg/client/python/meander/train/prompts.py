"""The prompts that a trainer publishes, drawn from a file."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..data.events import TRANSITIONS
from .config import Config, weighted


NO_TRACKS = (
    "credit: tracks have advantages of their own, for which a loss of pairs has no use: it takes the best and the "
    "worst sample of a group by reward"
)
"""Why a loss of pairs is refused."""

_SOMETHING = re.compile(r"\S")
_TEXT, _JSON = ("", ".txt"), (".json", ".jsonl", ".ndjson")


def read(path: str | Path) -> list[dict[str, Any]]:
    """The prompts of a file: a text a line (.txt), or JSON with the fields of a Prompt (prompt alone is required) or
    texts, one a line, one after the other or in an array. A file without an extension may have both in its lines."""
    if str(path).startswith("hf://"):
        raise ValueError(f"{path}: a data set of the Hugging Face Hub; must be a file: "
                         f"'meander prompts {path} --out prompts.jsonl' fetches it")  # fmt: skip
    path = Path(path)
    kind = path.suffix.lower()
    if kind not in _TEXT + _JSON:
        raise ValueError(f"{path}: {kind} is not read here; must be text (.txt) or JSON (.json, .jsonl): "
                         f"'meander prompts {path} --out prompts.jsonl' makes JSON of it")  # fmt: skip
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: {e}; must be UTF-8") from None
    if "\0" in text:
        raise ValueError(f"{path}: a zero byte; must be a text")
    out = []
    for n, item in _objects(path, text) if kind in _JSON else _lines(path, text):
        fields = {"prompt": item} if isinstance(item, str) else item
        if not isinstance(fields, dict) or not isinstance(fields.get("prompt"), str):
            found = fields.get("prompt") if isinstance(fields, dict) else fields
            raise ValueError(f"{path}:{n}: prompt: {found!r:.60}; must be a text")
        out.append(fields)
    if not out:
        raise ValueError(f"{path}: no prompt in it")
    return out


def check_rollouts(config: Config, given: list[dict[str, Any]], forward: bool) -> None:
    """ValueError: a prompt has a rollout of its own without a stochastic step, for which a loss of log-probs has no
    use, or whose samples would be equal; or whose last latents, which a forward loss takes, are not stored."""
    for fields in given:
        for of in [fields, *(s for s in fields.get("stages") or () if s.get("name") == config.stage)]:
            if (own := of.get("rollout")) is None:
                continue
            steps, kept = of.get("num_inference_steps", config.steps), own.get("return_step_indices")
            what = f"prompt {fields['prompt']!r:.60}: rollout"
            of_noise = TRANSITIONS.get(own.get("sde_type") or "", {"stochastic": True}).get("stochastic")
            ode = not of_noise or own.get("sde_step_indices") == []
            if ode and not forward:
                raise ValueError(f"--loss {config.loss}: needs log-probs, and no step of {what} is stochastic")
            if ode and of.get("initial_noise", config.initial_noise) == "shared":
                raise ValueError(f"--initial-noise: shared; must be per_sample, as no step of {what} is stochastic")
            if forward and (kept is None and not ode or kept is not None and steps not in kept):
                raise ValueError(
                    f"{what}.return_step_indices: {kept}; must have {steps}, the last latents, for --loss {config.loss}"
                )


def check_stages(config: Config, given: list[dict[str, Any]], pairs: bool = False) -> None:
    """ValueError: a prompt does not have, or does not train, a stage that the settings name, or has stages and they
    name none, or credits tracks, for which a loss of pairs has no use."""
    for fields in given:
        stages = fields.get("stages") or []
        trains = ", ".join(str(s.get("name")) for s in stages if not (s.get("frozen") or s.get("interaction")))
        what = f"prompt {fields['prompt']!r:.60}"
        if stages and not config.stage:
            raise ValueError(f"--stage: empty; must name one that {what} trains: {trains or 'none'}")
        mine = [fields, *(s for s in stages if s.get("name") == config.stage)]
        if pairs and any(c.get("track") for of in mine for c in of.get("credit") or ()):
            raise ValueError(f"--loss {config.loss}: {what}: {NO_TRACKS}")
        for flag, name in [("--stage", config.stage)] * bool(config.stage) + [("--beside", n) for n in config.others]:
            if name not in trains.split(", "):
                why = "is frozen or of an interaction" if name in [s.get("name") for s in stages] else "is not there"
                raise ValueError(f"{flag} {name}: {why}; must be one that {what} trains: {trains or 'none'}")


def asked(fields: dict[str, Any]) -> tuple[str, str]:
    """What a prompt asks for: its text, and what else a pipeline is given."""
    more = {k: v for k, v in fields.items() if k in ("prompt_2", "prompt_3", "conditions", "arguments")}
    return fields["prompt"], json.dumps(more, sort_keys=True)


def _lines(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """The lines that are not blank with their numbers; without an extension those in braces are JSON."""
    for n, line in enumerate(text.split("\n"), 1):
        line = line.strip()
        if line.startswith("{"):
            try:
                item = json.loads(line, object_pairs_hook=_once)
            except ValueError as e:
                if not path.suffix:
                    raise ValueError(f"{path}:{n}: {e}; must be a text, or JSON with the fields of a prompt") from None
                item = line
            if path.suffix and item is not line:
                raise ValueError(f"{path}:{n}: JSON in a file of texts; name it .jsonl")
            yield n, item
        elif line:
            yield n, line


def _objects(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """The values of a file of JSON, those of an array one by one, with their lines."""
    decoder, line, at, seen = json.JSONDecoder(object_pairs_hook=_once), 1, 0, 0
    while (found := _SOMETHING.search(text, at)) is not None:
        at = found.start()
        line, seen = line + text.count("\n", seen, at), at
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError as e:
            raise ValueError(f"{path}:{line}: {e}; must be JSON with the fields of a prompt") from None
        for item in value if isinstance(value, list) else [value]:
            yield line, item


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names come once."""
    out = dict(pairs)
    if len(out) < len(pairs):
        twice = next(k for i, (k, _) in enumerate(pairs) if k in dict(pairs[:i]))
        raise ValueError(f"{twice}: must come at most once")
    return out


class Draw:
    """The prompts of each batch: the file in a new order in every epoch, the same for the same seed."""

    def __init__(self, prompts: list[dict[str, Any]], groups: int, seed: int):
        self.prompts, self.groups, self.seed = prompts, groups, seed
        # Of the newest two epochs: a batch may begin in one and end in the next.
        self._orders: dict[int, list[int]] = {}

    def epoch(self, batch: int) -> int:
        """The epoch that a batch begins in, from 0."""
        return batch * self.groups // len(self.prompts)

    def batch(self, batch: int) -> list[dict[str, Any]]:
        """The prompts of a batch."""
        out = []
        for i in range(batch * self.groups, (batch + 1) * self.groups):
            epoch, at = divmod(i, len(self.prompts))
            out.append(self.prompts[self._order(epoch)[at]])
        return out

    def _order(self, epoch: int) -> list[int]:
        if epoch not in self._orders:
            self._orders = {e: order for e, order in self._orders.items() if e == epoch - 1}
            n = len(self.prompts)
            self._orders[epoch] = random.Random(f"{self.seed} {epoch}").sample(range(n), n)
        return self._orders[epoch]


_ANY_SPAN = 1 << 20  # the most that a prompt may say


def training(
    config: Config, batch: int, drawn: list[dict[str, Any]], epoch: int, version: int, diversity: float = 0.0,
    clean: bool = False, versions: Mapping[str, int] = {},
) -> list[dict[str, Any]]:
    """The prompts of a batch to train on, made by weights of version or newer; diversity is its weight in the reward,
    clean says that the last latents are wanted, too. versions are those of other stages."""
    trained = config.window(batch)
    kept = {i for s in trained for i in (s, s + 1)} | ({config.steps} if clean else set())
    noise = {} if config.ode else {"noise_level": config.noise_level, "sde_step_indices": trained}
    images: dict[str, Any] = {
        "num_inference_steps": config.steps,
        "initial_noise": config.initial_noise,
        "rollout": {
            "sde_type": config.sde_type, **noise, "solver": config.solver,
            **({} if config.generic else {"return_conditioning": True}),
            **({"latents_dtype": config.latents_dtype} if config.latents_dtype else {}),
        },
    }  # fmt: skip
    out = []
    for i, fields in enumerate(drawn):
        common = _common(config, f"{batch_id(batch)}-{i:03d}", config.seed, batch, i)
        sample = {
            "uid": common.pop("uid"), "seed": common.pop("seed"),
            "group_size": config.group_size,
            "reward": config.rewards(diversity),
            "advantage": {"estimator": config.estimator},
            "batch": {"id": batch_id(batch), "groups": len(drawn), "step": batch, "epoch": epoch},
            **({"free_read_steps": True} if config.free_read_steps else {}),
        }
        # Of ode steps one group says by its last one whether the samplers have the trainer's weights.
        last = {config.steps - 1} if config.ode and i == 0 else set[int]()
        rollout = {"rollout": {**images["rollout"], "return_step_indices": sorted(kept | last)}}
        lane = {**common, **({} if config.texts else images | rollout), "min_policy_version": version}
        if config.stage:
            # A trainer that starts again announces the same weights once more, maybe while samples are made: they have
            # two versions then. What is behind is told by weights (Loop._next).
            sample["group_policy"] = {"max_policy_span": _ANY_SPAN}
            fields = {**fields, "stages": _stages(config, fields, lane, versions)}
            lane = {}
        out.append({**sample, **lane, **fields})
    return out


def _stages(
    config: Config, fields: dict[str, Any], lane: dict[str, Any], versions: Mapping[str, int]
) -> list[dict[str, Any]]:
    """The stages of a prompt of the file: the one that is trained has the settings of the lane that the file leaves
    out, the others are made by their newest weights."""
    newest = {name: {"min_policy_version": v} for name, v in versions.items()}
    return [{**(lane if s["name"] == config.stage else newest.get(s["name"], {})), **s} for s in fields["stages"]]


def batch_id(batch: int) -> str:
    """The batch id of the prompts of an update."""
    return f"u{batch:06d}"


def held_out(config: Config, name: str, prompts: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
    """The prompts of an evaluation: validation groups of the held-out ones, read by the rewarded reader and the gold
    one.

    A prompt of the file may say how these read; readers that it names besides are left out.
    """
    readers = [
        {"name": r["name"], "weight": 1.0 if k == 0 else 0.0}
        for k, r in enumerate(weighted(config.reward)) if r["name"] != "diversity"
    ]
    if config.gold and config.gold not in (r["name"] for r in readers):
        readers.append({"name": config.gold, "weight": 0.0})
    return [
        {
            **_common(config, f"{name}-{i:03d}", config.eval_seed, i),
            "group_size": config.eval_samples, "num_inference_steps": config.eval_steps or config.steps,
            "validation": True,
            "batch": {"id": name, "groups": len(prompts)}, "min_policy_version": version,
            **fields,
            "reward": [{r["name"]: r for r in fields.get("reward", [])}.get(r["name"], r) for r in readers],
        }
        for i, fields in enumerate(prompts)
    ]  # fmt: skip


def variety(config: Config, name: str, prompts: list[dict[str, Any]], version: int) -> list[dict[str, Any]]:
    """Groups of 8 sampled as in training, to measure how far their samples are apart."""
    chosen = [
        prompts[i * len(prompts) // min(config.variety, len(prompts))] for i in range(min(config.variety, len(prompts)))
    ]
    out = training(config, 0, chosen, 0, version)
    for i, p in enumerate(out):
        p |= {
            **_common(config, f"{name}-{i:03d}", config.eval_seed, i), "group_size": 8,
            "batch": {"id": name, "groups": len(out)}, "reward": [{"name": "diversity"}]
        }
    return out


def _common(config: Config, uid: str, *draw: object) -> dict[str, Any]:
    """What all prompts have; the seed of their noise is drawn of draw."""
    lane = {k: v for k, v in (("model", config.lane), ("tenant", config.tenant)) if v}
    seed = int.from_bytes(hashlib.sha256(repr(draw).encode()).digest()[:6], "big")
    given = {
        "true_cfg_scale": config.guidance, "true_cfg_scale_2": config.guidance_2,
        "height": config.height, "width": config.width, "frames": config.frames,
    }  # fmt: skip
    own = {name: value for name, value in given.items() if value and not config.texts}  # else those of the model
    return {"uid": uid, "seed": seed, **own, **lane}
