"""Weights: gives a lane of samplers another adapter while they work. Events are plain dicts with the names of the contract."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import math
import struct
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np
from nats.js.errors import APIError, KeyNotFoundError, NotFoundError

from .events import PREFIX, TOKEN, Event, checked, decode

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


class PolicyRefused(ValueError):
    """An adapter that no sampler could use; nothing is stored of it."""


async def policy(client: Client, lane: str = "") -> Event:
    """The current policy of a lane; without a name of the only one that there is."""
    kv = await client.js.key_value("mdr-policy")
    if not lane:
        lanes = sorted(await kv.keys())
        if len(lanes) != 1:
            raise ValueError(f"lane: empty; must be one of {', '.join(lanes)}")
        lane = lanes[0]
    if not TOKEN.fullmatch(lane):
        raise ValueError(f"lane: {lane!r}; must be 1 to 64 of A-Z a-z 0-9 _ -")
    return (await _current(client, lane))[0]


async def _current(client: Client, lane: str) -> tuple[Event, int]:
    """The newest policy of a lane, and the sequence of its message in the history."""
    m = await client.js.get_last_msg("MDR_POLICIES", f"{PREFIX}policy.{lane}")
    return decode(m.data or b""), m.seq or 0


async def push_policy(
    client: Client, adapter: str | Path, lane: str = "", *, scale: float = 1.0, rule: str = "finish", version: int | None = None,
    base: str = "", by: str = "python", note: str = "",
) -> Event:
    """Has a lane serve its checkpoint plus a LoRA in PEFT's form (a folder or a safetensors file) from now on, and returns the policy.

    What can be known of the adapter is checked first: PolicyRefused. rule says what becomes of samples that have begun: finish, switch or restart.
    version is above the current one; None is the next. base is the digest of the checkpoint that it was trained on, to be compared. Weights that
    the lane has already are not pushed again: the current policy is returned.
    """
    file, config = _read(Path(adapter))
    if rule not in RULES:
        raise PolicyRefused(f"rule: {rule!r}; must be one of {', '.join(RULES)}")
    now = await policy(client, lane)
    while True:
        if base and base != now.get("base_digest"):
            raise PolicyRefused(f"base: {base:.16}; must be of the checkpoint that lane {now['lane']!r} serves, {now.get('base_digest', ''):.16}")
        if not now.get("modules"):
            raise PolicyRefused(f"adapter: the model {now['model']!r} of lane {now['lane']!r} takes none")
        table = json.loads(await client.blob(now["modules"]))
        effective = check_adapter(file, config, table)
        if not math.isfinite(scale) or abs(scale) > 1000:
            raise PolicyRefused(f"scale: {scale}; must be a number of at most 1000")
        digest = weights_digest(now["base_digest"], file, effective, scale)
        if digest == now["weights_digest"]:
            return now
        following = now["policy_version"] + 1 if version is None else version
        if following <= now["policy_version"]:
            raise PolicyRefused(f"version: {following}; must be above {now['policy_version']}, which lane {now['lane']!r} serves")
        ref = await _put_blob(client, file)
        push = {k: v for k, v in now.items() if k not in ("rollback", "note")} | {
            "adapter": {"file": ref, "config": config, "scale": float(scale)}, "weights_digest": digest, "policy_version": following,
            "parent": now["policy_version"], "rule": rule, "by": by, "announced": time.time_ns(),
        }
        if note:
            push["note"] = note
        if await _store(client, push):
            return push
        now = await policy(client, now["lane"])  # somebody else was first


async def _store(client: Client, push: Event) -> bool:
    """Puts a policy behind its parent in the history, then into the bucket; False where the history has gone on."""
    lane, body = push["lane"], msgpack.packb(push)
    current, last = await _current(client, lane)
    if current["policy_version"] != push["parent"]:
        return False
    headers = {"Mdr-Type": "policy/1", "Content-Type": "application/msgpack", "Nats-Expected-Last-Subject-Sequence": str(last)}
    try:
        await client.js.publish(f"{PREFIX}policy.{lane}", body, headers=headers)
    except APIError as err:
        if err.err_code == _BEHIND:
            return False
        raise
    kv = await client.js.key_value("mdr-policy")
    while True:  # the bucket has the newest of the history
        try:
            entry = await kv.get(lane)
            revision, value = entry.revision, entry.value
        except KeyNotFoundError:
            revision, value = 0, None
        newest = (await client.js.get_last_msg("MDR_POLICIES", f"{PREFIX}policy.{lane}")).data or b""
        if newest == value:
            return True
        try:
            await kv.update(lane, newest, last=revision or 0)
        except APIError as err:
            if err.err_code != _BEHIND:
                raise


async def taken(client: Client, pushed: Event, timeout: float = 30) -> list[Event]:
    """Waits until every sampler of the lane that runs has answered a policy, or serves a later one, and returns those (presence/1), each with its
    answer (applied/1) under "answer", None where it went on to a later one by itself. TimeoutError where some are late."""
    end, version = time.monotonic() + timeout, pushed["policy_version"]
    while True:
        samplers, late = [], False
        kv = await client.js.key_value("mdr-presence")
        try:
            names = await kv.keys()
        except NotFoundError:
            names = []
        except Exception as err:  # noqa: BLE001 - the client has an error of its own for an empty bucket
            if type(err).__name__ != "NoKeysError":
                raise
            names = []
        for name in names:
            try:
                p = decode((await kv.get(name)).value or b"")
            except KeyNotFoundError:
                continue  # it has left
            if p["service"] != "sampler" or p.get("lane") != pushed["lane"]:
                continue
            answer = await _answer(client, pushed, name)
            late = late or answer is None and (p.get("policy_version") or 0) < version
            samplers.append(p | {"answer": answer})
        if not late:
            return samplers
        if time.monotonic() > end:
            raise TimeoutError(f"version {version} is stored; not every sampler has answered in {timeout} s")
        await asyncio.sleep(0.02)


async def _answer(client: Client, pushed: Event, name: str) -> Event | None:
    """What a sampler said last, where that is about the policy."""
    try:
        m = await client.js.get_last_msg("MDR_APPLIED", f"{PREFIX}applied.{pushed['lane']}.{name}")
    except NotFoundError:
        return None
    answer = decode(m.data or b"")
    return answer if answer["policy_version"] == pushed["policy_version"] else None


def _read(path: Path) -> tuple[bytes, bytes]:
    """The bytes of weights and configuration; the latter may be empty."""
    try:
        file = path / _FILE if path.is_dir() else path
        weights, config = file.read_bytes(), file.parent / _CONFIG
        return weights, config.read_bytes() if config.exists() else b""
    except OSError as err:
        raise PolicyRefused(f"adapter: {path}: {err.strerror or err}") from err


def check_adapter(file: bytes, config: bytes, table: dict[str, list[int]]) -> bytes:
    """Refuses (PolicyRefused) an adapter that cannot be read, is not finite, changes what the table {projection: [n, k]} does not have, in other shapes
    or with a rank above the smaller side. Returns the configuration that counts: config, or that in the file's header."""
    header, data = _header(file)
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
        parts.setdefault(module, {})[_SUFFIXES[suffix]] = (info, _floats(name, info, data))
    if not parts:
        raise PolicyRefused("adapter: no tensors")
    for module, p in sorted(parts.items()):
        if "A" not in p or "B" not in p:
            raise PolicyRefused(f"adapter: module {module}: lora_A or lora_B is missing")
        a, b = p["A"][0]["shape"], p["B"][0]["shape"]
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] < 1:
            raise PolicyRefused(f"adapter: module {module}: lora_A {a} and lora_B {b} do not fit")
        if a[0] > min(a[1], b[0]):
            raise PolicyRefused(f"adapter: module {module}: rank {a[0]}; must be at most {min(a[1], b[0])}, the smaller side of its weight")
        if module not in table:
            raise PolicyRefused(f"adapter: module {module}: the transformer has none")
        if [b[0], a[1]] != list(table[module]):
            raise PolicyRefused(f"adapter: module {module}: changes a weight of {b[0]} x {a[1]}, here {table[module][0]} x {table[module][1]}")
        if not all(np.isfinite(x).all() for _, x in p.values()):
            raise PolicyRefused(f"adapter: module {module}: not finite; all numbers of lora_A and lora_B must be")
    return effective


def _header(file: bytes) -> tuple[dict[str, Any], bytes]:
    """The header of a safetensors file, and what is behind it."""
    try:
        size = struct.unpack("<Q", file[:8])[0]
        if size > len(file) - 8:
            raise ValueError(f"a header of {size} bytes in a file of {len(file)}: truncated")
        header = json.loads(file[8 : 8 + size])
        if not isinstance(header, dict):
            raise ValueError("no header")
    except (struct.error, ValueError) as err:
        raise PolicyRefused(f"adapter: {_FILE}: {err}") from err
    return header, file[8 + size :]


def _floats(name: str, info: dict[str, Any], data: bytes) -> np.ndarray:
    """The elements of a tensor, flat."""
    begin, end = info["data_offsets"]
    if end > len(data):
        raise PolicyRefused(f"adapter: {name}: ends at byte {end} of {len(data)}: truncated")
    if info["dtype"] == "BF16":
        return (np.frombuffer(data[begin:end], "<u2").astype("<u4") << 16).view("<f4")
    if info["dtype"] not in _FLOATS:
        raise PolicyRefused(f"adapter: {name}: {info['dtype']}; must be F32, F16, BF16 or F64")
    return np.frombuffer(data[begin:end], _FLOATS[info["dtype"]])


def weights_digest(base: str, file: bytes, config: bytes, scale: float) -> str:
    """Names the weights of a checkpoint plus an adapter, as samplers do (lora.WeightsDigest)."""
    d = hashlib.sha256()
    for name, data in ((_FILE, file), (_CONFIG, config)):
        d.update(f"{name} {len(data)}\n".encode() + data)
    bits = struct.unpack("<Q", struct.pack("<d", scale))[0]
    return hashlib.sha256(f"{base}\n{d.hexdigest()} {bits:x}\n".encode()).hexdigest()


async def _put_blob(client: Client, data: bytes) -> Event:
    """Stores bytes under their SHA-256, unless they are there."""
    digest = hashlib.sha256(data).digest()
    ref = {"bucket": "mdr-blobs", "digest": digest.hex(), "size": len(data)}
    subject = f"$O.mdr-blobs.M.{base64.urlsafe_b64encode(digest.hex().encode()).decode()}"
    try:
        entry = json.loads((await client.js.get_last_msg("OBJ_mdr-blobs", subject)).data or b"{}")
        checked(await client.blob(ref), ref)
        if entry.get("size") == len(data):
            await client.js.publish(subject, json.dumps(entry).encode(), headers={"Nats-Rollup": "sub"})  # used again: not swept as forgotten
            return ref
    except Exception:  # noqa: BLE001, S110 - not there, or not whole: it is written
        pass
    nuid = uuid.uuid4().hex
    for begin in range(0, len(data), _CHUNK):
        await client.js.publish(f"$O.mdr-blobs.C.{nuid}", data[begin : begin + _CHUNK])
    entry = {
        "name": digest.hex(), "options": {"max_chunk_size": _CHUNK}, "bucket": "mdr-blobs", "nuid": nuid, "size": len(data),
        "chunks": -(-len(data) // _CHUNK), "digest": "SHA-256=" + base64.urlsafe_b64encode(digest).decode(),
    }
    await client.js.publish(subject, json.dumps(entry).encode(), headers={"Nats-Rollup": "sub"})
    return ref
