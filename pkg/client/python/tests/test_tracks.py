"""Batches whose states have several tracks, and advantages by stage and track."""

import numpy as np
import pytest

import meander
from meander.data.batch import Batch, Group, Sample
from meander.data.events import ADVANTAGE, STEP, EventError, check_known, fault

S, C = 4, 3
TRACKS = [
    {"name": "video", "shape": [2, 4], "elements": 8}, {"name": "sound", "shape": [4], "elements": 4},
]  # fmt: skip


def _sample(i, rng):
    """A sample of three states, between which two stochastic steps are."""
    states = rng.standard_normal((3, S, C)).astype(np.float32)
    t = {
        "uid": "g", "latents_shape": [S, C], "tracks": TRACKS, "log_prob_kind": "density", "cfg_rule": "inside",
        "transitions": ["sde", "sde"], "sigmas": [1.0, 0.5, 0.0], "noise_level": 0.7, "true_cfg_scale": 1.0,
        "prompt": "p", "negative_prompt": "", "weights_digest": "w", "policy_version_max": 1, "sample_seed": 1,
        "noise_seed": 1, "height": 32, "width": 32,
    }  # fmt: skip
    steps = []
    for k in range(2):
        sums = [-8.0 - i - k, -2.0 - i]
        steps.append({
            "step_index": k, "sigma": t["sigmas"][k], "sigma_next": t["sigmas"][k + 1], "timestep": 0.0,
            "noise_std": 0.5, "std_dev_t": 0.7, "transition": "sde", "log_prob": sum(sums) / 12,
            "log_prob_sum": sum(sums), "element_count": 12,
            "tracks": [
                {**track, "log_prob": x / track["elements"], "log_prob_sum": x} for track, x in zip(TRACKS, sums)
            ],
            "latents": [
                {"index": at, "tensor": {"dtype": "F32", "shape": [S, C], "data": states[at].tobytes()}}
                for at in ((0,), (1, 2))[k]
            ],
        })  # fmt: skip
    return Sample({"sample_index": i, "advantage": float(i), "reward": 1.0, "status": "scored"}, t, steps), states


def _group(credits=None):
    rng = np.random.default_rng(3)
    samples, states = zip(*(_sample(i, rng) for i in (0, 2)))
    advantage = {"uid": "g", "members": [
        {"sample_index": 0, "advantage": 0.0}, {"sample_index": 1, "advantage": None},
        {"sample_index": 2, "advantage": 2.0},
    ]}  # fmt: skip
    return Group(advantage | ({"credits": credits} if credits else {}), list(samples)), np.stack(states)


def test_a_track_is_a_view_of_the_states():
    group, states = _group()
    batch = meander.Batch([group], "b")
    assert batch.tracks == ["video", "sound"]
    flat = states.reshape(2, 3, -1)
    for name, part, shape in (("video", slice(0, 8), (2, 4)), ("sound", slice(8, 12), (4,))):
        track = batch.track(name)
        for key, at in (("latents", slice(0, 2)), ("next_latents", slice(1, 3))):
            assert track[key].shape == (2, 2, *shape) and np.shares_memory(track[key], batch[key])
            assert (track[key] == flat[:, at, part].reshape(2, 2, *shape)).all()
        assert (group.samples[1].track(2, name) == flat[1, 2, part].reshape(shape)).all()
    assert batch.track("video")["log_probs"].tolist() == [[-1.0, -1.125], [-1.25, -1.375]]
    sums = sum(batch.track(name)["log_prob_sums"] for name in batch.tracks)
    assert (sums / 12 == batch["log_probs"]).all()
    with pytest.raises(KeyError, match="track 'depth'; must be one of video, sound"):
        batch.track("depth")


def test_samples_of_other_tracks_are_refused():
    group, _ = _group()
    group.samples[1].trajectory = group.samples[1].trajectory | {"tracks": TRACKS[::-1]}
    with pytest.raises(ValueError, match="must be those of the other groups"):
        Batch([group])
    step = {"tracks": [{**TRACKS[0], "phase": 3}]}
    with pytest.raises(EventError, match="setting tracks.phase=3 is not known"):
        check_known(step, STEP, "step")


def test_advantages_by_stage_and_track():
    group, _ = _group([
        {"stage": "plan", "values": [0.5, None, -0.5]},
        {"stage": "main", "track": "video", "values": [1.0, None, 3.0]},
        {"stage": "main", "track": "sound", "values": [0.25, None, 0.75]},
    ])  # fmt: skip
    batch = Batch([group], "b")
    assert batch.credits == [("plan", ""), ("main", "video"), ("main", "sound")]
    assert batch.credit("plan").tolist() == [0.5, -0.5] and batch.credit("main", "video").tolist() == [1.0, 3.0]
    with pytest.raises(KeyError, match="no credit of stage 'main', track ''"):
        batch.credit("main")
    with pytest.raises(EventError, match="credits: plan, main video, main sound have advantages of their own"):
        batch.dataproto()
    assert "must be a list" in fault({"credits": 3}, {"credits": ADVANTAGE["credits"]})
    assert Batch([_group()[0]]).credits == []
