"""Training: Muon on the matrices, AdamW on the rest, an average of the weights."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM

from . import problems
from .tokens import ROWS, Tokens

WIDTH, LAYERS, INTERMEDIATE, HEADS, KV_HEADS = 128, 4, 384, 4, 2
PHASES = (  # steps, learning rate, warm-up, decay of the average, share of retry batches, and from which step on
    (1100, 4e-3, 100, 0.995, 0.3, 440),
    (420, 2e-3, 20, 0.98, 0.7, 0),
)
BATCH = {"plain": 128, "retry": 64}
SAVES = (700, 900, 1100, 1300, 1520)
MISTAKES_EVERY, MISTAKES_KEPT, MISTAKES_OF = 40, 2000, 256


def config() -> Qwen2Config:
    return Qwen2Config(
        vocab_size=ROWS, hidden_size=WIDTH, intermediate_size=INTERMEDIATE, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS, max_position_embeddings=512, rms_norm_eps=1e-6, tie_word_embeddings=True,
        initializer_range=0.05,
    )


class Muon:
    """Momentum steps made orthogonal by Newton-Schulz, matrices of one shape together."""

    def __init__(self, matrices, momentum=0.95, decay=0.01):
        shapes: dict = {}
        for p in matrices:
            shapes.setdefault(tuple(p.shape), []).append(p)
        self.groups = list(shapes.values())
        self.velocity = [torch.zeros(len(g), *g[0].shape) for g in self.groups]
        self.momentum, self.decay = momentum, decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group, velocity in zip(self.groups, self.velocity):
            g = torch.stack([p.grad for p in group])
            velocity.mul_(self.momentum).add_(g)
            x = g.add(velocity, alpha=self.momentum)
            tall = x.shape[1] > x.shape[2]
            if tall:
                x = x.mT
            x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
            for _ in range(5):
                s = x @ x.mT
                x = 3.4445 * x + (-4.775 * s + 2.0315 * s @ s) @ x
            if tall:
                x = x.mT
            scale = 0.2 * math.sqrt(max(x.shape[1:]))
            for p, u in zip(group, x):
                p.mul_(1 - lr * self.decay).add_(u, alpha=-lr * scale)


def padded(rows: list[list[int]], pad: int) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([r + [pad] * (longest - len(r)) for r in rows])


@torch.no_grad()
def sample(
    model, tokens: Tokens, prompts: list[list[int]], temperature: float, longest: int = 8
) -> list[tuple[str, bool]]:
    """Answers, and whether they ended by themselves; temperature 0 takes the likeliest token."""
    rows, done = [list(p) for p in prompts], [False] * len(prompts)
    for _ in range(longest):
        live = [i for i, d in enumerate(done) if not d]
        if not live:
            break
        ids = padded([rows[i] for i in live], tokens.pad)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        last = hidden[torch.arange(len(live)), torch.tensor([len(rows[i]) - 1 for i in live])]
        logits = model.lm_head(last)
        picks = logits.argmax(-1) if temperature == 0 else torch.multinomial(
            F.softmax(logits / temperature, -1), 1
        )[:, 0]
        for i, token in zip(live, picks.tolist()):
            rows[i].append(token)
            done[i] = token == tokens.end
    return [(tokens.text(r[len(p) :]), d) for r, p, d in zip(rows, prompts, done)]


def answers(model, tokens, ps, temperature) -> list[int | None]:
    out = []
    for i in range(0, len(ps), 500):
        prompts = [tokens.prompt([("user", p.text)]) for p in ps[i : i + 500]]
        out += [problems.parse(text) if ended else None for text, ended in sample(model, tokens, prompts, temperature)]
    return out


def rounded(average: dict) -> Qwen2ForCausalLM:
    """The model that would be saved: weights rounded to bf16, arithmetic in float32."""
    model = Qwen2ForCausalLM(config()).eval()
    model.load_state_dict({k: v.bfloat16().float() for k, v in average.items()}, strict=False)
    model.tie_weights()
    return model


class Run:
    """All that a step changes, and what a resumed run begins with."""

    def __init__(self, seed: int, tokens: Tokens):
        torch.manual_seed(seed)
        self.tokens, self.random = tokens, random.Random(seed)
        self.model = Qwen2ForCausalLM(config()).train()
        self.step, self.mistakes = 0, []
        self.begin_phase()

    def begin_phase(self) -> None:
        named = dict(self.model.named_parameters())
        matrices = [p for n, p in named.items() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in named.items() if p.ndim != 2 or "embed" in n]
        self.muon = Muon(matrices)
        self.adam = torch.optim.AdamW(others, lr=0.0, betas=(0.9, 0.99), weight_decay=0.0)
        self.average = {n: p.detach().clone() for n, p in named.items()}

    def state(self) -> dict:
        return {"step": self.step, "mistakes": self.mistakes, "random": self.random.getstate(), "torch": torch.get_rng_state(),
                "model": self.model.state_dict(), "muon": self.muon.velocity, "adam": self.adam.state_dict(),
                "average": self.average}

    def load(self, state: dict) -> None:
        self.step, self.mistakes, self.average = state["step"], state["mistakes"], state["average"]
        self.random.setstate(state["random"])
        torch.set_rng_state(state["torch"])
        self.model.load_state_dict(state["model"])
        self.muon.velocity = state["muon"]
        self.adam.load_state_dict(state["adam"])

    def loss(self, kind: str) -> torch.Tensor:
        make = problems.plain if kind == "plain" else lambda r: problems.retry(r, self.mistakes)
        rows, places, targets = [], [], []
        for i in range(BATCH[kind]):
            messages, answer = make(self.random)
            prompt, target = self.tokens.prompt(messages), self.tokens.answer(answer)
            rows.append(prompt + target[:-1])
            places += [(i, len(prompt) - 1 + j) for j in range(len(target))]
            targets += target
        hidden = self.model.model(input_ids=padded(rows, self.tokens.pad), use_cache=False).last_hidden_state
        at = torch.tensor(places)
        return F.cross_entropy(self.model.lm_head(hidden[at[:, 0], at[:, 1]]), torch.tensor(targets))

    def advance(self) -> float:
        """One step; returns its loss."""
        first, n = 0, self.step
        for steps, rate, warm, decay, share, since in PHASES:
            if n < first + steps:
                break
            first += steps
        n -= first
        if n == 0 and first > 0:
            self.begin_phase()
        lr = rate * min(1, (n + 1) / warm) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * n / steps)))
        if self.step % MISTAKES_EVERY == 0 and self.step >= 400:
            self.collect()
        loss = self.loss("retry" if n >= since and self.random.random() < share else "plain")
        self.model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.muon.step(lr)
        for g in self.adam.param_groups:
            g["lr"] = lr
        self.adam.step()
        keep = min(decay, (1 + n) / (10 + n))
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                self.average[name].lerp_(p, 1 - keep)
        self.step += 1
        return loss.item()

    def collect(self) -> None:
        """Adds wrong answers of the present weights to the mistakes that retries begin with."""
        ps = [problems.draw(self.random) for _ in range(MISTAKES_OF)]
        self.model.eval()
        given = answers(self.model, self.tokens, ps, 1.0)
        self.model.train()
        self.mistakes += [(p, a) for p, a in zip(ps, given) if a is not None and a != p.truth]
        self.mistakes = self.mistakes[-MISTAKES_KEPT:]


def accuracy(model, tokens, seed: int, n: int = 300) -> tuple[float, float]:
    """The share of right answers: greedy, and at temperature 1."""
    r = random.Random(f"accuracy {seed}")
    ps = [problems.draw(r) for _ in range(n)]
    return tuple(sum(a == p.truth for p, a in zip(ps, answers(model, tokens, ps, t))) / n for t in (0.0, 1.0))


def train(work: Path, folder: Path, seed: int, resume: bool, log) -> None:
    run = Run(seed, Tokens(folder))
    if resume:
        run.load(torch.load(work / "state.pt", weights_only=False))
        log(f"resumed at step {run.step}")
    began, losses = time.monotonic(), []
    while run.step < sum(p[0] for p in PHASES):
        losses.append(run.advance())
        if run.step % 50 == 0:
            log(json.dumps({"step": run.step, "seconds": round(time.monotonic() - began), "loss": round(sum(losses) / len(losses), 4),
                            "mistakes": len(run.mistakes)}))
            losses = []
            torch.save(run.state(), work / "state.pt")
        if run.step in SAVES:
            torch.save(run.average, work / f"average-{run.step}.pt")
            with torch.random.fork_rng():
                greedy, drawn = accuracy(rounded(run.average), run.tokens, seed)
            log(json.dumps({"step": run.step, "greedy": round(greedy, 3), "t1": round(drawn, 3)}))
