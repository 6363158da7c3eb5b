"""Weights: gives a lane of samplers another adapter while they work. Events are plain dicts with the names of the
contract."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import mmap
import struct
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
from nats.js.errors import APIError, KeyNotFoundError, NotFoundError

from . import tensorfile, weightsdir
from .control import keys
from .cursor import api
from .events import PREFIX, Event, Gone, checked, decode, fault, name_of
from .tasks import retry_while_away

if TYPE_CHECKING:
    from .client import Client

_FILE, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_BEHIND = 10071  # the server's error for a subject that has another last message
_CHUNK = 128 << 10
_SUFFIXES = {
    ".lora_A.weight": "A", ".lora_B.weight": "B", ".lora_A.default.weight": "A", ".lora_B.default.weight": "B",
    ".lora_down.weight": "A", ".lora_up.weight": "B", ".alpha": "alpha",
}
_FLOATS = {"F64": "<f8", "F32": "<f4", "F16": "<f2"}
RULES = ("finish", "switch", "restart")
"""What a group does about weights that come while it is made: its rules in text."""


class PolicyRefused(ValueError):
    """An adapter that no sampler could use; nothing is stored of it."""


class NoPolicy(ValueError):
    """No sampler has announced a model, or none on that lane."""


async def policy(client: Client, lane: str = "") -> Event:
    """What a lane serves now (policy/1): its newest version that its samplers have not refused. Without a name, that of
    the only lane that there is, or that samplers serve now.

    NoPolicy: no sampler has announced a model, or none on that lane. ValueError: the name is no token, or none is given
    and several lanes are served.
    """
    newest = await _newest(client, lane)
    if _bare(newest):
        return newest
    refused = await _refusals(client, newest["lane"])
    if newest["policy_version"] not in refused:
        return newest
    for p in reversed(await _stored(client, "MDR_POLICIES", f"{PREFIX}policy.{newest['lane']}")):
        if p["policy_version"] not in refused or _bare(p) and p.get("base_digest") == newest.get("base_digest"):
            return p
    return newest


def _bare(p: Event) -> bool:
    """Whether a policy is the checkpoint alone, which samplers can always serve."""
    return not p.get("adapter") and not p.get("weights")


async def _newest(client: Client, lane: str) -> Event:
    """The policy that was pushed last to a lane, whether samplers have taken it over, refused it, or not answered."""
    if not lane:
        try:
            lanes = await keys(client.js, "mdr-policy")
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
    return (await _last(client, name_of("lane", lane)))[0]


async def _last(client: Client, lane: str) -> tuple[Event, int]:
    """The newest policy of a lane, and the sequence of its message in the history."""
    try:
        m = await client.js.get_last_msg("MDR_POLICIES", f"{PREFIX}policy.{lane}")
    except NotFoundError:
        raise NoPolicy(f"lane: {lane!r}; no sampler has announced a model on it") from None
    return decode(m.data or b""), m.seq or 0


async def push_policy(
    client: Client, adapter: str | Path | Mapping[str, Any] | None, lane: str = "", *,
    config: Mapping[str, Any] | str | None = None, scale: float = 1.0, rule: str = "finish",
    version: int | None = None, base: str = "", by: str = "python", note: str = "",
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

    Weights that the lane has already are not pushed again: the newest policy is returned, unless samplers refused it.
    Samplers take it over by themselves: see taken.

    PolicyRefused: the adapter, or another argument, is one that no sampler could use; nothing is stored. NoPolicy,
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
        digest = weights_digest(now["base_digest"], file, effective, scale)
        ref = await _put_blob(client, file)
        return {"weights_digest": digest, "adapter": {"file": ref, "config": settings, "scale": float(scale)}}

    return await _follow(client, lane, following, rule, version, by, note)


async def push_weights(
    client: Client, files: str | Path | Sequence[str | Path] | Mapping[str, Any], lane: str = "", *,
    rule: str = "finish", version: int | None = None, base: str = "", by: str = "python", note: str = "",
    weights_dir: str | Path | None = None,
) -> Event:
    """push_policy of a whole transformer in place of the checkpoint's.

    files: its safetensors file, its shards in their order, or the folder of either; or its tensors by name, as a state
    dict has them. Its tensors, F32, F16, BF16 or F64,
    have the names and shapes of those of the checkpoint. The other arguments and errors are those of push_policy.
    weights_dir: a folder that samplers have too, as their --weights-dir. The files go by path, in any size, and nothing
    of them is stored in the server. Those that lie in it stay where they are, others are copied to it.
    """
    paths = [] if isinstance(files, Mapping) else _shards(files)
    contents: list[bytes | memoryview] = [_encoded(files)[0]] if isinstance(files, Mapping) else [
        _mapped(p) for p in paths
    ]
    if not contents:
        raise PolicyRefused(f"weights: {files}: no safetensors file")

    async def following(now: Event) -> Event:
        _onto(now, base)
        if not now.get("tensors"):
            raise PolicyRefused(f"weights: the model {now['model']!r} of lane {now['lane']!r} takes none")
        check_weights(contents, json.loads(await client.blob(now["tensors"])))
        if weights_dir is None:
            refs = [await _put_blob(client, data) for data in contents]
        else:
            store = "".join(c for c in (await api(client.nc, "STREAM.INFO.MDR_POLICIES"))["created"] if c.isdigit())
            try:
                refs = await asyncio.to_thread(
                    weightsdir.place, weights_dir, store, paths or [bytes(c) for c in contents]
                )
            except (OSError, ValueError) as err:
                raise PolicyRefused(f"weights_dir: {weights_dir}: {err}") from err
        lines = "".join(f"full {ref['digest']}\n" for ref in refs)
        return {
            "weights_digest": hashlib.sha256(f"{now['base_digest']}\n{lines}".encode()).hexdigest(), "weights": refs
        }

    return await _follow(client, lane, following, rule, version, by, note)


def _shards(files: str | Path | Sequence[str | Path]) -> list[Path]:
    """The safetensors files of a transformer; of a folder all in it."""
    paths = [Path(files)] if isinstance(files, (str, Path)) else [Path(f) for f in files]
    if len(paths) == 1 and paths[0].is_dir():
        inner = paths[0] / "transformer"
        paths = sorted((inner if inner.is_dir() else paths[0]).glob("*.safetensors"))
    return paths


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
) -> Event:
    """Has a lane serve the weights of an earlier version again, as its next version, and returns the policy (policy/1).
    rule, by and note are those of push_policy.

    PolicyRefused: the lane's history has no such version, or every sampler refused it, or its weights are no longer
    stored, or it is of another checkpoint. NoPolicy, ValueError: as policy.
    """

    async def following(now: Event) -> Event:
        then = next(
            (p for p in reversed(await policy_history(client, now["lane"])) if p["policy_version"] == version), None
        )
        if then is None:
            raise PolicyRefused(f"version: {version}; the history of lane {now['lane']!r} has none of that number")
        if not _bare(then) and (why := (await _refusals(client, now["lane"])).get(version)):
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
                    await client.blob(ref)
        except Gone as err:
            raise PolicyRefused(f"version: {version}; its weights are not stored any more: {err}") from None
        return {
            "weights_digest": then["weights_digest"], "rollback": version
        } | {k: then[k] for k in ("adapter", "weights") if then.get(k)}

    return await _follow(client, lane, following, rule, None, by, note)


async def _refusals(client: Client, lane: str) -> dict[int, str]:
    """The versions that samplers have refused and none has taken over, each with the last reason."""
    answers = await _stored(client, "MDR_APPLIED", f"{PREFIX}applied.{lane}.*")
    applied = {a["policy_version"] for a in answers if a["state"] == "applied"}
    return {a["policy_version"]: a.get("error", "") for a in answers if a["policy_version"] not in applied}


async def policy_history(client: Client, lane: str = "") -> list[Event]:
    """All versions that a lane has had (policy/1), the oldest first, also those that its samplers refused.

    NoPolicy, ValueError: as policy.
    """
    return await _stored(client, "MDR_POLICIES", f"{PREFIX}policy.{(await _newest(client, lane))['lane']}")


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
    note: str
) -> Event:
    """Stores what follows a lane's current policy, again if another client was first. following gives the weights:
    their digest, adapter, rollback."""
    if rule not in RULES:
        raise PolicyRefused(f"rule: {rule!r}; must be one of {', '.join(RULES)}")
    while True:
        now = await _newest(client, lane)
        weights = await following(now)
        if weights["weights_digest"] == now["weights_digest"]:
            if _bare(now) or now["policy_version"] not in await _refusals(client, now["lane"]):
                await _update_bucket(client, now["lane"])  # who pushed it may have died before that
                return now
        number = now["policy_version"] + 1 if version is None else version
        if number <= now["policy_version"]:
            raise PolicyRefused(
                f"version: {number}; must be above {now['policy_version']}, which lane {now['lane']!r} serves"
            )
        push = {k: v for k, v in now.items() if k not in ("adapter", "weights", "rollback", "note")} | weights | {
            "policy_version": number, "parent": now["policy_version"], "rule": rule, "by": by,
            "announced": time.time_ns(),
        }
        if note:
            push["note"] = note
        if await _store(client, push):
            return push


async def _store(client: Client, push: Event) -> bool:
    """Puts a policy behind its parent in the history, then into the bucket; False where the history has gone on."""
    lane, body = push["lane"], msgpack.packb(push)
    current, last = await _last(client, lane)
    if current["policy_version"] != push["parent"]:
        return False
    headers = {
        "Mdr-Type": "policy/1", "Content-Type": "application/msgpack", "Nats-Expected-Last-Subject-Sequence": str(last)
    }
    try:
        await client.js.publish(f"{PREFIX}policy.{lane}", body, headers=headers)
    except APIError as err:
        if err.err_code == _BEHIND:
            return False
        raise
    await _update_bucket(client, lane)
    return True


async def _update_bucket(client: Client, lane: str) -> None:
    """Copies the newest policy of a lane's history to the bucket."""
    kv = await client.js.key_value("mdr-policy")
    while True:
        try:
            entry = await kv.get(lane)
            revision, value = entry.revision, entry.value
        except KeyNotFoundError:
            revision, value = 0, None
        newest = (await client.js.get_last_msg("MDR_POLICIES", f"{PREFIX}policy.{lane}")).data or b""
        if newest == value:
            return
        try:
            await kv.update(lane, newest, last=revision or 0)
        except APIError as err:
            if err.err_code != _BEHIND:
                raise


async def taken(client: Client, pushed: Event, timeout: float = 30) -> list[Event]:
    """Waits until every running sampler of the lane has answered a policy, or serves a later one, and returns these
    samplers (presence/1), each with its answer (applied/1) under "answer"; None where it went on to a later one by
    itself.

    TimeoutError: not all have answered within timeout seconds.
    """
    end, version = time.monotonic() + timeout, pushed["policy_version"]
    silent = f"version {version} is stored; not every sampler has answered in {timeout} s"
    while True:
        samplers, late = [], False
        for p in await retry_while_away(client.samplers, end - time.monotonic()):
            if p.get("lane") != pushed["lane"]:
                continue
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


async def check_taken(client: Client, pushed: Event, timeout: float = 30) -> None:
    """Waits as taken does. PolicyRefused: every sampler that answered refused the policy, with the reason of one."""
    answers = [p["answer"] for p in await taken(client, pushed, timeout) if p["answer"]]
    if answers and all(a["state"] != "applied" for a in answers):
        raise PolicyRefused(f"version {pushed['policy_version']}: {answers[0].get('error', '')}")


async def _answer(client: Client, pushed: Event, name: str) -> Event | None:
    """What a sampler said last, where that is about the policy."""
    try:
        m = await client.js.get_last_msg("MDR_APPLIED", f"{PREFIX}applied.{pushed['lane']}.{name}")
    except NotFoundError:
        return None
    answer = decode(m.data or b"")
    return answer if answer["policy_version"] == pushed["policy_version"] else None


def _read(adapter: str | Path | None) -> tuple[bytes, bytes]:
    """The bytes of weights and configuration; the latter may be empty."""
    if adapter is None:
        return b"", b""
    path = Path(adapter)
    file = path / _FILE if path.is_dir() else path
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
    lora_B [n, r], of F32, F16, BF16 or F64, with r of at most min(n, k).

    PolicyRefused: the file cannot be read, is not finite, changes what the table does not have, or has other shapes.
    """
    header, data = _header("adapter", file)
    effective = config or (header.get("__metadata__") or {}).get("lora_adapter_metadata", "").encode()
    parts: dict[str, dict[str, Any]] = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        suffix = next((s for s in _SUFFIXES if name.endswith(s)), None)
        if suffix is None:
            raise PolicyRefused(f"adapter: {name}: no tensor of a LoRA")
        module = name.removesuffix(suffix)
        for prefix in ("base_model.model.", "transformer.", "diffusion_model."):
            module = module.removeprefix(prefix)
        part = parts.setdefault(module, {})
        if _SUFFIXES[suffix] in part:
            raise PolicyRefused(
                f"adapter: module {module}: {name} is given under another name, too; must be one of them"
            )
        part[_SUFFIXES[suffix]] = (info, _floats("adapter", name, info, data))
    if not parts:
        raise PolicyRefused("adapter: no tensors")
    for module, p in sorted(parts.items()):
        if "A" not in p or "B" not in p:
            raise PolicyRefused(f"adapter: module {module}: lora_A or lora_B is missing")
        a, b = p["A"][0]["shape"], p["B"][0]["shape"]
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] < 1:
            raise PolicyRefused(f"adapter: module {module}: lora_A {a} and lora_B {b} do not fit")
        if a[0] > min(a[1], b[0]):
            raise PolicyRefused(
                f"adapter: module {module}: rank {a[0]}; must be at most {min(a[1], b[0])}, the smaller side of its "
                f"weight"
            )
        if module not in table:
            raise PolicyRefused(f"adapter: module {module}: the transformer has none")
        if [b[0], a[1]] != list(table[module]):
            raise PolicyRefused(
                f"adapter: module {module}: changes a weight of {b[0]} x {a[1]}, here {table[module][0]} x "
                f"{table[module][1]}"
            )
        if not all(np.isfinite(x).all() for _, x in p.values()):
            raise PolicyRefused(f"adapter: module {module}: not finite; all numbers of lora_A and lora_B must be")
    return effective


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
            x = _floats("weights", name, info, data)
            if name not in table:
                raise PolicyRefused(f"weights: {name}: the transformer has none")
            if left.pop(name, None) is None:
                raise PolicyRefused(f"weights: {name}: is in two files; must be in one")
            if info["shape"] != list(table[name]):
                raise PolicyRefused(f"weights: {name}: {info['shape']}; must be {list(table[name])}")
            if not np.isfinite(x).all():
                raise PolicyRefused(f"weights: {name}: not finite")
            _release(file)
    if left:
        raise PolicyRefused(f"weights: {len(left)} tensors are missing, {min(left)} for one")


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
    """The elements of a tensor, flat, in float32 or as stored. data is what is behind the header, info the tensor's
    entry in it. PolicyRefused: the entry is wrong."""
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
    out = np.frombuffer(data[begin:end], dtype)
    return (out.astype("<u4") << 16).view("<f4") if info["dtype"] == "BF16" else out


def weights_digest(base: str, file: bytes, config: bytes, scale: float) -> str:
    """Names the weights of a checkpoint plus an adapter as samplers do (lora.WeightsDigest): 64 hex digits. base is the
    checkpoint's digest, config what check_adapter returned."""
    d = hashlib.sha256()
    for name, data in ((_FILE, file), (_CONFIG, config)):
        d.update(f"{name} {len(data)}\n".encode() + data)
    bits = struct.unpack("<Q", struct.pack("<d", scale))[0]
    return hashlib.sha256(f"{base}\n{d.hexdigest()} {bits:x}\n".encode()).hexdigest()


async def _put_blob(client: Client, data: bytes | memoryview) -> Event:
    """Stores bytes under their SHA-256, unless they are there."""
    digest = hashlib.sha256(data).digest()
    ref = {"bucket": "mdr-blobs", "digest": digest.hex(), "size": len(data)}
    subject = f"$O.mdr-blobs.M.{base64.urlsafe_b64encode(digest.hex().encode()).decode()}"
    try:
        entry = json.loads((await client.js.get_last_msg("OBJ_mdr-blobs", subject)).data or b"{}")
        checked(await client.blob(ref), ref)
        if entry.get("size") == len(data):
            # used again: not swept as forgotten
            await client.js.publish(subject, json.dumps(entry).encode(), headers={"Nats-Rollup": "sub"})
            return ref
    except Exception:  # noqa: BLE001, S110 - not there, or not whole: it is written
        pass
    nuid, sent = uuid.uuid4().hex, hashlib.sha256()
    for begin in range(0, len(data), _CHUNK):
        chunk = bytes(data[begin : begin + _CHUNK])
        sent.update(chunk)
        await client.js.publish(f"$O.mdr-blobs.C.{nuid}", chunk)
    if sent.digest() != digest:
        raise PolicyRefused("weights: a file was changed while it was sent; push it again once it is whole")
    entry = {
        "name": digest.hex(), "options": {"max_chunk_size": _CHUNK}, "bucket": "mdr-blobs", "nuid": nuid,
        "size": len(data),
        "chunks": -(-len(data) // _CHUNK), "digest": "SHA-256=" + base64.urlsafe_b64encode(digest).decode(),
    }
    await client.js.publish(subject, json.dumps(entry).encode(), headers={"Nats-Rollup": "sub"})
    return ref
