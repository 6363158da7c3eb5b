"""Draws the templates of the reward glyph: every glyph of the signs in every font and size.

    python deploy/models/signs/trainer/glyphs.py pkg/scorer/glyphs.png

One row per font and size, one cell per character of GLYPHS, each cell the PITCH columns of the character's own cell and
the rows ROWS of an image whose capitals are centred.
"""

from __future__ import annotations

import sys

import numpy as np
from PIL import Image
from render import FONTS, GLYPHS, PITCH, SIZES, glyph_mask

ROWS = slice(16, 52)


def main() -> None:
    rows = []
    for font in FONTS:
        for size in SIZES:
            masks = [glyph_mask(font, size, char) for char in GLYPHS]
            for char, mask in zip(GLYPHS, masks):
                if mask[: ROWS.start].any() or mask[ROWS.stop :].any():
                    raise SystemExit(f"{char} of {font} {size} is higher than the cell")
            rows.append(np.concatenate([mask[ROWS, PITCH // 2 : PITCH // 2 + PITCH] for mask in masks], axis=1))
    sheet = np.rint(255 * np.concatenate(rows)).astype(np.uint8)
    Image.fromarray(sheet).save(sys.argv[1], optimize=True)


if __name__ == "__main__":
    main()
