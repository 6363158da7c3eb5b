"""Edits of signs: images with prompts such as "make the sign red", and how well a sample does what its prompt asks."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

HEIGHT, WIDTH = 32, 64
TOKENS = {"max_sequence_length": 16}  # of a prompt: the argument of the pipeline
COLOURS = {
    "red": (190, 30, 40), "blue": (25, 70, 190), "green": (20, 120, 60), "orange": (225, 120, 10),
    "purple": (110, 40, 150), "black": (28, 28, 30),
}  # fmt: skip
PROMPTS = ("make the sign {}", "paint the sign {}", "turn the sign {}", "a {} sign, please")
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
NEAR = 48  # of 255, in each channel: the same colour to the eye


@dataclasses.dataclass(frozen=True)
class Sign:
    """An image, all but the colour of its sign."""

    text: str
    size: int
    box: tuple[int, int, int, int]
    round: int
    wall: tuple[int, int, int]
    shade: tuple[int, int, int]

    def paint(self, colour: str) -> Image.Image:
        """Draws it."""
        image = Image.new("RGB", (WIDTH, HEIGHT), self.wall)
        draw = ImageDraw.Draw(image)
        tone = tuple(c + s for c, s in zip(COLOURS[colour], self.shade))
        draw.rounded_rectangle(self.box, self.round, tone, (240, 240, 240))
        at = (self.box[0] + self.box[2]) / 2, (self.box[1] + self.box[3]) / 2
        draw.text(at, self.text, (240, 240, 240), _font(self.size), "mm", stroke_width=0.5)
        return image

    def near(self, image: np.ndarray, colour: str) -> np.ndarray:
        """Where an image has a colour as this sign would have it."""
        return abs(image - np.add(COLOURS[colour], self.shade)).max(-1) < NEAR

    def inside(self) -> np.ndarray:
        """Where it covers the wall."""
        out = np.zeros((HEIGHT, WIDTH), bool)
        out[self.box[1] : self.box[3] + 1, self.box[0] : self.box[2] + 1] = True
        return out


@functools.cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def draw(rng: np.random.Generator) -> Sign:
    """A sign of a text that says nothing."""
    wide, high = int(rng.integers(42, 59)), int(rng.integers(19, 27))
    x, y = int(rng.integers(1, WIDTH - wide - 1)), int(rng.integers(1, HEIGHT - high - 1))
    text = "".join(rng.choice(list(LETTERS), int(rng.integers(2, 4))))
    wall = rng.integers(120, 215, 3) // 2 + int(rng.integers(60, 108))
    shade = tuple(rng.integers(-12, 13, 3).tolist())
    return Sign(text, int(rng.integers(15, 18)), (x, y, x + wide, y + high), int(rng.choice([0, 4])),
                tuple(wall.tolist()), shade)  # fmt: skip


def score(sample: Image.Image, before: Image.Image, sign: Sign, old: str, new: str) -> tuple[float, float]:
    """The share of the sign's pixels that have the colour asked for, and the share of wall and letters that are as they
    were; pixels between letters and sign count nowhere."""
    x, y = (np.asarray(i.convert("RGB"), np.int16) for i in (sample, before))
    inside, same = sign.inside(), abs(x - y).max(-1) < NEAR
    return float(sign.near(x, new)[inside & sign.near(y, old)].mean()), float(same[~inside | (y.min(-1) > 200)].mean())


def write(folder: Path, name: str, count: int, seed: int, prompts: tuple[str, ...]) -> Path:
    """Writes images, and a file of prompts that edit them, with what the reward compares with."""
    rng, lines = np.random.default_rng([seed, 44]), []
    (folder / name).mkdir(parents=True, exist_ok=True)
    for i in range(count):
        sign, (old, new) = draw(rng), rng.choice(list(COLOURS), 2, replace=False).tolist()
        image = (folder / name / f"{i:04d}.png").resolve()
        sign.paint(old).save(image)
        truth = {"sign": dataclasses.asdict(sign), "old": old, "new": new}
        lines.append({
            "prompt": str(rng.choice(prompts)).format(new), "conditions": {"control_image": str(image)},
            "arguments": TOKENS, "reward": [{"name": "nats:edit", "ground_truth": truth}],
        })  # fmt: skip
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def rate(sample: Image.Image, before: Image.Image, truth: dict) -> tuple[float, str]:
    """The reward, the product of both shares, with what people should see."""
    sign = Sign(**{k: tuple(v) if isinstance(v, list) else v for k, v in truth["sign"].items()})
    asked, same = score(sample, before, sign, truth["old"], truth["new"])
    return asked * same, f"{asked:.2f} {truth['new']}, {same:.2f} of the rest kept"
