"""The client of a pipeline. It needs NATS and msgpack, nothing else."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import io
import json
import logging
import os
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgpack
import nats
import numpy as np
import numpy.typing as npt
from nats.aio.client import Client as NATS
from nats.aio.msg import Msg
from nats.js.errors import NoStreamResponseError, NotFoundError

from . import access, conditions as files, traces
from .bulk import Stored, last_of_each
from .cache import Cache
from ..data.batch import Group, Keep, Sample
from .control import Controls, Refused
from .cursor import PatientJetStream
from .discovery import discoverable
from ..data.memory import empty
from ..data.events import (
    ADVANTAGE, BATCH, PREFIX, STAGE, STEP, TOKENS, TRAJECTORY, UPDATE, AnyEvent, Event, EventError, Gone,
    by_name, checked, decode, fault, fitting, name_of, tensor,
)
from ..data.fields import PromptFields, RewardSpec
from .media import Files
from .reader import COUNTED, Batches, Groups, LogProbs
from ..data import staged
from .tasks import means_away, maybe_awaited, together
from .teacher import Teachers
from .updates import Updates
from ..data.text import NUMBERS, Text, add_events, answer_logits, text_of
from .verdicts import Verdicts

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..data import contract

_log = logging.getLogger("meander")

_GETS, _BULK = 32, 2  # requests at once for a stored message, and for many
_FILTERS = 256  # subjects of one request
_PORTION = 32 << 20  # bytes of states that are asked for at once, about
_CHUNK_WAIT = 5.0  # seconds without a part of a blob after which it is asked whether there are any
_HELD_BLOBS = 64  # tensors of texts that are kept for the next samples


@contextlib.asynccontextmanager
async def connect(
    url: str = access.DEFAULT_URL, token: str | None = None, patience: float = 10, *,
    credentials: str | None = None, ca: str | None = None, cert: str | None = None, key: str | None = None,
    context: str | None = None, js_domain: str | None = None, js_prefix: str | None = None, tls_first: bool = False,
    cloudevents: bool = False, cache: str | os.PathLike[str] = "", cache_bytes: int = 64 << 30,
) -> AsyncIterator["Client"]:
    """Connects to the NATS server of a pipeline.

    credentials is a credentials file: of `meander auth`, or a JWT and its key. ca is the PEM file of the authority that
    signed the server's certificate. cert and key are our own certificate, if the server wants one.

    context is a context of the nats command, by its name or the full path of its file. It has what is not given here.
    js_domain is the JetStream domain of the streams, where a leaf node leads to them; js_prefix is what another account
    exports its JetStream API under. tls_first begins with the TLS handshake, as some servers want it.

    cloudevents gives each event that is published the attributes of CloudEvents 1.0, as headers ce-*.

    cache is a folder that keeps the steps of samples that were read, of cache_bytes at most: later epochs, restarts and
    other processes of the machine read them there.

    With tls:// or ca the connection uses TLS. If the server does not, ConnectionError says so, and nothing was sent.

    ConnectionError: no server answers within patience seconds, or it refuses us. A connection that is lost later is
    made again; calls that need it wait, or raise.
    PermissionError: the server does not allow a call. It is raised at once.
    VersionMismatch, a warning: the pipeline is of another release than this client.
    """
    held = Cache(cache, cache_bytes) if cache else None
    of = access.read_context(context) if context else {}
    url = of.get("url", url) if url == access.DEFAULT_URL else url
    if not token and not credentials:
        token, credentials = of.get("token"), of.get("credentials")
    else:
        of = {k: v for k, v in of.items() if k not in ("user", "password")}
    ca, cert, key = ca or of.get("ca"), cert or of.get("cert"), key or of.get("key")
    js_domain, js_prefix = js_domain or of.get("js_domain"), js_prefix or of.get("js_prefix")
    if js_domain and js_prefix:
        raise ValueError("js_domain: excludes js_prefix; use one of them")
    denials = access.Denials(credentials)
    options: dict[str, Any] = {
        "name": "meander-python", "error_cb": denials.note, "max_reconnect_attempts": -1, "reconnect_time_wait": 0.2
    }
    options |= {name: of[name] for name in ("user", "password", "inbox_prefix") if name in of}
    options |= access.options(token, credentials, ca, cert, key)
    options["tls_handshake_first"] = tls_first or of.get("tls_first", False)
    options["api"] = f"$JS.{js_domain}.API" if js_domain else (js_prefix or "").removesuffix(".")
    try:
        nc = await asyncio.wait_for(access.open_connection(url, **options), patience)
    except (access.ClearText, asyncio.TimeoutError, OSError, nats.errors.Error) as e:
        why = denials.last or e
        raise ConnectionError(f"{url}: {str(why) or type(why).__name__}; {access.hint(why)}") from None
    denials.watch(nc)
    await access.compare_versions(nc, patience)
    try:
        yield Client(nc, access.mark(credentials), held, cloudevents)
    finally:
        with contextlib.suppress(Exception):
            await nc.drain()


class Client(Controls, Files, Teachers, Updates, Verdicts):
    """Publishes prompts, verdicts, controls and updates, reads the results, and asks teachers.

    nc is the connection, js its JetStream, and mark what the names of its durable consumers begin with; cache has
    steps that were read.
    """

    def __init__(self, nc: NATS, mark: str = "", cache: Cache | None = None, cloudevents: bool = False):
        self.nc, self.cache = nc, cache
        self.mark = mark  # see access.mark
        self.js = PatientJetStream(nc, cloudevents)
        self._gets, self._bulk = asyncio.Semaphore(_GETS), asyncio.Semaphore(_BULK)
        self._texts: dict[str, asyncio.Future[bytes]] = {}

    async def publish(
        self, /, run: str, prompt: str, timeout: float = 10, dry: bool = False,
        conditions: Mapping[str, Any] | None = None, arguments: Mapping[str, Any] | None = None,
        reward: str | RewardSpec | Sequence[str | RewardSpec] = (), **fields: Unpack[PromptFields],
    ) -> contract.Receipt:
        """Stores a prompt and returns intake's receipt, whose warnings are logged. fields are fields of a Prompt, such
        as group_size=8, listed below; names of flags are known too, such as n=8 and steps=20. reward names the reward
        functions, one or several, by name or with settings: {"name": "ocr", "weight": 0.5}; none: the model's. dry:
        nothing is stored but conditions; the receipt says what would become of the prompt now.

        conditions are files that a pipeline is given, by name: paths, bytes, images of Pillow, arrays (uint8, or floats
        0 to 1), or lists of them. arguments are what else it is called with, such as {"true_cfg_scale": 4}.

        Refused: intake refuses the prompt.
        ValueError: run or uid cannot be a name, or a condition is no image.
        TimeoutError: no answer in time. The prompt is stored anyway, unless the message says that the server was away;
        it says what intake waits for, such as a sampler for the model.
        """
        given = by_name(fields)
        if isinstance(given.get("rollout"), Mapping):
            given["rollout"] = by_name(given["rollout"])
        if uid := given.get("uid"):
            name_of("uid", uid)
        if reward:
            several = [reward] if isinstance(reward, (str, Mapping)) else reward
            given["reward"] = [{"name": r} if isinstance(r, str) else r for r in several]
        if conditions:
            given["conditions"] = await files.stored(self, conditions, timeout)
        if arguments:
            given["arguments"] = files.texts(arguments)
        body = msgpack.packb({"v": 1, "prompt": prompt, **given})
        if dry:
            return self._outcome(run, decode((await self._request(f"dry.{name_of('run', run)}", body, timeout)).data))
        return await self._ask(f"prompt.{name_of('run', run)}", "prompt/1", body, timeout,
            again=bool(given.get("uid")))

    publish.__doc__ = f"{publish.__doc__}\n\n        {PromptFields.__doc__}"

    async def _ask(self, subject: str, kind: str, body: bytes, timeout: float, again: bool = False) -> Any:
        """Stores an event that intake answers, and returns the receipt. again says that it may be stored twice: so it
        is where the answer may have been lost with the connection."""
        inbox = self.nc.new_inbox()
        answers = await self.nc.subscribe(inbox)
        headers = {"Mdr-Reply": inbox, "Mdr-Type": kind, "Content-Type": "application/msgpack"}
        waiting, end = "no intake answered in time", time.monotonic() + timeout
        try:
            receipt = None
            while receipt is None:
                connection = self.nc.stats["reconnects"]
                await self._store(PREFIX + subject, body, headers, end)
                while receipt is None and not (again and self.nc.stats["reconnects"] != connection):
                    try:
                        m = await answers.next_msg(max(0.001, min(1, end - time.monotonic())))
                    except nats.errors.TimeoutError:
                        if time.monotonic() > end:
                            raise TimeoutError(f"{waiting}; the {kind.split('/')[0]} is stored") from None
                        continue
                    answer = decode(m.data)
                    if waits := answer.get("waiting"):
                        waiting = waits  # another receipt says what became of it
                    else:
                        receipt = answer
        finally:
            with contextlib.suppress(Exception):
                await answers.unsubscribe()
        return self._outcome(subject, receipt)

    async def _request(self, subject: str, body: bytes, timeout: float) -> Any:
        try:
            return await self.nc.request(PREFIX + subject, body, timeout, headers=traces.trace_context() or None)
        except nats.errors.NoRespondersError:
            raise TimeoutError("no intake runs: start one, or publish without dry") from None

    @staticmethod
    def _outcome(what: str, receipt: Any) -> Any:
        """The receipt of what intake accepts or holds; its warnings are logged."""
        if not receipt["accepted"] and not receipt.get("waiting"):
            raise Refused(receipt)
        for warning in receipt.get("warnings") or ():
            _log.warning("%s: %s", what, warning)
        return receipt

    async def _store(self, subject: str, body: bytes, headers: dict[str, str], end: float) -> None:
        """Publishes an event once, and waits for a server that is away, and for the streams of a pipeline that has just
        started."""
        headers = {**traces.trace_context(), **headers, "Nats-Msg-Id": secrets.token_hex(16)}
        while True:
            try:
                await self.js.publish(subject, body, headers=headers)
                return
            except Exception as e:
                if not means_away(e):
                    raise
                if time.monotonic() > end:
                    why = "the server was away, and may have stored it or not"
                    if isinstance(e, NoStreamResponseError):
                        why = "nothing is stored: the server has no stream for it; is a pipeline up?"
                    raise TimeoutError(f"{subject}: {why}") from None
            await asyncio.sleep(0.05)

    async def _messages(self, subject: str, stored: str) -> AsyncGenerator[Msg, None]:
        sub = await self.js.subscribe(PREFIX + subject, stream=stored, ordered_consumer=True)
        try:
            async for m in sub.messages:
                yield m
        finally:
            with contextlib.suppress(Exception):
                await sub.unsubscribe()

    async def _events(self, subject: str, stored: str, spec: Event) -> AsyncIterator[Any]:
        async with contextlib.aclosing(self._messages(subject, stored)) as messages:
            async for m in messages:
                # Whatever a stranger stored: the services take it off the stream, and its true event comes.
                try:
                    yield fitting(m.data, spec, m.subject)
                except EventError as e:
                    _log.warning("skipped %s", e)

    def advantages(self, run: str) -> AsyncIterator[contract.Advantage]:
        """The results of the groups of a run as events: first the stored ones, then new ones as groups close."""
        return self._events(f"advantage.{name_of('run', run)}.*", "MDR_ADVANTAGES", ADVANTAGE)

    def batch_events(self, run: str) -> AsyncIterator[contract.Batch]:
        """The batches of a run as events with verl's metrics: first the stored ones, then new ones as batches close."""
        return self._events(f"batch.{name_of('run', run)}.*", "MDR_ADVANTAGES", BATCH)

    def updates(self, run: str) -> AsyncIterator[contract.Update]:
        """What trainers tell of their updates (see update): first the stored ones, then new ones."""
        return self._events(f"update.{name_of('run', run)}.*.*.*.*", "MDR_UPDATES", UPDATE)

    def stream_trajectories(self, run: str) -> AsyncIterator[contract.Trajectory]:
        """The trajectories of a run: first the stored ones, then new ones."""
        return self._events(f"trajectory.{name_of('run', run)}.*.*.*", "MDR_TRAJECTORIES", TRAJECTORY)

    def steps(self, run: str) -> AsyncIterator[contract.Step]:
        """The denoising steps of a run while they happen, of all attempts. Parts of large tensors are not included."""
        return self._events(f"step.{name_of('run', run)}.*.*.*.*.*", "MDR_STEPS", STEP)

    def tokens(self, run: str) -> AsyncIterator[contract.Tokens]:
        """The tokens of a run's texts while they are made, of all attempts. Parts of large tensors are not included."""
        return self._events(f"tokens.{name_of('run', run)}.*.*.*.*.*", "MDR_STEPS", TOKENS)

    def stream_groups(
        self, run: str, name: str = "", *, after: str = "", shared: bool = False, keep: Keep | None = None,
        faults: str = "raise", timeout: float = 0,
        follow: bool = True, logits: bool = False, stage: str = "",
    ) -> Groups:
        """Groups with advantages, in the order in which they closed. A group is complete: trajectories, steps, latents
        and texts, with all digests checked.

        name: the server remembers how far this reader is. A group is acknowledged when the next one is asked for, or by
        done(). Until then it comes again, in this process or a later one.
        after: the cursor of a group. Reading starts behind it, whatever was acknowledged. A trainer that stores the
        cursor in its checkpoint reads each group exactly once.
        shared: processes with the same name share the groups.
        keep: returns why a group is left out, or nothing (see fresh).
        faults: `raise` for a group that cannot be read completely, or `skip` it.
        timeout: seconds without a group until TimeoutError, which says what the run waits for. 0: wait for ever; the
        log then says it.
        follow=False: stop after the stored groups.
        logits: also read the stored logits of texts.
        stage: of samples with several stages read this one alone, as groups of its own. One that is not there or not
        trained is a fault.
        """
        return Groups(
            self, run, name, after=after, shared=shared, keep=keep, faults=faults, timeout=timeout, follow=follow,
            logits=logits, stage=stage
        )

    def batches(
        self, run: str, name: str = "", *, groups: int = 0, log_probs: LogProbs | None = None, tolerance: float = 1e-5,
        after: str = "",
        shared: bool = False, keep: Keep | None = None, faults: str = "raise", timeout: float = 0, follow: bool = True,
        logits: bool = False,
        log_prob_kind: str = "raw", empty: str = "", whole: bool = True, stage: str = "",
    ) -> Batches:
        """Batches to train on. groups is the number of groups in a batch, in the order in which they close; with 0 the
        batch ids of the prompts say it.

        log_probs(batch), a function or a coroutine function, returns the log-probs [B, W] of the trainer's policy. It
        checks the first batch: a ratio that is further than tolerance from 1 raises RatioOff. The other options are
        those of stream_groups. The groups of a batch id are sorted, so that equal prompts and seeds give equal batches.
        A batch without a sample to train on has size 0; left_out of a batch says why its other groups are not in it.
        empty: what becomes of a named batch of which no group counts, as all failed or were cancelled: `raise`
        EmptyBatch, or `give` it with size 0. Without it, `give` where faults are skipped.
        whole=False leaves the steps of images to batch.micro: of the batch alone results, trajectories, rewards and
        advantages are held.

        Batches of texts are TextBatch. log_prob_kind says which log-probs they have, raw or processed. A group whose
        server gave no such log-probs, and a batch of images and texts, are faults. With logits they also have the
        stored logits.

        Batches of samples with several stages are StagedBatch: batch.stage("paint") is that of a stage. With
        stage="paint" they are of that stage alone, which is all that is read.
        """
        return Batches(
            self, run, name, groups, log_probs, tolerance, log_prob_kind, after=after, shared=shared, keep=keep,
            faults=faults, timeout=timeout, follow=follow,
            logits=logits, empty=empty, whole=whole, stage=stage)

    async def group(
        self, run: str, uid: str, advantage: contract.Advantage | None = None, *, logits: bool = False,
        whole: bool = True, stage: str = "",
    ) -> Group:
        """A closed group with its trajectories, steps and texts, and with logits also the stored logits. Digests are
        checked, and tensors are complete. whole=False leaves the steps of images to complete. stage: of samples with
        several stages read this one alone, and return it as a group.

        Gone: a part of the group is no longer stored. EventError: a part is not what its name says.
        """
        subject = f"{PREFIX}advantage.{run}.{uid}"
        if advantage is None:
            try:
                m = await self.js.get_last_msg("MDR_ADVANTAGES", subject)
            except NotFoundError:
                raise Gone(f"{subject}: the group has not closed, or its result is no longer stored") from None
            advantage = fitting(m.data or b"", ADVANTAGE, subject, "run", "uid")
        source = advantage.get("source_run") or run
        if stage and advantage["status"] in COUNTED:
            staged.check_trained(advantage, stage)
        # A stage that is trained may have run for no sample: its group has none.
        if not (named := [stage] if stage else list(dict.fromkeys(staged.ran(advantage) + staged.trained(advantage)))):
            return await self._members(source, advantage, logits, whole)
        of = {n: await self._members(source, staged.view(advantage, n), logits, whole) for n in named}
        return of[stage] if stage else Group(advantage, [Sample(m, None, []) for m in advantage["members"]], stages=of)

    async def _results(self, run: str, uids: Sequence[str]) -> dict[str, contract.Advantage]:
        """The results of groups by their uid, of those that the server gives at once, and that are what they must be:
        group reads another, or says what is wrong."""
        out = dict[str, Any]()
        for at in range(0, len(uids), _FILTERS):
            subjects = {f"{PREFIX}advantage.{run}.{uid}": uid for uid in uids[at : at + _FILTERS]}
            found = await self._many("MDR_ADVANTAGES", list(subjects))
            for subject in subjects.keys() & found.keys():
                with contextlib.suppress(EventError):
                    out[subjects[subject]] = fitting(found[subject].data, ADVANTAGE, subject, "run", "uid")
        return out

    async def _members(self, run: str, advantage: contract.Advantage, logits: bool, whole: bool) -> Group:
        """A group with what its members name. Those of a stage are in rounds, each of which is a trajectory."""
        uid, members = advantage["uid"], advantage["members"]
        tokens = sorted({str(m.get("stage") or STAGE) for m in members}) or [STAGE]
        found = await self._many("MDR_TRAJECTORIES", [f"{PREFIX}trajectory.{run}.{uid}.*.{t}" for t in tokens])
        samples = [
            Sample(m, await self._trajectory(run, uid, m, found) if m["trajectory_seq"] else None, []) for m in members
        ]
        for s in samples:
            s.unread = s.trajectory is not None and s.trajectory.get("text") is None
        await self.complete([s for s in samples if whole or not s.unread], logits)
        if STAGE not in tokens and (lane := [s.trajectory for s in samples if s.trajectory is not None]):
            advantage = {**advantage, "policy_version_min": min(t["policy_version_min"] for t in lane),
                         "policy_version_max": max(t["policy_version_max"] for t in lane)}  # fmt: skip
        return Group(advantage, samples)

    async def _trajectory(
        self, run: str, uid: str, member: AnyEvent, found: Mapping[int | str, Stored] = {}
    ) -> contract.Trajectory:  # fmt: skip
        subject = f"{PREFIX}trajectory.{run}.{uid}.{member['sample_index']}.{member.get('stage') or STAGE}"
        m = await self._stored("MDR_TRAJECTORIES", member["trajectory_seq"], subject, found)
        trajectory: contract.Trajectory = fitting(
            m.data, TRAJECTORY, subject, "run", "uid", "sample_index", "stage",
            known=f"sample {uid} #{member['sample_index']}",
        )
        return trajectory

    async def complete(self, samples: Sequence[Sample], logits: bool = False) -> None:
        """Reads steps, encoded texts and texts of samples whose trajectories are there; with logits also the stored
        logits. Gone and EventError: as group."""
        for s in samples:
            if s.trajectory is not None and (said := s.trajectory.get("text")) is not None:
                if s.trajectory["stop_reason"] == "completed" and not said.get("said_by"):  # that has no tokens
                    s.text = await self.text(s.trajectory, logits)
        for some in _portions([s for s in samples if s.unread]):
            trajectories = [s.facts for s in some]
            steps = await self._steps(trajectories, "step", STEP)
            for s, t, s.steps in zip(some, trajectories, steps, strict=True):
                texts = t.get("conditioning") or []
                for named in texts:
                    if named["tensor"].get("data") is None:
                        await self.load(named["tensor"])
                s.conditioning = {named["name"]: tensor(named["tensor"]) for named in texts}
                s.unread = False

    async def text(self, trajectory: contract.Trajectory, logits: bool = False) -> Text:
        """What a completed sample of text says, token by token; with logits also what is stored of those.

        EventError: it did not come to an end, or no logits of it are stored.
        """
        name = f"{trajectory['uid']} #{trajectory['sample_index']}"
        stored: Any = trajectory.get("text")
        if stored is None:
            raise EventError(f"{name}: text: absent; must be there: the sample is an image")
        if wrong := fault(trajectory, TRAJECTORY):
            raise EventError(f"{name}: {wrong}")
        for field in ("ids", "mask", *NUMBERS):
            if stored.get(field):
                await self.load(stored[field])
        text = text_of(trajectory)
        if logits and (text.settings.get("logits") or {}).get("form", "none") == "none":
            raise EventError(
                f"{name}: no logits are stored; prompts must ask for them with text.logits, such as "
                f"{{'form': 'topk', 'k': 20}}"
            )
        if logits or trajectory["policy_version_min"] != trajectory["policy_version_max"]:
            add_events(text, (await self._steps([trajectory], "tokens", TOKENS, logits))[0], name)
        return text

    async def _many(self, stream: str, filters: Sequence[str]) -> dict[int | str, Stored]:
        """The newest messages of the subjects that filters match, by sequence and by subject, of those that the server
        gives at once."""
        async with self._bulk:
            given = await last_of_each(self.nc, stream, filters) if filters else []
        found: dict[int | str, Stored] = {m.seq: m for m in given}
        return found | {m.subject: m for m in given}

    async def _stored(self, stream: str, seq: int, subject: str, found: Mapping[int | str, Stored] = {}) -> Stored:
        """Returns the message with a sequence, which may be among those that were found. Its subject must begin with
        the given text."""
        m = found.get(seq)
        try:
            if m is None:
                async with self._gets:
                    raw = await self.js.get_msg(stream, seq)
                m = Stored(seq, raw.subject or "", raw.data or b"")
        except NotFoundError:
            raise Gone(
                f"{subject}: sequence {seq} of {stream} is no longer stored: read earlier, or let retention wait for "
                f"a named reader"
            ) from None
        _check_place(m, stream, subject)
        return m

    async def _steps(
        self, trajectories: Sequence[AnyEvent], kind: str, form: Event, logits: bool = False
    ) -> list[list[Any]]:
        """Returns the stored events that each trajectory names, with complete tensors; logits only if they are
        wanted."""
        subjects = [
            f"{PREFIX}{kind}.{t['run']}.{t['uid']}.{t['sample_index']}.{t['stage']}." for t in trajectories
        ]  # fmt: skip
        held = [self.cache.get(t) if self.cache and t["steps"] else [] for t in trajectories]
        ask = [s + ">" for s, t, has in zip(subjects, trajectories, held) if t["steps"] and not has]
        found = await self._many("MDR_STEPS", ask)
        for m in (m for has in held for m in has):
            found[m.seq] = found[m.subject] = m
        lack = [(s, r["seq"]) for s, t in zip(subjects, trajectories) for r in t["steps"] if r["seq"] not in found]
        for m in await together(self._stored("MDR_STEPS", seq, subject) for subject, seq in lack):
            found[m.seq] = m
        out: list[list[Any]] = []
        for subject, t in zip(subjects, trajectories, strict=True):
            out.append([])
            for ref in t["steps"]:
                m = found[ref["seq"]]
                _check_place(m, "MDR_STEPS", subject)
                step = fitting(m.data, form, m.subject, digest=ref["digest"], known=m.subject)
                if not logits:
                    step["logits"] = None
                for tensor in _apart(step):
                    await self.load(tensor, m.subject, found)
                out[-1].append(step)
        for subject, t, has in zip(subjects, trajectories, held):
            if self.cache and t["steps"] and not has:
                self.cache.put(t, {m.seq: m for m in found.values() if m.subject.startswith(subject)}.values())
        return out

    async def load(self, t: Any, subject: str = "", found: Mapping[int | str, Stored] = {}) -> None:
        """Adds the bytes of a tensor that travelled apart: as a blob, or in parts beside the event of that subject,
        which may be among messages that were found."""
        if ref := t.get("ref"):
            key = ref["digest"]
            if key not in self._texts:
                if len(self._texts) >= _HELD_BLOBS:
                    self._texts.clear()
                self._texts[key] = asyncio.ensure_future(self.blob(ref))
            try:
                t["data"] = await asyncio.shield(self._texts[key])
            except BaseException:
                self._texts.pop(key, None)
                raise
        elif parts := t.get("parts"):
            pieces = []
            for k in range(parts["first"], parts["first"] + parts["count"]):
                if m := found.get(f"{subject}.{k}"):
                    pieces.append(m.data)
                    continue
                try:
                    pieces.append((await self.js.get_last_msg("MDR_STEPS", f"{subject}.{k}")).data or b"")
                except NotFoundError:
                    raise Gone(f"{subject}.{k}: a part of a tensor is no longer stored") from None
            whole = empty((sum(map(len, pieces)),))
            np.concatenate([np.frombuffer(p, np.uint8) for p in pieces], out=whole)
            t["data"] = checked(whole.data.toreadonly(), parts)

    async def blob(self, ref: AnyEvent) -> bytes:
        """Returns an object of the blob bucket, checked against its digest. Gone: it is not there, or not whole."""
        out = io.BytesIO()
        await self._copy_blob(ref, out.write)
        return out.getvalue()

    async def _copy_blob(self, ref: AnyEvent, write: Callable[[bytes], object]) -> None:
        """blob in pieces: after an error, some were written."""
        what, bucket = f"blob {ref['digest']:.12}", ref["bucket"]
        stored, name = f"OBJ_{bucket}", base64.urlsafe_b64encode(ref["digest"].encode()).decode()
        try:
            async with self._gets:
                entry = _blob_entry((await self.js.get_last_msg(stored, f"$O.{bucket}.M.{name}")).data or b"", what)
        except NotFoundError:
            raise Gone(f"{what} is no longer stored") from None
        if entry["deleted"]:
            raise Gone(f"{what} is no longer stored")
        if entry["size"] != ref["size"]:
            raise EventError(f"{what} has {entry['size']} bytes that are not those of digest {ref['digest']:.12}")
        digest, size = hashlib.sha256(), 0
        async for chunk in self._chunks(stored, f"$O.{bucket}.C.{entry['nuid']}", ref["size"], what):
            digest.update(chunk)
            size += len(chunk)
            write(chunk)
        if size != ref["size"] or digest.hexdigest() != ref["digest"]:
            raise EventError(f"{size} bytes that are not those of digest {ref['digest']:.12}")

    async def _chunks(self, stream: str, subject: str, size: int, what: str) -> AsyncIterator[bytes]:
        """The messages of a subject after each other, size bytes in all."""
        have = 0
        if not size:
            return
        sub = await self.js.subscribe(subject, stream=stream, ordered_consumer=True)
        try:
            while have < size:
                try:
                    m = await sub.next_msg(timeout=_CHUNK_WAIT)
                except nats.errors.TimeoutError:
                    info = await self.js.stream_info(stream, subjects_filter=subject)
                    if not info.state.subjects:
                        raise Gone(f"{what} is no longer stored") from None
                    continue  # the server was away, or is slow
                have += len(m.data)
                yield m.data
                if m.metadata.num_pending == 0 and have < size:
                    raise Gone(f"{what}: {have} of {size} bytes are stored")
        finally:
            with contextlib.suppress(Exception):
                await sub.unsubscribe()

    async def interact(
        self, name: str, answer: Callable[[Any], dict[str, Any]], ready: Callable[[], object] = lambda: None, *,
        logits: bool = True
    ) -> None:
        """Answers requests as a worker of the interaction of that name, until cancelled; ready is called when it
        listens.

        answer runs in a thread; one that is async is awaited here. It gets a request (contract.InteractRequest) with
        messages, ids, log_probs and so on, and returns the reply (contract.InteractReply): content or terminate, and
        optionally score and metadata. An exception that it raises fails the sample with its text.

        request["generation_logits"] are the stored logits of the answer's tokens, whatever their size: one array
        [tokens, V] of the stored dtype (BF16 as float32), or [tokens, k] with the tokens that they are of in
        request["generation_logit_ids"]; None where the prompt asked for none. logits=False leaves them out, and
        saves what it takes to read them.
        """

        async def handle(msg: Msg) -> None:
            began, failed = time.monotonic(), None
            try:
                request = decode(msg.data)
                if logits:
                    request["generation_logits"], request["generation_logit_ids"] = await self._answer_logits(request)
                with traces.traced(msg.headers or {}):
                    reply = await maybe_awaited(await asyncio.to_thread(answer, request))
                if not isinstance(reply, Mapping):
                    raise TypeError(f"the interaction gives {type(reply).__name__}; must be a dict")
                data = msgpack.packb({"v": 1, **reply})
            except Exception as e:
                failed = f"{type(e).__name__}: {e}"[:4000]
                data = msgpack.packb({"v": 1, "error": failed})
            work.done(began, failed)
            await msg.respond(data)

        async def one(msg: Msg) -> None:
            task = asyncio.create_task(handle(msg))  # many at once
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        tasks: set[asyncio.Task[None]] = set()
        subject = f"mdr.v1.interact.{name}"
        async with discoverable(self.nc, "interaction", name, "answers what a model says", subject) as work:
            sub = await self.nc.subscribe(subject, queue=name, cb=one)
            try:
                await self.nc.flush()
                await maybe_awaited(ready())
                await asyncio.Event().wait()
            finally:
                await sub.unsubscribe()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _answer_logits(self, request: Event) -> tuple[npt.NDArray[Any] | None, npt.NDArray[Any] | None]:
        """The logits of the answer that a request is about, and the tokens that they are of, from the request or from
        the answer's events."""
        if not request.get("logits_form"):
            return None, None
        what, tokens = f"logits of answer {request['answer']}", len(request["ids"])
        parts: list[Event] = [request["logits"]] if request.get("logits") else []
        if not parts:
            at = ".".join(str(request[name]) for name in ("run", "uid", "sample_index", "stage", "attempt"))
            first = request["first_event"]
            subjects = [f"{PREFIX}tokens.{at}.{i}" for i in range(first, first + request["event_count"])]
            events = await together(self._tokens(subject) for subject in subjects)
            tokens, parts = sum(len(e["ids"]) for e in events), [e["logits"] for e in events if e.get("logits")]
        return answer_logits(parts, tokens, request, what)

    async def _tokens(self, subject: str) -> Event:
        """The tokens of a subject, with their logits."""
        try:
            m = await self.js.get_last_msg("MDR_STEPS", subject)
        except NotFoundError:
            raise Gone(f"{subject} is no longer stored") from None
        event = fitting(m.data or b"", TOKENS, subject)
        for t in ((event.get("logits") or {}).get("values"), (event.get("logits") or {}).get("ids")):
            if t:
                await self.load(t, subject)
        return event


def _portions(samples: Sequence[Sample]) -> Iterator[list[Sample]]:
    """Samples in parts whose stored states have about _PORTION bytes."""
    portion, size = list[Sample](), 0
    for s in samples:
        size += s.state_bytes
        portion.append(s)
        if size >= _PORTION:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def _apart(step: Event) -> list[Any]:
    """The tensors of an event whose bytes travelled apart."""
    tensors = [named["tensor"] for name in ("latents", "debug") for named in step.get(name) or ()]
    if step.get("checkpoint"):
        tensors.append(step["checkpoint"])
    if logits := step.get("logits"):
        tensors += filter(None, map(logits.get, ("values", "ids")))
    return [t for t in tensors if t.get("data") is None]


def _check_place(m: Stored, stream: str, subject: str) -> None:
    """EventError: the subject of a message does not begin with the given text."""
    if not m.subject.startswith(subject):
        raise EventError(f"{subject}: sequence {m.seq} of {stream} holds {m.subject}")


def _blob_entry(data: bytes, what: str) -> dict[str, Any]:
    """The entry of an object of the blob bucket. EventError: it is none."""
    try:
        entry = json.loads(data)
        return {"nuid": str(entry["nuid"]), "size": int(entry.get("size", 0)), "deleted": bool(entry.get("deleted"))}
    except (ValueError, TypeError, AttributeError, KeyError):
        raise EventError(f"{what}: its entry is no entry of an object") from None
