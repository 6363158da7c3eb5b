"""Reading signs with tesseract, many images in one call."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Sequence

from PIL import Image, ImageOps

MARGIN = 5  # pixels cut from every side: the frame of a framed sign lies inside them
SCALE = 3  # tesseract wants capitals of 40 pixels and more


def prepare(image: Image.Image) -> Image.Image:
    """Grey, dark on light, without the margin, enlarged."""
    grey = ImageOps.invert(image.convert("L"))
    w, h = grey.size
    grey = grey.crop((MARGIN, MARGIN, w - MARGIN, h - MARGIN))
    grey = ImageOps.autocontrast(grey)
    grey = grey.resize((grey.width * SCALE, grey.height * SCALE), Image.BICUBIC)
    return ImageOps.expand(grey, border=12, fill=grey.getpixel((2, 2)))


def whitelist(text: str) -> str:
    """The class of characters that the prompt promises: digits or capitals."""
    return "0123456789" if text.isdigit() else "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def read(images: Sequence[Image.Image], texts: Sequence[str]) -> list[str]:
    """What tesseract reads in each image, blanks removed; texts only choose the white-list (digits or capitals)."""
    out = [""] * len(images)
    with tempfile.TemporaryDirectory() as folder:
        for chars in sorted({whitelist(t) for t in texts}):
            index = [i for i, t in enumerate(texts) if whitelist(t) == chars]
            names = []
            for i in index:
                names.append(os.path.join(folder, f"{i}.png"))
                prepare(images[i]).save(names[-1])
            listing = os.path.join(folder, "list.txt")
            with open(listing, "w") as f:
                f.write("\n".join(names) + "\n")
            command = ["tesseract", listing, "stdout", "--psm", "7", "-c", f"tessedit_char_whitelist={chars}"]
            env = dict(os.environ, OMP_THREAD_LIMIT="1")
            done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
            pages = done.stdout.split("\f")
            if len(pages) < len(index):
                raise RuntimeError(
                    f"tesseract returned {len(pages)} pages for {len(index)} images: {done.stderr[-300:]}"
                )
            for i, page in zip(index, pages):
                out[i] = "".join(page.split())
    return out
