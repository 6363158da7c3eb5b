"""The settings of a training run: each is a field, a flag of meander-train and a line of its config.json."""

from __future__ import annotations

import argparse
import dataclasses
import math
import random
import secrets
import typing
from pathlib import Path
from typing import Any

from ..plugs.track import Sink, sink
from ..data.fields import Rollout
from ..data.events import TRANSITIONS


def _setting(default: Any, help: str, section: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "section": section})


DTYPES = ("float32", "bfloat16")
"""dtypes of the frozen network, by their names in torch."""
MAX_SUBSTEPS = 100
"""The most steps that a teacher takes within one of the student's, as services allow."""
SOLVERS: tuple[str, ...] = typing.get_args(typing.get_type_hints(Rollout)["solver"])
"""What integrates ode steps."""

_PIPE, _ROLL, _LOSS = "pipeline", "rollouts", "loss and optimizer"
_RUN, _EVAL, _STOP = "training", "evaluation", "alarms"


@dataclasses.dataclass
class Config:
    """Defaults are those that the model signs learns with on a processor."""

    nats: str = _setting("nats://127.0.0.1:4222", "the server of the pipeline", _PIPE)
    token: str = _setting("", "its token", _PIPE)
    credentials: str = _setting("", "file of credentials for it, as of meander auth", _PIPE)
    ca: str = _setting("", "PEM file of the authority that signed its certificate", _PIPE)
    context: str = _setting("", "context of the nats command, which has what is not given", _PIPE)
    run: str = _setting("learn", "run to publish to and read from", _PIPE)
    trainer: str = _setting("trainer", "name of this trainer: of its cursor, and of who pushes policies", _PIPE)
    follow: bool = _setting(False, "only read the run that another trainer publishes, and push nothing", _PIPE)
    stage: str = _setting(
        "", "of samples with several stages, the one to train: --lane and --model are its own. Without --prompts, "
        "which one trainer of the run has, batches are those that another publishes", _PIPE
    )
    beside: str = _setting(
        "", "with --prompts: names of other stages whose trainers push as often, with commas: a batch waits for the "
        "update before it of each. With --stage a batch that is left out counts as an update", _PIPE
    )
    lane: str = _setting("", "lane to train; default the only one there is", _PIPE)
    tenant: str = _setting(
        "", "train weights of one's own on the lane, under this name: several trainers of a lane have one each, with a "
        "--run each; default main, the lane's own weights", _PIPE
    )

    model: str = _setting(
        "deploy/models/signs", "folder in the diffusers layout or of a language model, or ORG/NAME[@REVISION] of the "
        "Hugging Face Hub: the checkpoint that the samplers serve", _ROLL,
    )
    generic: bool = _setting(
        False, "the samplers have --generic: compute a whole pipeline, as for a class that has no family", _ROLL
    )
    trust_class: bool = _setting(False, "the samplers have --trust-class: take a class that is not tested", _ROLL)
    prompts: str = _setting(
        "", "file of prompts to train on: a text a line, or JSON lines with fields of a prompt", _ROLL
    )
    groups: int = _setting(8, "prompts of a batch", _ROLL)
    group_size: int = _setting(16, "samples of a prompt", _ROLL)
    height: int = _setting(0, "of the samples, in pixels; 0: that of the model", _ROLL)
    width: int = _setting(0, "of the samples, in pixels; 0: that of the model", _ROLL)
    frames: int = _setting(0, "frames of a video; 0: those of the model", _ROLL)
    steps: int = _setting(4, "denoising steps", _ROLL)
    sde_steps: str = _setting("0-1", "the stochastic ones, which are trained: as 0-1 or 0,2", _ROLL)
    sde_window: int = _setting(
        0, "only so many of them at a time, another window for each update (MixGRPO); 0: all", _ROLL
    )
    sde_window_order: str = _setting(
        "random",
        "where the window is: random, or progressive, from the first to the last of --sde-steps, where it stays", _ROLL
    )
    sde_shift: int = _setting(1, "updates after which a progressive window moves on, by its length", _ROLL)
    sde_type: str = _setting(
        "sde", "their transition: sde, cps, dance_sde or ddim; or ode: no step is stochastic, and of samples the last "
        "latents alone are stored, which --loss diffusion_nft trains on", _ROLL
    )
    noise_level: float = _setting(0.9, "their noise", _ROLL)
    solver: str = _setting("euler", "what integrates the other steps: euler, heun, unipc, dpm or rk4", _ROLL)
    initial_noise: str = _setting(
        "", "shared by the samples of a prompt, or per_sample; default shared, of --sde-type ode per_sample", _ROLL
    )
    latents_dtype: str = _setting(
        "", "dtype of the stored states, F32, F16 or BF16; none: BF16 of a model that computes in it, else F32", _ROLL
    )
    guidance: float = _setting(
        1.0, "true_cfg_scale, of a whole pipeline its argument of guidance; 1 for none, 0 for the model's (the "
        "guidance input of FLUX.1 is a field of a prompt)", _ROLL
    )
    guidance_2: float = _setting(
        0.0, "true_cfg_scale_2, of the second network of a model that has two; 0: --guidance", _ROLL
    )
    reward: str = _setting("glyph", "reward functions to train on, as glyph or glyph=1,diversity=0.2", _ROLL)
    hold_diversity: float = _setting(
        0.9,
        "diversity is rewarded, too, while an evaluation finds less than this share of the start's: 20 times what is "
        "missing; 0: never",
        _ROLL
    )
    estimator: str = _setting("flow_grpo", "what turns rewards into advantages", _ROLL)
    ahead: int = _setting(
        0, "batches published before the weights that they shall be followed by: 0 trains on-policy", _ROLL
    )

    loss: str = _setting(
        "ppo",
        "ppo, grpo_guard, gspo, flow_dppo, dpo, diffusion_nft, diffusion_opd, or your own as module:name (see "
        "meander.train.losses)",
        _LOSS
    )
    loss_options: str = _setting(
        "",
        "its other settings, as mix_beta=0.1,adaptive_weight_min=1e-4; an unknown one is refused with all there are",
        _LOSS
    )
    clip: float = _setting(
        1e-4, "of ppo and grpo_guard: how far ratios count; log-probs are means over elements, so about 0.2 / elements",
        _LOSS
    )
    adv_clip_max: float = _setting(
        5.0, "of ppo, grpo_guard and diffusion_nft: advantages are clamped to plus or minus this", _LOSS
    )
    beta: float = _setting(
        0.005,
        "weight of the divergence from the base, beside any loss; of diffusion_nft, of the mean square distance of "
        "velocities",
        _LOSS
    )
    teacher: str = _setting("", "of diffusion_opd: the name of the `meander teacher` to learn from", _LOSS)
    teacher_substeps: int = _setting(
        5, "its velocities are the mean ones of so many steps inside each trained step; 1: those at its start", _LOSS
    )
    is_threshold: float = _setting(2.0, "importance weights of older batches are cut at this (--ahead)", _LOSS)
    targets: str = _setting(
        "", "linear layers that get the LoRA, by the ends of their names, as to_q,to_v; default those of attention",
        _LOSS
    )
    rank: int = _setting(16, "rank of the LoRA", _LOSS)
    alpha: int = _setting(16, "its alpha: it is scaled by alpha / rank", _LOSS)
    lr: float = _setting(2e-3, "learning rate", _LOSS)
    lr_schedule: str = _setting(
        "constant", "of the learning rate: constant, or linear or cosine, which end near 0 at --updates", _LOSS
    )
    warmup: int = _setting(0, "updates in which it rises to --lr first", _LOSS)
    adam_beta2: float = _setting(0.99, "AdamW's second beta", _LOSS)
    weight_decay: float = _setting(0.0, "AdamW's", _LOSS)
    max_grad_norm: float = _setting(1.0, "longer gradients are cut to this", _LOSS)
    minibatches: int = _setting(1, "optimizer steps of a batch", _LOSS)
    accumulate: int = _setting(
        1, "batches of an update: their gradients are added before the one step of the optimizer", _LOSS
    )
    micro_batch: int = _setting(64, "samples of one forward pass; gradients of several are accumulated", _LOSS)
    ema: float = _setting(0.9, "keep a running average of the adapter with this decay, and evaluate it; 0: none", _LOSS)
    dtype: str = _setting("float32", f"of the frozen network: {', '.join(DTYPES)}", _LOSS)
    device: str = _setting("auto", "auto, cpu, cuda or cuda:N", _LOSS)
    checkpointing: bool = _setting(False, "recompute activations in the backward pass", _LOSS)
    shard: bool = _setting(
        False,
        "for a network that one GPU has no room for: each process keeps a part of weights, gradients and optimizer "
        "state, and gathers one block at a time to compute it (FSDP2); needs several processes, as of torchrun, and "
        "host memory for each of them to load the network",
        _LOSS
    )

    updates: int = _setting(96, "policy updates", _RUN)
    seed: int = _setting(2, "of prompts, noise and the adapter", _RUN)
    threads: int = _setting(1, "of torch on a CPU", _RUN)
    out: str = _setting("meander-out/learn", "folder of checkpoints, logs, the curve and the sheets", _RUN)
    checkpoint_every: int = _setting(
        1, "updates between checkpoints; what was read since the last is read again after a crash", _RUN
    )
    cache: str = _setting("", "folder that keeps the steps that were read, for restarts and other processes", _RUN)
    cache_bytes: int = _setting(64 << 30, "most that it holds; what was used longest ago goes first", _RUN)
    free_read_steps: bool = _setting(
        False, "let the server free the steps of a batch once it is learned from: a long run takes the space of two "
        "batches, and cannot be verified or replayed", _RUN
    )
    keep_states: int = _setting(
        16 << 20, "bytes: what an update begins with (the adapter, the optimizer's moments, the running average) is "
        "stored with it where it is at most so large, so that --replay makes the update again to the bit; 0: never",
        _RUN
    )
    patience: float = _setting(600.0, "seconds to wait for a batch, or a sampler, before giving up", _RUN)
    tensorboard: bool = _setting(True, "log to TensorBoard too, where it is installed", _RUN)
    track: str = _setting(
        "", "log there, too, as RUN-TRAINER: wandb[=PROJECT], trackio[=PROJECT] or several of them with commas", _RUN
    )

    held_out: str = _setting("", "file of prompts to validate on: they choose the adapter; none: no evaluation", _EVAL)
    test: str = _setting("", "file of other prompts to test on, once, at the end: base, kept adapter and last", _EVAL)
    test_steps: int = _setting(20, "denoising steps of one more test of the base; 0: none", _EVAL)
    eval_every: int = _setting(4, "updates between evaluations", _EVAL)
    eval_samples: int = _setting(2, "samples of a held-out prompt", _EVAL)
    eval_steps: int = _setting(0, "their denoising steps, all ode; default --steps", _EVAL)
    eval_seed: int = _setting(100, "their seed, the same each time", _EVAL)
    gold: str = _setting("ocr", "reward function that is never trained on: the best adapter is the best by it", _EVAL)
    variety: int = _setting(
        12, "held-out prompts sampled as in training, in groups of 8, to measure diversity; 0: none", _EVAL)
    sheet: int = _setting(24, "held-out samples on the contact sheets before and after; 0: no sheets", _EVAL)

    stop: bool = _setting(True, "stop at an alarm of hacking or collapse; the best adapter is kept in any case", _STOP)
    ratio_factor: float = _setting(
        1.0, "most |log_prob - old| of the first pass: this times what roundings of --dtype explain at the step", _STOP
    )
    gold_drop: float = _setting(0.05, "hacking: the gold reader is this far below its best, twice", _STOP)
    diversity_floor: float = _setting(0.8, "hacking: diversity below this share of the start's", _STOP)
    kl_limit: float = _setting(3e-3, "hacking: divergence from the base beyond this", _STOP)
    reward_drop: float = _setting(
        0.15, "collapse: the mean reward of five updates is this far below the best five", _STOP
    )

    def __post_init__(self) -> None:
        positive = (
            "groups", "group_size", "steps", "rank", "lr", "minibatches", "micro_batch", "updates", "checkpoint_every",
            "patience", "eval_every", "eval_samples", "sde_shift", "accumulate", "alpha", "threads", "max_grad_norm",
            "clip", "adv_clip_max", "is_threshold", "noise_level", "cache_bytes"
        )
        self.initial_noise = self.initial_noise or ("per_sample" if self.ode else "shared")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and math.isnan(value):  # it would switch off what is compared with it
                raise ValueError(f"--{flag(field.name)}: {value}; must be a number")
            if field.name in positive and not value > 0:
                raise ValueError(f"--{flag(field.name)}: {value}; must be above 0")
        for name in (
            "beta", "weight_decay", "ratio_factor", "gold_drop", "diversity_floor", "kl_limit", "reward_drop",
            "test_steps", "ahead", "variety", "sheet", "keep_states",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise ValueError(f"--{flag(name)}: {getattr(self, name)}; must be at least 0")
        if not 0 <= self.adam_beta2 < 1:
            raise ValueError(f"--adam-beta2: {self.adam_beta2}; must be at least 0 and below 1")
        if not 1 <= self.teacher_substeps <= MAX_SUBSTEPS:
            raise ValueError(f"--teacher-substeps: {self.teacher_substeps}; must be 1 to {MAX_SUBSTEPS}")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype: {self.dtype!r}; must be one of {', '.join(DTYPES)}")
        if self.test and not self.held_out:
            raise ValueError("--test: needs --held-out, which chooses the adapter to test")
        if not 0 <= self.hold_diversity <= 1:
            raise ValueError(f"--hold-diversity: {self.hold_diversity}; must be from 0 to 1")
        if not 0 <= self.ema < 1:
            raise ValueError(f"--ema: {self.ema}; must be at least 0 and below 1")
        if self.minibatches > self.groups:
            raise ValueError(
                f"--minibatches: {self.minibatches}; must be at most the {self.groups} groups of a batch: groups stay "
                f"whole"
            )
        for name, of in (
            ("lr_schedule", ("constant", "linear", "cosine")), ("sde_window_order", ("random", "progressive")),
            ("sde_type", tuple(TRANSITIONS)), ("solver", SOLVERS),
        ("initial_noise", ("shared", "per_sample")),
        ("latents_dtype", ("", "F32", "F16", "BF16")),
        ):  # fmt: skip
            if getattr(self, name) not in of:
                raise ValueError(
                    f"--{flag(name)}: {getattr(self, name)!r}; must be {', '.join(of[:-1])} or {of[-1]}"
                )
        if self.ode:
            self._check_ode()
        if self.free_read_steps and (self.follow or self.checkpoint_every > 1 or self.accumulate > 1):
            raise ValueError(
                "--free-read-steps: needs --checkpoint-every 1 and --accumulate 1, as what was read since a checkpoint "
                "is read again after a crash; and no --follow, whose prompts are another trainer's"
            )
        for name in ("height", "width", "frames", "guidance", "guidance_2"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{flag(name)}: {getattr(self, name)}; must be above 0, or 0 for the default")
        if not 0 <= self.warmup < self.updates:
            raise ValueError(f"--warmup: {self.warmup}; must be at least 0 and below the {self.updates} updates")
        if self.sde_window < 0 or self.sde_window and self.sde_window > len(self.trained):
            raise ValueError(
                f"--sde-window: {self.sde_window}; must be 1 to {len(self.trained)} of --sde-steps {self.sde_steps}, "
                f"or 0 for all"
            )
        if self.sde_shift > 1 and not (self.sde_window and self.sde_window_order == "progressive"):
            raise ValueError("--sde-shift: needs --sde-window and --sde-window-order progressive")
        if self.accumulate > 1 and self.minibatches > 1:
            raise ValueError(
                "--accumulate: makes one step of several batches, --minibatches several steps of one; must not be both"
            )
        if self.stage and self.trainer == "trainer":
            self.trainer = self.stage
        if self.beside and not (self.stage and self.prompts):
            raise ValueError("--beside: needs --stage and --prompts: who publishes waits for the others")
        if self.checkpoint_every > 1 and self.stage and (self.beside or not self.prompts):
            raise ValueError(
                f"--checkpoint-every: {self.checkpoint_every}; must be 1 beside other trainers: they go on from an "
                f"update that a crash must not take back"
            )
        if (self.stage or self.texts) and (self.held_out or self.test):
            raise ValueError(
                "--held-out: measures images of one lane; with --stage or a language model it must be empty: publish "
                "validation prompts, and read their batch"
            )
        if self.stage and self.ahead:
            raise ValueError(f"--ahead: {self.ahead}; must be 0 with --stage")
        if not self.follow and not self.prompts and not self.stage:
            raise ValueError("--prompts: empty; must name a file of prompts, or --follow the run of another trainer")

    def _check_ode(self) -> None:
        """ValueError: a setting has no use where no step is stochastic."""
        if self.initial_noise == "shared":
            raise ValueError("--initial-noise: shared; must be per_sample with --sde-type ode: samples would be equal")
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        for name in ("sde_steps", "sde_window", "sde_window_order", "noise_level", "kl_limit"):
            if (value := getattr(self, name)) != defaults[name]:
                raise ValueError(f"--{flag(name)}: {value}; has no use with --sde-type ode: no step is stochastic")

    @property
    def ode(self) -> bool:
        """Whether no step is stochastic."""
        return not TRANSITIONS.get(self.sde_type, {"stochastic": True}).get("stochastic")

    @property
    def texts(self) -> bool:
        """Whether the model is a language model, by its folder."""
        folder = Path(self.model)
        return (folder / "config.json").exists() and not (folder / "model_index.json").exists()

    @property
    def others(self) -> list[str]:
        """The names in beside."""
        return [name.strip() for name in filter(None, self.beside.split(","))]

    @property
    def trained(self) -> list[int]:
        """The indices of sde_steps; none of ode."""
        out: set[int] = set()
        if self.ode:
            return []
        for part in self.sde_steps.split(","):
            first, _, last = part.partition("-")
            if not first.isdigit() or last and not last.isdigit():
                raise ValueError(f"--sde-steps: {self.sde_steps!r}; must be steps such as 0-1 or 0,2")
            out |= set(range(int(first), int(last or first) + 1))
        if not out or max(out) >= self.steps:
            raise ValueError(f"--sde-steps: {self.sde_steps!r}; must be steps from 0 to {self.steps - 1}")
        return sorted(out)

    def window(self, batch: int) -> list[int]:
        """The steps of trained that are stochastic in a batch (MixGRPO, arXiv 2507.21802, as verl-omni has it)."""
        steps = self.trained
        if not self.sde_window:
            return steps
        last = len(steps) - self.sde_window
        update = batch // self.accumulate
        if self.sde_window_order == "random":
            start = random.Random(f"{self.seed} window {update}").randint(0, last)
        else:
            start = min(update // self.sde_shift * self.sde_window, last)
        return steps[start : start + self.sde_window]

    def learning_rate(self, update: int) -> float:
        """The learning rate of an update, counted from 0: of nothing else, so that a run that goes on has it, too."""
        if update < self.warmup:
            return self.lr * (update + 1) / self.warmup
        done = (update - self.warmup) / (self.updates - self.warmup)
        return self.lr * {
            "constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2
        }[self.lr_schedule]

    def trackers(self) -> list[Sink]:
        """The sinks of track. ValueError: there is no such one, or its package is missing. A run that goes on in out
        has the name that it had; another has another one."""
        named = [to.strip() for to in filter(None, self.track.split(","))]
        if not named:
            return []
        file = Path(self.out) / "track-name"
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{self.run}-{self.trainer}-{secrets.token_hex(3)}")
        return [sink(to, file.read_text(), "--track") for to in named]

    def layers(self) -> tuple[str, ...]:
        """The names in targets."""
        return tuple(name for part in self.targets.split(",") if (name := part.strip()))

    def options(self) -> dict[str, float]:
        """The settings in loss_options."""
        out = {}
        for part in filter(None, self.loss_options.split(",")):
            name, _, value = part.strip().partition("=")
            try:
                out[name] = float(value)
            except ValueError:
                raise ValueError(f"--loss-options: {part!r}; must be NAME=NUMBER") from None
        return out

    def rewards(self, diversity: float = 0.0) -> list[dict[str, Any]]:
        """Those of training, with diversity beside them: to look at, or with a weight."""
        out = weighted(self.reward)
        if all(r["name"] != "diversity" for r in out) and self.group_size > 1:
            out.append({"name": "diversity", "weight": diversity})
        return out

    @property
    def reader(self) -> str:
        """The first reward function: the one whose rate is the curve."""
        return weighted(self.reward)[0]["name"]


# For help(Config) and the reference.
Config.__doc__ = "\n".join(
    [f"{Config.__doc__}\n", *(f"{f.name}: {f.metadata['help']}." for f in dataclasses.fields(Config))]
)


def weighted(text: str) -> list[dict[str, Any]]:
    """Reward functions with weights of a text such as glyph=1,diversity=0.2. ValueError: it is no such text."""
    out = []
    for part in text.split(","):
        name, _, weight = part.strip().partition("=")
        try:
            out.append({"name": name, "weight": float(weight or 1)})
        except ValueError:
            raise ValueError(f"--reward: {part!r}; must be NAME or NAME=WEIGHT") from None
    return out


def flag(name: str) -> str:
    """The name of the flag of a field."""
    return name.replace("_", "-")


def decisive() -> list[str]:
    """The names of the settings that decide what an update makes of a batch."""
    names = ("generic", "trust_class", "estimator", "groups", "group_size", "model", "stage")
    return [
        f.name for f in dataclasses.fields(Config)
        if f.metadata["section"] == _LOSS and f.name != "device" or f.name in (*names, "seed", "threads")
    ]


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds a flag for each setting, in groups."""
    sections: dict[str, argparse._ArgumentGroup] = {}
    kinds = typing.get_type_hints(Config)
    for f in dataclasses.fields(Config):
        section = f.metadata["section"]
        group = sections.setdefault(section, sections.get(section) or parser.add_argument_group(section))
        kind = kinds[f.name]
        text = f.metadata["help"].replace("%", "%%")
        if kind is bool:
            group.add_argument(f"--{flag(f.name)}", action=argparse.BooleanOptionalAction, default=f.default, help=text)
            continue
        shown = f" (default {f.default})" if f.default != "" else ""
        # torchrun takes --run for a prefix of its own --run-path.
        names = [f"--{flag(f.name)}"] + (["--run-name"] if f.name == "run" else [])
        group.add_argument(*names, dest=f.name, type=kind, default=f.default, metavar=kind.__name__, help=text + shown)
