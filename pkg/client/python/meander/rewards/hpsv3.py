"""HPSv3 (Ma et al. 2025, arXiv 2508.03789): what people prefer, by a Qwen2-VL trained on HPDv3."""

from __future__ import annotations

from collections.abc import Sequence

from .network import TorchReward, files, fill, pretrained, state
from .reward import Fault, Input, Score, Scored

_TOKEN = "<|Reward|>"  # where the network says its score


class HPSv3(TorchReward):
    """HPSv3: which image people would prefer for a prompt.

    The score is the mean that the network predicts, beside a deviation: about 0 to 15 for images of today's models.

    Its library needs transformers 4.45, so this worker has an environment of its own. 7 billion weights are 16 GB with
    --dtype bf16, which is how they were trained.
    """

    name = "hpsv3"
    extra = "hpsv3"
    flags = {
        "--weights": {
            "default": "MizzenAI/HPSv3",
            "help": "folder or name of the hub with HPSv3.safetensors (%(default)s)",
        },
        "--base": {
            "default": "Qwen/Qwen2-VL-7B-Instruct",
            "help": "folder or name of the hub with the configuration and the processor, without weights (%(default)s)",
        },
        **TorchReward.flags,
    }

    def __init__(
        self, weights: str = "MizzenAI/HPSv3", base: str = "Qwen/Qwen2-VL-7B-Instruct", device: str = "",
        dtype: str = "f32"
    ):
        super().__init__(device, dtype)
        from hpsv3.inference import HPSv3RewardInferencer
        from hpsv3.model.qwen2vl_trainer import Qwen2VLRewardModelBT
        from transformers import AutoConfig, AutoProcessor

        (path,) = files(weights, "HPSv3.safetensors")
        config = pretrained(AutoConfig, base, "--base")
        processor = pretrained(AutoProcessor, base, "--base", padding_side="right")
        processor.tokenizer.add_special_tokens({"additional_special_tokens": [_TOKEN]})
        if config.model_type != "qwen2_vl":
            raise Fault(f"--base {base}: {config.model_type}; must be a Qwen2-VL")
        config.pad_token_id, config.use_cache = processor.tokenizer.pad_token_id, False
        model = Qwen2VLRewardModelBT._from_config(
            config, torch_dtype=self.dtype, attn_implementation="sdpa", output_dim=2, reward_token="special",
            special_token_ids=processor.tokenizer.convert_tokens_to_ids([_TOKEN]), rm_head_type="ranknet")  # fmt: skip
        model.resize_token_embeddings(len(processor.tokenizer))
        tensors = state(path)
        fill(model, tensors.get("model", tensors), path)
        model = self.place(model)
        model.rm_head.float().register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
        # The library's own class, whose constructor would fetch the weights of the base, too.
        self.library = HPSv3RewardInferencer.__new__(HPSv3RewardInferencer)
        self.library.model, self.library.processor, self.library.device = model, processor, self.device
        self.library.use_special_tokens = True

    def score(self, samples: Sequence[Input]) -> list[Scored]:
        """Scores all samples in one pass."""
        import torch

        with torch.inference_mode():
            rewards = self.library.reward([s.image for s in samples], [s.prompt for s in samples])
        return [Score(x) for x in rewards[:, 0].float().tolist()]
