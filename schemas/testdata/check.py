#!/usr/bin/env python3
"""Reads the golden events with a msgpack decoder of its own and checks them.

For every golden/<name>.msgpack: it is one map that uses nothing beyond the contract,
it says what golden/<name>.json says, and the digests in it and in digests.json are
those of its fields. Standard library only. Run from anywhere; exits 1 on a fault.
"""

import base64
import json
import pathlib
import struct
import sys

HERE = pathlib.Path(__file__).resolve().parent


class F32(float):
    """A number that was stored in 32 bits."""


def decode(data):
    """The one value that data is."""
    value, end = read(data, 0)
    if end != len(data):
        raise ValueError(f"{len(data) - end} bytes after the value")
    return value


def read(b, i, bins=None):
    """The value at b[i] and where it ends. Where byte strings begin and end is added to bins."""
    c = b[i]
    i += 1

    def big(fmt):
        size = struct.calcsize(">" + fmt)
        return struct.unpack(">" + fmt, b[i : i + size])[0], i + size

    def raw(n, i):
        if i + n > len(b):
            raise ValueError("ends within a value")
        return b[i : i + n], i + n

    def items(n, i):
        out = []
        for _ in range(n):
            v, i = read(b, i, bins)
            out.append(v)
        return out, i

    def mapping(n, i):
        flat, i = items(2 * n, i)
        keys = flat[::2]
        if len(set(keys)) != n or not all(isinstance(k, str) for k in keys):
            raise ValueError("keys must be strings, each once")
        return dict(zip(keys, flat[1::2])), i

    if c < 0x80:
        return c, i
    if c >= 0xE0:
        return c - 256, i
    if c < 0x90:
        return mapping(c & 15, i)
    if c < 0xA0:
        return items(c & 15, i)
    if c < 0xC0:
        s, i = raw(c & 31, i)
        return s.decode(), i
    if c in (0xC0, 0xC2, 0xC3):
        return {0xC0: None, 0xC2: False, 0xC3: True}[c], i
    if c == 0xCA:
        v, i = big("f")
        return F32(v), i
    numbers = {0xCB: "d", 0xCC: "B", 0xCD: "H", 0xCE: "I", 0xCF: "Q", 0xD0: "b", 0xD1: "h", 0xD2: "i", 0xD3: "q"}
    if c in numbers:
        return big(numbers[c])
    lengths = {0xC4: "B", 0xC5: "H", 0xC6: "I", 0xD9: "B", 0xDA: "H", 0xDB: "I", 0xDC: "H", 0xDD: "I", 0xDE: "H", 0xDF: "I"}
    if c not in lengths:
        raise ValueError(f"code {c:#x} is not in the contract")
    n, i = big(lengths[c])
    if c <= 0xC6:
        if bins is not None:
            bins.append((i, i + n))
        return raw(n, i)
    if c <= 0xDB:
        s, i = raw(n, i)
        return s.decode(), i
    return items(n, i) if c <= 0xDD else mapping(n, i)


def same(value, twin):
    """Whether a decoded value is what its JSON twin says."""
    if isinstance(value, bytes):
        return isinstance(twin, str) and value == base64.b64decode(twin)
    if isinstance(value, dict):
        return isinstance(twin, dict) and value.keys() == twin.keys() and all(same(v, twin[k]) for k, v in value.items())
    if isinstance(value, list):
        return isinstance(twin, list) and len(value) == len(twin) and all(map(same, value, twin))
    if isinstance(value, F32):
        return struct.pack("<f", value) == struct.pack("<f", twin)
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return value is twin or isinstance(value, str) and value == twin
    return not isinstance(twin, (bool, str)) and value == twin


IV = (0x6A09E667, 0xBB67AE85, 0x3C6EF372, 0xA54FF53A, 0x510E527F, 0x9B05688C, 0x1F83D9AB, 0x5BE0CD19)
ORDER = (2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8)
CHUNK_START, CHUNK_END, PARENT, ROOT = 1, 2, 4, 8


def blake3(data):
    """BLAKE3 after the paper of its authors, section 2: a binary tree of chunks of 1024 bytes."""

    def compress(cv, block, counter, flags):
        m = list(struct.unpack("<16I", block.ljust(64, b"\0")))
        v = [*cv, *IV[:4], counter & 0xFFFFFFFF, counter >> 32, len(block), flags]

        def mix(a, b, c, d, x, y):
            for add, first, second in ((x, 16, 12), (y, 8, 7)):
                v[a] = (v[a] + v[b] + add) & 0xFFFFFFFF
                v[d] = turn(v[d] ^ v[a], first)
                v[c] = (v[c] + v[d]) & 0xFFFFFFFF
                v[b] = turn(v[b] ^ v[c], second)

        def turn(x, n):
            return (x >> n | x << (32 - n)) & 0xFFFFFFFF

        for _ in range(7):
            for i in range(4):
                mix(i, 4 + i, 8 + i, 12 + i, m[2 * i], m[2 * i + 1])
            for i in range(4):
                mix(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4, m[8 + 2 * i], m[9 + 2 * i])
            m = [m[i] for i in ORDER]
        return [a ^ b for a, b in zip(v[:8], v[8:])]

    def node(data, chunk, root):
        """The chaining value of a subtree whose first chunk has this number."""
        if len(data) <= 1024:
            cv, at = IV, 0
            while True:
                block = data[at : at + 64]
                last = at + 64 >= len(data)
                flags = (CHUNK_START if at == 0 else 0) | (CHUNK_END | root if last else 0)
                cv, at = compress(cv, block, chunk, flags), at + 64
                if last:
                    return cv
        left = 1024
        while 2 * left < len(data):
            left *= 2
        children = node(data[:left], chunk, 0) + node(data[left:], chunk + left // 1024, 0)
        return compress(IV, struct.pack("<16I", *children), 0, PARENT | root)

    return struct.pack("<8I", *node(data, 0, ROOT))


SCHEMAS = HERE.parent / "jsonschema"


def named(digest):
    return "blake3:" + digest.hex()


class Digest:
    """A digest over fields, laid out as digest.go documents. Which fields enter is x-digest in the JSON Schema."""

    def __init__(self, domain, schema, schedule=False):
        self.schema, self.schedule, self.fields = schema, schedule, b""
        self.text(domain)

    def integer(self, n):
        self.fields += struct.pack("<Q", n % 2**64)

    def text(self, s):
        self.integer(len(s.encode()))
        self.fields += s.encode()

    def resolved(self, of):
        for choice in of.get("anyOf", []) + of.get("allOf", []):
            if choice.get("type") != "null":
                of = choice
        return self.schema["$defs"][of["$ref"].rpartition("/")[2]] if "$ref" in of else of

    def struct(self, value, of):
        of = self.resolved(of)
        for name, field in of["properties"].items():
            tag = field.get("x-digest")
            if name not in value or name == "v" or tag == "-" or self.schedule and tag == "content":
                continue
            if self.is_set(value[name], field, name in of.get("required", [])):
                self.text(name)
                self.value(value[name], field)
        self.text("")

    @staticmethod
    def is_set(x, of, required):
        if isinstance(x, list):
            return bool(x)
        if x is None or isinstance(x, dict) or not required or "anyOf" in of or isinstance(of.get("type"), list):
            return x is not None
        return bool(x) or isinstance(x, float) and struct.pack("<d", x) != bytes(8)

    def value(self, x, of):
        of = self.resolved(of)
        if isinstance(x, bool):
            self.integer(int(x))
        elif isinstance(x, F32):
            self.fields += struct.pack("<f", x)
        elif isinstance(x, float):
            self.fields += struct.pack("<d", x)
        elif isinstance(x, int):
            self.integer(x)
        elif isinstance(x, str):
            self.text(x)
        elif isinstance(x, list):
            self.integer(len(x))
            items = of["items"]
            for item in x:
                if "anyOf" in items or isinstance(items.get("type"), list):
                    self.fields += bytes([item is not None])
                if item is not None:
                    self.value(item, items)
        elif "dtype" in x and "shape" in x:
            self.text(x["dtype"])
            self.value(x["shape"], {"items": {}})
            travels = x.get("ref") or x.get("parts")
            self.text(travels["digest"] if travels else named(blake3(x["data"])))
        elif "properties" in of:
            self.struct(x, of)
        else:
            self.integer(len(x))
            for name in sorted(x):
                self.text(name)
                self.text(x[name])

    def named(self):
        return named(blake3(self.fields))


def schema_of(kind):
    return json.loads((SCHEMAS / f"{kind}.v1.json").read_text())


def schedule_digest(e):
    schema = schema_of("request")
    if "text" in e:
        d = Digest("meander text schedule 1", schema, schedule=True)
        d.struct(e["text"], schema["properties"]["text"])
        return d.named()
    d = Digest("meander schedule 1", schema, schedule=True)
    if any("stage" in c for c in e.get("conditions") or ()):  # what a stage makes differs between samples
        made = [{k: v for k, v in c.items() if k != "ref" or "stage" not in c} for c in e["conditions"]]
        e = e | {"conditions": made}
    sampling = {n: p for n, p in schema["properties"].items() if n not in NO_SAMPLING}
    d.struct(e, {"properties": sampling, "required": schema["required"]})
    return d.named()


NO_SAMPLING = {
    "v", "run", "uid", "sample_index", "stage", "group_size", "lane", "base_digest", "text", "return_step_indices",
    "checkpoint_step_indices", "debug", "return_conditioning", "schedule_digest", "prune", "priority",
    "min_policy_version", "policy_version", "group",
}
"""The fields of a request that are not of its part Sampling."""


def content_digest(kind, e):
    schema = schema_of(kind)
    d = Digest(f"meander {kind}/1", schema)
    d.struct(e, schema)
    return d.named()


def payload_digest(data):
    """Over an event's bytes, each byte string's own digest in the place of its content."""
    bins = []
    read(data, 0, bins)
    folded, at = b"", 0
    for start, end in bins:
        folded, at = folded + data[at:start] + blake3(data[start:end]), end
    return named(blake3(folded + data[at:]))


def main():
    faults = []
    files = sorted((HERE / "golden").glob("*.msgpack"))
    digests = json.loads((HERE / "digests.json").read_text())
    for file in files:
        name = file.stem
        try:
            event = decode(file.read_bytes())
            if not isinstance(event, dict) or event.get("v") != 1:
                faults.append(f"{name}: not a map of version 1")
            if not same(event, json.loads(file.with_suffix(".json").read_text(encoding="utf-8"))):
                faults.append(f"{name}: differs from its JSON twin")
            kind = name.split("-")[0]
            if kind == "request" and schedule_digest(event) != event["schedule_digest"]:
                faults.append(f"{name}: schedule_digest differs")
            if kind in ("advantage", "step", "tokens") and name in digests and content_digest(kind, event) != digests[name]:
                faults.append(f"{name}: content digest differs")
            if kind in ("step", "tokens") and payload_digest(file.read_bytes()) != digests[f"{name} payload"]:
                faults.append(f"{name}: payload digest differs")
        except (ValueError, KeyError, IndexError, UnicodeDecodeError, struct.error) as e:
            faults.append(f"{name}: {type(e).__name__}: {e}")
    if len(files) < 20:
        faults.append(f"only {len(files)} goldens in {HERE / 'golden'}")
    vector = {
        "sigmas": [F32(1), F32(0.5), F32(0)], "transitions": ["sde", "ode"], "noise_level": 0.7, "solver": "euler",
        "log_prob_kind": "density", "latents_dtype": "BF16", "true_cfg_scale": 4.0, "height": 64, "width": 128,
    }
    print("schedule vector:", schedule_digest(vector))
    print("\n".join(faults) if faults else f"{len(files)} goldens agree")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
