"""ImageReward (Xu et al. 2023, arXiv 2304.05977): what people prefer, by BLIP and a small network over it."""

from __future__ import annotations

from collections.abc import Sequence

from .network import TorchReward, files, fill, state
from .reward import Input, Score, Scored

_FILES = ("ImageReward.pt", "med_config.json")
_TOKENIZER = ("vocab.txt",)


class ImageReward(TorchReward):
    """ImageReward: how people would rate the image for its prompt.

    The score is about -2.3 to 2: over the images of the paper it has mean 0 and standard deviation 1.

    Its library needs transformers 4, so this worker has an environment of its own.
    """

    name = "imagereward"
    extra = "imagereward"
    flags = {
        "--weights": {
            "default": "THUDM/ImageReward",
            "help": f"folder or name of the hub with {' and '.join(_FILES)} (%(default)s)",
        },
        "--tokenizer": {
            "default": "google-bert/bert-base-uncased",
            "help": "folder or name of the hub with BERT's vocab.txt (%(default)s)",
        },
        **TorchReward.flags,
    }

    def __init__(
        self, weights: str = "THUDM/ImageReward", tokenizer: str = "google-bert/bert-base-uncased", device: str = "",
        dtype: str = "f32"
    ):  # fmt: skip
        super().__init__(device, dtype)
        from ImageReward import ImageReward as Library
        from ImageReward.models.BLIP import blip, blip_pretrain
        from transformers import BertTokenizer

        checkpoint, config = files(weights, *_FILES)
        (vocabulary,) = files(tokenizer, *_TOKENIZER, flag="--tokenizer")
        # The library would ask the hub for the tokenizer by name.
        blip_pretrain.init_tokenizer = lambda: BertTokenizer(str(vocabulary))
        try:
            model = Library(str(config), self.device)
        finally:
            blip_pretrain.init_tokenizer = blip.init_tokenizer
        # Checkpoints of older transformers have the positions, which are no weights.
        tensors = {k: t for k, t in state(checkpoint).items() if not k.endswith("position_ids")}
        own = {k: t for k, t in model.state_dict().items() if k.endswith("position_ids")}
        fill(model, {**own, **tensors}, checkpoint)
        self.model = self.place(model)

    def score(self, samples: Sequence[Input]) -> list[Scored]:
        """Scores all samples in one pass. A prompt is cut at 35 tokens, as in the library."""
        import torch

        blip = self.model.blip
        words = blip.tokenizer(
            [s.prompt for s in samples], padding="max_length", truncation=True, max_length=35, return_tensors="pt"
        ).to(self.device)
        pixels = torch.stack([self.model.preprocess(s.image) for s in samples])
        with torch.inference_mode():
            images = blip.visual_encoder(pixels.to(self.device, self.dtype))
            seen = torch.ones(images.shape[:-1], dtype=torch.long, device=self.device)
            text = blip.text_encoder(
                words.input_ids, attention_mask=words.attention_mask, encoder_hidden_states=images,
                encoder_attention_mask=seen, return_dict=True)  # fmt: skip
            rewards = self.model.mlp(text.last_hidden_state[:, 0]).float()
            return [Score(x) for x in ((rewards - self.model.mean) / self.model.std)[:, 0].tolist()]
