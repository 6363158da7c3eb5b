#!/usr/bin/env python3
"""Reads the golden events with a msgpack decoder of its own and checks them.

For every golden/<name>.msgpack: it is one map that uses nothing beyond the contract,
it says what golden/<name>.json says, and the digests in it and in digests.json are
those of its fields. Standard library only. Run from anywhere; exits 1 on a fault.
"""

import base64
import hashlib
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


def sha256(data):
    return hashlib.sha256(data).digest()


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


HASHES = {"": sha256, "b3:": blake3}
"""The algorithm of a digest, by the text before its hex digits."""


class Digest:
    """A digest over fields, laid out as digest.go documents."""

    def __init__(self, domain, name=""):
        self.name, self.fields = name, b""
        self.text(domain)

    def add(self, data):
        self.fields += data

    def integer(self, n):
        self.add(struct.pack("<Q", n % 2**64))

    def double(self, x):
        self.add(struct.pack("<d", x))

    def single(self, x):
        self.add(struct.pack("<f", x))

    def text(self, s):
        self.integer(len(s.encode()))
        self.add(s.encode())

    def optional(self, x):
        self.add(b"\0" if x is None else b"\1" + struct.pack("<d", x))

    def list(self, items, put):
        self.integer(len(items or []))
        for item in items or []:
            put(item)

    def tensor(self, t):
        self.text(t["dtype"])
        self.list(t["shape"], self.integer)
        travels = t.get("ref") or t.get("parts")
        self.add(bytes.fromhex(travels["digest"].removeprefix(self.name)) if travels else HASHES[self.name](t["data"]))

    def hex(self):
        return self.name + HASHES[self.name](self.fields).hex()


def text_schedule_digest(t):
    d = Digest("meander text schedule 1")
    d.integer(t["max_new_tokens"])
    d.double(t["temperature"])
    d.integer(t["top_k"])
    d.double(t["top_p"])
    d.double(t["min_p"])
    d.list(t["stop"], d.text)
    d.list(t["stop_token_ids"], d.integer)
    d.integer(t["vocabulary"])
    if "interaction" in t:
        i = t["interaction"]
        d.text("interaction")
        d.text(i["name"])
        d.integer(i["max_turns"])
        d.list(sorted(i.get("params", {}).items()), lambda p: (d.text(p[0]), d.text(p[1])))
    return d.hex()


def schedule_digest(e):
    if "text" in e:
        return text_schedule_digest(e["text"])
    d = Digest("meander schedule 1")
    d.list(e["sigmas"], d.single)
    d.list(e["transitions"], d.text)
    d.double(e["noise_level"])
    for field in ("solver", "log_prob_kind", "latents_dtype"):
        d.text(e[field])
    d.double(e["true_cfg_scale"])
    for n in (e["height"], e["width"], len(e["transitions"])):
        d.integer(n)
    for field in ("prompt_2", "prompt_3"):
        if field in e:
            d.text(field)
            d.text(e[field])
    for field, put in (("guidance", d.double), ("frames", d.integer), ("cfg_from", d.double), ("cfg_until", d.double),
                       ("true_cfg_scale_2", d.double), ("boundary_ratio", d.double),
                       ("guidance_rescale", d.double)):
        if field in e:
            d.text(field)
            put(e[field])
    return d.hex()


def step_digest(e, name=""):
    d = Digest("meander step 1", name)
    d.text(e["uid"])
    d.integer(e["sample_index"])
    d.text(e["stage"])
    for field in ("step_index", "num_inference_steps"):
        d.integer(e[field])
    d.text(e["transition"])
    d.double(e["noise_level"])
    for field in ("sigma", "sigma_next", "timestep"):
        d.single(e[field])
    d.double(e["std_dev_t"])
    d.double(e["noise_std"])
    d.optional(e["log_prob"])
    d.text(e["log_prob_kind"])
    d.optional(e["log_prob_sum"])
    d.integer(e["element_count"])
    d.list(e["latents"], lambda t: (d.integer(t["index"]), d.tensor(t["tensor"])))
    d.list(e["debug"], lambda t: (d.text(t["name"]), d.tensor(t["tensor"])))
    d.integer(e["policy_version"])
    d.text(e["weights_digest"])
    d.text(e["schedule_digest"])
    if "scheduled_sampling" in e:
        r = e["scheduled_sampling"]
        d.text("scheduled_sampling")
        d.list([r["base"], r["source"], r["from"]], d.integer)
        for field in ("u", "a", "u_next", "a_next"):
            d.double(r[field])
        d.text(r["sampler"])
        d.integer(r["order"])
    return d.hex()


def tokens_digest(e, name=""):
    d = Digest("meander tokens 1", name)
    d.text(e["uid"])
    d.text(e["stage"])
    for field in ("sample_index", "n", "turn", "position", "turn_position"):
        d.integer(e[field])
    d.integer(int(e["generated"]))
    d.list(e["ids"], d.integer)
    for field in ("log_probs", "processed_log_probs", "log_sum_exps", "entropies", "top_log_probs"):
        d.list(e[field], d.single)
    if "engine" in e:
        d.text("engine")
        d.text(e["engine"])
    d.text(e["logits_kind"])
    if "logits" in e:
        logits = e["logits"]
        d.text("logits")
        d.text(logits["form"])
        if "ids" in logits:
            d.tensor(logits["ids"])
        d.tensor(logits["values"])
        d.integer(logits["masked"])
    d.integer(e["vocabulary"])
    d.text(e.get("finish_reason", ""))
    d.integer(e["policy_version"])
    d.text(e["weights_digest"])
    d.text(e["schedule_digest"])
    return d.hex()


def advantage_digest(e):
    d = Digest("meander advantage 1")
    for field in ("uid", "batch", "status"):
        d.text(e[field])
    d.integer(e["group_size"])
    d.list(e["members"], lambda m: (d.integer(m["sample_index"]), d.optional(m["reward"]), d.optional(m["advantage"]), d.text(m["status"])))
    d.optional(e["mean"])
    d.optional(e["std"])
    for field in ("scale", "std_basis", "estimator"):
        d.text(e[field])
    d.double(e["epsilon"])
    d.integer(e["trained_steps"])
    d.text(e["schedule_digest"])
    d.integer(e["policy_version_min"])
    d.integer(e["policy_version_max"])
    if "mode" in e:
        d.text(e["mode"])
    for field in ("adv_clip_max", "gamma"):
        if field in e:
            d.optional(e[field])
    if "singleton" in e:
        d.text(e["singleton"])
    for member in e["members"]:
        for a in member.get("step_advantages", []):
            d.double(a)
    if "refilled_by" in e:
        d.text(e["refilled_by"])
    if "branch_scope" in e:
        d.text(e["branch_scope"])
        d.integer(len(e.get("branches", [])))
        for b in e.get("branches", []):
            d.integer(b["step_index"])
            d.optional(b["mean"])
            d.optional(b["std"])
            d.integer(len(b["children"]))
            for c in b["children"]:
                d.integer(c["sample_index"])
                d.integer(c["leaves"])
                d.optional(c["reward"])
                d.optional(c["advantage"])
    return d.hex()


def payload_digest(data, name):
    """Over an event's bytes, each byte string's own digest in the place of its content."""
    bins, hashed = [], HASHES[name]
    read(data, 0, bins)
    folded, at = b"", 0
    for start, end in bins:
        folded, at = folded + data[at:start] + hashed(data[start:end]), end
    return name + hashed(folded + data[at:]).hex()


def step_faults(data, event, stem, compute, digests):
    """What differs of the digests of a step, or of tokens, by each algorithm. With a tensor elsewhere that has its digest
    by one of them, the content digest is by that one alone."""
    elsewhere = {t[:3] if t[:3] in HASHES else "" for t in travelling(event)}
    for name in HASHES:
        if payload_digest(data, name) != digests[f"{name}{stem} payload"]:
            yield f"{stem}: payload digest {name} differs"
        if elsewhere <= {name} and compute(event, name) != digests[name + stem]:
            yield f"{stem}: content digest {name} differs"


def travelling(value):
    """The digests of the tensors in a value that are not inside it."""
    if isinstance(value, dict):
        for key, v in value.items():
            yield from [v["digest"]] if key in ("ref", "parts") else travelling(v)
    elif isinstance(value, list):
        for v in value:
            yield from travelling(v)


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
            if kind == "advantage" and advantage_digest(event) != digests[name]:
                faults.append(f"{name}: content digest differs")
            if compute := {"step": step_digest, "tokens": tokens_digest}.get(kind):
                faults += step_faults(file.read_bytes(), event, name, compute, digests)
        except (ValueError, KeyError, IndexError, UnicodeDecodeError, struct.error) as e:
            faults.append(f"{name}: {type(e).__name__}: {e}")
    if len(files) < 20:
        faults.append(f"only {len(files)} goldens in {HERE / 'golden'}")
    vector = {
        "sigmas": [1, 0.5, 0], "transitions": ["sde", "ode"], "noise_level": 0.7, "solver": "euler", "log_prob_kind": "density",
        "latents_dtype": "BF16", "true_cfg_scale": 4, "height": 64, "width": 128,
    }
    print("schedule vector:", schedule_digest(vector))
    print("\n".join(faults) if faults else f"{len(files)} goldens agree")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
