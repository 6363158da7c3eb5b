"""Versions of the weights: adapters against peft's own, replacements, and the base's bits after them."""

import numpy as np
import pytest
from talk import Refused, frames_of, latents

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

from meander.torch import families  # noqa: E402
from meander.torch.engine import Engine, Settings, make_engine  # noqa: E402
from meander.torch.folder import Folder  # noqa: E402
from meander.torch.server import Worker  # noqa: E402

H, W = 64, 96
ONE, TWO, THREE = "1" * 64, "2" * 64, "3" * 64
TARGETS = {
    "qwen-image": ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.img_mlp.net.2"],
    "krea2": [
        "transformer_blocks.0.attn.to_q", "transformer_blocks.1.ff.down", "text_fusion.refiner_blocks.0.attn.to_v",
    ],  # fmt: skip
    # Whole pipelines.
    "sd3": ["transformer_blocks.0.attn.to_q", "transformer_blocks.2.ff.net.2", "transformer_blocks.1.attn.add_k_proj"],
    "flux2": ["transformer_blocks.0.attn.to_v", "single_transformer_blocks.1.attn.to_qkv_mlp_proj", "x_embedder"],
    "wan-two": ["blocks.0.attn1.to_q", "transformer_2.blocks.1.attn2.to_k", "transformer_2.blocks.0.ffn.net.2"],
}


def relative(a, b):
    return np.linalg.norm(np.float64(a) - b) / np.linalg.norm(np.float64(b))


class Bench:
    """A worker of its own, whose velocities are of one state."""

    def __init__(self, name, folder, dial, worker=None):
        family = families.find(Folder(folder))
        self.worker = worker or Worker(family, Settings("cpu", "f32"))
        if worker is None:
            self.worker.load(lambda say: make_engine(family, Settings("cpu", "f32", threads=1), say))
        assert self.worker.error is None, self.worker.error
        self.client = dial("", worker=self.worker)
        self.card = self.client.ready()["card"]
        self.client.frames = frames_of(self.card)
        self.x = latents(self.card, 2, H, W)
        self.handles = [self.encode(text) for text in ("a red cat", "a blue sign")]
        self.linear = self.client("modules")[0]["linear"]
        self.targets = TARGETS.get(name)

    def encode(self, text):
        if "pipeline" not in self.card:
            return self.client.encode(text)[0][0]
        size = {"frames": self.client.frames, "height": H, "width": W}
        recipe = {"prompts": [[text]], "truncate": False, "steps": 4, **size}
        return self.client("encode", recipe)[0]["items"][0]["handle"]

    @property
    def weights(self):
        return self.worker.engine.weights

    def velocity(self, version=""):
        return self.client.velocity(self.x, [0.7, 0.3], self.handles, H, W, [self.card["guidance"]] * 2, version)

    def adapter(self, seed, rank=4, targets=None, scale=0.5):
        """The modules and tensors of a random adapter."""
        draw, modules, tensors = np.random.default_rng(seed), [], {}
        for name in targets or self.targets:
            rows, columns = self.linear[name]
            modules.append({"name": name, "scale": scale, "rank": rank})
            tensors[name + ".A"] = draw.standard_normal((rank, columns)).astype(np.float32) / columns**0.5
            tensors[name + ".B"] = draw.standard_normal((rows, rank)).astype(np.float32)
        return modules, tensors

    def load(self, version, modules, tensors):
        return self.client("load", {"weights": version, "kind": "adapter", "modules": modules, "files": []}, tensors)[0]

    def load_whole(self, version, state):
        args = {"weights": version, "kind": "whole", "modules": [], "files": []}
        return self.client("load", args, state)[0]

    def misses(self, version):
        """Whether a velocity says that a version is not there, so that its host loads it again."""
        try:
            self.velocity(version)
        except Refused as e:
            assert e.kind == "weights" and "load it first" in e.message
            return True
        return False

    def refuses(self, version, modules, tensors):
        with pytest.raises(Refused) as e:
            self.load(version, modules, tensors)
        assert e.value.kind == "weights"
        return e.value.message


@pytest.fixture
def bench(folders, dial):
    return lambda name: Bench(name, folders[name], dial)


@pytest.mark.parametrize("name", tuple(TARGETS))
def test_an_adapter_is_pefts(name, bench):
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict

    b = bench(name)
    modules, tensors = b.adapter(0)
    base = b.velocity()
    b.load(ONE, modules, tensors)
    ours = b.velocity(ONE)
    # The same by peft: alpha/rank = 2/4 is the scale of 0.5.
    other = bench(name)
    names = {"A": "lora_A.weight", "B": "lora_B.weight"}
    state = {f"{k[:-2]}.{names[k[-1]]}": torch.from_numpy(v) for k, v in tensors.items()}
    second = "transformer_2."
    for start, network in other.worker.engine.family.networks.items():
        own = [t for t in b.targets if t.startswith(second) == bool(start)]
        config = LoraConfig(r=4, lora_alpha=2, target_modules=[t.removeprefix(second) for t in own])
        inject_adapter_in_model(config, network, adapter_name="x")
        of = {k.removeprefix(second): v for k, v in state.items() if k.startswith(tuple(own))}
        assert not set_peft_model_state_dict(network, of, adapter_name="x").unexpected_keys
    theirs = other.velocity()
    assert relative(theirs, base) > 1e-2, "the adapter does nothing"
    print(f"{name}: adapter moves {relative(theirs, base):.2g}, ours from peft's {relative(ours, theirs):.2g}")
    assert relative(ours, theirs) < 5e-6
    assert np.array_equal(b.velocity(), base), "the base must have its bits again"
    assert b.client("modules")[0]["linear"] == b.linear, "names of layers must not change"


def test_a_compiled_network_computes_every_version(folders, dial, monkeypatch):
    """A compiled network keeps what it saw: adapters that come later, their order and their memory must reach it."""
    plain = Bench("qwen-image", folders["qwen-image"], dial)
    family = families.find(Folder(folders["qwen-image"]))
    monkeypatch.setattr(type(family), "default_size", lambda self: (H, W))
    worker = Worker(family, Settings("cpu", "f32", compile=True))
    worker.load(lambda say: Engine(family, Settings("cpu", "f32", threads=1, compile=True), say))
    compiled = Bench("qwen-image", folders["qwen-image"], dial, worker)
    assert "/compiled/nondeterministic" in compiled.client.ready()["backend"]
    base = plain.velocity()

    def agree(version=""):
        theirs = plain.velocity(version)
        assert relative(compiled.velocity(version), theirs) < 5e-6
        assert not version or relative(theirs, base) > 1e-2

    def load(version, seed, **settings):
        for b in (plain, compiled):
            b.load(version, *b.adapter(seed, **settings))
        agree(version)

    agree()
    load(ONE, 1)
    load(TWO, 2, scale=0.25)
    agree()
    agree(ONE)
    for b in (plain, compiled):
        b.client("unload", {"weights": ONE})
    load(THREE, 3)  # in the memory of the first
    load(ONE, 4, targets=["transformer_blocks.1.img_mlp.net.2"], scale=2.0)  # a layer that had none
    agree(TWO)
    agree()
    for i in range(4, 9):  # more than are kept: the first of all take the place of others
        load(str(i) * 64, i, scale=0.1 * i)
    agree("7" * 64)
    load(ONE, 1)
    agree()
    state = changed(plain, 1.1)
    for b in (plain, compiled):
        b.load_whole("e" * 64, state)
    agree("e" * 64)
    agree(ONE)
    agree()


def test_two_versions_beside_the_base(bench):
    b = bench("krea2")
    base, first = b.velocity(), b.adapter(1)
    b.load(ONE, *first)
    one = b.velocity(ONE)
    second = b.adapter(2, rank=3)
    b.load(TWO, *second)
    two = b.velocity(TWO)
    assert relative(one, two) > 1e-2
    for version, v in ((ONE, one), ("", base), (TWO, two), (ONE, one)):
        assert np.array_equal(b.velocity(version), v)
    b.load(ONE, *second)  # resident: the version that it names stays
    assert np.array_equal(b.velocity(ONE), one)


def test_products_of_one_layer_are_added(bench):
    b = bench("qwen-image")
    modules, tensors = b.adapter(1)
    more, others = b.adapter(2, rank=3, scale=-2.0)
    both = {**tensors, **{k + ".1": v for k, v in others.items()}}
    b.load(ONE, modules + more, both)
    # One product of the joined factors is the same sum.
    joined, factors = [], {}
    for m in modules:
        n = m["name"]
        a = np.concatenate([0.5 * tensors[n + ".A"], -2.0 * others[n + ".A"]])
        joined.append({"name": n, "scale": 1.0, "rank": 7})
        factors |= {
            n + ".A": a.astype(np.float32),
            n + ".B": np.concatenate([tensors[n + ".B"], others[n + ".B"]], axis=1),
        }
    b.load(TWO, joined, factors)
    assert relative(b.velocity(ONE), b.velocity(TWO)) < 5e-6


def test_an_unloaded_adapter_gives_its_place_to_the_next(bench):
    b = bench("qwen-image")

    def places():
        return [t.data_ptr() for a in b.weights._adapters.values() for ps in a.values() for p in ps for t in (p.a, p.b)]

    b.load(ONE, *b.adapter(1))
    b.velocity(ONE)
    before = places()
    b.client("unload", {"weights": ONE})
    with pytest.raises(Refused, match="not loaded"):
        b.velocity(ONE)
    b.load(TWO, *b.adapter(2, scale=0.25))
    assert places() == before, "equal shapes must be overwritten in place"
    two = b.velocity(TWO)
    b.client("unload", {"weights": TWO})
    b.load(THREE, *b.adapter(2, rank=5, scale=0.25))  # other shapes: anew
    b.velocity(THREE)
    fresh = bench("qwen-image")
    fresh.load(TWO, *fresh.adapter(2, scale=0.25))
    assert np.array_equal(fresh.velocity(TWO), two), "nothing of the adapter before may be left"
    b.client("unload", {"weights": "f" * 64})  # one that is not resident is no error


def test_adapters_that_do_not_fit(bench):
    b = bench("qwen-image")
    base = b.velocity()
    modules, tensors = b.adapter(1)
    name = modules[0]["name"]
    assert "at least one" in b.refuses(ONE, [], {})
    assert "linear layer" in b.refuses(ONE, [{**modules[0], "name": "no.such"}, *modules[1:]], tensors)
    assert "rank" in b.refuses(ONE, [{**modules[0], "rank": 0}, *modules[1:]], tensors)
    assert "must be f32 [5," in b.refuses(ONE, [{**modules[0], "rank": 5}, *modules[1:]], tensors)
    assert "scale" in b.refuses(ONE, [{**modules[0], "scale": float("inf")}, *modules[1:]], tensors)
    assert "must be a map" in b.refuses(ONE, ["x"], tensors)
    assert "none; must be f32" in b.refuses(ONE, modules, {k: v for k, v in tensors.items() if k != name + ".B"})
    assert "belong to no entry" in b.refuses(ONE, modules[1:], tensors)
    with pytest.raises(Refused, match="not loaded"):
        b.velocity(ONE)
    with pytest.raises(Refused, match="kind"):
        b.client("load", {"weights": "6" * 64, "kind": "some", "modules": modules, "files": []}, tensors)
    assert np.array_equal(b.velocity(), base)


def changed(b, factor):
    """The tensors of a whole network that differs from the base."""
    return {n: t.numpy() * np.float32(factor) for n, t in b.worker.engine.family.transformer.state_dict().items()}


@pytest.mark.parametrize(("kind", "most"), [("adapter", 4), ("whole", 2)])
def test_a_version_more_takes_the_place_of_the_one_used_longest_ago(kind, most, bench):
    """Hosts share a worker, and one that was killed never unloads: others must go on pushing."""
    b = bench("qwen-image")
    base, own, expected = b.velocity(), {}, {}
    versions = [str(i) * 64 for i in range(2 * most + 1)]
    for i, version in enumerate(versions):
        own[version] = b.adapter(i, scale=0.1 * (i + 1)) if kind == "adapter" else changed(b, 1 + 0.1 * (i + 1))

    def load(version):
        if kind == "adapter":
            b.load(version, *own[version])
        else:
            b.load_whole(version, own[version])

    for version in versions:
        load(version)
        expected[version] = b.velocity(version)
        assert relative(expected[version], base) > 1e-3
    assert len({v.tobytes() for v in expected.values()}) == len(versions)
    assert np.array_equal(b.velocity(), base)
    gone, kept = versions[:-most], versions[-most:]
    assert all(b.misses(v) for v in gone)
    for version in kept:
        assert np.array_equal(b.velocity(version), expected[version])
    # The host of one that is gone loads it again, and gets its bits.
    load(gone[0])  # in place of kept[0]
    assert np.array_equal(b.velocity(gone[0]), expected[gone[0]])
    assert b.misses(kept[0])
    # A velocity counts as use, and so does a load of what is resident.
    last = kept[1:]
    for version in [*last[1:], gone[0]]:
        b.velocity(version)
    if last:
        load(last[0])
    order = [*last[1:], gone[0], *last[:1]]
    load(kept[0])
    assert b.misses(order[0])
    for version in [*order[1:], kept[0]]:
        assert np.array_equal(b.velocity(version), expected[version])
    # The one that the network computes may be the one to go.
    b.velocity(order[1])
    for version in gone[1:][:most]:
        load(version)
    assert b.misses(order[1])
    assert np.array_equal(b.velocity(), base)
    for _ in range(2):
        b.client("unload", {"weights": order[1]})  # that of a host that does not know
    assert np.array_equal(b.velocity(gone[1]), expected[gone[1]])
    assert np.array_equal(b.velocity(), base)


def test_a_version_that_does_not_fit_leaves_the_others(bench):
    b = bench("qwen-image")
    kept = [str(i) * 64 for i in range(4)]
    for i, version in enumerate(kept):
        b.load(version, *b.adapter(i))
    modules, tensors = b.adapter(9)
    b.refuses("5" * 64, modules[1:], tensors)
    assert not any(b.misses(v) for v in kept)
    for i in range(2):
        b.load_whole(str(i + 6) * 64, changed(b, 1.1 + 0.1 * i))
    state = changed(b, 1.5)
    state.pop(next(n for n, _ in b.worker.engine.family.transformer.named_parameters()))
    with pytest.raises(Refused, match="missing"):
        b.load_whole("8" * 64, state)
    assert not any(b.misses(v) for v in (*kept, "6" * 64, "7" * 64))


def parameters(b):
    return [p for network in b.worker.engine.family.networks.values() for p in network.parameters()]


@pytest.mark.parametrize(
    ("name", "by"),
    [("krea2", "files"), ("krea2", "tensors"), ("wan-two", "files")],
)
def test_a_whole_network_replaces_the_base(name, by, bench, tmp_path):
    from safetensors.torch import save_file

    b = bench(name)
    base = b.velocity()
    other = bench(name)
    torch.manual_seed(9)
    with torch.no_grad():
        for p in parameters(other):
            p.mul_(1 + 0.1 * torch.randn_like(p))
    expected = other.velocity()
    networks = other.worker.engine.family.networks.items()
    state = {start + n: t.clone() for start, network in networks for n, t in network.state_dict().items()}
    args = {"weights": ONE, "kind": "whole", "modules": [], "files": []}
    if by == "files":
        names = sorted(state)
        for i in range(2):
            save_file({n: state[n] for n in names[i::2]}, tmp_path / f"{i}.safetensors")
        args["files"] = [str(tmp_path / f"{i}.safetensors") for i in range(2)]
        b.client("load", args)
        for i in range(2):
            (tmp_path / f"{i}.safetensors").unlink()  # nothing is read later
    else:
        b.client("load", args, {n: t.numpy() for n, t in state.items()})
    places = [p.data_ptr() for p in parameters(b)]
    assert relative(expected, base) > 1e-2
    assert np.array_equal(b.velocity(ONE), expected)
    assert np.array_equal(b.velocity(), base)
    b.load(TWO, *b.adapter(1))
    adapted = b.velocity(TWO)
    assert np.array_equal(b.velocity(ONE), expected)
    assert np.array_equal(b.velocity(TWO), adapted), "an adapter is one of the base"
    assert np.array_equal(b.velocity(ONE), expected)
    b.client("unload", {"weights": ONE})
    assert np.array_equal(b.velocity(), base)
    if by == "tensors":  # the same name for others: what was resident under it is gone
        b.client("load", args, {n: t.numpy() for n, t in state.items()})
        assert np.array_equal(b.velocity(ONE), expected)
        b.client("unload", {"weights": ONE})
        b.client("load", args, {n: t.numpy() * np.float32(1.1) for n, t in state.items()})
        assert relative(b.velocity(ONE), expected) > 1e-3
    assert places == [p.data_ptr() for p in parameters(b)]


def test_a_whole_network_that_memory_is_too_small_for_is_refused(bench, monkeypatch):
    from meander.torch import memory

    b = bench("qwen-image")
    network = b.worker.engine.family.transformer
    state = {n: t.numpy().copy() for n, t in network.state_dict().items()}
    changed = {n: t * np.float32(1.1) for n, t in state.items()}
    one = sum(t.nbytes for t in state.values())
    args = {"kind": "whole", "modules": [], "files": []}
    before = b.velocity()

    def free(n):
        monkeypatch.setattr(memory, "free_bytes", lambda: n)

    free(2 * one - 1)
    with pytest.raises(Refused) as e:
        b.client("load", {"weights": ONE, **args}, changed)
    assert e.value.kind == "weights"
    assert ONE[:12] in e.value.message and "are free" in e.value.message
    assert e.value.message.count(memory.size(one)) == 2
    assert np.array_equal(b.velocity(), before) and not b.weights.has(ONE)
    free(2 * one)
    b.client("load", {"weights": ONE, **args}, changed)
    assert relative(b.velocity(ONE), before) > 1e-3
    free(one)  # the base is kept already
    b.client("load", {"weights": TWO, **args}, state)
    b.client("unload", {"weights": TWO})
    free(None)  # a system that does not say
    b.client("load", {"weights": TWO, **args}, state)
    assert np.array_equal(b.velocity(TWO), before)
    # What others leave counts as free: first with both places taken, then with one.
    b.velocity(ONE)
    free(0)
    b.client("load", {"weights": THREE, **args}, changed)
    assert b.misses(TWO) and not b.misses(ONE) and not b.misses(THREE)
    b.client("unload", {"weights": ONE})
    b.client("load", {"weights": TWO, **args}, state)
    assert b.misses(THREE) and np.array_equal(b.velocity(TWO), before)
    b.client("unload", {"weights": TWO})
    with pytest.raises(Refused, match="are free"):
        b.client("load", {"weights": ONE, **args}, changed)
    assert np.array_equal(b.velocity(), before)


def write(root, texts):
    for name, text in texts.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


@pytest.mark.parametrize(
    ("texts", "free"),
    [
        ({}, None),
        ({"proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 5000 kB\n"}, 5000 * 1024),
        (
            {  # of version 2, where a group above has the limit
                "proc/meminfo": "MemAvailable: 5000 kB\n",
                "proc/self/cgroup": "0::/pods/one\n",
                "sys/fs/cgroup/pods/one/memory.max": "max\n",
                "sys/fs/cgroup/pods/one/memory.current": "10\n",
                "sys/fs/cgroup/pods/memory.max": "4000000\n",
                "sys/fs/cgroup/pods/memory.current": "3000000\n",
                "sys/fs/cgroup/pods/memory.stat": "anon 7\ninactive_file 200\nactive_file 30\nslab x\n",
            },
            1000230,
        ),
        (
            {  # of version 1, in a container that sees its own group as the root
                "proc/meminfo": "MemAvailable: 5000 kB\n",
                "proc/self/cgroup": "5:cpu:/docker/x\n4:memory:/docker/x\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "2500\n",
                "sys/fs/cgroup/memory/memory.stat": "inactive_file 99\ntotal_inactive_file 300\n",
            },
            0,
        ),
        ({"proc/meminfo": "MemAvailable: 5000 kB\n", "proc/self/cgroup": "nothing\n"}, 5000 * 1024),
    ],
)
def test_free_memory_is_the_least_of_machine_and_groups(texts, free, tmp_path):
    from meander.torch import memory

    write(tmp_path, texts)
    assert memory.free_bytes(tmp_path) == free


def test_this_machine_says_what_is_free():
    from pathlib import Path

    from meander.torch import memory

    if not Path("/proc/meminfo").exists():
        pytest.skip("no /proc")
    assert 1e6 < (memory.free_bytes() or 0) < 1e16


def test_whole_networks_that_do_not_fit(bench, tmp_path):
    from safetensors.torch import save_file

    b = bench("qwen-image")
    base = b.velocity()
    state = {n: t.clone() for n, t in b.worker.engine.family.transformer.state_dict().items()}
    name = next(n for n, _ in b.worker.engine.family.transformer.named_parameters())

    def refuses(tensors=None, files=None):
        if tensors is not None:
            save_file(tensors, tmp_path / "x.safetensors")
        with pytest.raises(Refused) as e:
            files = files or [str(tmp_path / "x.safetensors")]
            b.client("load", {"weights": ONE, "kind": "whole", "modules": [], "files": files})
        assert e.value.kind == "weights"
        return e.value.message

    assert "missing" in refuses({n: t for n, t in state.items() if n != name})
    assert "unknown" in refuses({**state, "more": torch.zeros(1)})
    assert "must be [" in refuses({**state, name: state[name][..., :1].contiguous()})
    (tmp_path / "x.safetensors").write_bytes(b"no safetensors")
    assert "must be safetensors" in refuses()
    assert "absolute paths" in refuses(files=["x.safetensors"])
    assert "absolute paths" in refuses(files=[str(tmp_path / "none")])
    save_file(state, tmp_path / "x.safetensors")
    assert "in two of them" in refuses(files=[str(tmp_path / "x.safetensors")] * 2)
    assert np.array_equal(b.velocity(), base)
