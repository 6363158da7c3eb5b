#!/usr/bin/env python3
"""Draws what the model signs is trained and measured on, into this folder:

prompts.txt: a colour and a text of 2 to 6 characters, three in five of them capitals, the others digits; none is held out.
held_out.jsonl: the prompts of deploy/models/signs/held_out.txt, read as the model's card has it: glyph, and tesseract with a
white-list of digits or of capitals.
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
    lines = []
    for prompt in held_out:
        letters = string.digits if prompt.split('"')[1].isdigit() else string.ascii_uppercase
        readers = [{"name": "glyph"}, {"name": "ocr", "weight": 0.0, "params": {"whitelist": letters}}]
        lines.append(json.dumps({"prompt": prompt, "reward": readers}))
    (HERE / "held_out.jsonl").write_text("\n".join(lines) + "\n")

    rng = random.Random(0)
    seen = {prompt.split('"')[1] for prompt in held_out}
    lines = []
    for _ in range(COUNT):
        text = None
        while text is None or text in seen:
            letters = string.ascii_uppercase if rng.random() < 0.6 else string.digits
            text = "".join(rng.choices(letters, k=rng.randint(2, 6)))
        seen.add(text)
        lines.append(f'a {rng.choice(COLOURS)} sign that says "{text}"')
    (HERE / "prompts.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
