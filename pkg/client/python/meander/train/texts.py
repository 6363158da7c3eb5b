"""The lane of a language model in meander-train: its network with an adapter, its batches, and the gradient of its
tokens. All else is as for images."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from ..data.batch import Batch
from ..data.events import EventError
from ..data.textbatch import TextBatch
from ..torch.family import Family
from . import distributed
from .config import Config
from .learner import Learner, _Shared
from .loop import Trainer
from .losses import Steps
from .model import Network
from .rollouts import Rollouts

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_ROUNDING = 1e-4  # of a token's log-prob in float32, at most: see data.batch.Ratio


class TextTrainer(Trainer):
    """A training run of a language model's lane."""

    @staticmethod
    def _network(c: Config) -> Network:
        if wrong := next((n for n in ("shard", "generic", "trust_class", "checkpointing") if getattr(c, n)), ""):
            raise ValueError(f"--{wrong.replace('_', '-')}: set; must not be, {c.model} is a language model")
        if distributed.world() > 1:
            raise ValueError(f"--model: {c.model} is a language model, which one process trains; here are several")
        return TextNetwork(c.model, c.rank, c.alpha, c.layers(), c.seed, distributed.device(c.device),
                           getattr(torch, c.dtype))  # fmt: skip

    def _check_size(self) -> None:
        """There is none."""

    async def _rollouts(self, batch: Batch, counts: bool = True) -> Rollouts:
        return TextRollouts(batch)

    def _check_model(self, batch: Rollouts) -> None:
        """ValueError: the samples are of another model than the one to train, by its vocabulary."""
        own = self.network.networks[""].config.vocab_size
        made = max(int(batch.batch["input_ids"].max()) + 1, 0)
        if made > own:
            raise ValueError(
                f"--model: {self.config.model}: a vocabulary of {own}; the samples have token {made - 1}: must be the "
                "folder that the samplers serve"
            )


class _Model:
    """What Network asks of a family."""

    lora_targets = _PROJECTIONS

    def __init__(self, network: Any, dtype: torch.dtype):
        self.networks, self.dtype, self.device = {"": network}, dtype, torch.device("cpu")


class TextNetwork(Network):
    """A language model of transformers with an adapter."""

    def _load(self, folder: str | Path, dtype: torch.dtype, generic: bool, trust: bool) -> Family:
        from transformers import AutoModelForCausalLM

        try:
            network = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        except (OSError, ValueError) as e:
            raise ValueError(f"--model: {folder}: {e}") from e
        return cast(Family, _Model(network.to(self.device), dtype))

    def log_probs(self, t: dict[str, torch.Tensor]) -> torch.Tensor:
        """Those of the responses' tokens [B, R], of the distribution that they were drawn from."""
        names = ("input_ids", "attention_mask", "position_ids")
        logits = self.networks[""](**{name: t[name] for name in names}).logits.float()
        first = t["prompts"].shape[1]  # the logits in front of a token are its own
        z = logits[:, first - 1 : -1] / t["temperature"][:, None, None].float()
        return z.log_softmax(-1).gather(-1, t["responses"][..., None])[..., 0]


class TextRollouts(Rollouts):
    """The answers of a batch that have advantages: log_probs and advantages are [B, R], of the tokens of responses."""

    def __init__(self, batch: Batch):
        if not batch.size:
            raise EventError(f"batch {batch.name}: no sample has an advantage")
        if not isinstance(batch, TextBatch):
            raise EventError(
                f"batch {batch.name}: it is of images; those of a language model must be of texts: see --stage"
            )
        batch.check_whole("this trainer")
        for s in batch.samples:
            x: Any = s.text.settings if s.text else {}
            if x["temperature"] == 0 or x["top_k"] or x["top_p"] < 1 or x["min_p"] > 0:
                raise EventError(
                    f"batch {batch.name}: its tokens were drawn with filters or greedily, which this trainer does not "
                    "compute: ask for none of temperature 0, top_k, top_p, min_p"
                )
        self.batch, self.name, self.size, self.counts = batch, batch.name, batch.size, True
        self.log_probs, self.advantages = batch["log_probs"].astype(np.float64), batch["advantages"]
        self.rewards, self.mask = batch["rewards"], batch.mask
        self.tokens = batch.torch()
        self.length = self.mask.sum() / self.size
        self.kernels, self.spreads = cast(Any, [None]), {}

    @property
    def steps(self) -> list[int]:
        """All tokens are one step."""
        return [0]

    def pieces(self, rows: list[int], size: int) -> Any:
        """The rows as micro-batches."""
        return (np.array(rows[i : i + size]) for i in range(0, len(rows), size))

    def rows(self, rows: np.ndarray, device: torch.device) -> dict[str, torch.Tensor]:
        """The tensors of some rows."""
        names = ("input_ids", "attention_mask", "position_ids", "prompts", "responses", "temperature")
        return {name: self.tokens[name][rows].to(device) for name in names}


class TextLearner(Learner):
    """The gradient over the tokens of a batch: the mean over tokens of the loss of each."""

    def __init__(self, network: Network, loss: Any, *settings: Any):
        if loss.forward or loss.pairs or loss.trajectory or loss.drift or loss.base:
            raise ValueError(
                f"--loss: {type(loss).__name__}; must be ppo, or your own of single steps: --model is a language model"
            )
        super().__init__(network, loss, *settings)

    def _add(self, shared: _Shared, rows: np.ndarray, count: float) -> None:
        batch, network = cast(TextRollouts, shared.batch), cast(TextNetwork, self.network)
        mask = torch.as_tensor(batch.mask[rows], device=network.device)

        def tokens(x: np.ndarray) -> torch.Tensor:
            return torch.as_tensor(x[rows], dtype=torch.float64, device=network.device)[mask][:, None]

        t = batch.rows(rows, network.device)
        now = network.log_probs(t).double()[mask][:, None]
        old, one = tokens(shared.old), torch.ones(1, dtype=torch.float64, device=network.device)
        each = np.broadcast_to(batch.rewards[:, None], batch.mask.shape)
        given = self.loss(
            Steps(now, old, tokens(batch.advantages), tokens(shared.weights), one, one, tokens(each)[:, 0])
        )
        share = count * batch.length
        total = shared.tally.told(given, now.shape).sum() / share
        if self.beta or shared.compare:
            with torch.no_grad(), network.base():
                base = network.log_probs(t).double()[mask][:, None]
            apart = (base - now).exp() - (base - now) - 1  # of one token, its mean is KL(now || base)
            shared.tally.kl[0] += torch.tensor([float(apart.detach().sum()), apart.numel()], dtype=torch.float64)
            total = total + self.beta * apart.sum() / share
        shared.tally.loss += float(total.detach())
        self._backward(total)
        self._tally(shared, now.detach(), tokens(batch.log_probs))
        weights = shared.weights[rows]
        shared.tally.weight += torch.tensor([weights.sum(), weights.size], dtype=torch.float64)

    def _tally(self, shared: _Shared, now: torch.Tensor, made: torch.Tensor) -> None:
        """How far the network is from what made the samples."""
        off, ratio, tally = (now - made).abs(), (now - made).exp(), shared.tally
        tally.ratio += torch.tensor([float(ratio.sum()), ratio.numel()], dtype=torch.float64)
        tally.ratio_max = torch.maximum(tally.ratio_max, ratio.max().cpu())
        if shared.fresh:
            tally.off[0] = max(float(tally.off[0]), float(off.max()))
            kind = self.network.family.dtype
            tally.bound[0] = _ROUNDING * torch.finfo(kind).eps / torch.finfo(torch.float32).eps
        else:
            tally.moved += torch.tensor([float(off.sum()), off.numel()], dtype=torch.float64)

    @torch.no_grad()
    def score(
        self, batch: Rollouts, rows: list[int], with_means: bool = True
    ) -> tuple[np.ndarray, torch.Tensor | None]:  # fmt: skip
        """Returns the log-probs [B, R] of the rows under the current network, NaN for other rows."""
        of, network = cast(TextRollouts, batch), cast(TextNetwork, self.network)
        out = np.full(batch.log_probs.shape, np.nan)
        for piece in of.pieces(rows, self.micro_batch):
            found = network.log_probs(of.rows(piece, network.device)).double().cpu().numpy()
            out[piece] = np.where(of.mask[piece], found, 0)
        return out, None


TextTrainer._learner = TextLearner
