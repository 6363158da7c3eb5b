"""Weights: gives a lane of samplers another adapter while they work. Events are plain dicts with the names of the
contract."""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import json
import logging
import math
import mmap
import struct
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from nats.js.errors import NotFoundError

from . import lease as leases
from . import versions
from ..data import lora, tensorfile, weightsdir
from .control import keys
from .cursor import api
from ..data.events import PREFIX, TENANT, Event, Gone, decode, fault, name_of
from .tasks import means_away, retry_while_away
from .versions import NoPolicy as NoPolicy

if TYPE_CHECKING:
    from .client import Client

_log = logging.getLogger("meander")

_FILE, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_DIFFUSERS = "pytorch_lora_weights.safetensors"
"""What diffusers names the file."""
_CHUNK, _PIECE = 128 << 10, 4 << 20
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
RULES = ("finish", "switch", "restart")
"""What a group does about weights that come while it is made: its rules in text."""


class PolicyRefused(ValueError):
    """An adapter that no sampler could use; nothing is stored of it."""


async def policy(client: Client, lane: str = "", tenant: str = "") -> Event:
    """What a lane serves now (policy/1): its newest version that its samplers have not refused. Without a name, that of
    the only lane that there is, or that samplers serve now. tenant: whose weights of the lane; empty: main's.

    NoPolicy: no sampler has announced a model, or none on that lane, or the tenant has none there. ValueError:
    a name is no token, or no lane is given and several are served.
    """
    newest = await _newest(client, lane, tenant)
    if _bare(newest):
        return newest
    refused = await _refusals(client, newest)
    if newest["policy_version"] not in refused:
        return newest
    for p in reversed(await _stored(client, "MDR_POLICIES", f"{PREFIX}policy.{versions.key_of(newest)}")):
        if p["policy_version"] not in refused or _bare(p) and p.get("base_digest") == newest.get("base_digest"):
            return p
    return newest


def _bare(p: Event) -> bool:
    """Whether a policy is the checkpoint alone, which samplers can always serve."""
    return not p.get("adapter") and not p.get("weights")


async def _newest(client: Client, lane: str, tenant: str = "") -> Event:
    """The policy that was pushed last to a tenant of a lane, whether samplers have taken it over, refused it, or not
    answered."""
    if not lane:
        try:
            lanes = sorted({key.partition(".")[0] for key in await keys(client.js, "mdr-policy")})
        except NotFoundError:  # no service has been up
            lanes = []
        if not lanes:
            raise NoPolicy("no sampler has announced a model yet")
        if len(lanes) > 1:
            served = {str(p.get("lane")) for p in await client.samplers()} & set(lanes)
            if len(served) != 1:
                raise ValueError(
                    f"lane: empty; must be one of {', '.join(lanes)}, of which samplers serve {len(served)} now"
                )
            lanes = list(served)
        lane = lanes[0]
    return (await versions.last(client, name_of("lane", lane), name_of("tenant", tenant or TENANT)))[0]


async def push_policy(
    client: Client, adapter: str | Path | Mapping[str, Any] | None, lane: str = "", *,
    config: Mapping[str, Any] | str | None = None, scale: float = 1.0, rule: str = "finish",
    version: int | None = None, base: str = "", by: str = "python", note: str = "",
    lease: leases.Lease | None = None, tenant: str = "",
) -> Event:
    """Has a lane serve its checkpoint plus a LoRA from now on, and returns the policy (policy/1).

    adapter: a folder or a safetensors file in PEFT's form; or its tensors by name, of numpy or torch, float64, float32,
    bfloat16 or float16, as get_peft_model_state_dict has them; None: the checkpoint alone.
    config: of tensors, what adapter_config.json says, as PEFT's config.to_dict() or as JSON.
    scale: how much of it, at most 1000 either way; 1 is what it was trained at.
    rule: what becomes of samples that have begun: finish, switch or restart.
    version: its number, above that of the newest; None: the next.
    base: the digest of the checkpoint that it was trained on, to be compared; empty: any.
    by, note: for people.
    lease: the trainer's, which has the lane to itself.
    tenant: who has versions of their own on the lane, as each of several trainers has; empty: that of the lease, or
    main. The first push of one begins with its version 0, the checkpoint.

    Weights that the lane has already are not pushed again: the newest policy is returned, unless samplers refused it.
    An adapter as it begins, which adds nothing yet, is the checkpoint where that is served; later it is refused.
    Samplers take it over by themselves: see taken.

    PolicyRefused: the adapter, or another argument, is one that no sampler could use; nothing is stored. Held: a
    trainer has the lane to itself, and this is not its lease; Taken: another process has taken the lease. NoPolicy,
    ValueError: as policy.
    """
    if config is not None and not isinstance(adapter, Mapping):
        raise PolicyRefused("config: is for tensors; that of a folder lies beside its weights")
    file, settings = _encoded(adapter, config) if isinstance(adapter, Mapping) else _read(adapter)

    async def following(now: Event) -> Event:
        _onto(now, base)
        if adapter is None:
            return {"weights_digest": now.get("base_digest", "")}
        if not now.get("modules"):
            raise PolicyRefused(f"adapter: the model {now['model']!r} of lane {now['lane']!r} takes none")
        effective = check_adapter(file, settings, json.loads(await client.blob(now["modules"])))
        if not math.isfinite(scale) or abs(scale) > 1000:
            raise PolicyRefused(f"scale: {scale}; must be a number of at most 1000")
        if _is_fresh(file):
            if _bare(await policy(client, now["lane"], now["tenant"])):
                return {"weights_digest": now.get("base_digest", "")}
            raise PolicyRefused(
                "adapter: changes nothing: lora_B is 0 everywhere; for the checkpoint alone push None"
            )
        digest = weights_digest(now["base_digest"], file, effective, scale)
        ref = await put_blob(client, file)
        return {"weights_digest": digest, "adapter": {"file": ref, "config": settings, "scale": float(scale)}}

    return await _follow(client, lane, following, rule, version, by, note, lease, tenant)


async def push_weights(
    client: Client, files: str | Path | Sequence[str | Path] | Mapping[str, Any] | Iterable[tuple[str, Any]],
    lane: str = "", *,
    rule: str = "finish", version: int | None = None, base: str = "", by: str = "python", note: str = "",
    weights_dir: str | Path | None = None, lease: leases.Lease | None = None, patience: float = 0, tenant: str = "",
) -> Event:
    """push_policy of a whole network in place of the checkpoint's: the transformer, or the language model.

    files: its safetensors file, its shards in their order, their index, or the folder of them; or its tensors by name,
    as a state dict has them. Its tensors, F32, F16, BF16 or F64, have the names and shapes of those of the checkpoint.
    Tensors in memory are not copied: they are written one after the other. A mapping may have functions that return
    them, and pairs of name and tensor may come one by one, so that of a sharded network one is gathered at a time;
    some 512 MiB of such are held at once.
    The other arguments and errors are those of push_policy.
    weights_dir: a folder that samplers have too, as their --weights-dir. The files go by path, in any size, and nothing
    of them is stored in the server. Those that lie in it stay where they are, others are copied to it.
    patience: seconds for which a server that is away is asked again; pairs, which come once, need not be given again.
    """
    sources = _sources(files)
    refs: list[Event] = []

    async def following(now: Event) -> Event:
        _onto(now, base)
        if not now.get("tensors"):
            drawn = (now.get("text") or {}).get("engine") or now.get("engine")
            why = f": {drawn['name']} draws its samples: push an adapter, or leave out --engine" if drawn else ""
            raise PolicyRefused(f"weights: the model {now['model']!r} of lane {now['lane']!r} takes none{why}")
        if not refs:  # pairs come once
            table = json.loads(await client.blob(now["tensors"]))
            refs.extend(await _stored_files(client, sources(table), weights_dir, patience))
        lines = "".join(f"full {ref['digest']}\n" for ref in refs)
        return {
            "weights_digest": hashlib.sha256(f"{now['base_digest']}\n{lines}".encode()).hexdigest(), "weights": refs
        }

    follow = partial(_follow, client, lane, following, rule, version, by, note, lease, tenant)
    return await retry_while_away(follow, patience)


_Table = dict[str, list[int]]
_Files = Iterator["Path | weightsdir.Pieces"]


def _sources(files: Any) -> Callable[[_Table], _Files]:
    """What gives the files of weights for the shapes of a lane, each checked before it is given.

    PolicyRefused: they are no weights at all, or tensors of them that are in memory have a wrong dtype.
    """
    if isinstance(files, Mapping):
        for name, t in files.items():
            if not callable(t):
                _kind(name, t)
        return partial(_from_tensors, files)
    if not isinstance(files, (str, Path)) and not isinstance(files, Sequence):
        return partial(_from_tensors, files)
    if isinstance(files, Sequence) and not all(isinstance(f, (str, Path)) for f in files):
        return _sources(dict(files))
    paths = _shards(files)
    if not paths:
        raise PolicyRefused(f"weights: {files}: no safetensors file")
    contents = [_mapped(p) for p in paths]

    def sources(table: _Table) -> _Files:
        check_weights(contents, table)
        return iter(paths)

    return sources


def _kind(name: str, t: Any) -> list[int]:
    """The shape of a tensor. PolicyRefused: its dtype is none of weights."""
    try:
        return tensorfile.kind_of(name, t)[1]
    except ValueError as err:
        raise PolicyRefused(f"tensors: {err}") from None


_FILE_BYTES = 512 << 20
"""Tensors in memory make a file as soon as they have so many bytes."""
_MOST_FILES = 256


def _from_tensors(tensors: Any, table: _Table) -> _Files:
    """The files of tensors in memory: of a mapping, or of pairs. What is wrong with any tensor of a mapping is said
    before the first file."""
    left, whole = dict(table), isinstance(tensors, Mapping)

    def check(name: str, t: Any) -> None:
        shape = _kind(name, t)
        if left.pop(name, None) is None:
            why = "is given twice; must be once" if name in table else "the network has none"
            raise PolicyRefused(f"weights: {name}: {why}")
        if shape != list(table[name]):
            raise PolicyRefused(f"weights: {name}: {shape}; must be {list(table[name])}")

    if whole:
        for name, t in tensors.items():
            if not callable(t):
                check(name, t)
        if missing := set(left) - set(tensors):
            raise _missing(missing)
    held: dict[str, Any] = {}
    size = count = 0
    for name, t in tensors.items() if whole else tensors:
        if callable(t):
            t = t()
        if not whole or callable(tensors[name]):
            check(name, t)
        held[name], size = t, size + tensorfile.size_of(t)
        del t
        if size >= _FILE_BYTES:
            if (count := count + 1) == _MOST_FILES:
                most = f"{_MOST_FILES} files of {_FILE_BYTES} bytes"
                raise PolicyRefused(f"weights: more than {most}; push files instead")
            yield partial(_pieces, held)
            held.clear()  # the file is written
            size = 0
    if left:
        raise _missing(left)
    if held:
        yield partial(_pieces, held)


def _missing(left: Collection[str]) -> PolicyRefused:
    return PolicyRefused(f"weights: {len(left)} tensors are missing, {min(left)} for one")


def _pieces(tensors: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    """The bytes of a file of tensors. PolicyRefused: a number of them is not finite."""
    try:
        yield from tensorfile.pieces(tensors, finite=True)
    except ValueError as err:
        raise PolicyRefused(f"weights: {err}") from None


async def _stored_files(
    client: Client, files: _Files, weights_dir: str | Path | None, patience: float
) -> list[Event]:
    """Puts the files of weights where samplers find them."""
    if weights_dir is None:
        refs = list[Event]()
        while (file := await asyncio.to_thread(next, files, None)) is not None:
            put = partial(put_blob, client, _mapped(file) if isinstance(file, Path) else file)
            try:
                refs.append(await retry_while_away(put, patience))
            except Exception as err:
                if patience and means_away(err):
                    raise TimeoutError(f"weights: NATS is away for over {patience:g} s; push them again") from err
                raise
        return refs
    store = "".join(c for c in (await api(client.nc, "STREAM.INFO.MDR_POLICIES"))["created"] if c.isdigit())
    try:
        return await asyncio.to_thread(weightsdir.place, weights_dir, store, files)
    except PolicyRefused:
        raise
    except (OSError, ValueError) as err:
        full = isinstance(err, OSError) and err.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        fix = "; free space in it, and push the weights again" if full else ""
        raise PolicyRefused(f"weights_dir: {weights_dir}: {err}{fix}") from err


def _shards(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """The safetensors files of a transformer: those given, or of an index or a folder its checkpoint's."""
    paths = [Path(files)] if isinstance(files, (str, Path)) else [Path(f) for f in files]
    if len(paths) != 1:
        return paths
    (file,) = paths
    if file.is_dir():
        folder = file / "transformer" if (file / "transformer").is_dir() else file
        names = [f.name for f in folder.iterdir()]
        try:
            chosen = tensorfile.choose_checkpoint(names)
        except ValueError as err:
            raise PolicyRefused(f"weights: {folder}: {err}, or name the file or the index itself") from None
        if not chosen:
            several = ", ".join(sorted(n for n in names if n.endswith(".safetensors")))
            raise PolicyRefused(
                f"weights: {folder}: several files and no index: {several}; copy the *.safetensors.index.json that was "
                "saved with them" if several else f"weights: {folder}: no safetensors file"
            )
        file = folder / chosen
    if file.suffix != ".json":
        return [file]
    try:
        table = json.loads(_bytes("weights", file))["weight_map"]
        return [file.with_name(name) for name in sorted(set(table.values()))]
    except (AttributeError, KeyError, TypeError, ValueError) as err:
        raise PolicyRefused(f"weights: {file}: no index with a weight_map: {err}") from err


def _encoded(tensors: Mapping[str, Any], config: Mapping[str, Any] | str | None = None) -> tuple[bytes, bytes]:
    """The safetensors file of tensors in memory, and the JSON of their configuration; it may be empty."""
    try:
        file = tensorfile.encode(tensors)
    except ValueError as err:
        raise PolicyRefused(f"tensors: {err}") from None
    if config is None or isinstance(config, str):
        return file, (config or "").encode()
    plain = {k: sorted(v) if isinstance(v, set) else getattr(v, "value", v) for k, v in config.items()}
    return file, json.dumps(plain, default=str).encode()


def _onto(now: Event, base: str) -> None:
    """Refuses a push that is for another checkpoint than the lane's."""
    if base and base != now.get("base_digest"):
        raise PolicyRefused(
            f"base: {base:.16}; must be of the checkpoint that lane {now['lane']!r} serves, "
            f"{now.get('base_digest', ''):.16}"
        )


async def rollback_policy(
    client: Client, version: int, lane: str = "", *, rule: str = "finish", by: str = "python", note: str = "",
    lease: leases.Lease | None = None, tenant: str = "",
) -> Event:
    """Has a lane serve the weights of an earlier version again, as its next version, and returns the policy (policy/1).
    rule, by, note, lease and tenant are those of push_policy.

    PolicyRefused: the lane's history has no such version, or every sampler refused it, or its weights are no longer
    stored, or it is of another checkpoint. NoPolicy, ValueError: as policy.
    """

    async def following(now: Event) -> Event:
        history = await policy_history(client, now["lane"], now["tenant"])
        then = next((p for p in reversed(history) if p["policy_version"] == version), None)
        if then is None:
            raise PolicyRefused(f"version: {version}; the history of lane {now['lane']!r} has none of that number")
        if not _bare(then) and (why := (await _refusals(client, now)).get(version)):
            raise PolicyRefused(
                f"version: {version}; was refused by the samplers ({why}); must be one that was taken over")
        if then.get("base_digest") != now.get("base_digest"):
            raise PolicyRefused(
                f"version: {version}; must be of the checkpoint that lane {now['lane']!r} serves, "
                f"{now.get('base_digest', ''):.16}"
            )
        try:
            for ref in [*([then["adapter"]["file"]] if then.get("adapter") else []), *(then.get("weights") or [])]:
                if ref.get("bucket"):  # samplers look at what lies by path
                    await client._copy_blob(ref, len)
        except Gone as err:
            raise PolicyRefused(f"version: {version}; its weights are not stored any more: {err}") from None
        return {
            "weights_digest": then["weights_digest"], "rollback": version
        } | {k: then[k] for k in ("adapter", "weights") if then.get(k)}

    return await _follow(client, lane, following, rule, None, by, note, lease, tenant)


async def _refusals(client: Client, of: Event) -> dict[int, str]:
    """The versions of a policy's tenant that samplers have refused and none has taken over, each with the last
    reason."""
    answers = await _stored(client, "MDR_APPLIED", f"{PREFIX}applied.{versions.key_of(of)}.*")
    applied = {a["policy_version"] for a in answers if a["state"] == "applied"}
    return {a["policy_version"]: a.get("error", "") for a in answers if a["policy_version"] not in applied}


async def policy_history(client: Client, lane: str = "", tenant: str = "") -> list[Event]:
    """All versions that a tenant of a lane has had (policy/1), the oldest first, also those that its samplers refused.

    NoPolicy, ValueError: as policy.
    """
    of = versions.key_of(await _newest(client, lane, tenant))
    stored = await _stored(client, "MDR_POLICIES", f"{PREFIX}policy.{of}")
    # one that was announced again, by a trainer that took the lane or a sampler that starts, has its last form
    return [
        p for p, then in zip(stored, [*stored[1:], {}])
        if any(p.get(k) != then.get(k) for k in ("policy_version", "weights_digest"))
    ]


async def _stored(client: Client, stream: str, subject: str) -> list[Event]:
    """The events of a subject, the oldest first."""
    out: list[Event] = []
    seq = 1
    while True:
        try:
            m = await client.js.get_msg(stream, seq, subject, next=True)
        except NotFoundError:
            return out
        out.append(decode(m.data or b""))
        seq = (m.seq or 0) + 1


async def _follow(
    client: Client, lane: str, following: Callable[[Event], Awaitable[Event]], rule: str, version: int | None, by: str,
    note: str, lease: leases.Lease | None, tenant: str,
) -> Event:
    """Stores what follows a lane's current policy, again if another client was first. following gives the weights:
    their digest, adapter, rollback."""
    if rule not in RULES:
        raise PolicyRefused(f"rule: {rule!r}; must be one of {', '.join(RULES)}")
    tenant = name_of("tenant", tenant or (lease.tenant if lease else TENANT))
    if lease and tenant != lease.tenant:
        raise PolicyRefused(f"tenant: {tenant!r}; must be that of the lease, {lease.tenant!r}")
    if tenant != TENANT:
        await versions.begin(client, (await _newest(client, lane))["lane"], tenant)
    while True:
        now = await _newest(client, lane, tenant)
        # Asked after the version: a trainer that takes the lane later announces it again, and store sees that.
        epoch = await lease.follow(now) if lease else now.get("epoch", 0)
        if lease is None:
            await leases.check_free(client, now["lane"], tenant)
        weights = await following(now)
        if weights["weights_digest"] == now["weights_digest"]:
            if _bare(now) or now["policy_version"] not in await _refusals(client, now):
                await versions.update_bucket(client, versions.key_of(now))  # who pushed it may have died before that
                return now
        number = now["policy_version"] + 1 if version is None else version
        if number <= now["policy_version"]:
            raise PolicyRefused(
                f"version: {number}; must be above {now['policy_version']}, which lane {now['lane']!r} serves"
            )
        push = {k: v for k, v in now.items() if k not in ("adapter", "weights", "rollback", "note")} | weights | {
            "policy_version": number, "parent": now["policy_version"], "rule": rule, "by": by,
            "announced": time.time_ns(),
        } | ({"epoch": epoch} if epoch else {})
        if note:
            push["note"] = note
        if await versions.store(client, push, now):
            return push


async def taken(client: Client, pushed: Event, timeout: float = 30, *, refused: str = "raise") -> list[Event]:
    """Waits until every running sampler of the lane has answered a policy, or serves a later one, and returns these
    samplers (presence/1), each with its answer (applied/1) under "answer"; None where it went on to a later one by
    itself. There is none where no sampler runs: the next begins with the policy.

    PolicyRefused: every sampler that answered refused it, with the reason of one; refused="give" returns such answers.
    A sampler that refused it beside others is logged. TimeoutError: not all have answered within timeout seconds.
    """
    if refused not in ("raise", "give"):
        raise ValueError(f"refused: {refused!r}; must be raise or give")
    samplers = await _answered(client, pushed, timeout)
    answers = [p["answer"] for p in samplers if p["answer"]]
    bad = [a for a in answers if a["state"] != "applied"]
    if bad and refused == "raise":
        if len(bad) == len(answers):
            raise PolicyRefused(f"version {pushed['policy_version']}: {bad[0].get('error', '')}")
        for a in bad:
            _log.warning("%s refuses version %d: %s", a["instance"], pushed["policy_version"], a.get("error", ""))
    return samplers


async def _answered(client: Client, pushed: Event, timeout: float) -> list[Event]:
    end, version = time.monotonic() + timeout, pushed["policy_version"]
    silent = f"version {version} is stored; not every sampler has answered in {timeout} s"
    while True:
        samplers, late = [], False
        for p in await retry_while_away(client.samplers, end - time.monotonic()):
            if p.get("lane") != pushed["lane"]:
                continue
            if pushed["tenant"] != TENANT:  # what it serves of this one
                own = next((t for t in p.get("tenants") or () if t["tenant"] == pushed["tenant"]), None)
                p["policy_version"] = own and own["policy_version"]
                p["weights_digest"], p["loading"] = own["weights_digest"] if own else "", own and own.get("loading")
            try:
                left = max(0.1, end - time.monotonic())
                ask = retry_while_away(partial(_answer, client, pushed, p["instance"]), left)
                answer = await asyncio.wait_for(ask, left)
            except asyncio.TimeoutError:
                raise TimeoutError(silent) from None
            # one that loads what it uses is about to answer
            late = late or answer is None and ((p.get("policy_version") or 0) < version or p.get("loading") == version)
            samplers.append(p | {"answer": answer})
        if not late:
            return samplers
        if time.monotonic() > end:
            raise TimeoutError(silent)
        await asyncio.sleep(0.02)


async def _answer(client: Client, pushed: Event, name: str) -> Event | None:
    """What a sampler said last, where that is about the policy."""
    try:
        m = await client.js.get_last_msg("MDR_APPLIED", f"{PREFIX}applied.{versions.key_of(pushed)}.{name}")
    except NotFoundError:
        return None
    answer = decode(m.data or b"")
    return answer if answer["policy_version"] == pushed["policy_version"] else None


def _read(adapter: str | Path | None) -> tuple[bytes, bytes]:
    """The bytes of weights and configuration; the latter may be empty."""
    if adapter is None:
        return b"", b""
    path = Path(adapter)
    file = path
    if path.is_dir():
        file = next((path / name for name in (_FILE, _DIFFUSERS) if (path / name).exists()), path / _FILE)
    config = file.parent / _CONFIG
    return _bytes("adapter", file), _bytes("adapter", config) if config.exists() else b""


def _bytes(what: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as err:
        raise PolicyRefused(f"{what}: {path}: {err.strerror or err}") from err


def _mapped(path: Path) -> memoryview:
    """The bytes of a file of weights, which are read when they are used."""
    try:
        with path.open("rb") as f:
            return memoryview(mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as err:  # ValueError: it is empty
        raise PolicyRefused(f"weights: {path}: {getattr(err, 'strerror', None) or err}") from err


def _release(file: bytes | memoryview) -> None:
    """Lets the system take back the memory of what was read from a mapped file."""
    if isinstance(file, memoryview) and isinstance(file.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        file.obj.madvise(mmap.MADV_DONTNEED)


def check_adapter(file: bytes, config: bytes, table: dict[str, list[int]]) -> bytes:
    """Checks the bytes of adapter_model.safetensors and adapter_config.json, which may be empty, and returns the
    configuration that counts: config, or that in the file's header.

    table: of each projection that adapters can change, by its name, the shape [n, k] of its weight. lora_A is [r, k],
    lora_B [n, r], of F32, F16, BF16 or F64.

    PolicyRefused: the file cannot be read, is not finite, has a tensor or a setting that is not used, changes what the
    table does not have, or has other shapes.
    """
    header, data = _header("adapter", file)
    effective = config or (header.get("__metadata__") or {}).get("lora_adapter_metadata", "").encode()
    parts: dict[str, dict[str, Any]] = {}
    off: set[str] = set()
    try:
        scale = lora.parse_config(effective)
        for name, info in header.items():
            if name == "__metadata__":
                continue
            module, kind, taken_off = lora.split(name)
            off |= taken_off
            part = parts.setdefault(module, {})
            if kind in part:
                raise ValueError(f"module {module}: {name} is given under another name, too; must be one of them")
            part[kind] = (info, _floats("adapter", name, info, data))
    except ValueError as err:
        raise err if isinstance(err, PolicyRefused) else PolicyRefused(f"adapter: {err}") from None
    if not parts:
        raise PolicyRefused("adapter: no tensors")
    resolver, changed = lora.Resolver(table), set[str]()
    for module, p in sorted(parts.items()):
        try:
            _check_module(p, scale, module)
            own, swap = resolver.resolve(module)
            n, k = p["B"][0]["shape"][0], p["A"][0]["shape"][1]
            if not own:
                raise ValueError("the transformer has none")
            rows = sum(table[m][0] for m in own)
            if n != rows or any(table[m][1] != k for m in own) or swap and n % 2:
                raise ValueError(f"changes a weight of {n} x {k}, here {rows} x {table[own[0]][1]}")
            if twice := changed & set(own):
                raise ValueError(f"{min(twice)} is changed under another name, too; must be one of them")
            changed |= set(own)
        except ValueError as err:
            raise PolicyRefused(f"adapter: module {module}: {err}") from None
    if off:
        usual = off <= {"base_model.model.", "transformer."}  # of PEFT and of diffusers
        _log.log(
            logging.INFO if usual else logging.WARNING,
            "adapter: names of modules are read without %s", ", ".join(sorted(off)),
        )
    return effective


def _is_fresh(file: bytes) -> bool:
    """Whether an adapter is as training begins with it: lora_A of each module is drawn and lora_B is 0, so that it adds
    nothing yet. file is one that check_adapter takes."""
    header, data = _header("adapter", file)
    for name, info in header.items():
        part = "" if name == "__metadata__" else lora.split(name)[1]
        if part in ("A", "B") and bool(_floats("adapter", name, info, data).any()) != (part == "A"):
            return False
    return True


def _check_module(p: dict[str, Any], scale: lora.Scaling | None, module: str) -> None:
    """ValueError: the tensors of a module do not make a low-rank product."""
    if "A" not in p or "B" not in p:
        raise ValueError("lora_A or lora_B is missing")
    a, b = p["A"][0]["shape"], p["B"][0]["shape"]
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] < 1:
        raise ValueError(f"lora_A {a} and lora_B {b} do not fit")
    if "alpha" in p:
        alpha = p["alpha"][1]
        if alpha.size != 1 or not np.isfinite(alpha).all():
            raise ValueError("alpha is not a number")
    elif scale is not None and not math.isfinite(scale(module, a[0])):
        raise ValueError("not finite; the scale must be")
    if not all(np.isfinite(x).all() for _, x in p.values()):
        raise ValueError("not finite; all numbers of lora_A and lora_B must be")


def check_weights(files: Sequence[bytes | memoryview], table: dict[str, list[int]]) -> None:
    """Checks the bytes of a transformer's safetensors files, of F32, F16, BF16 or F64. table has the shape of each
    tensor by its name.

    PolicyRefused: a file cannot be read or is not finite, or the files do not have each tensor of the table once.
    """
    left = dict(table)
    for file in files:
        header, data = _header("weights", file)
        header.pop("__metadata__", None)
        for name, info in header.items():
            stored = _stored_bytes("weights", name, info, data)
            if name not in table:
                raise PolicyRefused(f"weights: {name}: the transformer has none")
            if left.pop(name, None) is None:
                raise PolicyRefused(f"weights: {name}: is in two files; must be in one")
            if info["shape"] != list(table[name]):
                raise PolicyRefused(f"weights: {name}: {info['shape']}; must be {list(table[name])}")
            for begin in range(0, len(stored), _PIECE):
                if not tensorfile.is_finite(info["dtype"], stored[begin : begin + _PIECE]):
                    raise PolicyRefused(f"weights: {name}: not finite")
                _release(file)
    if left:
        raise _missing(left)


def _header(what: str, file: bytes | memoryview) -> tuple[dict[str, Any], bytes | memoryview]:
    """The header of a safetensors file, and the bytes behind it. PolicyRefused: it is none; what is its name."""
    try:
        size = struct.unpack("<Q", file[:8])[0]
        if size > len(file) - 8:
            raise ValueError(f"a header of {size} bytes in a file of {len(file)}: truncated")
        header = json.loads(bytes(file[8 : 8 + size]))
        if not isinstance(header, dict):
            raise ValueError("no header")
    except (struct.error, ValueError) as err:
        raise PolicyRefused(f"{what}: no safetensors file: {err}") from err
    return header, file[8 + size :]


def _floats(what: str, name: str, info: Any, data: bytes | memoryview) -> np.ndarray:
    """The elements of a tensor, flat, in float32 or as stored. The arguments are those of _stored_bytes."""
    out = np.frombuffer(_stored_bytes(what, name, info, data), np.dtype(_FLOATS.get(info["dtype"], "<u2")))
    return (out.astype("<u4") << 16).view("<f4") if info["dtype"] == "BF16" else out


def _stored_bytes(what: str, name: str, info: Any, data: bytes | memoryview) -> bytes | memoryview:
    """The bytes of a tensor. data is what is behind the header, info the tensor's entry in it. PolicyRefused: the
    entry is wrong."""
    if wrong := fault(info, {"dtype": str, "shape": [int], "data_offsets": [int]}):
        raise PolicyRefused(f"{what}: {name}: {wrong}")
    dtype, count = np.dtype(_FLOATS.get(info["dtype"], "<u2")), math.prod(info["shape"])
    if info["dtype"] not in _FLOATS and info["dtype"] != "BF16":
        raise PolicyRefused(f"{what}: {name}: {info['dtype']}; must be F32, F16, BF16 or F64")
    begin, end = (*info["data_offsets"], -1, -1)[:2]
    if min(info["shape"], default=0) < 0 or begin < 0 or end - begin != count * dtype.itemsize:
        raise PolicyRefused(
            f"{what}: {name}: bytes {begin} to {end}; must be the {count * dtype.itemsize} of {info['dtype']} "
            f"{info['shape']}"
        )
    if end > len(data):
        raise PolicyRefused(f"{what}: {name}: ends at byte {end} of {len(data)}: truncated")
    return data[begin:end]


def weights_digest(base: str, file: bytes, config: bytes, scale: float) -> str:
    """Names the weights of a checkpoint plus an adapter as samplers do (lora.WeightsDigest): 64 hex digits. base is the
    checkpoint's digest, config what check_adapter returned."""
    d = hashlib.sha256()
    for name, data in ((_FILE, file), (_CONFIG, config)):
        d.update(f"{name} {len(data)}\n".encode() + data)
    bits = struct.unpack("<Q", struct.pack("<d", scale))[0]
    return hashlib.sha256(f"{base}\n{d.hexdigest()} {bits:x}\n".encode()).hexdigest()


async def put_blob(client: Client, data: bytes | memoryview | weightsdir.Pieces) -> Event:
    """Stores bytes under their SHA-256, unless they are there. Pieces are asked for twice: to name them, and to send
    them."""
    pieces: weightsdir.Pieces = data if callable(data) else partial(_sliced, data)
    digest, size = await asyncio.to_thread(_digest_of, pieces)
    ref = {"bucket": "mdr-blobs", "digest": digest.hex(), "size": size}
    subject = f"$O.mdr-blobs.M.{base64.urlsafe_b64encode(digest.hex().encode()).decode()}"
    try:
        entry = json.loads((await client.js.get_last_msg("OBJ_mdr-blobs", subject)).data or b"{}")
        await client._copy_blob(ref, len)
        if entry.get("size") == size:
            # used again: not swept as forgotten
            await client.js.publish(subject, json.dumps(entry).encode(), headers={"Nats-Rollup": "sub"})
            return ref
    except Exception:  # noqa: BLE001, S110 - not there, or not whole: it is written
        pass
    nuid, sent, count = uuid.uuid4().hex, hashlib.sha256(), 0
    for chunk in _chunks(pieces()):
        sent.update(chunk)
        await client.js.publish(f"$O.mdr-blobs.C.{nuid}", chunk)
        count += 1
    if sent.digest() != digest:
        raise PolicyRefused("weights: they were changed while they were sent; push them again once they are whole")
    entry = {
        "name": digest.hex(), "options": {"max_chunk_size": _CHUNK}, "bucket": "mdr-blobs", "nuid": nuid,
        "size": size, "chunks": count, "digest": "SHA-256=" + base64.urlsafe_b64encode(digest).decode(),
    }
    await client.js.publish(subject, json.dumps(entry).encode(), headers={"Nats-Rollup": "sub"})
    return ref


def _sliced(data: bytes | memoryview) -> Iterator[memoryview]:
    """The pieces of what is in memory, or mapped."""
    view = memoryview(data)
    for begin in range(0, len(view), _PIECE):
        yield view[begin : begin + _PIECE]
        _release(view)


def _digest_of(pieces: weightsdir.Pieces) -> tuple[bytes, int]:
    """The SHA-256 and the size of a file."""
    digest, size = hashlib.sha256(), 0
    for piece in pieces():
        digest.update(piece)
        size += len(piece)
    return digest.digest(), size


def _chunks(pieces: Iterator[bytes | memoryview]) -> Iterator[bytes]:
    """The messages of a blob."""
    rest = bytearray()
    for piece in pieces:
        rest += piece
        while len(rest) >= _CHUNK:
            yield bytes(rest[:_CHUNK])
            del rest[:_CHUNK]
    if rest:
        yield bytes(rest)
