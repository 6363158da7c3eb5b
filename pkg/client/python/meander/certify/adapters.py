"""The losses and steps of trainers, as functions of the inputs of the vectors. Each shows what an adapter is."""

from __future__ import annotations

import collections
import importlib
import pathlib
import runpy
import types
from collections.abc import Callable, Iterator
from typing import Any

Judged = tuple[str, str, Callable[..., Any]]
"""A name, the title of a set of vectors, and the function that it is judged by."""


def trl() -> Iterator[Judged]:
    """GRPOTrainer's loss of tokens. Made for TRL 1.16."""
    import torch
    from trl import GRPOTrainer

    kinds = {"sample_mean": "grpo", "token_mean": "bnpo", "fixed_length": "dr_grpo"}

    def grpo(
        log_prob: Any, old: Any, reference: Any, advantages: Any, mask: Any, clip_low: float, clip_high: float,
        beta: float, reduce: str,
    ) -> Any:
        alone = types.SimpleNamespace(
            gather=lambda x: x, gather_for_metrics=lambda x: x, reduce=lambda x, **_: x, num_processes=1
        )
        self = types.SimpleNamespace(
            _get_per_token_logps_and_entropies=lambda *_, **__: (log_prob, torch.zeros_like(log_prob), None),
            loss_type=kinds[reduce], beta=beta, epsilon_low=clip_low, epsilon_high=clip_high,
            max_completion_length=log_prob.size(1), importance_sampling_level="token", aux_loss_enabled=False,
            top_entropy_quantile=1.0, off_policy_mask_threshold=None, use_vllm=False, _entropy_bonus_enabled=False,
            args=types.SimpleNamespace(delta=None, use_bias_correction_kl=False), accelerator=alone,
            model=types.SimpleNamespace(training=False), _metrics={"eval": collections.defaultdict(list)},
        )
        ids = torch.zeros_like(mask, dtype=torch.long)
        return GRPOTrainer._compute_loss(self, None, {
            "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask,
            "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": reference,
        })  # fmt: skip

    yield "trl GRPOTrainer", "losses/grpo_tokens", grpo


def verl() -> Iterator[Judged]:
    """verl's loss of tokens and advantages of groups. Made for verl 0.9.1."""
    import numpy as np
    import torch
    from verl.trainer.ppo import core_algos
    from verl.workers.config import ActorConfig

    kinds = {
        "sample_mean": "seq-mean-token-mean", "token_mean": "token-mean", "fixed_length": "seq-mean-token-sum-norm",
    }

    def vanilla(
        log_prob: Any, old: Any, reference: Any, advantages: Any, mask: Any, clip_low: float, clip_high: float,
        beta: float, reduce: str,
    ) -> Any:
        config = ActorConfig(
            strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, clip_ratio_low=clip_low,
            clip_ratio_high=clip_high, clip_ratio_c=1e9, loss_agg_mode=kinds[reduce],
        )
        loss = core_algos.compute_policy_loss_vanilla(
            old, log_prob, advantages[:, None].expand_as(log_prob), mask, kinds[reduce], config
        )[0]
        kl = core_algos.kl_penalty(log_prob, reference, "low_var_kl")
        return loss + beta * core_algos.agg_loss(kl, mask, kinds[reduce])

    def grpo(rewards: Any, std: str, epsilon: float) -> Any:
        flat = rewards.reshape(-1, 1)
        groups, scales = np.repeat(np.arange(rewards.shape[0]), rewards.shape[1]), {"group": True, "none": False}
        if std not in scales:
            raise NotImplementedError(f"std {std}")
        found = core_algos.compute_grpo_outcome_advantage(flat, torch.ones_like(flat), groups, epsilon, scales[std])
        return found[0].reshape(rewards.shape)

    yield "verl vanilla", "losses/grpo_tokens", vanilla
    yield "verl grpo", "advantages/flow_grpo", grpo


def meander() -> Iterator[Judged]:
    """The losses of meander-train."""
    import torch

    from ..train import losses
    from ..train.objective import Kernel

    def steps(name: str, *settings: str) -> Callable[..., Any]:
        def of(
            log_prob: Any, old: Any = None, advantages: Any = None, weights: Any = None, mean: Any = None,
            old_mean: Any = None, noise_std: float = 1.0, step: float = 1.0, base: Any = None, **options: float,
        ) -> Any:
            pairs, wide = base is not None, log_prob.dim() > 1 and base is None
            rows = log_prob if wide else log_prob.reshape(-1, 1)
            one = torch.ones_like(rows)

            def column(x: Any) -> Any:
                return one if x is None else x.reshape(len(rows), -1).expand_as(rows)

            drift = None if mean is None else ((mean - old_mean) ** 2).mean(dim=1, keepdim=True) / (2 * noise_std**2)
            out = losses.make(name, **{k: options[k] for k in settings})(losses.Steps(
                rows, column(old), column(advantages), column(weights), one[:1, 0] * noise_std, one[:1, 0] * step,
                one[:, 0], drift, column(base) if pairs else None,
            ))  # fmt: skip
            return out[0].mean()

        return of

    yield "meander ppo", "losses/ppo", steps("ppo", "clip", "adv_clip_max")
    yield "meander grpo_guard", "losses/grpo_guard", steps("grpo_guard", "clip", "adv_clip_max")
    yield "meander flow_dppo", "losses/flow_dppo", steps("flow_dppo", "kl_mask_threshold")
    yield "meander gspo", "losses/gspo", steps("gspo", "clip_low", "clip_high")
    yield "meander dpo", "losses/dpo", steps("dpo", "dpo_beta")

    def nft(
        clean: Any, noise: Any, sigma: Any, velocity: Any, old_velocity: Any, advantages: Any, mix_beta: float,
        adaptive_weight_min: float, adv_clip_max: float,
    ) -> Any:
        made = losses.make("diffusion_nft", mix_beta=mix_beta, adaptive_weight_min=adaptive_weight_min,
                           adv_clip_max=adv_clip_max)  # fmt: skip
        noised = (1 - sigma[:, None]) * clean + sigma[:, None] * noise
        now, before, x0, xt = (x[:, None] for x in (velocity, old_velocity, clean, noised))
        return made(losses.Noised(now, before, x0, xt, sigma, advantages, "flow_grpo"))[0].mean()

    yield "meander diffusion_nft", "losses/diffusion_nft", nft

    def opd(mean: Any, teacher_mean: Any, noise_std: float) -> Any:
        one = torch.ones(len(mean), 1, dtype=mean.dtype)
        taught = Kernel(1.0, 1.0, noise_std, 1.0, "density").divergence(mean, teacher_mean)[:, None]
        steps = losses.Steps(one, one, one, one, one[0], one[0], one[:, 0], taught=taught)
        return losses.DiffusionOPD()(steps).mean()

    yield "meander diffusion_opd", "losses/diffusion_opd", opd


def flow_grpo(folder: str) -> Iterator[Judged]:
    """The step of a checkout of flow_grpo."""
    module = _file(f"{folder}/flow_grpo/diffusers_patch/sd3_sde_with_logprob.py")

    def sde(x: Any, v: Any, next: Any, sigmas: Any, step: int, noise_level: float) -> Any:
        scheduler = types.SimpleNamespace(sigmas=sigmas.float(), index_for_timestep=lambda t: int(t))
        x, v, next = (t.reshape(1, 1, 1, -1) for t in (x, v, next))
        return module.sde_step_with_logprob(scheduler, v, [step], x, noise_level, prev_sample=next)[1]

    yield "flow_grpo sd3_sde_with_logprob", "transitions/sde", sde


def diffusion_nft(folder: str) -> Iterator[Judged]:
    """The steps of a checkout of DiffusionNFT."""
    module = _file(f"{folder}/flow_grpo/diffusers_patch/solver.py")

    for name, title in (("flow_grpo_step", "transitions/sde"), ("dance_grpo_step", "transitions/dance_sde")):

        def of(
            x: Any, v: Any, next: Any, sigmas: Any, step: int, noise_level: float, take: Any = getattr(module, name)
        ) -> Any:
            return take(v.float()[None], x.float()[None], noise_level, sigmas.float(), step, next.float()[None])[2]

        yield f"DiffusionNFT {name}", title, of


def _file(path: str) -> Any:
    if not pathlib.Path(path).is_file():
        raise ValueError(f"{path}: no such file")
    return types.SimpleNamespace(**runpy.run_path(path))


ADAPTERS: dict[str, Callable[..., Iterator[Judged]]] = {
    "trl": trl, "verl": verl, "meander": meander, "flow_grpo": flow_grpo, "DiffusionNFT": diffusion_nft,
}  # fmt: skip
"""The trainers by name; the last two take the folder of a checkout, as flow_grpo=FOLDER."""


def own(spec: str) -> tuple[str, Callable[..., Any]]:
    """The callable of FILE.py:NAME or module:NAME, with its name. ValueError: there is none."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ValueError(f"{spec!r}; must be one of {', '.join(ADAPTERS)}, or FILE.py:NAME")
    try:
        module = _file(place) if place.endswith(".py") else importlib.import_module(place)
    except ImportError as e:
        raise ValueError(f"{spec}: {e}") from e
    have = {n: f for n, f in vars(module).items() if callable(f) and not n.startswith("__")}
    if name not in have:
        raise ValueError(f"{spec}: must be one of {', '.join(have) or 'its functions, and it has none'}")
    return name, have[name]
