"""A byte-level BPE trained on a few sentences, and a corpus that tests its reader."""

import gzip
import json
import os
import random
import unicodedata

from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

SENTENCES = [
    "Describe the image by detailing the color, shape, size, texture, quantity, text, spatial relationships of "
    "the objects and background:",
    'a blue sign that says "4071", a red sign that says "OPEN", an old, round, large sign; it is green.',
    "We're sure they've said it's what you'll do; I'm told he'd rather DON'T. YOU'LL see, THEY'RE here.",
    "Le c\u0153ur d\u00e9\u00e7u mais l'\u00e2me plut\u00f4t na\u00efve, Lou\u00ffs r\u00eava de crapa\u00fcter en cano\u00eb.",
    "Falsches \u00dcben von Xylophonmusik qu\u00e4lt jeden gr\u00f6\u00dferen Zwerg. Stra\u00dfe, Schild, Gr\u00fc\u00dfe.",
    "El ping\u00fcino Wenceslao hizo kil\u00f3metros bajo exhaustiva lluvia y fr\u00edo, \u00bfverdad? \u00a1S\u00ed!",
    "\u0421\u044a\u0435\u0448\u044c \u0436\u0435 \u0435\u0449\u0451 \u044d\u0442\u0438\u0445 \u043c\u044f\u0433\u043a\u0438\u0445 "
    "\u0444\u0440\u0430\u043d\u0446\u0443\u0437\u0441\u043a\u0438\u0445 \u0431\u0443\u043b\u043e\u043a, \u0434\u0430 \u0432\u044b\u043f\u0435\u0439 \u0447\u0430\u044e.",
    "\u0394\u03b9\u03b1\u03c6\u03c5\u03bb\u03ac\u03be\u03c4\u03b5 \u03b3\u03b5\u03bd\u03b9\u03ba\u03ac \u03c4\u03b7 \u03b6\u03c9\u03ae \u03c3\u03b1\u03c2.",
    "\u4e00\u4e2a\u5199\u7740\u201c\u4f60\u597d\u201d\u7684\u724c\u5b50\u3002\u6211\u80fd\u541e\u4e0b\u73bb\u7483\u800c\u4e0d\u4f24\u8eab\u4f53\u3002",
    "\u3044\u308d\u306f\u306b\u307b\u3078\u3068 \u3061\u308a\u306c\u308b\u3092\u3001\u30ab\u30bf\u30ab\u30ca\u3068\u6f22\u5b57\u3002",
    "\ud0a4\uc2a4\uc758 \uace0\uc720\uc870\uac74\uc740 \uc785\uc220\ub07c\ub9ac \ub9cc\ub098\uc57c \ud558\uace0.",
    "\u0647\u0644\u0627 \u0633\u0643\u0646\u062a\u064f \u0628\u0630\u064a \u0636\u063a\u062b\u064d. \u05d3\u05d2 \u05e1\u05e7\u05e8\u05df \u05e9\u05d8 \u05d1\u05d9\u05dd.",
    "\u0926\u0947\u0935\u0928\u093e\u0917\u0930\u0940 \u0932\u093f\u092a\u093f. \u0e40\u0e1b\u0e47\u0e19\u0e21\u0e19\u0e38\u0e29\u0e22\u0e4c. Ti\u1ebfng Vi\u1ec7t.",
    "for (int i = 0; i < n; ++i) {\n\treturn x[i] * 3.14e-10; // 0x7F\n}\r\n\r\n    pass  \n",
    "\U0001f469\u200d\U0001f680 \U0001f1e8\U0001f1ed \u2764\ufe0f \U0001f44d\U0001f3fd \u2203x \u2208 \u211d: x\u00b2 \u2265 0 \u2192 \u2713 \u20ac100 \u00bd",
]

NFC_CASES = [
    "e\u0301", "\u0065\u0323\u0302", "\u1e69 s\u0323\u0307 s\u0307\u0323", "\u212b \u2126 \u212a",
    "\u1100\u1161\u11a8 \uac01",
    "\u0958 \u0915\u093c", "\ufb01 \u01c4 \u33a5", "\u0344", "\u0f71\u0f74\u0f80", "a\u0300\u0316\u0301",
    "\u0300leading",
    "\u2adc \u1d15e \U0001d15e", "q\u0307\u0323 " * 3, "\u05d3\u05bc \u05bc\u05b8", "\u0041\u030a\u0327",
    "a\u0345\u1ac5\u0316\u0301",
    "\U00011935\U00011930", "a\u0301\u08d3\u0323\u0302",
]

CASES = [
    "", " ", "  ", "\n", "\r\n", " \n ", "\t", "   leading", "trailing   ", "a  b   c    d", "a\n\n\nb", "a \n \n b",
    "x\u00a0y", "x\u3000\u3000y", "x\u2028y\u2029z", "x\u0085y", "x\x0b\x0cy", "a\x1c\x1d\x1e\x1fb",
    "\u200b\u200c\u200d\ufeff", "\u180e x",
    "it's IT'S it'S 's 'S '\u017f it'\u017f x'\u017fy 'rE 'Ve 'lL 'll'll ''s '", "I'd'd I'm 'tis '99 '\u0301s",
    "\u2019s isn\u2019t",
    "123 4567 \u0661\u0662\u0663 \u2167 \u00b2\u00b3 \u00bd \u3007 \u4e94 1a2b", "(a)[b]{c}<d> a.b,c;d:e!f?",
    "...---...!!!???\n\n",
    "foo_bar __init__ $x @user #tag", "\"4071\" \"OPEN\" \u201cquoted\u201d", "!\r\n!\n\r!\n x", " !\n !",
    "\x00\x01\x7f\x80\x9f",
    "<|im_start|>user\nhi<|im_end|>\n", "<|im_start|><|im_start|>", "<|im_start", "x<|endoftext|>y",
    "<|im_end|> \n <|im_end|>",
    "  <|im_end|>  ", "<|IM_END|>", "<|im_end|", "<|im_<|im_end|>", "e<|im_end|>\u0301",
    "\U0010ffff \ufffd \ufdd0 \ue000",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466", "\U0001f3f4\U000e0067\U000e0062\U000e007f",
    "#\ufe0f\u20e3 1\ufe0f\u20e3",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "abababababababab", "the" * 30, "\u0e01\u0e33\u0e01\u0e33",
    "\ud558" * 20,
]


def train_bpe(size):
    """Returns vocab (token to id) and merges of a byte-level BPE over SENTENCES."""
    tok = Tokenizer(models.BPE())
    tok.normalizer = normalizers.NFC()
    tok.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    trainer = trainers.BpeTrainer(vocab_size=size, show_progress=False, min_frequency=1,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    weights = [8, 6, 3] + [1] * (len(SENTENCES) - 3)
    tok.train_from_iterator([s for s, w in zip(SENTENCES, weights) for _ in range(w)], trainer)
    model = json.loads(tok.to_str())["model"]
    return model["vocab"], [tuple(m) for m in model["merges"]]


def classes():
    """Runs [first, last, class] over all scalar values: how the pre-tokenizer's engine
    sees a character (L letter, N number, S white space; anything else is left out)."""
    scalars = [c for c in range(0x110000) if not 0xD800 <= c <= 0xDFFF]
    text = "".join(map(chr, scalars))
    label = {}
    for name, pattern in (("L", r"\p{L}"), ("N", r"\p{N}"), ("S", r"\s")):
        split = pre_tokenizers.Split(Regex(pattern), behavior="removed")
        rest = set()
        for _, (a, b) in split.pre_tokenize_str(text):
            rest.update(range(a, b))
        for i, c in enumerate(scalars):
            if i not in rest:
                assert c not in label
                label[c] = name
    runs = []
    for c in scalars:
        if c in label:
            if runs and runs[-1][2] == label[c] and runs[-1][1] == c - 1:
                runs[-1][1] = c
            else:
                runs.append([c, c, label[c]])
    return runs


def contractions():
    """Every character c for which the pre-tokenizer takes "'c" for a contraction."""
    split = pre_tokenizers.Split(Regex(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"), behavior="isolated")
    found = []
    for c in range(0x110000):
        if 0xD800 <= c <= 0xDFFF:
            continue
        if len(split.pre_tokenize_str("'" + chr(c) + "0")) == 2:
            found.append(c)
    return found


def combining():
    """Characters that the normalizer sorts as combining marks: they let a mark of class
    220 pass to the front of one of class 240."""
    nfc = normalizers.NFC()
    for c in range(0x110000):
        s = "a\u0345" + chr(c) + "\u0316"
        if not 0xD800 <= c <= 0xDFFF and nfc.normalize_str(s) != s:
            yield c


def composites():
    """Characters that the normalizer composes from their canonical decomposition."""
    nfc = normalizers.NFC()
    for c in range(0x110000):
        if not 0xD800 <= c <= 0xDFFF:
            nfd = unicodedata.normalize("NFD", chr(c))
            if nfd != chr(c) and nfc.normalize_str(nfd) == chr(c):
                yield c


def runs(chars):
    """Runs [first, last] of an ascending sequence."""
    found = []
    for c in chars:
        if found and found[-1][1] == c - 1:
            found[-1][1] = c
        else:
            found.append([c, c])
    return found


def texts(prompts, special, seed):
    rng = random.Random(seed)
    yield from CASES
    yield from NFC_CASES
    yield from SENTENCES
    yield from prompts
    for a in range(0x20, 0x3100, 32):  # every character of the lower blocks, beside a letter and a digit
        yield "".join(f"a{chr(c)}1" if c % 2 else chr(c) for c in range(a, a + 32))
    assigned = [c for c in range(0x20, 0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    ascii_ = [chr(c) for c in range(32, 127)]
    pieces = special + [" ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "\u0301", "\u0323", "\u200d", "\ufe0f", "\u3000"]
    words = " ".join(SENTENCES).split(" ")
    for i in range(700):
        n = rng.randint(1, 40)
        kind = i % 5
        if kind == 0:
            yield "".join(chr(rng.choice(assigned)) for _ in range(n))
        elif kind == 1:
            yield "".join(rng.choice(ascii_) for _ in range(n))
        elif kind == 2:
            yield "".join(rng.choice(words) + rng.choice(pieces) for _ in range(n // 2 + 1))
        elif kind == 3:
            yield "".join(
                rng.choice((rng.choice(ascii_), rng.choice(pieces), chr(rng.choice(assigned)))) for _ in range(n)
            )
        else:
            text = rng.choice(SENTENCES)
            a = rng.randrange(len(text))
            yield unicodedata.normalize("NFD", text[a:a + 60])


def write_gz(path, lines):
    with open(path, "wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0) as f:
        for line in lines:
            f.write((json.dumps(line, ensure_ascii=True, separators=(",", ":")) + "\n").encode())


def record_corpus(full, half, out, prompts, special, seed):
    def encode(tokenizer, text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    write_gz(os.path.join(out, "corpus.jsonl.gz"),
             ([t, encode(full, t), encode(half, t)] for t in texts(prompts, special, seed)))
    write_gz(os.path.join(out, "classes.json.gz"), [classes(), contractions(), runs(combining()), runs(composites())])
