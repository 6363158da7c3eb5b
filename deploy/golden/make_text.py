#!/usr/bin/env python3
"""Record what the OCR reward of verl-omni (verl_omni/utils/reward_score/genrm_ocr.py) makes of texts.

    python deploy/golden/make_text.py pkg/scorer/testdata/text.json

Part of `make golden`. `plain` is every character that the rule drops or changes, and what becomes of it; `unassigned`
are the ranges that this Python's Unicode does not know; `final` are those of c that make the sigma of a string the
final one: "cΣ", "AcΣ", "AΣc". `scores` are [target, recognised, score].
"""

import argparse
import json
import random
import re
import sys
import unicodedata

import Levenshtein

ODD = ["Σ", "σ", "ς", "İ", "i", "I", "ı", "ß", "ẞ", "SS", "Å", "\u0307", "\u0301", "'", ".", ":", "\u2019", "\u00ad", "\u02b0", "Ⅰ",
       "A", "b", "7", " ", "\x1c", "\x1f", "\u3000", "\u200b", "\u0345", "日", "\U0001d400", "Ა", "Ꭰ", "ǅ"]


def plain(text):
    return re.sub(r"\s+", "", text).lower()


def score(target, recognised):
    t, r = plain(target), plain(recognised)
    distance = 0 if t in r else Levenshtein.distance(r, t)
    distance = min(distance, len(t))
    if len(t) > 0:
        return 1 - distance / len(t)
    return 1.0 if len(r) == 0 else 0.0


def ranges(numbers):
    out = []
    for n in numbers:
        if out and out[-1][1] == n - 1:
            out[-1][1] = n
        else:
            out.append([n, n])
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out")
    out = parser.parse_args().out
    characters = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]
    rng = random.Random(20260101)
    scores = []
    for _ in range(400):
        a, b = ("".join(rng.choices(ODD, k=rng.randrange(0, 9))) for _ in range(2))
        if rng.random() < 0.5:  # near misses and hits
            b = "".join(rng.choice([c, c.upper(), c.lower(), "", c + rng.choice(ODD)]) for c in a)
        scores.append([a, b, score(a, b)])
    with open(out, "w", encoding="ascii") as out_file:
        json.dump(dict(
            about="deploy/golden/make_text.py, Python %s, Unicode %s, Levenshtein %s" % (
                sys.version.split()[0], unicodedata.unidata_version, Levenshtein.__version__),
            plain={c: plain(c) for c in characters if plain(c) != c},
            unassigned=ranges(ord(c) for c in characters if unicodedata.category(c) == "Cn"),
            final=[ranges(ord(c) for c in characters if plain(f.replace("c", c)).count("ς") > (c == "ς"))
                   for f in ("cΣ", "AcΣ", "AΣc")],
            scores=scores), out_file, separators=(",", ":"))
        out_file.write("\n")


if __name__ == "__main__":
    main()
