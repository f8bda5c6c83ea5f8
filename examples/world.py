"""The tiny tasks of the examples: questions, gold answers, and demonstrations for the warm start.

A model of 0.14 million parameters learns them in seconds. Every decision is an association of one symbol with another,
a copy, or one comparison. Demonstrations are right about as often as the run file says: with none that are right on
purpose, learning from reward does not begin, and with all of them it has nothing to add.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz+-*=?|!:,."

DIGITS = "0123456789"

LETTERS = "abcdefghij"

FACTS = dict(zip(LETTERS, "7302918564", strict=True))
"""A letter has a digit. Only demonstrations and rewards say which one."""

RIGHT, WRONG = "y", "n"
"""What a verifier says of an answer."""

Prompt = Callable[..., str]

Messages = list[dict[str, str]]


@dataclass
class Question:
    """A question with one right answer."""

    text: str
    gold: str
    id: str = ""

    def __str__(self) -> str:
        return self.text

    def grade(self, answer: str) -> float:
        """1 for the right answer, and 0 for any other text."""
        return float(answer == self.gold)


def sums(numbers: random.Random) -> Question:
    """The last digit of a sum of two digits: `7+5` is `2`."""
    a, b = numbers.randrange(10), numbers.randrange(10)
    return Question(f"{a}+{b}", str((a + b) % 10))


def facts(numbers: random.Random) -> Question:
    """The digit of a letter: `e` is `9`."""
    letter = numbers.choice(LETTERS)
    return Question(letter, FACTS[letter])


KINDS = {"sums": sums, "facts": facts}


def questions(kind: str, seed: str) -> Iterator[Question]:
    """Endless questions of a kind."""
    numbers = random.Random(seed)
    while True:
        yield KINDS[kind](numbers)


def demos(name: str, right: float, numbers: random.Random, prompt: Prompt) -> Iterator[Messages]:
    """Endless demonstrations of a role: `KIND.ROLE`. A share of `right` is right on purpose, and the rest by chance."""
    kind, _, role = name.partition(".")
    for place in itertools.count():
        yield from ROLES[role or "solver"](KINDS[kind](numbers), right, numbers, prompt, place)


def guess(gold: str, choices: str, right: float, numbers: random.Random) -> str:
    """The gold answer, or one by chance."""
    return gold if numbers.random() < right else numbers.choice(choices)


def solver(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Answers a question."""
    yield said(prompt("answer", q=q), guess(q.gold, DIGITS, right, numbers))


def generator(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Answers a question, or answers it again when it knows an earlier answer and what the verifier says of it."""
    if place % 2 == 0:
        yield from solver(q, right, numbers, prompt, place)
        return
    earlier = guess(q.gold, DIGITS, right, numbers)
    critique = guess(verdict(q, earlier), RIGHT + WRONG, right, numbers)
    yield said(prompt("revise", q=q, a=earlier, c=critique), guess(q.gold, DIGITS, right, numbers))


def verifier(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Says whether an answer is right."""
    answer = guess(q.gold, DIGITS, 0.5, numbers)
    yield said(prompt("verify", q=q, a=answer), guess(verdict(q, answer), RIGHT + WRONG, right, numbers))


ROLES = {"solver": solver, "generator": generator, "verifier": verifier}


def verdict(q: Question, answer: str) -> str:
    """What is true of an answer."""
    return RIGHT if q.grade(answer) else WRONG


def said(question: str, answer: str) -> Messages:
    """A conversation of one call."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
