"""A sharded learner in two processes (FSDP2, gloo, CPU) against one that has the whole network, without a pipeline."""

import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

import test_train  # noqa: E402
from conftest import ENVIRONMENT, free_port  # noqa: E402
from test_train import cleaned, folder, rolled  # noqa: E402, F401
from meander.data.batch import Batch  # noqa: E402
from meander.torch import families  # noqa: E402
from meander.train import distributed, records  # noqa: E402
from meander.train.learner import Learner  # noqa: E402
from meander.train.losses import LOSSES, make  # noqa: E402
from meander.train.model import Network, _blocks, digest  # noqa: E402
from meander.train.rollouts import Rollouts  # noqa: E402

# By name: the loss, settings of the network and of the learner, and what else an update is of.
CASES = {
    **{name: (name, {}, {"beta": 0.01}, {}) for name in LOSSES},
    "guided, recomputed, cut": ("ppo", {"checkpointing": True}, {"max_grad_norm": 1e-3}, {"guided": True}),
    "bfloat16": ("ppo", {"dtype": torch.bfloat16}, {"beta": 0.01}, {}),
    "minibatches": ("grpo_guard", {}, {"minibatches": 3, "micro_batch": 64}, {}),
    "noised minibatches": ("diffusion_nft", {}, {"minibatches": 3, "micro_batch": 64}, {}),
    "older, accumulated": ("gspo", {}, {}, {"behind": 1, "parts": 2}),
    "a process without a group": ("dpo", {}, {"beta": 0.01}, {"groups": 1}),
}  # fmt: skip


def batches(where, guided=False, groups=3, **_):
    """Two batches, of groups of different lengths."""
    out = []
    for seed in (0, 1):
        whole = cleaned(rolled(test_train.network(where, seed=3), groups=groups, seed=seed))
        for sample in whole.batch.samples if guided else ():
            sample.trajectory |= {"true_cfg_scale": 2.0, "cfg_scales": [2.0, 1.0, 1.0]}
            sample.conditioning |= {f"negative_{name}": value for name, value in sample.conditioning.items()}
        out.append(whole.batch.groups)
    return out


def learner(where, loss, network, settings, shard):
    net = Network(where, rank=3, alpha=3, seed=3, shard=shard, **network)
    return Learner(net, make(loss), **({"lr": 3e-3, "ema": 0.5, "micro_batch": 4} | settings))


def mine(groups):
    """The share of this process; of one without a group that of another, which does not count."""
    own = groups[distributed.rank() :: distributed.world()]
    return Rollouts(Batch(own or groups, "b", "7@1"), counts=bool(own))


def updated(of, made, behind=0, parts=1, **_):
    """Takes an update, or two, with the batches, and returns what they say."""
    said = []
    for number, groups in enumerate(made):
        share = test_train.taught(mine(groups)) if of.loss.taught else mine(groups)
        report = of.update(share, behind, part=number % parts, parts=parts)
        said.append(
            {
                k: getattr(report, k)
                for k in ("ratio_off", "loss", "grad_norm", "kl", "weight", "used", "moved", "figures")
            }
        )
    return said


def length(tensors):
    return sum(float(v.double().square().sum()) for v in tensors) ** 0.5


def process(where, out):
    """What a process does: every case sharded and with the whole network, and what it holds of the sharded one."""
    torch.set_num_threads(1)
    distributed.begin("cpu")
    found = {}
    for name, (loss, network, settings, of) in CASES.items():
        made = batches(where, **of)
        for shard in (True, False):
            one = learner(where, loss, network, settings, shard)
            found[name, shard] = {"said": updated(one, made, **of), "average": dict(one.best()), "adapter": one.adapter}
            if shard:  # weights, gradients and optimizer state
                tensors = [*(p for _, p in one.network.named_parameters()), *(p.grad for p in one.network.parameters())]
                tensors += [v for s in one.optimizer.state.values() for v in s.values() if v.dim()]
                found[name, shard]["held"] = sum(t.to_local().numel() for t in tensors), sum(t.numel() for t in tensors)
    # What is gathered for a checkpoint goes on to the bit, and in one process, too.
    loss, network, settings, of = CASES["gspo"]
    made = batches(where, **of)
    whole = learner(where, loss, network, settings, True)
    updated(whole, made[:1])
    state = whole.state()
    if distributed.rank() == 0:
        records.save_checkpoint(pathlib.Path(out), whole.network, state, {})
    updated(whole, made[1:])
    state, _ = distributed.share(records.load_checkpoint(pathlib.Path(out)) if distributed.rank() == 0 else None)
    again = learner(where, loss, network, settings, True)
    again.load(state)
    updated(again, made[1:])
    found["resumed"] = [digest(x) for x in (whole.adapter, again.adapter, whole.best(), again.best())]
    torch.save(found, f"{out}/process-{distributed.rank()}.pt")
    distributed.end()


@pytest.fixture(scope="module")
def found(folder, tmp_path_factory):  # noqa: F811
    """What two processes found, and the folder of the checkpoint."""
    torch.set_num_threads(1)  # as theirs
    out = tmp_path_factory.mktemp("processes")
    env = ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    code = f"import test_shard; test_shard.process({str(folder)!r}, {str(out)!r})"
    both = [
        subprocess.Popen(
            [sys.executable, "-c", code], env=env | {"RANK": str(r), "LOCAL_RANK": str(r)}, stderr=subprocess.PIPE,
            text=True
        )
        for r in (0, 1)
    ]
    try:
        said = [p.communicate(timeout=900)[1] for p in both]
    finally:
        for p in both:
            p.kill()
    assert all(p.returncode == 0 for p in both), "\n".join(text[-3000:] for text in said)
    return [torch.load(out / f"process-{r}.pt", weights_only=False) for r in (0, 1)], out


@pytest.mark.parametrize("name", CASES)
def test_two_processes_with_a_part_of_the_network_do_what_one_does_with_the_whole(folder, found, name):  # noqa: F811
    loss, network, settings, of = CASES[name]
    one = learner(folder, loss, network, settings, False)
    want = updated(one, batches(folder, **of), **of)
    (first, second), _ = found
    assert digest(first[name, True]["adapter"]) == digest(second[name, True]["adapter"])
    # Passes of bfloat16 round otherwise in micro-batches of other samples, and a process makes minibatches of its own
    # groups: those are compared with two processes that have the whole, which have the same ones.
    near = 0.05 if name == "bfloat16" else 1e-4
    alike = "minibatches" not in name
    for said, others, alone in zip(first[name, True]["said"], first[name, False]["said"], want, strict=True):
        assert said["used"] == others["used"] == alone["used"]
        for key in ("loss", "grad_norm", "weight", "kl", "moved", "ratio_off"):
            assert said[key] == pytest.approx(others[key], rel=1e-4, abs=1e-8, nan_ok=True), key
        for key in ("loss", "grad_norm", "weight") if alike else ():
            assert said[key] == pytest.approx(alone[key], rel=near, abs=1e-7, nan_ok=True), key
    for kept, alone in (("adapter", one.adapter), ("average", one.best())):
        # The second matrices begin at 0. AdamW makes steps of equal length from gradients that differ in their last
        # bits only.
        for other, tolerance in (
            (first[name, False][kept], 1e-3), (alone, 0.2 if name == "bfloat16" else 1e-3)
        )[: 1 + alike]:
            names = [k for k in other if "lora_B" in k]
            assert length(other[k] for k in names) > 0
            assert length(
                first[name, True][kept][k] - other[k] for k in names
            ) < tolerance * length(other[k] for k in names), kept


def test_each_process_holds_half(found):
    for name in CASES:
        parts, whole = zip(*(of[name, True]["held"] for of in found[0]))
        assert sum(parts) == whole[0] and max(parts) < 0.6 * whole[0], name


def test_what_is_gathered_goes_on_to_the_bit_and_in_one_process(folder, found):  # noqa: F811
    processes, out = found
    for of in processes:
        adapter, again, average, averaged = of["resumed"]
        assert adapter == again and average == averaged != adapter
    loss, network, settings, _ = CASES["gspo"]
    state, _ = records.load_checkpoint(out)
    one = learner(folder, loss, network, settings, False)
    updated(one, batches(folder)[:1])
    kept = one.state()["optimizer"]["state"]
    assert {i: {k: v.shape for k, v in of.items()} for i, of in kept.items()} == {
        i: {k: v.shape for k, v in of.items()} for i, of in state["optimizer"]["state"].items()
    }
    alone = learner(folder, loss, network, settings, False)
    alone.load(state)
    updated(alone, batches(folder)[1:])
    got, want = alone.adapter, processes[0]["gspo", True]["adapter"]
    assert length(got[k] - want[k] for k in want) < 1e-3 * length(want[k] for k in want if "lora_B" in k)


def test_one_process_is_refused_before_the_network_is_read(tmp_path):
    with pytest.raises(ValueError, match="--shard: one process; must be several, as of torchrun"):
        Network(tmp_path / "none", shard=True)


def test_blocks_of_every_family_are_known():
    """Those that diffusers names; a network without them is refused."""
    import diffusers

    for family in families.FAMILIES.values():
        kind = getattr(diffusers, family.parts["transformer"][1])
        assert kind._no_split_modules or kind._repeated_blocks, kind
    odd = type("Odd", (torch.nn.Linear,), {"_no_split_modules": None, "_repeated_blocks": []})
    with pytest.raises(ValueError, match="--shard: Odd; must be a network whose blocks diffusers names"):
        _blocks(odd(2, 2))
