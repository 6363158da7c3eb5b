"""Images of signs, drawn on the fly: what the checkpoint is trained to paint.

An image is 64 x 128 pixels of RGB, float32 in [-1, 1]. The prompt names the colour of the sign and the text; everything
else is drawn at random from a few discrete choices (FONTS, SIZES, PLACES, INKS, SHAPES) plus a continuous shade, so
that two samples of one prompt differ. Every glyph sits centred in its own cell at the fixed pitch PITCH, and the row of
cells is centred: without that regularity the flow model needs many times the training.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from PIL import Image, ImageDraw, ImageFont

HEIGHT, WIDTH = 64, 128
PITCH = 20  # pixels from one glyph centre to the next: six glyphs fill 120 of the 128 columns
FONT_DIR = "/usr/share/fonts/truetype"

# Debian packages fonts-dejavu-core, fonts-liberation and fonts-freefont-ttf. All are fixed-width, so that a cell of
# PITCH pixels holds any glyph at the larger size.
FONTS = {
    "dejavu": "dejavu/DejaVuSansMono-Bold.ttf",
    "liberation": "liberation/LiberationMono-Bold.ttf",
    "freemono": "freefont/FreeMonoBold.ttf",
}
SIZES = (33, 28)  # pixels per em
PLACES = (-8, 0, 8)  # rows by which the middle of the capitals lies below the middle of the image
INKS = {"white": (240, 240, 240), "yellow": (250, 222, 85), "cyan": (165, 235, 245)}
SHAPES = ("plain", "frame", "rounded")
WALL = (150, 148, 142)  # what shows behind the corners of a rounded sign
COLOURS = {
    "red": (190, 30, 40),
    "blue": (25, 70, 180),
    "green": (20, 120, 60),
    "black": (28, 28, 30),
    "orange": (205, 95, 10),
    "purple": (110, 40, 150),
    "brown": (110, 65, 30),
    "gray": (90, 96, 104),
}
GLYPHS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
MAX_CHARS = 6

WORDS = (
    "A B C X UP NO GO IN ON WC TO OK BUS BAR ZOO SPA GYM TAX PUB NEW HOT ICE SKI RUN OUT OFF YES "
    "OPEN EXIT STOP SALE CAFE TAXI MENU SHOP BANK PARK PULL PUSH HELP FIRE LIFT ROOM FREE GATE NORTH "
    "HOTEL PHONE TRAIN METRO WATER SOUTH RIGHT ENTRY SLOW LEFT QUIET STAFF MUSIC BOOKS TOILET CLOSED "
    "DANGER POLICE SCHOOL OFFICE TICKET CAMERA BAKERY GARAGE MUSEUM STREET YELLOW BRIDGE"
).split()


@dataclasses.dataclass(frozen=True)
class Look:
    """Everything about an image that the prompt does not say."""

    font: str
    size: int
    place: int
    ink: str
    shape: str


def prompt_of(colour: str, text: str) -> str:
    """The sentence that asks for a sign."""
    return f'a {colour} sign that says "{text}"'


def text_in(prompt: str) -> str:
    """The text that a prompt asks for."""
    return prompt.split('"')[1]


@functools.cache
def glyph_mask(font: str, size: int, char: str) -> np.ndarray:
    """Coverage [HEIGHT, 2*PITCH] in [0, 1] of one glyph, its advance centred, capitals centred on the middle row."""
    face = ImageFont.truetype(f"{FONT_DIR}/{FONTS[font]}", size, layout_engine=ImageFont.Layout.BASIC)
    _, top, _, bottom = face.getbbox("H", anchor="ms")
    image = Image.new("L", (2 * PITCH, HEIGHT))
    baseline = HEIGHT / 2 + (bottom - top) / 2
    ImageDraw.Draw(image).text((PITCH, round(baseline)), char, fill=255, font=face, anchor="ms")
    return np.asarray(image, np.float32) / 255


@functools.cache
def shape_mask(shape: str) -> np.ndarray:
    """Coverage [HEIGHT, WIDTH]: of the frame's line for "frame", of the sign itself for "rounded"."""
    scale = 4
    image = Image.new("L", (WIDTH * scale, HEIGHT * scale))
    draw = ImageDraw.Draw(image)
    if shape == "frame":
        box = (2 * scale, 2 * scale, (WIDTH - 2) * scale - 1, (HEIGHT - 2) * scale - 1)
        draw.rounded_rectangle(box, radius=5 * scale, outline=255, width=2 * scale)
    elif shape == "rounded":
        draw.rounded_rectangle((0, 0, WIDTH * scale - 1, HEIGHT * scale - 1), radius=16 * scale, fill=255)
    else:
        raise ValueError(f"shape {shape!r} has no mask")
    return np.asarray(image.resize((WIDTH, HEIGHT), Image.BOX), np.float32) / 255


def text_mask(text: str, look: Look) -> np.ndarray:
    """Coverage [HEIGHT, WIDTH] of the whole text."""
    out = np.zeros((HEIGHT, WIDTH + 4 * PITCH), np.float32)
    left = (WIDTH - PITCH * len(text)) // 2
    for i, char in enumerate(text):
        x = left + i * PITCH + PITCH // 2 - PITCH + 2 * PITCH
        part = np.roll(glyph_mask(look.font, look.size, char), look.place, axis=0)
        np.maximum(out[:, x : x + 2 * PITCH], part, out=out[:, x : x + 2 * PITCH])
    return out[:, 2 * PITCH : 2 * PITCH + WIDTH]


def random_look(rng: np.random.Generator) -> Look:
    """One of the 162 looks, uniformly."""
    pick = lambda options: list(options)[rng.integers(len(options))]  # noqa: E731
    return Look(pick(FONTS), pick(SIZES), pick(PLACES), pick(INKS), pick(SHAPES))


def paint(colour: str, text: str, look: Look, rng: np.random.Generator) -> np.ndarray:
    """Image [3, HEIGHT, WIDTH], float32 in [-1, 1]; rng gives the shade and the ramp."""
    base = np.asarray(COLOURS[colour], np.float32) + rng.uniform(-12, 12, 3).astype(np.float32)
    ramp = np.linspace(-1, 1, HEIGHT, dtype=np.float32)[:, None] * np.float32(rng.uniform(-14, 14))
    sign = np.broadcast_to(base[:, None, None] + ramp[None], (3, HEIGHT, WIDTH))
    ink = np.asarray(INKS[look.ink], np.float32) + np.float32(rng.uniform(-6, 6))
    cover = text_mask(text, look)
    if look.shape == "frame":
        cover = np.maximum(cover, shape_mask("frame"))
    out = sign + (ink[:, None, None] - sign) * cover[None]
    if look.shape == "rounded":
        inside = shape_mask("rounded")[None]
        wall = np.asarray(WALL, np.float32)[:, None, None] + np.float32(rng.uniform(-10, 10))
        out = wall + (out - wall) * inside
    return np.clip(out, 0, 255) / 127.5 - 1


def random_text(rng: np.random.Generator, held_out: frozenset[str] = frozenset()) -> str:
    """One to six characters: half digits, one in six a common word, the rest random capitals; never a held-out
    string."""
    while True:
        kind, n = rng.random(), int(rng.integers(1, MAX_CHARS + 1))
        if kind < 0.5:
            text = "".join(GLYPHS[i] for i in rng.integers(0, 10, n))
        elif kind < 0.66:
            text = WORDS[rng.integers(len(WORDS))]
        else:
            text = "".join(GLYPHS[i] for i in rng.integers(10, 36, n))
        if text not in held_out:
            return text


def random_sign(rng: np.random.Generator, held_out: frozenset[str] = frozenset()) -> tuple[str, str, np.ndarray]:
    """(colour, text, image), all at random."""
    colour = list(COLOURS)[rng.integers(len(COLOURS))]
    text = random_text(rng, held_out)
    return colour, text, paint(colour, text, random_look(rng), rng)


def to_image(image: np.ndarray) -> Image.Image:
    """PIL image of [3, H, W] in [-1, 1]."""
    pixels = np.clip(np.rint((image + 1) * 127.5), 0, 255).astype(np.uint8)
    return Image.fromarray(pixels.transpose(1, 2, 0))
