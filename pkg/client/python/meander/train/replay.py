"""The time machine: makes an update of a stored run again, of the stream or of an archive, and compares two that are
made with other settings or by another version of the code."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import math
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import nats.errors
import torch
from nats.js.errors import NotFoundError
from safetensors import torch as safetensors

from ..client.client import Client, connect
from ..data.events import PREFIX, AnyEvent, Gone, decode
from ..data.textbatch import batch_of
from . import ledger
from .archive import Archive, Recorder
from .config import Config, flag
from .learner import Learner, Report
from .loop import kind_of, teacher_of
from .model import Network, digest, encoded
from .rollouts import Rollouts

_APART = 1e-2
"""How far, of its length, an update may be off where it is not the same to the bit: Adam divides gradients by their own
size, so that roundings of another processor or library decide the direction of those that are nearly 0."""
_ROWS = 24  # of the table
_PATIENCE = 1.0  # seconds to wait for a teacher to answer
_PLACES = {"nats", "token", "credentials", "ca", "context", "lane", "tenant", "trainer"}
"""Settings that say where the update is."""


@dataclasses.dataclass
class Made:
    """What an update made, tensors by the names of the adapter's parameters, float32 on the CPU."""

    gradients: dict[str, torch.Tensor]
    """As cut to max_grad_norm, of the last step of the optimizer."""
    steps: dict[str, torch.Tensor]
    """By how much the weights changed."""
    weights: dict[str, torch.Tensor]
    """The adapter behind the update."""
    average: str
    """The digest of the running average; empty: there is none."""
    report: Report
    """What the learner says of it."""
    taught_by: str
    """The teacher that was asked; empty: none."""


def main(given: dict[str, Any]) -> None:
    """The command line with --replay, of which the flags that were given. It exits: 0 it is the same, or two were
    compared; 1 it is not."""
    try:
        link = asyncio.run(_Replay(given).run())
    except (ValueError, OSError, Gone, RuntimeError, NotFoundError, nats.errors.Error) as e:
        sys.exit(f"meander-train: --replay {given['replay']}: {e or type(e).__name__}")
    if given.get("json"):
        print(json.dumps(link))
    else:
        print(f"{link['link']} {link['of']}: {link['verdict']}: {link['what']}")
    sys.exit(link["verdict"] not in ("holds", "compared"))


class _Replay:
    """One replay; given are the flags that were given."""

    def __init__(self, given: dict[str, Any]):
        own = {f.name for f in dataclasses.fields(Config)}
        self.options = {k: v for k, v in given.items() if k not in own}
        self.given = {k: v for k, v in given.items() if k in own}
        self.of, _, number = str(given["replay"]).partition("@")
        self.file = "." in self.of or "/" in self.of
        if number and not number.isdigit() or not number and not self.file:
            raise ValueError("must be RUN@K, or the FILE of an archive or FILE@K, with the number of an update")
        self.number = int(number) if number else None

    @contextlib.asynccontextmanager
    async def _source(self) -> AsyncIterator[Client]:
        """The archive, or a connection."""
        if self.file:
            yield Archive.read(Path(self.of))
            return
        names = ("token", "credentials", "ca", "context")
        named = {k: v for k in names if (v := self.given.get(k))}
        async with connect(self.given.get("nats", Config.nats), **named) as client:
            yield client

    async def run(self) -> dict[str, Any]:
        """Makes the update, and returns the link with its verdict."""
        async with self._source() as client:
            recorder = Recorder(client)
            self.update = await self._update(client)
            told, settings = self._settings()
            batches = [await self._batch(client, name, told) for name in self.update["batches"]]
            begins = await client.blob(self.update["state"]) if self.update.get("state") else None
            policies = await self._policies(client)
            before = policies.get(self.update.get("weights_before", ""), {})
            if begins is None and before.get("adapter"):
                begins = await client.blob(before["adapter"]["file"])
            after = policies.get(self.update["weights_digest"], {})
            adapter = await client.blob(after["adapter"]["file"]) if after.get("adapter") else None
            if bundle := self.options.get("bundle"):
                await self._beside(client, batches, before)
                recorder.events.keep("MDR_POLICIES", {p["seq"] for p in policies.values()})
                recorder.events.write(Path(bundle))
            torch.set_num_threads(told.threads)
            lr = self.update.get("lr")
            first = await self._make(client, told, batches, begins, lr)
            if digests := self._batch_fault(batches):
                return self._link("broken", digests)
            others = {k: v for k, v in settings.items() if v != getattr(told, k)}
            if others:
                second = await self._make(client, dataclasses.replace(told, **others), batches, begins,
                                          others.get("lr", lr))  # fmt: skip
                what = ", ".join(f"--{flag(k)} {v} for {getattr(told, k)}" for k, v in others.items())
                return self._link("compared", f"{what}: {self._compare(first, second, what)}")
        if kept := self.options.get("keep"):
            safetensors.save_file({f"{kind}/{n}": t.contiguous() for kind in ("gradients", "steps")
                                   for n, t in getattr(first, kind).items()}, kept)  # fmt: skip
        if against := self.options.get("against"):
            parts: dict[str, dict[str, torch.Tensor]] = {"gradients": {}, "steps": {}}
            for name, t in safetensors.load_file(against).items():
                kind, _, of = name.partition("/")
                parts[kind][of] = t
            other = dataclasses.replace(first, gradients=parts["gradients"], steps=parts["steps"])
            return self._link("compared", self._compare(other, first, f"{against} and this code"))
        if "micro" in self.options:
            length = f"gradient {_length(first.gradients):.6g}"
            return self._link("compared", f"micro-batch {self.options['micro']}: {length}")
        return self._verdict(first, told, begins is not None and bool(self.update.get("state")), adapter)

    async def _update(self, client: Client) -> AnyEvent:
        """The event of the update."""
        lane, tenant, trainer = (self.given.get(k) or "*" for k in ("lane", "tenant", "trainer"))
        number = "*" if self.number is None else self.number
        subject = f"{PREFIX}update.{'*' if self.file else self.of}.{lane}.{tenant}.{trainer}.{number}"
        found = {m.seq: m for m in (await client._many("MDR_UPDATES", [subject])).values()}
        if not found:
            raise ValueError("no trainer told of this update")
        if len(who := {m.subject.rsplit(".", 1)[0].split(".", 4)[4] for m in found.values()}) > 1:
            raise ValueError(f"updates of {', '.join(sorted(who))}; name one by --lane, --tenant, --trainer")
        update = decode(found[max(found)].data)
        if not update["batches"] or not update.get("settings"):
            raise ValueError("it does not tell what it learned from, or its settings: another or an older trainer")
        return update

    def _settings(self) -> tuple[Config, dict[str, Any]]:
        """The settings that the update tells, and those that are given in their place."""
        told = json.loads(self.update["settings"])
        known = {f.name for f in dataclasses.fields(Config)}
        if unknown := sorted(told.keys() - known):
            raise ValueError(f"it has the setting {unknown[0]}, which this version does not know")
        own = {"device": "cpu"} | {k: v for k, v in self.given.items() if k in ("model", "device", "threads")}
        if other := sorted(self.given.keys() - told.keys() - own.keys() - _PLACES):
            raise ValueError(f"--{flag(other[0])}: does not decide an update, and must not be given")
        config = Config(**{"prompts": "-", **told, **own})
        return config, {k: v for k, v in self.given.items() if k in told and k not in own}

    async def _batch(self, client: Client, name: str, config: Config) -> Any:
        """A batch of the update, whole."""
        run = self.update["run"]
        try:
            event = decode((await client.js.get_last_msg("MDR_ADVANTAGES", f"{PREFIX}batch.{run}.{name}")).data or b"")
        except NotFoundError:
            raise ValueError(f"batch {name} is not stored any more") from None
        groups = [await client.group(run, uid, stage=config.stage) for uid in event["uids"]]
        return batch_of(groups, name, "", "processed" if config.texts else "raw", client)

    def _batch_fault(self, batches: list[Any]) -> str:
        got, want = ledger.joined([b.digest() for b in batches]), self.update.get("batch_digest", "")
        return "" if got == want else f"its batch gives {got:.16}, the update names {want:.16}"

    async def _beside(self, client: Client, batches: list[Any], before: AnyEvent) -> None:
        """Reads what `meander prove` asks of the batches beside what an update is made of, where it is stored."""
        refs, u = [before.get("modules"), (before.get("adapter") or {}).get("file")], self.update
        for step in range(1, u["step"]):
            with contextlib.suppress(NotFoundError):
                earlier = f"{PREFIX}update.{u['run']}.{u['lane']}.{u['tenant']}.{u['trainer']}.{step}"
                await client.js.get_last_msg("MDR_UPDATES", earlier)
        for batch in batches:
            for g in batch.groups:
                await client._many("MDR_REWARDS", [f"{PREFIX}reward.*.{u['run']}.{batch.name}.{g.uid}.*"])
                with contextlib.suppress(NotFoundError):
                    m = await client.js.get_last_msg("MDR_GROUPS", f"{PREFIX}group.{u['run']}.{g.uid}")
                    record = decode(m.data or b"")
                    await client.js.get_msg("MDR_PROMPTS", record["group"]["prompt_seq"])
                refs += [m.get("ref") for s in g.samples for m in s.facts.get("media") or ()]
        for ref in filter(None, refs):
            with contextlib.suppress(Gone):
                await client.blob(ref)

    async def _policies(self, client: Client) -> dict[str, AnyEvent]:
        """The policies of the lane before and after the update, by the digests of their weights."""
        wanted = {self.update["weights_digest"], self.update.get("weights_before", "")} - {""}
        found, subject = dict[str, AnyEvent](), f"{PREFIX}policy.{self.update['lane']}.{self.update['tenant']}"
        with contextlib.suppress(NotFoundError):
            seq = (await client.js.get_last_msg("MDR_POLICIES", subject)).seq or 0
            for seq in range(seq, 0, -1):
                with contextlib.suppress(NotFoundError):
                    m = await client.js.get_msg("MDR_POLICIES", seq)
                    p = decode(m.data or b"") if m.subject == subject else {}
                    if p.get("weights_digest") in wanted - found.keys():
                        found[p["weights_digest"]] = {**p, "seq": seq}
                if found.keys() == wanted:
                    break
        return found

    async def _make(self, client: Client, config: Config, batches: list[Any], begins: bytes | None,
                    lr: float | None) -> Made:
        """Makes the update with settings."""
        kind: Any = kind_of(config)
        network: Network = kind._network(config)
        learner: Learner = kind.learns(network, config)
        if begins is not None and self.update.get("state"):
            learner.load(ledger.unpacked(begins, learner))
        elif begins is not None:
            network.load(safetensors.load(begins))
        if learner.average is None and config.ema:
            learner.average = network.state()
        if (micro := self.options.get("micro")) is not None:
            pieces: Any = learner._pieces
            changed: Any = learner
            changed._pieces = lambda *of: _only(pieces(*of), micro)
        before, parts = network.state(), len(batches)
        behind = self.update.get("staleness") or 0
        for part, batch in enumerate(batches):
            rollouts = await self._rollouts(client, network, config, batch)
            report = await asyncio.to_thread(learner.update, rollouts, behind, lr, part, parts)
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.detach().cpu().clone()
            for name, p in network._adapter().items()
        }
        steps = {name: t - before[name] for name, t in learner.adapter.items()}
        average = "" if learner.average is None else digest(learner.average)
        return Made(gradients, steps, learner.adapter, average, report, learner.taught_by)

    async def _rollouts(self, client: Client, network: Network, config: Config, batch: Any) -> Rollouts:
        """A batch as the network needs it."""
        if config.texts:
            from .texts import TextRollouts

            return TextRollouts(batch)
        whole = network.whole
        for c in [c for s in batch.samples for c in s.facts.get("conditions") or []] if whole else ():
            if whole and whole.lacks(c):
                whole.read(c, await client.blob(c["ref"]))
        if self.file and config.teacher:
            raise ValueError(f"teacher {config.teacher} gave what it learned, and must run: name RUN@K of its pipeline")
        teacher = teacher_of(client, config, _PATIENCE)
        return Rollouts(batch, network.family.conditioning, True, whole.recipe if whole else None, None, teacher)

    def _verdict(self, made: Made, config: Config, exact: bool, adapter: bytes | None) -> dict[str, Any]:
        """Whether the update that was made is the one that was told."""
        code, told = ledger.code(torch.device(config.device), made.taught_by), self.update.get("code", "")
        file = encoded(made.weights)
        if adapter is None:
            return self._link("unchecked", "its new weights are not stored")
        if hashlib.sha256(adapter).digest() == hashlib.sha256(file).digest():
            want = self.update.get("average_digest", "")
            if want and made.average != want:
                return self._link("broken", f"the running average is {made.average:.16}, it told {want:.16}")
            return self._link("holds", f"made again to the bit from {', '.join(self.update['batches'])}: the adapter's "
                              f"{len(file)} bytes" + (", and the running average" if want else ""))  # fmt: skip
        then = safetensors.load(adapter)
        apart = {n: t - then[n] for n, t in made.weights.items()}
        off = _length(apart) / max(_length(made.steps), 1e-30)
        what = f"the new weights are {off:.2g} of the step's length from those that it told"
        if not exact:
            return self._link("unchecked", f"{what}: the optimizer's moments are not stored (--keep-states)")
        if code != told:
            return self._link("unchecked", f"{what}: by {code}, and it was made by {told}") | {"off": off}
        if off <= _APART:
            return self._link("unchecked", f"{what}, which roundings of another processor explain") | {"off": off}
        return self._link("broken", what)

    def _link(self, verdict: str, what: str) -> dict[str, Any]:
        return {"link": "update", "of": f"update {self.update['step']}", "verdict": verdict, "what": what}

    def _compare(self, a: Made, b: Made, what: str) -> str:
        """Prints how far two updates are apart, by groups of parameters, and returns the sum of it."""
        rows = list[tuple[str, float, float, float, float]]()
        for group in dict.fromkeys(map(_group, a.gradients)):
            names = [n for n in a.gradients if _group(n) == group]
            ga, gb, sa, sb = ({n: of[n] for n in names} for of in (a.gradients, b.gradients, a.steps, b.steps))
            rows.append((group, _length(ga), _length(gb), _cosine(ga, gb), _apart(sa, sb)))
        if not self.options.get("json"):
            print(f"{what}\n{'':40}{'|gradient|':>12}{'other':>12}{'cosine':>10}{'steps apart':>13}")
            for row in sorted(rows, key=lambda r: -r[4])[:_ROWS]:
                print(f"{row[0][-39:]:40}{row[1]:12.4g}{row[2]:12.4g}{row[3]:10.6f}{row[4]:13.4g}")
            if len(rows) > _ROWS:
                print(f"and {len(rows) - _ROWS} more, whose steps are less far apart")
        off = _apart(a.steps, b.steps)
        return (f"losses {a.report.loss:.6g} and {b.report.loss:.6g}, cosine of the gradients "
                f"{_cosine(a.gradients, b.gradients):.6f}, steps {off:.4g} of their length apart")  # fmt: skip


def _only(pieces: Iterable[Any], micro: int) -> Iterator[Any]:
    """The micro-batch of an index, of those of a batch."""
    n = 0
    for n, piece in enumerate(pieces, 1):
        if n == micro + 1:
            yield piece
            return
    raise ValueError(f"--micro: {micro}; must be one of 0 to {n - 1}")


def _group(name: str) -> str:
    return name.split(".lora_")[0].removeprefix("base_model.model.")


def _length(of: dict[str, torch.Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in of.values()))


def _cosine(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    size = _length(a) * _length(b)
    return sum(float((t.double() * b[n].double()).sum()) for n, t in a.items()) / size if size else math.nan


def _apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    size = max(_length(a), _length(b))
    return _length({n: t.double() - b[n].double() for n, t in a.items()}) / size if size else 0.0
