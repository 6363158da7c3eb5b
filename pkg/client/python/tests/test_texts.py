"""Texts as batches, from a pipeline that serves the language model sums."""

import copy

import msgpack
import numpy as np
import pytest

import meander
from conftest import first
from meander.data.text import add_events, answer_logits, text_of

CONVERSATION = {"interaction": {"name": "sums", "max_turns": 3}, "logits": {"form": "full", "answers": [0, 2]}}
LIKELY = {"temperature": 0.7, "top_k": 5}


async def ask(client, run, uid, prompt="347+58=?", batch="b", groups=1, n=4, **fields):
    text = {"logits": {"form": "full"}, **fields.pop("text", {})}
    return await client.publish(
        run, prompt, uid=uid, model="sums", group_size=n, text=text, reward=[{"name": "numeric_match"}],
        batch={"id": batch, "groups": groups}, **{"seed": 3, **fields})


def test_arrays(run, sums):
    """Every array says of every token what the trajectory and the events say, over several turns, in groups of other
    lengths."""

    async def test(client, name):
        await ask(client, name, "u0", "999+1=?", groups=2, n=8, text=CONVERSATION)
        await ask(client, name, "u1", "7+2=?", groups=2, n=2, text=CONVERSATION)
        batch = await first(client.batches(name, "trainer", logits=True, timeout=50))
        assert isinstance(batch, meander.TextBatch) and batch.size == 10 and batch.logits_kind == "raw"
        p, r = batch["prompts"].shape[1], batch["responses"].shape[1]
        assert len(set(batch["num_turns"])) > 1, "some end early, some go on"
        for b, s in enumerate(batch.samples):
            t = s.text
            n, left = len(t.ids), p - t.prompt_length
            row = slice(left, left + n)
            assert np.array_equal(
                batch["input_ids"][b, row], t.ids
            ) and batch["attention_mask"][b].sum() == n == batch["attention_mask"][b, row].sum()
            assert np.array_equal(
                batch["position_ids"][b, row], np.arange(n)
            ) and np.array_equal(batch["loss_mask"][b, row], t.mask)
            assert (batch["input_ids"][b] == 0).sum() == p + r - n, "the rest is padding"
            assert np.array_equal(batch["labels"][b], np.where(batch["loss_mask"][b] == 1, batch["input_ids"][b], -100))
            assert batch["response_length"][b] == n - t.prompt_length and batch["num_turns"][b] == len(t.turns)
            turns = batch["turn_indices"][b]
            assert np.array_equal(
                batch["response_mask"][b], turns % 2 * (turns > 0)
            ), "what was given is 0, what was generated 1"
            assert (turns == -1).sum() == r - batch["response_length"][b]
            assert np.array_equal(
                batch["logits_mask"][b], (turns == 1) | (turns == 5)
            ), "the second answer has none, and keeps its index"
            assert np.array_equal(batch["advantages"][b], batch["response_mask"][b] * s.advantage)
            assert (batch["log_probs"][b] < 0).sum() == t.generated and not batch["log_probs"][b][
                batch["response_mask"][b] == 0
            ].any()
        assert np.array_equal(batch["input_ids"], np.concatenate([batch["prompts"], batch["responses"]], axis=1))
        assert batch.messages[0][0] == {"role": "user", "content": "999+1=?"} and batch.messages[0][-1] == {
            "role": "assistant", "content": batch.texts[0]
        }
        assert len(batch.messages[0]) == batch["num_turns"][0] and set(
            m["role"] for m in batch.messages[0]
        ) <= {"user", "assistant"}
        assert (
            batch["policy_versions"] == np.where(batch["response_mask"] == 1, batch["policy_version"][:, None], -1)
        ).all()
        # The log-probs are those of the stored logits, and of the log-sum-exps.
        where = batch["logits_mask"]
        again = batch.recompute_log_prob(batch["logits"])
        np.testing.assert_allclose(again[where], batch["log_probs"][where], rtol=0, atol=2e-6)
        z = np.take_along_axis(batch["logits"], batch["responses"][..., None], 2)[..., 0]
        np.testing.assert_allclose((z - batch["log_sum_exps"])[where], batch["log_probs"][where], rtol=0, atol=2e-6)
        off = batch.ratio(np.where(where, again, 0.0))
        assert set(off.per_step) == {1, 3, 5} and off.per_step[1] < 1e-5 and off.per_step[5] < 1e-5 and not off.ok
        with pytest.raises(meander.RatioOff, match="turn 3: .*another temperature"):
            batch.check(np.where(where, again, 0.0))
        batch.check(np.where(where, again, batch["log_probs"]))
        one = batch["log_probs"].astype(np.float64)
        one[np.unravel_index(np.flatnonzero(where)[0], where.shape)] += 2e-4  # little in the mean of a turn
        with pytest.raises(meander.RatioOff, match="the furthest token 0.0002"):
            batch.check(one)
        with pytest.raises(meander.RatioOff, match="inf"):
            batch.check(np.where(where, np.nan, batch["log_probs"]))
        bare = await first(client.batches(name, timeout=50))
        assert "logits" not in bare and bare.logits_kind == ""
        assert bare["uid"].tolist() == batch["uid"].tolist()
        with pytest.raises(ValueError, match="must be .10, "):
            batch.recompute_log_prob(batch["logits"][:, 1:])

    run(test, sums)


def test_dataproto(run, sums):
    async def test(client, name):
        await ask(client, name, "u", "999+1=?", n=8, text=CONVERSATION)
        batch = await first(client.batches(name, timeout=50))
        proto = batch.dataproto()
        tensors, other, meta = proto["batch"], proto["non_tensor_batch"], proto["meta_info"]
        assert tensors["rm_scores"].shape == tensors["response_mask"].shape and np.array_equal(
            tensors["rm_scores"].sum(axis=1), batch["rewards"].astype(np.float32)
        )
        for b, s in enumerate(batch.samples):
            assert np.flatnonzero(tensors["rm_scores"][b]).tolist() in (
                [], [len(s.text.ids) - s.text.prompt_length - 1]
            )
        assert np.array_equal(
            tensors["old_log_probs"], batch["log_probs"]
        ) and other["raw_prompt"][0] == [{"role": "user", "content": "999+1=?"}]
        assert other["__num_turns__"].tolist() == batch["num_turns"].tolist() and meta["temperature"] == 1
        assert meta["log_prob_kind"] == "raw"
        padded = meander.TextBatch(batch.groups, pad_token_id=304)
        assert ((padded["input_ids"] == 304) == (padded["attention_mask"] == 0)).all()
        with pytest.raises(ValueError, match="log_prob_kind: 'drawn'; must be raw or processed"):
            client.batches(name, log_prob_kind="drawn")

    run(test, sums)


def test_advantages_of_tokens(run, sums):
    """Where an estimator discounts, each token that was generated has its own advantage, and what was given none."""

    async def test(client, name):
        discounted = {"estimator": "reinforce_plus_plus", "gamma": 0.9}
        await ask(client, name, "u", "999+1=?", n=8, text=CONVERSATION, advantage=discounted)
        batch = await first(client.batches(name, timeout=50))
        mask, several = batch["response_mask"] == 1, batch["num_turns"] > 2
        assert several.any() and not batch["advantages"][~mask].any()
        for b, s in enumerate(batch.samples):
            own = batch["advantages"][b, mask[b]]
            assert own.tolist() == s.member["step_advantages"] and s.member["tokens"] == mask[b].sum() == len(own)
            np.testing.assert_allclose(own.mean(), s.advantage, atol=1e-12)
        np.testing.assert_allclose(batch["advantages"][mask].mean(), 0, atol=1e-12)  # whitened over all tokens
        np.testing.assert_allclose(batch["advantages"][mask].std(ddof=1), 1, atol=1e-6)
        # A reward of 1 is worth 0.9 of itself a token before: from turn to turn, too.
        b = int(np.flatnonzero(several & (batch["rewards"] == 1))[0])
        own = batch["advantages"][b, mask[b]]
        np.testing.assert_allclose(np.diff(own)[:-1], np.diff(own)[1:] * 0.9, rtol=1e-9)

    run(test, sums)


def test_torch(run, sums):
    torch = pytest.importorskip("torch")

    async def test(client, name):
        await ask(client, name, "u")
        batch = await first(client.batches(name, timeout=50))
        t = batch.torch()
        assert t["input_ids"].dtype == t["sample_seed"].dtype == torch.int64 and "uid" not in t
        assert t["log_probs"].dtype == torch.float32

    run(test, sums)


def test_kinds_of_log_probs(run, sums):
    """Raw log-probs are the model's, processed ones those of the draw; a server may give one of them only."""

    async def test(client, name):
        await ask(client, name, "u0", batch="warm", text={"temperature": 0.5})
        await ask(client, name, "u1", batch="filtered", text=LIKELY)
        raw, processed = {}, {}
        for kind, into in (("raw", raw), ("processed", processed)):
            async for batch in client.batches(name, log_prob_kind=kind, logits=True, timeout=50):
                into[batch.name] = batch
                if len(into) == 2:
                    break
        for batch in raw.values():
            batch.check(batch.recompute_log_prob(batch["logits"]))
            assert np.abs(batch["log_probs"] - batch["processed_log_probs"]).max() > 1e-3
        warm, filtered = processed["warm"], processed["filtered"]
        assert np.array_equal(warm["log_probs"], raw["warm"]["processed_log_probs"])
        warm.check(warm.recompute_log_prob(warm["logits"]))
        with pytest.raises(ValueError, match="drawn with filters"):
            filtered.recompute_log_prob(filtered["logits"])
        group = copy.deepcopy(raw["warm"].groups[0])
        del group.samples[2].text.numbers["log_probs"]
        with pytest.raises(ValueError, match="u0 #2: no raw log-probs: .* log_prob_kind='processed'"):
            meander.TextBatch([group])
        assert meander.TextBatch([group], log_prob_kind="processed").size == 4
        del group.samples[2].text.numbers["processed_log_probs"]
        with pytest.raises(
            ValueError, match="u0 #2: no processed log-probs: the server that drew the tokens gives none$"
        ):
            meander.TextBatch([group], log_prob_kind="processed")

    run(test, sums)


def test_forms_of_logits(run, sums):
    async def test(client, name):
        await ask(client, name, "top", batch="a", text={"logits": {"form": "topk", "k": 5, "dtype": "F16"}})
        await ask(
            client, name, "ids", batch="b", text={"logits": {"form": "ids", "ids": [15, 19]}, "tokens_per_event": 4}
        )
        await ask(client, name, "masked", batch="c", text={"logits": {"form": "full", "kind": "processed"}, **LIKELY})
        seen = {}
        async for batch in client.batches(name, logits=True, timeout=50):
            seen[batch.name] = batch
            if len(seen) == 3:
                break
        top, ids, masked = seen["a"], seen["b"], seen["c"]
        where = top["logits_mask"]
        assert top["logits"].shape[2] == 5 and (
            np.diff(top["logits"][where], axis=1) <= 0
        ).all() and (top["logit_ids"][~where] == -1).all()
        best = top["logits"][where][:, 0] - top["log_sum_exps"][where]
        np.testing.assert_allclose(best, top["top_log_probs"][where], atol=0.01)
        assert (ids["logit_ids"][ids["logits_mask"]] == [15, 19]).all()
        assert "logit_ids" not in masked and masked.logits_kind == "processed" and (
            np.isfinite(masked["logits"][masked["logits_mask"]]).sum(axis=1) == 5
        ).all()
        await ask(client, name, "bare", batch="d", text={"logits": {"form": "none"}})
        # The last that closed, whichever it was.
        reader = client.batches(name, after=batch.cursor, logits=True, timeout=50)
        with pytest.raises(meander.EventError, match="bare #.: no logits are stored; prompts must ask"):
            await first(reader)
        with pytest.raises(ValueError, match="must store one form"):
            meander.TextBatch([*top.groups, *ids.groups])

    run(test, sums)


def test_equal_seeds_equal_batches_and_a_place(run, sums):
    """Two runs of equal seeds are equal batches, a named reader goes on behind what it has read, and the off-policy
    filter is that of images."""

    async def test(client, name):
        digests = []
        for run_name in (name, name + "again"):
            for expected, prompt in (("b0", "347+58=?"), ("b1", "900-1=?")):
                await ask(client, run_name, f"u-{expected}", prompt, batch=expected)
                reader = client.batches(run_name, "trainer", timeout=50)
                batch = await first(reader)
                assert batch.name == expected
                await reader.done(batch)
                await reader.close()
                digests.append(batch.digest())
        assert digests[:2] == digests[2:] and digests[0] != digests[1]
        reader = client.batches(name, groups=1, keep=meander.fresh(min_policy_version=10**6), follow=False)
        assert [b async for b in reader] == [] and sum(reader.health.left_out.values()) == 2

    run(test, sums)


def test_nothing_to_train_on(run, sums):
    """An answer without tokens has an advantage and nothing to train on: it is left out, by name."""

    async def test(client, name):
        await ask(client, name, "empty", batch="b0", text={"max_new_tokens": 0, "logits": {"form": "none"}})
        await ask(client, name, "whole", batch="b1")
        reader = client.batches(name, groups=1, timeout=50)
        async for batch in reader:
            break
        assert batch["uid"].tolist() == ["whole"] * 4
        assert reader.health.left_out == {
            "sample: an answer without tokens": 4, "no sample with an advantage and something to train on": 1
        }

    run(test, sums)


def test_images_and_texts(run, sums, binary):
    """A batch of both is a fault that says so; each by itself is read from the same run."""
    if not binary.with_name("meander-sampler").is_file():
        pytest.skip("meander-sampler is not beside meander: 'make build' makes it")

    async def test(client, name):
        await ask(client, name, "text", groups=2)
        image = {
            "model": "synthetic", "group_size": 2, "num_inference_steps": 4, "reward": [{"name": "synthetic"}],
            "rollout": {"sde_step_indices": [1]}
        }
        await client.publish(name, "a fox", uid="image", batch={"id": "b", "groups": 2}, **image)
        with pytest.raises(meander.EventError, match="batch b: image is of images, text of texts; must be one"):
            await first(client.batches(name, timeout=50))
        skipping = client.batches(name, faults="skip", follow=False)
        assert [b async for b in skipping] == [] and skipping.health.left_out == {
            "fault: images and texts in one batch": 2
        }
        for kind in ("text", "image"):
            batch = await first(
                client.batches(name, keep=lambda g, kind=kind: "" if g.kind == kind else f"an {g.kind}", timeout=50)
            )
            assert set(batch["uid"]) == {kind} and isinstance(batch, meander.TextBatch) == (kind == "text")
        with pytest.raises(ValueError, match="an image; a batch of texts"):
            meander.TextBatch(batch.groups)
        with pytest.raises(ValueError, match="text: a text; a batch of images"):
            meander.Batch([await client.group(name, "text")])
        with pytest.raises(meander.EventError, match="the sample is an image"):
            await client.text(batch.samples[0].trajectory)

    run(test, sums)


def test_strange_texts(run, sums):
    """A trajectory whose parts do not fit together is an error that names it."""

    async def test(client, name):
        await ask(
            client, name, "u", "999+1=?", n=2,
            text={"interaction": {"name": "sums", "max_turns": 2}, "logits": {"form": "full"}}
        )
        async for trajectory in client.stream_trajectories(name):
            text = await client.text(trajectory, logits=True)
            break
        assert text.answer == text.messages[-1]["content"] and text.logits.there.sum() == text.generated
        ids = trajectory["text"]["ids"]
        for change, match in [
            ({"mask": ids}, "text.mask: int32"),
            ({"ids": ids | {"shape": [1]}}, "bytes; I32"),
            ({"log_probs": ids}, "text.log_probs: int32"),
            (
                {"mask": trajectory["text"]["mask"] | {"data": bytes(len(text.ids))}},
                "the last turn generated, as mask has it"
            ),
            ({"turns": trajectory["text"]["turns"][1:]}, r"turns\[0\]: 14 to"),
            ({"turns": trajectory["text"]["turns"][:-1]}, "must be those of ids"),
            ({"turns": [{"begin": 0, "end": len(text.ids), "generated": False}]}, "the last turn generated"),
            ({"ids": None}, "no text: it completed"),
        ]:
            with pytest.raises(meander.EventError, match=match):
                text_of(trajectory | {"text": trajectory["text"] | change})
        with pytest.raises(meander.EventError, match="text.settings.vocabulary: 'x'; must be int"):
            await client.text(
                trajectory | {"text": trajectory["text"] | {"settings": text.settings | {"vocabulary": "x"}}}
            )
        events = []
        async for e in client.tokens(name):
            if e["attempt"] == trajectory["attempt"]:
                events.append(e)
            if len(events) == len(trajectory["steps"]):
                break
        bare = text_of(trajectory)
        half = len(events) // 2
        add_events(bare, [e | {"policy_version": int(i >= half), "logits": None} for i, e in enumerate(events)], "u")
        where = bare.mask == 1
        assert bare.logits is None and set(bare.policy_versions[where]) == {0, 1} and (
            bare.policy_versions[~where] == -1
        ).all()
        assert (np.diff(bare.policy_versions[where]) >= 0).all(), "each token says which weights drew it"
        full = {"form": "full", "values": {"dtype": "F32", "shape": [1, 320], "data": bytes(1280)}, "masked": 0}
        for change, match in [
            (events[1:], "event 1 of tokens: position"),
            (events[:-1], f"must be all {len(text.ids)}"),
            ([events[0] | {"generated": True}, *events[1:]], "event 0 of tokens"),
            ([*events[:-1], events[-1] | {"ids": [1]}], "must be the tokens of the sequence"),
            (
                [*events[:-1], events[-1] | {"log_sum_exps": [], "logits": full}],
                "logits .* and their log-sum-exps; must be of 1 tokens"
            ),
            ([*events[:-1], events[-1] | {"logits_kind": "processed"}], "another form than those before"),
        ]:
            with pytest.raises(meander.EventError, match=match):
                add_events(text_of(trajectory), change, "u")

    run(test, sums)


def test_the_trainers_of_images_refuse_texts(run, sums):
    pytest.importorskip("torch")
    pytest.importorskip("diffusers")
    from meander.train.rollouts import Rollouts

    async def test(client, name):
        await ask(client, name, "u")
        with pytest.raises(meander.EventError, match="is of texts"):
            Rollouts(await first(client.batches(name, timeout=50)))

    run(test, sums)


def test_unscored(run, sums):
    """Tokens of which a server gave no log-prob have NaN, and are in no loss: the mask leaves them out."""

    async def test(client, name):
        await ask(client, name, "u0", n=4)
        batch = await first(client.batches(name, "trainer", timeout=50))
        groups = copy.deepcopy(batch.groups)
        t = groups[0].trained[0].text
        numbers = {k: np.array(v) for k, v in t.numbers.items()}
        numbers["log_probs"][t.prompt_length] = numbers["processed_log_probs"][t.prompt_length] = np.nan
        t.numbers = numbers
        assert t.unscored == 1 and groups[0].trained[1].text.unscored == 0
        without = meander.TextBatch(groups)
        assert without["response_mask"].sum() == batch["response_mask"].sum() - 1 and not without["response_mask"][0, 0]
        assert without["advantages"][0, 0] == 0 and np.isfinite(without["log_probs"]).all()
        assert without.ratio(batch["log_probs"]).max_abs == 0
        packed = meander.events.decode(msgpack.packb({"v": 1, "log_probs": [float("nan"), -1.0]}))
        assert packed["log_probs"][1] == -1
        with pytest.raises(meander.EventError):
            meander.events.decode(msgpack.packb({"v": 1, "entropies": [float("nan")]}))

    run(test, sums)


@pytest.mark.parametrize("rows, why", [
    ([[1.0, np.nan, 2.0], [1, 2, 3]], "NaN"), ([[1, np.inf, 2], [1, 2, 3]], "inf"),
    ([[0, 0, 0], [1, 2, 3]], "all zero"),
    ([[1, 2, 3]], r"must be \[2, 3\]"), ([[1, 2], [3, 4]], r"must be \[2, 3\]"), ([[1, -np.inf, 2], [1, 2, 3]], "-inf"),
])
def test_answer_logits_refused(rows, why):
    """What cannot be the logits of an answer is refused by name, and not handed to a reward."""
    values = np.array(rows, np.float32)
    part = {"form": "full", "values": {"dtype": "F32", "shape": list(values.shape), "data": values.tobytes()}}
    request = {"logits_form": "full", "logits_kind": "raw", "vocabulary": 3}
    with pytest.raises(meander.EventError, match=why):
        answer_logits([part], 2, request, "logits of answer 0")
    whole = {**part, "values": {"dtype": "F16", "shape": [1, 3], "data": np.array([[1, 2, 3]], np.float16).tobytes()}}
    got, ids = answer_logits([whole, whole], 2, request, "logits of answer 0")
    assert ids is None and got.shape == (2, 3) and got.dtype == np.float16
