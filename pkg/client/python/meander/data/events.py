"""Events as they are stored: msgpack maps. Nothing in them is trusted before it is checked."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from operator import contains
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from blake3 import blake3

from .fields import ALIASES

PREFIX = "mdr.v1."
"""What all subjects of the contract begin with."""
STAGE, TENANT = "main", "main"
"""The stage of samples whose prompt names none, and the tenant of a lane that has one."""
MAX_EVENT = 8 << 20
"""Bytes of an event at most."""
TOKEN = re.compile("[A-Za-z0-9_-]{1,64}")
"""Names of runs, groups, lanes and readers."""
_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "U64": "<u8", "I32": "<i4", "U32": "<u4", "I16": "<i2",
    "U16": "<u2", "I8": "i1", "U8": "u1",
    "BOOL": "?",
}

_JSON = frozenset((b"{", b" ", b"\t", b"\r", b"\n"))  # no map of msgpack begins with one
Event = dict[str, Any]
"""A decoded event: values by the names of the contract, which meander.contract has with their types."""
AnyEvent = Mapping[str, Any]
"""An event that is only read: a plain dict, or one with types."""
Bytes = bytes | memoryview
"""Bytes, or a view of some that is not written to."""


def name_of(field: str, value: Any) -> str:
    """The name of a run, a group, a lane or a reader. ValueError: it is none, and what may be meant."""
    text = str(value)
    if TOKEN.fullmatch(text):
        return text
    repaired = "-".join(re.findall("[A-Za-z0-9_-]+", text))[:64]
    hint = f", such as {repaired!r}" if repaired else ""
    raise ValueError(f"{field}: {value!r}; must be 1 to 64 characters of A-Z a-z 0-9 _ -{hint}")


def by_name(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Fields by their own names, which are also given by those of flags. TypeError: a field is given twice."""
    out = dict(fields)
    for alias in ALIASES.keys() & out.keys():
        name = ALIASES[alias]
        if name in out:
            raise TypeError(f"{alias} and {name}: both given; must be one: they are one field")
        out[name] = out.pop(alias)
    return out


class EventError(ValueError):
    """An event, or something that it points to, is not valid."""


class Gone(EventError):
    """Something that an event points to is no longer stored: retention removed it."""


def decode(data: bytes) -> Event:
    """Decodes one event, msgpack or JSON, whose byte strings stay base64.

    EventError: it has extension types or numbers that are not finite, or is neither."""
    event = _unpacked(data)
    _check_finite(event)
    return event


def _unpacked(data: bytes, of_pairs: Any = None) -> Event:
    if len(data) > MAX_EVENT:
        raise EventError(f"event of {len(data)} bytes; at most {MAX_EVENT} are read")
    try:
        if data[:1] in _JSON:
            event = json.loads(data, object_pairs_hook=of_pairs)
        else:
            event = msgpack.unpackb(
                data, raw=False, strict_map_key=True, ext_hook=_no_extension, object_pairs_hook=of_pairs
            )
    except EventError:
        raise
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as e:
        raise EventError(f"no {'JSON' if data[:1] in _JSON else 'msgpack'}: {str(e) or type(e).__name__}") from None
    if not isinstance(event, dict):
        raise EventError(f"event is a {type(event).__name__}; want a map")
    return event


def _check_finite(event: Event) -> None:
    if not _finite(event):
        raise EventError("it has a number that is not finite")


def _once(pairs: list[tuple[str, Any]]) -> Event:
    """A map of its fields. EventError: it has one twice."""
    out = dict(pairs)
    if len(out) != len(pairs):
        raise EventError("a map has a field twice")
    return out


_BLAKE3 = "blake3:"
_PLAIN = {str, int, float, bool, type(None)}  # values without parts


def has_digest(data: Bytes, digest: str) -> bool:
    """Says whether bytes have a digest, by the algorithm that it names."""
    if digest.startswith(_BLAKE3):
        return bool(_BLAKE3 + blake3(data).hexdigest() == digest)
    return hashlib.sha256(data).hexdigest() == digest


def payload_digest(data: bytes, event: Event) -> str:
    """Returns the digest by which trajectories name their steps. It is taken over an event's bytes, in which the
    content of each byte string (msgpack's bin) is replaced by its own BLAKE3. event is what decode made of data.

    EventError: a map has a field twice."""
    unpacker, folded = msgpack.Unpacker(max_buffer_size=len(data)), blake3()
    unpacker.feed(data)
    folded.update(data[_fold(event, data, 0, unpacker, folded) :])
    return _BLAKE3 + str(folded.hexdigest())


_PREFIX = 32
_LARGE = 64 << 10  # bytes of a byte string that is not copied
_BIN = re.compile(rb"\xc6(\x00[\x01-\x80]..)", re.DOTALL)  # what a large one begins with, and its size
_MARK = os.urandom(12)  # what stands for large ones: nobody can have it in an event


def _lifted(data: Bytes) -> tuple[bytes, dict[bytes, memoryview]]:
    """The bytes of an event with a mark in place of each large byte string, and these by their marks. Where an event
    has these marks as byte strings, each once, and no others, it is the event itself without the large ones: up to the
    first, both have the same bytes, so what is of one is of the other."""
    left, held, at, begin = list[Any](), dict[bytes, memoryview](), 0, 0
    while found := _BIN.search(data, begin):
        begin, size = found.end(), int.from_bytes(found[1], "big")
        if begin + size > len(data):
            begin = found.start() + 1
            continue
        mark = _MARK + len(held).to_bytes(4, "big")
        held[mark] = memoryview(data)[begin : begin + size]
        left += data[at : begin - 4], len(mark).to_bytes(4, "big"), mark
        at = begin = begin + size
    return b"".join([*left, data[at:]]), held


def _is_payload(
    data: bytes, strings: list[bytes], digest: str, large: Mapping[bytes, memoryview] = {}
) -> bool:  # fmt: skip
    """Whether an event's bytes have a payload_digest, where strings are its byte strings in order, and large those that
    were lifted from it. It looks for their content, so False may be said of some that have it."""
    folded, at = list[bytes](), 0
    for content in strings:
        begin = data.find(content[:_PREFIX], at)  # the whole of a state takes long to look for
        if begin < 0 or not data.startswith(content, begin):
            return False
        if (whole := large.get(content)) is None:
            folded += data[at:begin], blake3(content).digest()
        else:
            folded += data[at : begin - 4], len(whole).to_bytes(4, "big"), blake3(whole).digest()
        at = begin + len(content)
    folded.append(data[at:])
    return _BLAKE3 + str(blake3(b"".join(folded)).hexdigest()) == digest


def _fold(value: Any, data: bytes, at: int, unpacker: msgpack.Unpacker, folded: blake3) -> int:
    """Digests data from `at` to the last byte string in the value that comes next, and returns where that ends."""
    skip = unpacker.skip
    if type(value) is bytes:
        skip()
        end: int = unpacker.tell()
        folded.update(data[at : end - len(value)] + blake3(value).digest())
        return end
    if type(value) is list and not _PLAIN.issuperset(map(type, value)):
        unpacker.read_array_header()
        for v in value:
            at = _fold(v, data, at, unpacker, folded)
    elif type(value) is dict:
        if unpacker.read_map_header() != len(value):
            raise EventError("a map has a field twice")
        for v in value.values():
            skip()  # its name
            if type(v) in _PLAIN:
                skip()
            else:
                at = _fold(v, data, at, unpacker, folded)
    else:
        skip()
    return at


_UNSCORED = ("log_probs", "processed_log_probs", "top_log_probs")  # of tokens: NaN where a server gave none


def _finite(event: Event) -> bool:
    """Says whether all numbers of an event are finite, as the contract requires."""
    left: list[Any] = [event]
    while left:
        x = left.pop()
        if type(x) is dict:
            for k in _UNSCORED:
                if type(x.get(k)) is list:
                    x = x | {k: [n for n in x[k] if n == n]}
            x = x.values()
        for v in x:
            if type(v) is float:
                if not math.isfinite(v):
                    return False
            elif type(v) not in _PLAIN and type(v) is not bytes:
                left.append(v)
    return True


def _no_extension(code: int, _data: bytes) -> None:
    raise EventError(f"msgpack extension {code}; events have none")


class Maybe:
    """A field that may be absent or null."""

    def __init__(self, of: Any):
        self.of = of


NUMBER = (int, float)
"""The types of a number in a form."""
_PLANS = 256  # kinds of maps whose plan is kept, of each struct
_INFORMS = ("group", "timings")  # what is in them decides no rollout


class Form(dict[str, Any]):
    """The fields of a struct of the contract, with the form of each. A list that is null is an empty one."""

    def __init__(self, fields: Iterable[tuple[str, Any]]):
        super().__init__(fields)
        plain = {name: types for name, of in self.items() if (types := _exact(of))}
        self.plain, self.types = list(plain), list(plain.values())
        """The fields whose values are one of some types, and these; the others have parts."""
        self.parts = [(name, of) for name, of in self.items() if name not in plain]
        self.structs = [(name, of) for name, of in self.items() if name not in _INFORMS and _of_structs(of)]
        """The fields that are structs, or lists of them."""
        self.plans = dict[tuple[Any, ...], Any]()
        """The plans of maps by their names and the types of their values, of which few events differ."""

    def plan(self, value: Event, kind: tuple[Any, ...]) -> tuple[list[str], list[tuple[str, Any]], list[str]] | None:
        """What is left to look at in a map of that kind: its numbers, its fields with parts and the form of each, or
        the types in a list of plain values, and the lists that it lacks. None: a field is wrong, or not known."""
        numbers, parts, lacking = list[str](), list[tuple[str, Any]](), list[str]()
        for name in (*value, *self.keys() - value.keys()):
            of, spec = type(value.get(name)), self.get(name, ())  # of what is not known no value is right
            if of is type(None) and isinstance(spec, (Maybe, list)):
                lacking += [name] if isinstance(spec, list) else []
                continue
            while isinstance(spec, Maybe):
                spec = spec.of
            if of is list and isinstance(spec, list) and type(spec[0]) not in (Form, list):
                parts.append((name, _exact(spec[0]) - {bytes, dict}))
            elif of is dict and (spec is dict or isinstance(spec, Form)) or of is list and isinstance(spec, list):
                parts.append((name, spec))
            elif of not in (_PLAIN if spec is object else _exact(spec)):
                return None
            elif of is bytes:
                parts.append((name, bytes))
            elif of is float:
                numbers.append(name)
        if len(self.plans) < _PLANS:
            self.plans[kind] = numbers, parts, lacking
        return numbers, parts, lacking


def _exact(spec: Any) -> frozenset[type]:
    """The types whose values all have a form; none where more must be looked at."""
    if isinstance(spec, Maybe):
        return _exact(spec.of) | {type(None)}
    return frozenset(spec) if isinstance(spec, tuple) else frozenset({spec} if isinstance(spec, type) else ())


def _of_structs(spec: Any) -> bool:
    spec = spec.of if isinstance(spec, Maybe) else spec
    return isinstance(spec[0] if isinstance(spec, list) else spec, Form)


@functools.cache
def form(name: str) -> Any:
    """The form of a struct of the contract by its name, or of a field as contract.json writes it."""
    types = {"int": int, "number": NUMBER, "str": str, "bool": bool, "bytes": bytes, "map": dict, "any": object}
    if name.endswith("?"):
        return Maybe(form(name[:-1]))
    if name.startswith("["):
        return [form(name[1:-1])]
    return types.get(name) or Form((field, form(f)) for field, f in _CONTRACT["structs"][name].items())


_CONTRACT: Event = json.loads(Path(__file__).with_name("contract.json").read_text("utf-8"))
TRANSITIONS: dict[str, Event] = {t["name"]: t for t in _CONTRACT["transitions"]}
"""The transitions by their names, with what is true of them: schemas.Transition."""
ESTIMATORS: dict[str, Event] = {e["name"]: e for e in _CONTRACT["estimators"]}
"""The estimators by their names, with what is true of them: estimator.Properties in Go."""
TENSOR: Event = form("Tensor")
"""The form of a tensor: its bytes, or where they are."""
# The services check more than forms, and take what is faulty off the streams.
ADVANTAGE: Event = form("Advantage")
"""The result of a group."""
GROUP: Event = form("GroupRecord")
"""The record of a group, from before its first sample."""
BATCH: Event = form("Batch")
"""The result of a batch."""
TRAJECTORY: Event = form("Trajectory")
"""A sample."""
TOKENS: Event = form("Tokens")
"""Tokens of a text."""
STEP: Event = form("Step")
"""A denoising step."""
UPDATE: Event = form("Update")
"""What a trainer tells of an update of weights."""


def medium(trajectory: AnyEvent, kind: str) -> Any:
    """A file of a sample by its kind, image, video or audio; None: it has none."""
    return next((m for m in trajectory.get("media") or () if m["kind"] == kind), None)


def check_known(event: AnyEvent, spec: Event, what: str) -> None:
    """EventError: the event has a field that its form does not have. Without it, a number that is computed from the
    event may be that of another sample."""
    if unknown := next(_unknown(event, spec), ""):
        raise EventError(f"{what}: setting {unknown} is not known to this version; upgrade meander-rl")


def _unknown(value: Any, spec: Any, path: str = "") -> Iterator[str]:
    spec = spec.of if isinstance(spec, Maybe) else spec
    if isinstance(spec, Form) and isinstance(value, dict):
        if not value.keys() <= spec.keys():
            yield from (f"{path}{key}={v!r:.40}" for key, v in value.items() if key not in spec)
        for key, of in spec.structs:
            if value.get(key):
                yield from _unknown(value[key], of, f"{path}{key}.")
    elif isinstance(spec, list):
        for v in value or ():
            yield from _unknown(v, spec[0], path)


def check_uses(trajectory: AnyEvent, uses: Collection[str], reader: str) -> None:
    """EventError: a setting of the sample is set that the reader does not use. uses are those that it does; settings
    that come through another field of the trajectory, as cfg_from through cfg_scales, are used by who uses that."""
    for name in _unused(frozenset(uses)):
        if trajectory.get(name):
            raise EventError(
                f"{trajectory.get('uid')} #{trajectory.get('sample_index')}: setting {name}={trajectory[name]!r:.40} "
                f"is not used by {reader}; leave it out of the prompt, or train with what computes it"
            )


@functools.lru_cache(16)
def _unused(uses: frozenset[str]) -> list[str]:
    """The settings of samples that a reader does not use."""
    return [name for name, through in _CONTRACT["settings"].items() if through not in uses]


SETTINGS: dict[str, type] = {
    name: t for name in _CONTRACT["settings"]
    if (t := {"int": int, "number": float, "str": str, "bool": bool}.get(
        _CONTRACT["structs"]["Trajectory"][name].rstrip("?")
    ))
}  # fmt: skip
"""The settings of a sample that are one value, with its type."""


def fault(value: object, spec: Any, field: str = "") -> str:
    """What is wrong with the form of a value; empty when nothing is."""
    if isinstance(spec, Maybe):
        return "" if value is None else fault(value, spec.of, field)
    if isinstance(spec, dict):
        if not isinstance(value, dict):
            return f"{field or 'event'}: {type(value).__name__}; must be a map"
        fields: Iterable[tuple[str, Any]] = spec.items()
        if isinstance(spec, Form) and all(map(contains, spec.types, map(type, map(value.get, spec.plain)))):
            fields = spec.parts
        for k, s in fields:
            v = value.get(k)
            if v is None and isinstance(s, list) and isinstance(spec, Form):
                value[k] = []
            elif wrong := fault(v, s, f"{field}.{k}" if field else k):
                return wrong
        return ""
    if isinstance(spec, list):
        if not isinstance(value, list):
            return f"{field}: {type(value).__name__}; must be a list"
        if _exact(spec[0]).issuperset(map(type, value)):
            return ""
        return next(filter(None, (fault(v, spec[0], f"{field}[{i}]") for i, v in enumerate(value))), "")
    if not isinstance(value, spec) or isinstance(value, bool) and spec not in (bool, object):
        names = spec if isinstance(spec, tuple) else (spec,)
        return f"{field}: {value!r:.60}; must be {' or '.join(t.__name__ for t in names)}"
    return ""


def _is_right(value: Any, spec: Any, held: list[tuple[Event, str]]) -> bool:
    """Whether _finite, fault and check_known find nothing, and what fault does for lists that are null. It is quick,
    and False of some right events too. held gets the maps and names of byte strings, in order."""
    if type(spec) is Form:
        kind = (*value, *map(type, value.values()))
        if (plan := spec.plans.get(kind) or spec.plan(value, kind)) is None:
            return False
        numbers, parts, lacking = plan
        for name in lacking:
            value[name] = []
        for name, of in parts:
            if of is bytes:
                held.append((value, name))
            elif type(of) is frozenset:
                types = set(map(type, value[name]))
                if float in types and not (types <= _FLOATS and math.isfinite(sum(filter(None, value[name])))):
                    return False
                if not types <= of:
                    return False
            elif of is dict:
                if not _finite(value[name]):
                    return False
            elif not _is_right(value[name], of, held):
                return False
        # A sum with a number that is not finite is not finite.
        return not numbers or math.isfinite(sum(map(value.__getitem__, numbers)))
    of = spec[0]
    part = dict if type(of) is Form else list
    for v in value:
        if type(v) is not part or not _is_right(v, of, held):
            return False
    return True


_FLOATS = {float, type(None)}


def fitting(data: Bytes, spec: Event, subject: str, *named: str, digest: str = "", known: str = "") -> Any:
    """A decoded event of that form, whose named fields are the last tokens of its subject, in that order, and whose
    payload_digest is the given one, where one is given. known: what to call it where it has a field that is not known,
    which is an error then."""
    event = _quickly(data, spec, digest) if known else None
    right = event is not None
    if event is None:
        whole = bytes(data)
        try:
            event = _unpacked(whole, _once if digest else None)
            _check_finite(event)
        except EventError as e:
            raise EventError(f"{subject}: {e}") from None
        if digest and payload_digest(whole, event) != digest:
            raise EventError(f"{subject}: it is not the step that the trajectory names")
        if wrong := fault(event, spec):
            raise EventError(f"{subject}: {wrong}")
    tokens = subject.split(".")[3:]
    if named and [str(event[f]) for f in named] != tokens[: len(named)]:
        raise EventError(f"{subject}: says that it is of {' '.join(str(event[f]) for f in named)}")
    if known and not right:
        check_known(event, spec, known)
    return event


def _quickly(data: Bytes, spec: Event, digest: str) -> Event | None:
    """What fitting returns, with views of data in place of large byte strings. None: it must be looked at in full."""
    if len(data) > MAX_EVENT:
        return None
    strings = list[tuple[Event, str]]()
    left, large = _lifted(data) if len(data) > _LARGE else (bytes(data), {})
    try:
        event = _unpacked(left, _once if digest else None)
    except EventError:
        return None
    if not _is_right(event, spec, strings):
        return None
    contents = [of[name] for of, name in strings]
    if digest and not _is_payload(left, contents, digest, large):
        return None
    if large:
        if [c for c in contents if c in large] != list(large):
            return None
        for of, name in strings:
            of[name] = large.get(of[name], of[name])
    return event


def tensor(t: AnyEvent) -> np.ndarray:
    """A tensor whose bytes are in the event (Client.load fetches the others). BF16 becomes float32."""
    return widened(t["dtype"], stored_tensor(t)) if t["dtype"] == "BF16" else stored_tensor(t)


def widened(dtype: str, values: np.ndarray) -> np.ndarray:
    """What stored_tensor gave, F16 and BF16 as float32, others as they are."""
    if dtype == "BF16":
        out = values.astype("<u4")
        out <<= 16
        return out.view("<f4")
    return values.astype(np.float32) if dtype == "F16" else values


def stored_tensor(t: AnyEvent) -> np.ndarray:
    """A view of a tensor's bytes in the event, of its dtype and shape; uint16 are the bits of BF16."""
    data, shape = t.get("data"), tuple(t["shape"])
    if data is None:
        raise EventError("the tensor's bytes are not in the event: Client.load fetches them")
    dtype = np.dtype("<u2") if t["dtype"] == "BF16" else np.dtype(_DTYPES.get(t["dtype"], "V1"))
    if dtype.kind == "V":
        raise EventError(f"dtype {t['dtype']!r}; want one of {', '.join(_DTYPES)}, BF16")
    if min(shape, default=1) < 0 or math.prod(shape) * dtype.itemsize != len(data):
        raise EventError(
            f"tensor of {len(data)} bytes; {t['dtype']} {list(shape)} has {math.prod(shape) * dtype.itemsize}"
        )
    return np.frombuffer(data, dtype).reshape(shape)


def checked(data: Bytes | None, ref: AnyEvent) -> Bytes:
    """The bytes, if they are those that a reference names."""
    if data is None or len(data) != ref["size"] or not has_digest(data, ref["digest"]):
        raise EventError(f"{len(data or b'')} bytes that are not those of digest {ref['digest']:.12}")
    return data
