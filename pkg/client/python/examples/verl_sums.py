"""GRPO of a language model with verl's own trainer: the pipeline draws and rates the answers, verl trains a LoRA.

    bin/meander up --model sums & python pkg/client/python/examples/verl_sums.py

The problems and the evaluations are those of grpo_sums.py beside it. Without a GPU verl trains on the CPU: verl_cpu.py.
"""

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path

import pandas
import torch
from grpo_sums import problems

args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
args.add_argument("--url", default=os.environ.get("MEANDER_URL", "nats://127.0.0.1:4222"), help="of the pipeline")
args.add_argument("--model", default="deploy/models/sums", help="the folder that the pipeline serves")
args.add_argument("--lane", default="sums", help="that serves it")
args.add_argument(
    "--out", type=Path, default=Path("meander-out/learn-verl"), help="takes log.jsonl (default %(default)s)"
)
args.add_argument("--updates", type=int, default=40)
args.add_argument("--prompts", type=int, default=32, help="of a batch (default %(default)s)")
args.add_argument("--samples", type=int, default=8, help="of a prompt (default %(default)s)")
args.add_argument("--held-out", type=int, default=300, help="problems of the evaluations before and after")
args.add_argument("--lr", type=float, default=2e-3)
args.add_argument("--legacy", action="store_true", help="the trainer of trainer.use_v1=False, which takes a DataProto")
args.add_argument("--seed", type=int, default=0)


def dataset(file: Path, asked: list[tuple[str, str]]) -> Path:
    """Problems as verl's data sets have them. The pipeline's reward compares with ground_truth."""
    rows = [
        {"data_source": "sums", "prompt": [{"role": "user", "content": question}], "extra_info": {"index": i},
         "reward_model": {"style": "rule", "ground_truth": answer}}
        for i, (question, answer) in enumerate(asked)
    ]  # fmt: skip
    pandas.DataFrame(rows).to_parquet(file)
    return file


def under(part: str, /, **values: object) -> list[str]:
    """Overrides of a part of verl's configuration; ++ also adds what its files do not have."""
    return [f"++{part}.{key}={value}" for key, value in values.items()]


def settings(a: argparse.Namespace) -> list[str]:
    """What differs from verl's defaults."""
    train = dataset(a.out / "train.parquet", problems(random.Random(a.seed), a.prompts * a.updates, False))
    held_out = dataset(a.out / "held_out.parquet", problems(random.Random(7), a.held_out, True))
    manager, rows = "AgentLoopManager" if a.legacy else "AgentLoopManagerTQ", a.prompts * a.samples
    model, actor, rollout = (f"actor_rollout_ref.{part}" for part in ("model", "actor", "rollout"))
    out = [
        *under("trainer", use_v1=not a.legacy, n_gpus_per_node=1, logger="[file]", resume_mode="disable", save_freq=-1),
        *under("trainer", total_training_steps=a.updates, test_freq=a.updates),
        *under("data", train_files=train, val_files=held_out, train_batch_size=a.prompts, shuffle=False, seed=a.seed),
        *under("data", max_prompt_length=16, max_response_length=16, dataloader_num_workers=0),
        *under("algorithm", adv_estimator="grpo"),
        *under("reward", num_workers=1),
        *under("transfer_queue.backend.SimpleStorage", num_data_storage_units=1),
        *under(model, path=Path(a.model).resolve(), lora_rank=16, lora_alpha=16),
        *under(actor, strategy="fsdp2", ppo_mini_batch_size=a.prompts, ppo_micro_batch_size_per_gpu=rows),
        *under(f"{actor}.optim", lr=a.lr, weight_decay=0),
        *under(rollout, name="meander", n=a.samples, calculate_log_probs=True, tensor_model_parallel_size=1),
        *under(rollout, log_prob_micro_batch_size_per_gpu=rows),
        *under(f"{rollout}.agent", agent_loop_manager_class=f"meander.plugs.verl.{manager}"),
        *under(f"{rollout}.engine_kwargs.meander", url=a.url, lane=a.lane),
        *under(f"{rollout}.engine_kwargs.meander.fields", reward="[{name:exact_match}]", text="{tokens_per_event:8}"),
        *under(f"{rollout}.val_kwargs", n=a.samples, temperature=1.0),
    ]
    if not torch.cuda.is_available():
        out += [
            *under("trainer", device="cpu"),
            *under("ray_kwargs.ray_init", num_gpus=1, num_cpus=16, include_dashboard=False),
            *under(model, use_remove_padding=False, enable_gradient_checkpointing=False),
            *under(f"{model}.override_config", attn_implementation="eager"),
            *under(f"{actor}.fsdp_config", use_torch_compile=False),
            *under(
                f"{actor}.fsdp_config.mixed_precision", param_dtype="fp32", reduce_dtype="fp32", buffer_dtype="fp32"
            ),
        ]
    return out


def main(a: argparse.Namespace) -> None:
    a.out = a.out.resolve()
    a.out.mkdir(parents=True, exist_ok=True)
    began, file = time.monotonic(), a.out / "verl.jsonl"
    os.environ |= {"VERL_FILE_LOGGER_PATH": str(file), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    if not torch.cuda.is_available():
        here = str(Path(__file__).parent)
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        os.environ |= {"VERL_USE_EXTERNAL_MODULES": "verl_cpu", "VERL_ENGINE_DEVICE": "cuda", "PYTHONPATH": path}
    import verl
    from hydra import compose, initialize_config_dir
    from verl.trainer import main_ppo, main_ppo_v0

    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer/config"), version_base=None):
        config = compose("ppo_trainer", overrides=settings(a))
    main_ppo.run_ppo(config, main_ppo_v0.TaskRunner if a.legacy else main_ppo.TaskRunnerV1)
    logged = [json.loads(line)["data"] for line in file.read_text().splitlines()]
    held_out = [v for row in logged for k, v in row.items() if k.startswith("val-core/") and f"/mean@{a.samples}" in k]
    log = [
        {"update": i, "reward": row["critic/score/mean"], "entropy": row["actor/entropy"],
         "norm": row["actor/grad_norm"], "probability_off": row["training/rollout_probs_diff_max"],
         "seconds": row["timing_s/step"]}
        for i, row in enumerate(row for row in logged if "critic/score/mean" in row)
    ]  # fmt: skip
    (a.out / "log.jsonl").write_text("".join(json.dumps(r) + "\n" for r in log))
    summary = {
        "before": held_out[0], "after": held_out[-1], "held_out": a.held_out, "samples": a.samples,
        "updates": a.updates, "seconds": time.monotonic() - began,
    }  # fmt: skip
    (a.out / "summary.json").write_text(json.dumps(summary))
    rates = f"{held_out[0]:.3f} right before, {held_out[-1]:.3f} after"
    print(f"held out, temperature 1: {rates}, {summary['seconds']:.0f} s")


if __name__ == "__main__":
    try:
        main(args.parse_args())
    except (ValueError, ConnectionError) as e:
        sys.exit(f"verl_sums: {e}")
