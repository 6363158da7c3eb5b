"""Adapters from Python, against a pipeline that serves the model signs."""

import asyncio
import json
import re
import resource
import struct
import tracemalloc

import numpy as np
import pytest

import meander
from conftest import SIGNS, Up, announced, first
from meander import policy, versions
from meander.data import weightsdir

MODULE = "transformer_blocks.0.attn.to_q"


def lora(module=MODULE, d=64, rank=2, fill=0.05, wide=0, again=()):
    """The file of a LoRA on one projection of d x d (or d x d + wide), constant; again are other names of its
    lora_A."""
    a, b = np.full((rank, d + wide), fill, np.float32), np.full((d, rank), fill, np.float32)
    header, data = {}, b""
    for name, x in (
        (f"base_model.model.{module}.lora_A.weight", a), (f"base_model.model.{module}.lora_B.weight", b),
        *((name, a) for name in again)
    ):
        header[name] = {"dtype": "F32", "shape": list(x.shape), "data_offsets": [len(data), len(data) + x.nbytes]}
        data += x.tobytes()
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def put(folder, data, rank=2):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_model.safetensors").write_bytes(data)
    (folder / "adapter_config.json").write_text(
        json.dumps({"r": rank, "lora_alpha": rank, "peft_type": "LORA", "target_modules": ["to_q"]})
    )
    return folder


async def width(client):
    """The side of MODULE's weight."""
    table = json.loads(await client.blob((await policy.policy(client))["modules"]))
    n, k = table[MODULE]
    assert n == k
    return n


def test_push_and_rollback(run, signs, tmp_path):
    async def test(client, name):
        base = await policy.push_policy(client, None)
        digests = []
        for fill in (0.05, 0.1):
            adapter = put(tmp_path / str(fill), lora(d=await width(client), fill=fill))
            pushed = await policy.push_policy(client, adapter, by="lin", note=name, base=base["base_digest"])
            assert (pushed["by"], pushed["note"], pushed["rule"]) == ("lin", name, "finish")
            (sampler,) = await policy.taken(client, pushed)
            assert sampler["answer"]["state"] == "applied"
            assert sampler["answer"]["weights_digest"] == pushed["weights_digest"]
            assert sampler["answer"]["canary"]["norm"] > 0
            digests.append(pushed["weights_digest"])
            assert (
                await policy.push_policy(client, adapter)
            )["policy_version"] == pushed["policy_version"], "the lane has these weights"
        assert len({base["base_digest"], *digests}) == 3
        back = await policy.rollback_policy(client, pushed["policy_version"] - 1, by="lin")
        assert (back["weights_digest"], back["rollback"], back["policy_version"]) == (
            digests[0], pushed["policy_version"] - 1, pushed["policy_version"] + 1
        )
        await policy.taken(client, back)
        await client.publish(
            name, 'a red sign that says "7"', uid="fox", group_size=2, num_inference_steps=2,
            reward=[{"name": "glyph"}], min_policy_version=back["policy_version"]
        )
        await first(client.advantages(name))
        group = await client.group(name, "fox")
        assert {
            s.trajectory["weights_digest"] for s in group.samples
        } == {digests[0]}, "samples are made with it, and the digests agree"
        again = await policy.push_policy(client, None, rule="switch")
        assert "adapter" not in again and "rollback" not in again and again["weights_digest"] == base["base_digest"]
        history = [p["policy_version"] for p in await policy.policy_history(client)]
        assert history == sorted(history) and history[-4:] == [
            pushed["policy_version"] - 1, *(pushed["policy_version"] + k for k in (0, 1, 2))
        ]
        with pytest.raises(policy.PolicyRefused, match="version: 4711; the history"):
            await policy.rollback_policy(client, 4711)
        # Too small to change a weight in float32: only the sampler can see that.
        nothing = await policy.push_policy(client, put(tmp_path / "nothing", lora(d=await width(client), fill=1e-30)))
        (sampler,) = await policy.taken(client, nothing, refused="give")
        assert sampler["answer"]["state"] == "refused"
        with pytest.raises(policy.PolicyRefused, match="canary: .* the adapter changes nothing"):
            await policy.taken(client, nothing)
        assert (
            await policy.policy(client)
        )["policy_version"] == again["policy_version"], "what was refused is not served"
        assert (await policy.policy_history(client))[-1]["policy_version"] == nothing["policy_version"]
        with pytest.raises(policy.PolicyRefused,
            match=f"version: {nothing['policy_version']}; was refused by the samplers .canary"):
            await policy.rollback_policy(client, nothing["policy_version"])
        again = await policy.push_policy(client, tmp_path / "nothing")
        assert again["policy_version"] == nothing["policy_version"] + 1, "a refused version is not what the lane has"
        await policy.taken(client, await policy.push_policy(client, None))

    run(test, signs)


def test_a_fresh_adapter_is_the_checkpoint(run, signs, tmp_path):
    """The first push of a trainer, whose lora_B is 0, changes nothing and is no fault; later it is one."""

    async def test(client, name):
        await policy.taken(client, await policy.push_policy(client, None))
        base, d = await policy.policy(client), await width(client)
        zero, a = np.zeros((d, 2), np.float32), np.full((2, d), 0.05, np.float32)
        fresh = {f"base_model.model.{MODULE}.lora_{x}.weight": m for x, m in zip("AB", (a, zero), strict=True)}
        for tensors in (fresh, {k: m * 2 for k, m in fresh.items()}):
            pushed = await policy.push_policy(client, tensors)
            assert pushed["weights_digest"] == base["base_digest"]
            assert pushed["policy_version"] == base["policy_version"]
            (sampler,) = await policy.taken(client, pushed)
            assert sampler["answer"] is None or sampler["answer"]["state"] == "applied"
        await client.publish(
            name, "a fox", group_size=2, num_inference_steps=4, min_policy_version=pushed["policy_version"],
            reward=[{"name": "synthetic"}], rollout={"sde_step_indices": [1]},
        )
        batch = await first(client.batches(name, groups=1, timeout=50))
        assert set(batch["weights_digest"]) == {base["base_digest"]}
        trained = await policy.push_policy(client, {k: m + 0.01 for k, m in fresh.items()})
        await policy.taken(client, trained)
        with pytest.raises(policy.PolicyRefused, match="adapter: changes nothing: .*push None"):
            await policy.push_policy(client, fresh)
        assert (await policy.policy(client))["policy_version"] == trained["policy_version"]
        await policy.taken(client, await policy.push_policy(client, None))
        wrong = {k.replace("to_q", "to_x"): m for k, m in fresh.items()}
        with pytest.raises(policy.PolicyRefused, match="the transformer has none"):
            await policy.push_policy(client, wrong)

    run(test, signs)


def test_pushes_from_memory(run, signs, tmp_path):
    """Tensors instead of files: of numpy, and of torch in bfloat16."""

    async def test(client, _):
        d = await width(client)
        names = [f"base_model.model.{MODULE}.lora_{x}.weight" for x in "AB"]
        config = {"r": 2, "lora_alpha": 2, "peft_type": "LORA", "target_modules": {"to_q"}}
        arrays = dict(zip(names, (np.full((2, d), 0.05, np.float32), np.full((d, 2), 0.05, np.float32)), strict=True))
        pushes = [arrays]
        try:
            import torch

            pushes.append({name: torch.tensor(x).bfloat16() for name, x in arrays.items()})
        except ImportError:
            pass
        for tensors in pushes:
            pushed = await policy.push_policy(client, tensors, config=config)
            (sampler,) = await policy.taken(client, pushed)
            assert sampler["answer"]["state"] == "applied", sampler["answer"]
            assert sampler["answer"]["weights_digest"] == pushed["weights_digest"]
        with pytest.raises(policy.PolicyRefused, match=f"tensors: {names[0]}: int64; must be"):
            await policy.push_policy(client, {names[0]: np.ones((2, d), np.int64)})
        with pytest.raises(policy.PolicyRefused, match="config: is for tensors"):
            await policy.push_policy(client, put(tmp_path / "a", lora(d=d)), config=config)
        with pytest.raises(policy.PolicyRefused, match="tensors are missing"):
            await policy.push_weights(client, {})
        await policy.taken(client, await policy.push_policy(client, None))

    run(test, signs)


def test_wrong_adapters_are_refused_by_name(run, signs, tmp_path):
    async def test(client, _):
        d = await width(client)
        wrong = {
            f"module {MODULE}: rank {d + 1}; the adapter configuration has 2": lora(d=d, rank=d + 1),
            f"module {MODULE}: changes a weight of {d} x {d + 1}, here {d} x {d}": lora(d=d, wide=1),
            "module blocks.0.q: the transformer has none": lora("blocks.0.q", d),
            f"module {MODULE}: not finite": lora(d=d, fill=np.nan),
            "truncated": lora(d=d)[:-100],
            "a header of .* truncated": lora(d=d)[:100],
            "no tensor of a LoRA": lora(d=d).replace(b".lora_A.weight", b".lora_Z.weight"),
            "lora_A or lora_B is missing": lora(d=d).replace(
                b"0.attn.to_q.lora_A.weight", b"1.attn.to_q.lora_A.weight"
            ),
            f"module {MODULE}: transformer.* is given under another name": lora(
                d=d, again=[f"transformer.{MODULE}.lora_A.weight"]
            ),
            "F99; must be": lora(d=d).replace(b'"F32"', b'"F99"'),
            "shape: .*must be a list": lora(d=d).replace(b"[2, %d]" % d, b'"2, %d"' % d),
            f"must be the {4 * 3 * d} of F32": lora(d=d).replace(b"[2, %d]" % d, b"[3, %d]" % d),
            "adapter: no safetensors file": b"not a file of tensors",
        }
        before = await policy.policy(client)
        for fault, data in wrong.items():
            with pytest.raises(policy.PolicyRefused, match=fault):
                await policy.push_policy(client, put(tmp_path / "a", data))
        good = put(tmp_path / "a", lora(d=d))
        for fault, fields in {
            "rule: 'later'; must be one of": {"rule": "later"}, "scale: nan": {"scale": float("nan")},
            "base: f00; must be of the checkpoint": {"base": "f00"},
            "version: 0; must be above": {"version": 0},
        }.items():
            with pytest.raises(policy.PolicyRefused, match=fault):
                await policy.push_policy(client, good, **fields)
        with pytest.raises(policy.PolicyRefused, match="No such file"):
            await policy.push_policy(client, tmp_path / "nowhere")
        with pytest.raises(policy.NoPolicy, match="lane: 'other'"):
            await policy.push_policy(client, good, "other")
        assert await policy.policy(client) == before, "nothing is stored of them"

    run(test, signs)


def shard(path, tensors):
    """Writes tensors {name: (info, bytes)} as a safetensors file."""
    header, data = {}, b""
    for name, (info, x) in tensors.items():
        header[name] = info | {"data_offsets": [len(data), len(data) + len(x)]}
        data += x
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def test_weights_of_a_whole_transformer(run, signs, tmp_path):
    """In shards, half of one matrix of the checkpoint; what no sampler could use is refused before it is stored."""
    file = (SIGNS / "transformer/diffusion_pytorch_model.safetensors").read_bytes()
    header, data = policy._header("weights", file)
    header.pop("__metadata__", None)
    tensors = {name: (info, data[slice(*info["data_offsets"])]) for name, info in header.items()}
    name, (info, x) = next(
        (n, t) for n, t in tensors.items() if n.endswith("attn.to_q.weight") and t[0]["dtype"] == "BF16"
    )
    changed = tensors | {name: (info, x[: len(x) // 2] + bytes(len(x) - len(x) // 2))}
    names = sorted(changed)

    async def test(client, _):
        halves = [shard(tmp_path / f"{i}.safetensors", {n: changed[n] for n in names[i::2]}) for i in range(2)]
        (tmp_path / "empty").mkdir()
        cut = tmp_path / "cut"
        cut.write_bytes(halves[1].read_bytes()[:-10])
        before = await policy.policy(client)
        for fault, files in {
            "tensors are missing": halves[:1], "is in two files": [halves[0], halves[0]],
            "the transformer has none": [*halves, shard(tmp_path / "more", {"more": changed[names[0]]})],
            "must be \\[": shard(
                tmp_path / "flat",
                {n: ((t[0] | {"shape": [len(t[1]) // 2]}) if n == name else t[0], t[1]) for n, t in changed.items()}
            ),
            "not finite": shard(tmp_path / "nan", changed | {name: (info, b"\xc0\x7f" * (len(x) // 2))}),
            "no safetensors file": tmp_path / "empty", "truncated": [halves[0], cut],
        }.items():
            with pytest.raises(policy.PolicyRefused, match=fault):
                await policy.push_weights(client, files)
        assert await policy.policy(client) == before
        pushed = await policy.push_weights(client, halves, by="lin")
        (sampler,) = await policy.taken(client, pushed)
        assert sampler["answer"]["state"] == "applied"
        assert sampler["answer"]["weights_digest"] == pushed["weights_digest"]
        (tmp_path / "model/transformer").mkdir(parents=True)
        for i, half in enumerate(halves):
            (tmp_path / f"model/transformer/d-{i}.fp16.safetensors").write_bytes(half.read_bytes())
        with pytest.raises(policy.PolicyRefused, match="several files and no index: d-0.fp16.safetensors, d-1"):
            await policy.push_weights(client, tmp_path / "model")
        index = tmp_path / "model/transformer/diffusion_pytorch_model.safetensors.fp16.index.json"
        index.write_text(json.dumps({"weight_map": {
            n: f"d-{i}.fp16.safetensors" for i in (0, 1) for n in names[i::2]}}))
        assert (
            await policy.push_weights(client, tmp_path / "model")
        )["policy_version"] == pushed["policy_version"], "the lane has these weights"
        await policy.taken(client, await policy.push_policy(client, None))

    run(test, signs)


def test_weights_by_path(binary, tmp_path):
    """Files in the folder that the samplers share stay where they are, others are copied to it; nothing of them is in
    the server."""
    shared, elsewhere = tmp_path / "shared", tmp_path / "elsewhere"
    (shared / "mine").mkdir(parents=True)
    elsewhere.mkdir()
    (tmp_path / "up").mkdir()
    header, data = policy._header("weights", (SIGNS / "transformer/diffusion_pytorch_model.safetensors").read_bytes())
    header.pop("__metadata__", None)
    tensors = {name: (info, data[slice(*info["data_offsets"])]) for name, info in header.items()}
    name, (info, x) = next(
        (n, t) for n, t in tensors.items() if n.endswith("attn.to_q.weight") and t[0]["dtype"] == "BF16"
    )
    mine = shard(
        shared / "mine/model.safetensors", tensors | {name: (info, x[: len(x) // 2] + bytes(len(x) - len(x) // 2))}
    )
    other = shard(elsewhere / "model.safetensors", tensors | {name: (info, bytes(len(x)))})
    up = Up(tmp_path / "up", None, "--weights-dir", str(shared), model=SIGNS).start()

    async def test():
        await announced(up.url)
        async with meander.connect(up.url) as client:
            for file, where in (mine, r"mine/model\.safetensors"), (other, r"meander-[0-9]+/[0-9a-f]{64}\.safetensors"):
                pushed = await policy.push_weights(client, file, weights_dir=shared)
                (of,) = pushed["weights"]
                assert re.fullmatch(where, of["path"]) and "bucket" not in of
                assert (shared / of["path"]).read_bytes() == file.read_bytes()
                (sampler,) = await policy.taken(client, pushed)
                assert sampler["answer"]["state"] == "applied", sampler["answer"]
                with pytest.raises(meander.Gone):
                    await client.blob({"bucket": "mdr-blobs"} | of)
            back = await policy.rollback_policy(client, 1)
            await policy.taken(client, back)
            assert back["weights"][0]["path"] == "mine/model.safetensors"
            with pytest.raises(policy.PolicyRefused, match="weights_dir: "):
                await policy.push_weights(client, other, weights_dir=shared / "none")

    try:
        asyncio.run(test())
    finally:
        up.stop()


def state_of_signs():
    """The transformer of signs in float32, by name."""
    header, data = policy._header("weights", (SIGNS / "transformer/diffusion_pytorch_model.safetensors").read_bytes())
    header.pop("__metadata__", None)
    return {
        name: policy._floats("weights", name, info, data).reshape(info["shape"]).astype(np.float32)
        for name, info in header.items()
    }


def test_weights_from_memory(binary, tmp_path, monkeypatch):
    """A state dict, functions that give its tensors, and pairs make the same files, by path and through the server; of
    what cannot be used, or breaks off, nothing stays, and the version before is in use."""
    monkeypatch.setattr(policy, "_FILE_BYTES", 100 << 10)
    shared, state = tmp_path / "shared", state_of_signs()
    shared.mkdir()
    name = next(n for n in state if n.endswith("attn.to_q.weight"))
    state[name] = state[name] / 2
    up = Up(tmp_path, None, "--weights-dir", str(shared), model=SIGNS).start()

    def cut(at=5, error=KeyError("of a trainer")):
        yield from list(state.items())[:at]
        raise error

    def without(*names):
        return ((n, x) for n, x in state.items() if n not in names)

    async def test():
        await announced(up.url)
        async with meander.connect(up.url) as client:
            pushed = await policy.push_weights(client, state, weights_dir=shared)
            (sampler,) = await policy.taken(client, pushed)
            assert sampler["answer"]["state"] == "applied", sampler["answer"]
            assert len(pushed["weights"]) > 5
            stored = {p.name: p.read_bytes() for p in (shared / pushed["weights"][0]["path"]).parent.iterdir()}
            assert {f"{f['digest']}.safetensors" for f in pushed["weights"]} == stored.keys()
            for same in (state.items(), iter(state.items()), {n: lambda x=x: x for n, x in state.items()}):
                for by in {"weights_dir": shared}, {}:
                    assert (await policy.push_weights(client, same, **by))["weights_digest"] == pushed["weights_digest"]
                    if same is not state.items() and hasattr(same, "__next__"):
                        break  # pairs come once
            gone = shared / pushed["weights"][0]["path"]
            for fault, files in {
                f"tensors: {name}: int64; must be": state | {name: np.ones(3, np.int64)},
                f"weights: {name}: not finite": state | {name: np.full_like(state[name], np.nan)},
                f"weights: {name}: .*; must be": state | {name: state[name][1:]},
                "weights: 1 tensors are missing": without(name),
                "weights: more: the network has none": state | {"more": state[name]},
                f"weights: {name}: is given twice": [*without(name), (name, state[name])][-1:] * 2,
            }.items():
                files = iter(files) if isinstance(files, list) else files
                for by in {"weights_dir": shared}, {}:
                    with pytest.raises(policy.PolicyRefused, match=fault):
                        await policy.push_weights(client, files, **by)
                    if hasattr(files, "__next__"):
                        break
            with pytest.raises(KeyError, match="of a trainer"):
                await policy.push_weights(client, cut(), weights_dir=shared)
            soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, hard))  # as a disk that is full
            try:
                with pytest.raises(policy.PolicyRefused, match="weights_dir: .*; free space in it"):
                    await policy.push_weights(client, state | {name: state[name] / 2}, weights_dir=shared)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert {p.name: p.read_bytes() for p in gone.parent.iterdir()} == stored, "nothing else is in the folder"
            assert (await policy.policy(client))["policy_version"] == pushed["policy_version"]
            # What samplers find must be what was pushed.
            other = await policy.push_weights(client, state | {name: state[name] / 4}, weights_dir=shared)
            await policy.taken(client, other)
            gone.write_bytes(bytes(len(stored[gone.name])))
            await policy.taken(client, await policy.push_policy(client, None))
            with pytest.raises(policy.PolicyRefused, match=f"{gone.name}: has another SHA-256"):
                await policy.taken(client, await policy.rollback_policy(client, pushed["policy_version"]))

    try:
        asyncio.run(test())
    finally:
        up.stop()


def test_tensors_in_memory_are_not_copied(tmp_path):
    """What is held besides the tensors does not grow with them."""
    state = {f"{i}": np.zeros((1 << 23,), np.float32) for i in range(4)}  # 128 MiB
    tracemalloc.start()
    try:
        weightsdir.place(tmp_path, "1", policy._from_tensors(state, {n: list(x.shape) for n, x in state.items()}))
        assert tracemalloc.get_traced_memory()[1] < 24 << 20
    finally:
        tracemalloc.stop()


def test_other_bytes_under_a_digest_are_refused(run, signs, tmp_path):
    """What the store gives for an adapter must be what the policy names."""

    async def test(client, _):
        data = lora(d=await width(client), fill=0.07)
        pushed = await policy.push_policy(client, put(tmp_path / "a", data))
        await policy.taken(client, pushed)
        forged = pushed | {"adapter": pushed["adapter"] | {"file": pushed["adapter"]["file"] | {"size": len(data) - 1}}}
        with pytest.raises(meander.EventError, match="not those of digest"):
            await client.blob(forged["adapter"]["file"])
        forged |= {
            "policy_version": pushed["policy_version"] + 1, "parent": pushed["policy_version"],
            "weights_digest": "0" * 64
        }
        assert await versions.store(client, forged, pushed)
        (sampler,) = await policy.taken(client, forged, refused="give")
        assert sampler["answer"]["state"] == "refused" and sampler["answer"]["serving"] == pushed["policy_version"]
        await policy.taken(client, await policy.push_policy(client, None))

    run(test, signs)


def test_two_who_push_at_once(run, signs, tmp_path):
    async def test(client, _):
        before, d = await policy.policy(client), await width(client)
        folders = [put(tmp_path / str(i), lora(d=d, fill=0.01 * (i + 1))) for i in range(4)]
        pushed = await asyncio.gather(*(policy.push_policy(client, f) for f in folders))
        assert sorted(p["policy_version"] for p in pushed) == [before["policy_version"] + 1 + i for i in range(4)]
        await policy.taken(client, max(pushed, key=lambda p: p["policy_version"]))

    run(test, signs)
