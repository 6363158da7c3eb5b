"""An archive of a run ('meander runs export') as a client that reads it, without a server; and a client that keeps what
is read through it, as a small archive."""

from __future__ import annotations

import asyncio
import hashlib
import io
import re
import tarfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from nats.js.api import RawStreamMsg
from nats.js.errors import NotFoundError

from ..client.bulk import Stored
from ..client.client import Client
from ..data.events import AnyEvent, EventError, Gone

_ORDER = (
    "MDR_PROMPTS", "MDR_GROUPS", "MDR_STEPS", "MDR_TRAJECTORIES", "MDR_REWARDS", "MDR_ADVANTAGES", "MDR_UPDATES",
    "MDR_POLICIES",
)  # fmt: skip
"""The streams in the order of an archive: steps before the trajectories that name them."""


class Events:
    """Stored events by stream and sequence, with what JetStream of a connection is asked for them."""

    def __init__(self) -> None:
        self.streams: dict[str, dict[int, Stored]] = {}
        self.blobs: dict[str, bytes] = {}

    def add(self, stream: str, m: Stored) -> None:
        """Adds an event."""
        self.streams.setdefault(stream, {})[m.seq] = m

    def keep(self, stream: str, seqs: Collection[int]) -> None:
        """Removes the other events of a stream."""
        self.streams[stream] = {seq: m for seq, m in self.streams.get(stream, {}).items() if seq in seqs}

    async def get_msg(self, stream: str, seq: int) -> RawStreamMsg:
        """The event of a sequence. NotFoundError: there is none."""
        if (m := self.streams.get(stream, {}).get(seq)) is None:
            raise NotFoundError
        return RawStreamMsg(subject=m.subject, seq=m.seq, data=m.data, stream=stream)

    async def get_last_msg(self, stream: str, subject: str) -> RawStreamMsg:
        """The newest event of the subjects that one with wildcards matches. NotFoundError: there is none."""
        return await self.get_msg(stream, max((m.seq for m in self.matching(stream, [subject])), default=0))

    def matching(self, stream: str, filters: Sequence[str]) -> list[Stored]:
        """The events of the subjects that filters match."""
        some = re.compile("|".join(map(_pattern, filters)))
        return [m for m in self.streams.get(stream, {}).values() if some.fullmatch(m.subject)]

    def write(self, path: Path) -> None:
        """Writes them as an archive."""
        files = {
            f"{stream}/{seq:010d}-{m.subject}.msgpack": m.data
            for stream in sorted(self.streams, key=_ORDER.index) for seq, m in sorted(self.streams[stream].items())
        } | {f"blobs/{digest}": data for digest, data in sorted(self.blobs.items())}  # fmt: skip
        sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in files.items())
        with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as out:
            for name, data in (files | {"SHA256SUMS": sums.encode()}).items():
                header = tarfile.TarInfo(name)
                header.size = len(data)
                out.addfile(header, io.BytesIO(data))


def _pattern(subject: str) -> str:
    return re.escape(subject).replace(r"\*", "[^.]+").replace(">", ".+")


class Archive(Client):
    """A client whose events are those of an archive: it reads, and has no connection."""

    def __init__(self, events: Events):
        self.events, self.cache = events, None
        self.js = events  # type: ignore[assignment]  # of JetStream it asks for stored events alone
        self._gets, self._bulk = asyncio.Semaphore(32), asyncio.Semaphore(2)
        self._texts = {}

    @classmethod
    def read(cls, path: Path) -> "Archive":
        """Reads a file, and checks the digests of all that is in it. EventError: it is no archive, or was changed."""
        events, sums, listed = Events(), dict[str, str](), ""
        try:
            with tarfile.open(path, "r:") as files:
                for f in files:
                    data = (files.extractfile(f) or io.BytesIO()).read()
                    sums[f.name] = hashlib.sha256(data).hexdigest()
                    folder, _, name = f.name.partition("/")
                    if f.name == "SHA256SUMS":
                        listed = data.decode()
                    elif folder == "blobs" and sums[f.name] != name:
                        raise ValueError(f"{f.name}: its bytes are not those that it names")
                    elif folder == "blobs":
                        events.blobs[name] = data
                    elif name:
                        seq, _, subject = name.removesuffix(".msgpack").partition("-")
                        events.add(folder, Stored(int(seq), subject, data))
        except (tarfile.TarError, ValueError) as e:
            raise EventError(f"{path}: {e}; must be the file that 'meander runs export' wrote") from None
        lines = [line.split("  ", 1) for line in listed.splitlines() if not line.startswith("#")]
        for digest, name in lines:
            if sums.get(name) != digest:
                raise EventError(f"{path}: {name}: its bytes are not those that SHA256SUMS names")
        if len(lines) != len(sums) - 1:
            raise EventError(f"{path}: {len(sums) - 1 - len(lines)} of its files are not in SHA256SUMS")
        return cls(events)

    async def _many(self, stream: str, filters: Sequence[str]) -> dict[int | str, Stored]:
        found: dict[int | str, Stored] = {}
        for m in self.events.matching(stream, filters) if filters else ():
            found[m.seq] = found[m.subject] = m
        return found

    async def blob(self, ref: AnyEvent) -> bytes:
        """A blob of the archive. Gone: it is not in it."""
        data = self.events.blobs.get(ref["digest"])
        if data is None:
            raise Gone(f"blob {ref['digest']:.12} is not in the archive")
        return data


class Recorder:
    """What is read through a client while it is recorded."""

    def __init__(self, client: Client):
        self.events, self._js = Events(), client.js
        many, blob = client._many, client.blob

        async def keep_many(stream: str, filters: Sequence[str]) -> Mapping[int | str, Stored]:
            found = await many(stream, filters)
            for m in found.values():
                self.events.add(stream, m)
            return found

        async def keep_blob(ref: AnyEvent) -> bytes:
            self.events.blobs[ref["digest"]] = data = await blob(ref)
            return data

        changed: Any = client
        changed._many, changed.blob, changed.js = keep_many, keep_blob, self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._js, name)

    async def get_msg(self, stream: str, seq: int) -> RawStreamMsg:
        """JetStream's, kept."""
        return self._kept(stream, await self._js.get_msg(stream, seq))

    async def get_last_msg(self, stream: str, subject: str) -> RawStreamMsg:
        """JetStream's, kept."""
        return self._kept(stream, await self._js.get_last_msg(stream, subject))

    def _kept(self, stream: str, m: RawStreamMsg) -> RawStreamMsg:
        if stream.startswith("MDR_"):
            self.events.add(stream, Stored(m.seq or 0, m.subject or "", m.data or b""))
        return m
