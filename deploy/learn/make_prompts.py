#!/usr/bin/env python3
"""Draws what the model signs is trained and measured on, into this folder:

prompts.txt: a colour and a text of 2 to 6 characters, three in five capitals, the others digits; none is held out.
validation.jsonl: 120 others of the same kind, 24 of each length, which choose the adapter; read as those of the test.
held_out.jsonl: the test, the prompts of deploy/models/signs/held_out.txt, read as the model's card has it: glyph, and
tesseract with a white-list of digits or of capitals.
"""

import json
import random
import string
from pathlib import Path

COLOURS = ("red", "blue", "green", "black", "orange", "purple", "brown", "gray")
COUNT = 1280
HERE = Path(__file__).parent


def main() -> None:
    held_out = (HERE.parent / "models" / "signs" / "held_out.txt").read_text().splitlines()
    write("held_out.jsonl", held_out)

    rng = random.Random(0)
    seen = {prompt.split('"')[1] for prompt in held_out}
    (HERE / "prompts.txt").write_text("\n".join(draw(rng, seen) for _ in range(COUNT)) + "\n")
    write("validation.jsonl", [draw(rng, seen, 2 + i % 5) for i in range(120)])


def draw(rng: random.Random, seen: set[str], length: int = 0) -> str:
    """A prompt with a text that is none of seen, which it joins; length 0: of 2 to 6."""
    text = None
    while text is None or text in seen:
        letters = string.ascii_uppercase if rng.random() < 0.6 else string.digits
        text = "".join(rng.choices(letters, k=length or rng.randint(2, 6)))
    seen.add(text)
    return f'a {rng.choice(COLOURS)} sign that says "{text}"'


def write(name: str, prompts: list[str]) -> None:
    """Writes prompts with both readers."""
    lines = []
    for prompt in prompts:
        letters = string.digits if prompt.split('"')[1].isdigit() else string.ascii_uppercase
        readers = [{"name": "glyph"}, {"name": "ocr", "weight": 0.0, "params": {"whitelist": letters}}]
        lines.append(json.dumps({"prompt": prompt, "reward": readers}))
    (HERE / name).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
