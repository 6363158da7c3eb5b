"""Batches of texts as arrays, under the names of trainers of language models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .batch import Batch, Group, Ratio, Sample
from .events import EventError
from .micro import Completing
from .text import NUMBERS, Text

Array = npt.NDArray[Any]
"""An array of numpy, of any dtype."""

KINDS = {"raw": "log_probs", "processed": "processed_log_probs"}
"""The array of each log_prob_kind."""
_IGNORED = -100  # labels that transformers takes no loss of


class TextBatch(Batch):
    """Whole groups of texts as arrays: B samples with an advantage, prompts of P tokens at most, responses of R, L = P
    + R.

    A response is all that follows the prompt: in a conversation the answers and what was given between them. Prompts
    are padded on the left, responses on the right, so that column P of input_ids begins every response; padding is
    pad_token_id, 0 unless set, and masked everywhere.

    | name | shape | |
    |---|---|---|
    | prompts, responses | [B, P], [B, R] int64 | token ids, padded left and right |
    | input_ids, attention_mask, position_ids | [B, L] int64 | as transformers takes them |
    | response_mask | [B, R] int64 | 1 where a token was generated and has a log-prob (health.unscored counts others) |
    | loss_mask, labels | [B, L] int64 | the same over the whole sequence; labels are -100 outside it |
    | turn_indices | [B, R] int64 | 1 the first answer, 2 what was said to it, and so on; -1 padding |
    | log_probs | [B, R] float32 | nats, 0 outside response_mask: see log_prob_kind |
    | processed_log_probs | [B, R] float32 | where all samples have them |
    | entropies, top_log_probs | [B, R] float32 | of the model's distribution; of its likeliest token |
    | policy_versions | [B, R] int64 | of each token; -1 outside response_mask |
    | advantages | [B, R] float64 | of each token; 0 outside response_mask |
    | rewards, temperature | [B] float64 | weighted sums of scores; what tokens were drawn with |
    | uid, prompt, weights_digest | [B] str | |
    | sample_index, policy_version, group_index | [B] int64 | |
    | round | [B] int64 | of a stage: the round that the sample is of, from 1 |
    | response_length, num_turns | [B] int64 | tokens of the response; turns, the prompt included |
    | sample_seed | [B] uint64 | |
    | logits | [B, R, K] float32 | read with logits=True: what is stored, 0 where logits_mask is |
    | logit_ids | [B, R, K] int64 | the tokens that they are of, -1 where there are none; absent of form full |
    | log_sum_exps, logits_mask | [B, R] float32, bool | of all V logits, of logits_kind |

    response_mask is 0 where a token was given, is padding, or its server gave no log-prob. log_probs are what ratios
    are of: by log_prob_kind "raw" of the model alone, log_softmax(logits); "processed" of the draw, after temperature
    and filters. logits - log_sum_exps are log-probs; logits are of logits_kind.

    `texts` has the last answers, `messages` the conversations.

    ValueError: a sample has no log-probs of log_prob_kind, is an image, or is of another model than the others.
    """

    unit = "turn"
    why_off = (
        "other weights, another temperature than 1 (see log_prob_kind), another template or a lower precision than the "
        "sampler's"
    )

    def __init__(
        self, groups: Sequence[Group], name: str = "", cursor: str = "", log_prob_kind: str = "raw",
        pad_token_id: int = 0
    ):
        check_kind(log_prob_kind)
        self.log_prob_kind, self.pad_token_id = log_prob_kind, pad_token_id
        super().__init__(groups, name, cursor)

    def of_groups(self, groups: Sequence[Group], pin: bool = False, rows: Sequence[int] | None = None) -> TextBatch:
        """Returns a batch like this one of other groups."""
        return TextBatch(groups, self.name, self.cursor, self.log_prob_kind, self.pad_token_id)

    def _collate(self) -> dict[str, Array]:
        rows = [(g, s, _text(g, s)) for g in self.groups for s in g.trained]
        if not rows:
            return {}
        for g, s, t in rows:
            if why := lacking(t, self.log_prob_kind):
                raise ValueError(f"{g.uid} #{s.member['sample_index']}: {why}")
            if t.settings["vocabulary"] != rows[0][2].settings["vocabulary"]:
                raise ValueError(
                    f"{g.uid}: a vocabulary of {t.settings['vocabulary']}, of other groups "
                    f"{rows[0][2].settings['vocabulary']}; the texts of a batch must be of one model"
                )
        out = self._sequences([t for _, _, t in rows])
        texts, n = [t for _, _, t in rows], out["responses"].shape[1]
        for k in NUMBERS:
            if all(k in t.numbers for t in texts):
                out[k] = _right(texts, n, 0, np.float32, lambda t,
                    k=k: np.nan_to_num(t.numbers[k]))  # type: ignore[misc]
        out["log_probs"] = out[KINDS[self.log_prob_kind]]
        out["policy_versions"] = _right(texts, n, -1, np.int64, lambda t: t.policy_versions)
        out["advantages"] = _advantages(rows, out["response_mask"] == 1)
        out["temperature"] = np.array([t.settings["temperature"] for t in texts], np.float64)
        out["response_length"] = np.array([len(t.ids) - t.prompt_length for t in texts], np.int64)
        out["num_turns"] = np.array([len(t.turns) for t in texts], np.int64)
        return out | _logits(texts, n) | self._facts()

    def _sequences(self, texts: list[Text]) -> dict[str, Array]:
        p, r = max(t.prompt_length for t in texts), max(len(t.ids) - t.prompt_length for t in texts)
        prompts = np.full((len(texts), p), self.pad_token_id, np.int64)
        attention = np.zeros((len(texts), p), np.int64)
        for i, t in enumerate(texts):
            prompts[i, p - t.prompt_length :], attention[i, p - t.prompt_length :] = t.ids[: t.prompt_length], 1
        responses = _right(texts, r, self.pad_token_id, np.int64, lambda t: t.ids)
        turns = _right(texts, r, -1, np.int64, lambda t: t.turn)
        mask = _right(texts, r, 0, np.int64, lambda t: t.mask * ~np.isnan(t.numbers[KINDS[self.log_prob_kind]]))
        attention = np.concatenate([attention, (turns >= 0).astype(np.int64)], axis=1)
        ids, loss = np.concatenate([prompts, responses], axis=1), np.concatenate([np.zeros_like(prompts), mask], axis=1)
        return {
            "prompts": prompts, "responses": responses, "input_ids": ids, "attention_mask": attention,
            "position_ids": (attention.cumsum(axis=1) - 1).clip(0),
            "response_mask": mask, "loss_mask": loss, "labels": np.where(loss == 1, ids, _IGNORED),
            "turn_indices": turns,
        }

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """[B, R] bool: the tokens that were generated."""
        return self["response_mask"] == 1

    def ratio(self, log_probs: npt.ArrayLike, tolerance: float = 1e-5) -> Ratio:
        """How far exp(log_probs - the stored ones) is from 1: the mean of each turn's tokens, and the furthest token.
        log_probs [B, R] are of log_prob_kind, in nats."""
        off, turns = self._distances(log_probs), self["turn_indices"]
        per_turn = {int(i): float(off[(turns == i) & self.mask].mean()) for i in np.unique(turns[self.mask])}
        return Ratio(max(per_turn.values(), default=0.0), per_turn, tolerance, float(off.max(initial=0)))

    @property
    def _written(self) -> list[Text]:
        return [s.text for s in self.samples if s.text is not None]

    @property
    def texts(self) -> list[str]:
        """The last answer of each sample, without what ended it."""
        return [t.answer for t in self._written]

    @property
    def messages(self) -> list[list[dict[str, str]]]:
        """The conversation of each sample, as chat templates take it."""
        return [t.messages for t in self._written]

    @property
    def logits_kind(self) -> str:
        """Of the logits that are there: raw, or processed; empty without any."""
        return next((t.logits.kind for t in self._written if t.logits), "")

    def recompute_log_prob(self, logits: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """The log-probs [B, R], float64, in nats, of the responses under logits [B, R, V], of which row r is what token
        r of the response was drawn from; 0 outside response_mask.

        Of log_prob_kind processed the logits are divided by the temperature first.

        ValueError: logits of another shape, or processed log-probs of tokens that were drawn with filters or greedily.
        """
        z = np.asarray(logits)
        if z.shape[:2] != self["responses"].shape or z.ndim != 3:
            raise ValueError(f"logits: shape {list(z.shape)}; must be {[*self['responses'].shape, 'V']}")
        out = np.zeros(self["responses"].shape)
        for b, t in enumerate(self._written):
            divisor = 1.0
            if self.log_prob_kind == "processed":
                x = t.settings
                if x["temperature"] == 0 or x["top_k"] or x["top_p"] < 1 or x["min_p"] > 0:
                    raise ValueError(
                        f"{self['uid'][b]}: its tokens were drawn with filters or greedily; recompute raw log-probs, "
                        f"or ask for none of temperature 0, top_k, top_p, min_p"
                    )
                divisor = x["temperature"]
            rows = np.flatnonzero(self.mask[b])
            y = z[b, rows].astype(np.float64) / divisor
            top = y.max(axis=1, keepdims=True)
            lse = top[:, 0] + np.log(np.exp(y - top).sum(axis=1))
            out[b, rows] = y[np.arange(len(rows)), self["responses"][b, rows]] - lse
        return out

    def dataproto(self) -> dict[str, dict[str, Any]]:
        """The batch under the names that verl's trainers of language models read: {batch, non_tensor_batch, meta_info},
        in numpy. Sequences are int64 as in the table above, numbers [B, R] float32.

        rm_scores and token_level_rewards have the reward at the last token that was generated.
        """
        scores = np.zeros(self.mask.shape, np.float32)
        last = self.mask.shape[1] - 1 - self.mask[:, ::-1].argmax(axis=1)
        scores[np.arange(len(scores)), last] = self["rewards"]
        names = ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask", "loss_mask")
        advantages, log_probs = self["advantages"].astype(np.float32), self["log_probs"]
        batch = {name: self[name] for name in names} | {
            "rollout_log_probs": log_probs, "old_log_probs": log_probs, "advantages": advantages, "returns": advantages,
            "rm_scores": scores,
            "token_level_scores": scores, "token_level_rewards": scores,
        }
        raw = np.empty(self.size, object)
        for i, t in enumerate(self._written):
            raw[i] = t.settings["messages"]
        other = {
            "uid": self["uid"].astype(object), "raw_prompt": raw, "sample_index": self["sample_index"],
            "global_steps": self["policy_version"],
            "__num_turns__": self["num_turns"].astype(np.int32),
        }
        meta = {
            "batch": self.name, "cursor": self.cursor, "digest": self.digest(), "log_prob_kind": self.log_prob_kind,
            "pad_token_id": self.pad_token_id
        }
        if len(set(self["temperature"])) == 1:
            meta["temperature"] = float(self["temperature"][0])
        return {"batch": batch, "non_tensor_batch": other, "meta_info": meta}


def check_kind(log_prob_kind: str) -> None:
    """ValueError: log_prob_kind is neither raw nor processed."""
    if log_prob_kind not in KINDS:
        raise ValueError(f"log_prob_kind: {log_prob_kind!r}; must be raw or processed")


def lacking(text: Text, log_prob_kind: str) -> str:
    """Why a text has no log-probs of that kind; "": it has."""
    if KINDS[log_prob_kind] in text.numbers:
        return ""
    other = next((k for k in KINDS if KINDS[k] in text.numbers), "")
    return f"no {log_prob_kind} log-probs: the server that drew the tokens gives none" + (
        f"; it gives {other} ones: log_prob_kind={other!r}" if other else ""
    )


def batch_of(
    groups: Sequence[Group], name: str, cursor: str, log_prob_kind: str, source: Completing | None = None
) -> Batch:
    """The groups as one batch, of images or of texts; source reads steps that are not read yet. EventError: there are
    images and texts."""
    from .staged import StagedBatch

    kinds = {g.kind: g.uid for g in groups if g.samples}  # of a stage that ran for none a group is of no kind
    if len(kinds) > 1 and "stages" in kinds:
        other = next(v for k, v in kinds.items() if k != "stages")
        raise EventError(f"batch {name or 'of groups'}: samples of {kinds['stages']} have stages, those of {other} "
                         "none; "
                         "must be alike: read one stage (stage=NAME), or in batches of their own")
    if len(kinds) > 1:
        raise EventError(f"batch {name or 'of groups'}: {kinds['image']} is of images, {kinds['text']} of texts; "
                         "must be one, in runs or batches of their own, or leave out the others with keep: "
                         "lambda g: '' if g.kind == 'text' else 'an image'")
    out: Batch
    if "stages" in kinds:
        out = StagedBatch(groups, name, cursor, log_prob_kind)
    else:
        out = TextBatch(groups, name, cursor, log_prob_kind) if "text" in kinds else Batch(groups, name, cursor)
    out.source = source
    return out


def _text(group: Group, sample: Sample) -> Text:
    if sample.text is None:
        raise ValueError(
            f"{group.uid} #{sample.member['sample_index']}: an image; a batch of texts must have texts alone"
        )
    return sample.text


def _right(texts: list[Text], length: int, padding: int, dtype: Any, of: Callable[[Text], Array]) -> Array:
    """The values of the tokens behind the prompt, [B, length] of dtype, padded on the right. of(text) has one for each
    token of the whole sequence."""
    out = np.full((len(texts), length), padding, dtype)
    for i, t in enumerate(texts):
        row = of(t)[t.prompt_length :]
        out[i, : len(row)] = row
    return out


def _advantages(rows: list[tuple[Group, Sample, Text]], mask: npt.NDArray[np.bool_]) -> Array:
    """The advantages [B, R], float64: of each token where the estimator gives them, else the sample's at all; 0 outside
    mask."""
    out = np.zeros(mask.shape)
    for i, (g, s, t) in enumerate(rows):
        each = s.member.get("step_advantages")
        if each and len(each) != t.generated:
            raise ValueError(
                f"{g.uid} #{s.member['sample_index']}: {len(each)} advantages; must be one for each of the "
                f"{t.generated} tokens that were generated"
            )
        generated = np.flatnonzero(t.mask[t.prompt_length :])
        out[i, generated] = each or s.advantage
    return out * mask


def _logits(texts: list[Text], length: int) -> dict[str, Array]:
    """The arrays of the stored logits; none unless they were read. ValueError: texts store different forms."""
    having = [(i, t, t.logits) for i, t in enumerate(texts) if t.logits]
    if not having:
        return {}
    first = having[0][2]
    for _, _, x in having:
        if (x.form, x.kind, x.values.shape[1]) != (first.form, first.kind, first.values.shape[1]):
            raise ValueError(
                f"logits: {x.kind} {x.form}, {x.values.shape[1]} of a token, and {first.kind} {first.form}, "
                f"{first.values.shape[1]}; the texts of a batch must store one form"
            )
    shape = (len(texts), length, first.values.shape[1])
    out: dict[str, Array] = {
        "logits": np.zeros(shape, np.float32), "log_sum_exps": np.zeros(shape[:2], np.float32),
        "logits_mask": np.zeros(shape[:2], bool)
    }
    if first.ids is not None:
        out["logit_ids"] = np.full(shape, -1, np.int64)
    for i, t, x in having:
        rows = slice(t.prompt_length, None)
        n = len(t.ids) - t.prompt_length
        out["logits"][i, :n], out["log_sum_exps"][i, :n], out["logits_mask"][i, :n] = x.values[rows], x.log_sum_exps[
            rows], x.there[rows]
        if x.ids is not None:
            out["logit_ids"][i, :n] = x.ids[rows]
    return out
