"""Updates of trainers of stages, proved by what is stored of them."""

import json
import os
import shutil
import subprocess

from conftest import ENVIRONMENT

import meander

LINKS = "batch,trajectories,rewards,advantages,prompts"


async def updates(client, name):
    """A batch of two groups, of children and of two rounds, an update of all its stages, and one of each."""
    think = meander.stage("think", model="sums", text={"temperature": 1.5, "max_new_tokens": 4},
                          credit={"jpeg_compressibility": 1, "confidence": 0.25})  # fmt: skip
    reward = [{"name": "jpeg_compressibility"}, {"name": "confidence", "stage": "think", "weight": 0.5}]
    for uid, more, rounds in (("g0", {"children": 2}, 1), ("g1", {}, 2)):
        paint = meander.stage("paint", 'a red sign that says "{think.text}"', model="signs", steps=2, height=32, width=32,
                              rollout={"return_conditioning": False}, **more)  # fmt: skip
        await client.publish(name, "47+58=?", timeout=60, uid=uid, seed=3, group_size=4, reward=reward,
                             batch={"id": "b", "groups": 2}, **meander.stages(think, paint, rounds=rounds))  # fmt: skip
    batch = await anext(aiter(client.batches(name, "all", timeout=60)))
    policy = await meander.policy.policy(client, "signs")
    digests = [batch.digest(), *(batch.stage(s).digest() for s in batch.stages)]
    for step, digest in enumerate(digests, 1):
        await client.update(
            name, "signs", step, batches=["b"], batch_digest=digest, weights_digest=policy["weights_digest"],
            ledger={"weights_before": policy["base_digest"]},
        )  # fmt: skip
        yield step, batch.stages


def test_a_trainer_of_a_stage_is_proved(lanes, run, binary, tmp_path):
    async def check(client, name):
        async for step, stages in updates(client, name):
            archive = tmp_path / f"{step}.tar"
            subprocess.run([binary, "runs", "export", name, "--nats", lanes, "--out", archive], env=ENVIRONMENT, check=True)
            done = subprocess.run([binary, "prove", "--archive", archive, "--json", "--links", LINKS], env=ENVIRONMENT,
                                  capture_output=True)  # fmt: skip
            found = {x["link"]: x for x in json.loads(done.stdout)["links"]}
            assert {n: found[n]["verdict"] for n in LINKS.split(",")} == dict.fromkeys(LINKS.split(","), "holds"), found
            learned = "all stages" if step == 1 else f"stage {stages[step - 2]}"
            assert found["batch"]["what"].endswith(f" for {learned}")
        if kept := os.environ.get("KEEP_ARCHIVE"):  # services/prove/testdata/stages.tar
            shutil.copy(archive, kept)

    run(check, lanes)
