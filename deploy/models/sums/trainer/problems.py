"""Additions and subtractions of up to three digits, slips, and conversations about them."""

from __future__ import annotations

import random
from dataclasses import dataclass

from .tokens import SYSTEM

Message = tuple[str, str]


@dataclass(frozen=True)
class Problem:
    a: int
    op: str
    b: int

    @property
    def text(self) -> str:
        return f"{self.a}{self.op}{self.b}=?"

    @property
    def truth(self) -> int:
        return self.a + self.b if self.op == "+" else self.a - self.b

    @property
    def kind(self) -> str:
        size = len(str(max(self.a, self.b)))
        return ("add" if self.op == "+" else "sub" if self.a >= self.b else "neg") + str(size)

    @property
    def held_out(self) -> bool:
        return max(self.a, self.b) >= 100 and (7919 * self.a + 104729 * self.b + 31 * (self.op == "+")) % 97 == 0


def number(r: random.Random, digits: int) -> int:
    return r.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def draw(r: random.Random, held_out: bool = False) -> Problem:
    """A problem of those held out, or of the others."""
    while True:
        size = r.choices((3, 2, 1), (0.6, 0.28, 0.12))[0]
        other = size if r.random() < 0.6 else r.randint(1, size)
        a, b = number(r, size), number(r, other)
        if r.random() < 0.5:
            a, b = b, a
        op = r.choice("+-")
        if op == "-" and a < b and r.random() < 0.6:
            a, b = b, a
        p = Problem(a, op, b)
        if p.held_out == held_out:
            return p


def slip(r: random.Random, p: Problem) -> int:
    """A wrong answer of the kind that people make who know how: a digit or two off, or the sign."""
    places = len(str(abs(p.truth)))
    while True:
        wrong, u = p.truth, r.random()
        sign = lambda: r.choice((-1, 1))  # noqa: E731
        if p.op == "-" and r.random() < 0.05:
            wrong = -p.truth
        elif u < 0.6:
            wrong += sign() * 10 ** r.randrange(places)
        elif u < 0.8:
            wrong += sign() * r.randint(2, 9) * 10 ** r.randrange(places)
        elif places > 1:
            first, second = r.sample(range(places), 2)
            wrong += sign() * 10**first + sign() * 10**second
        if wrong != p.truth and (wrong >= 0 or p.op == "-"):
            return wrong


def hint(p: Problem, answer: int) -> str:
    return "too low" if answer < p.truth else "too high"


def opening(r: random.Random, p: Problem) -> list[Message]:
    head = [("system", SYSTEM)] if r.random() < 0.05 else []
    return [*head, ("user", p.text)]


def plain(r: random.Random) -> tuple[list[Message], str]:
    """A problem and its answer, one in five of which is a slip: the noise that leaves reinforcement learning something
    to do."""
    p = draw(r)
    return opening(r, p), str(slip(r, p) if r.random() < 0.2 else p.truth)


def retry(r: random.Random, mistakes: list[tuple[Problem, int]]) -> tuple[list[Message], str]:
    """A conversation with one wrong answer or two, each with its hint; half of the first are mistakes that the model
    made."""
    if mistakes and r.random() < 0.5:
        p, wrong = r.choice(mistakes)
    else:
        p = draw(r)
        wrong = slip(r, p)
    messages = opening(r, p)
    for turn in range(2 if r.random() < 0.25 else 1):
        if turn > 0:
            wrong = slip(r, p)
        messages += [("assistant", str(wrong)), ("user", hint(p, wrong))]
    return messages, str(slip(r, p) if r.random() < 0.05 else p.truth)


def parse(text: str) -> int | None:
    """The number of an answer in canonical form, else None."""
    try:
        n = int(text)
    except ValueError:
        return None
    return n if str(n) == text else None
