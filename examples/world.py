"""The tiny tasks of the examples: questions, gold answers, and demonstrations for the warm start.

A model of 0.14 million parameters learns them in seconds. Every decision is an association of one symbol with another,
a copy, or one comparison. Demonstrations are right about as often as the run file says: with none that are right on
purpose, learning from reward does not begin, and with all of them it has nothing to add.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz+-*=?|!:,."

DIGITS = "0123456789"

LETTERS = "abcdefghij"

FACTS = dict(zip(LETTERS, "7302918564", strict=True))
"""A letter has a digit. Only demonstrations and rewards say which one."""

FIRST, SECOND = LETTERS[:5], LETTERS[5:]

NEXT = dict(zip(FIRST, "gjfih", strict=True))
"""A letter of `SECOND` follows each letter of `FIRST`."""

KEYS = "abcd"
"""The letters of chunks in the task `memory`."""

NOTHING = "-"
"""A memory that is empty."""

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
    chunks: tuple[str, ...] = ()
    """The parts of a text that is read part by part."""

    def __str__(self) -> str:
        return self.text

    def grade(self, answer: str) -> float:
        """1 for the right answer, and 0 for any other text."""
        return float(answer == self.gold)


def sums(numbers: random.Random) -> Question:
    """The last digit of a sum of two digits: `7+5` is `2`."""
    a, b = numbers.randrange(10), numbers.randrange(10)
    return Question(f"{a}+{b}", str((a + b) % 10))


def small_sums(numbers: random.Random) -> Question:
    """The sum of two digits below 5: `3+4` is `7`."""
    a, b = numbers.randrange(5), numbers.randrange(5)
    return Question(f"{a}+{b}", str(a + b))


def lookups(numbers: random.Random) -> Question:
    """A key, and the digit that a tool has for it: `3` and `7`, and another digit the next time."""
    return Question(numbers.choice(DIGITS), numbers.choice(DIGITS))


def share_right(text: str, is_whole: bool, gold: str) -> float:
    """The share of the gold answer, with its end, that is right before the first mistake."""
    right = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(text, gold, strict=False)))
    return (right + (is_whole and text == gold)) / (len(gold) + 1)


def facts(numbers: random.Random) -> Question:
    """The digit of a letter: `e` is `9`."""
    letter = numbers.choice(LETTERS)
    return Question(letter, FACTS[letter])


def series(numbers: random.Random) -> Question:
    """The digits of five letters, which are asked for one by one: `ebajc` is `93740`."""
    letters = "".join(numbers.sample(LETTERS, 5))
    return Question(letters, "".join(FACTS[letter] for letter in letters))


def memory(numbers: random.Random) -> Question:
    """A letter whose digit is in one of three chunks: `c` with the chunks `a3`, `c9` and `b1` is `9`."""
    letters = numbers.sample(KEYS, 3)
    digits = [numbers.choice(DIGITS) for _ in letters]
    place = numbers.randrange(len(letters))
    chunks = tuple(letter + digit for letter, digit in zip(letters, digits, strict=True))
    return Question(letters[place], digits[place], chunks=chunks)


def hops(numbers: random.Random) -> Question:
    """The digit of the letter that follows a letter: a document has the letter, and another one the digit."""
    letter = numbers.choice(FIRST)
    return Question(letter, FACTS[NEXT[letter]])


def search(letter: str) -> str:
    """The one document about a letter, or `!` for a search that is not understood."""
    if letter not in LETTERS or len(letter) != 1:
        return "!"
    return letter + (NEXT[letter] if letter in FIRST else FACTS[letter])


OPERATORS = {"p": "+", "t": "*", "m": "-"}


def products(numbers: random.Random) -> Question:
    """Two digits and what to do with them, plus, times or minus: `78t` is `56`. Nobody knows it without calculating."""
    a, b, name = numbers.randrange(10), numbers.randrange(10), numbers.choice(list(OPERATORS))
    return Question(f"{a}{b}{name}", calculate(f"{a}{OPERATORS[name]}{b}"))


def calculate(code: str) -> str:
    """The value of an expression of two digits, or `!` for other code."""
    found = re.fullmatch(r"(\d)([-+*])(\d)", code)
    if found is None:
        return "!"
    a, b = int(found[1]), int(found[3])
    return str({"+": a + b, "-": a - b, "*": a * b}[found[2]])


def relations(numbers: random.Random) -> Question:
    """The digit of a letter, or of the letter that follows it: `ue` is `9`, and `we` is the digit of `h`, `5`."""
    kind, letter = numbers.choice("uw"), numbers.choice(FIRST)
    return Question(kind + letter, FACTS[letter if kind == "u" else NEXT[letter]])


TOOLS = {"x": NEXT, "y": FACTS, "z": {}}
"""What tools know of letters: `x` the one that follows, `y` the digit, and `z` nothing."""


def use(step: str) -> str:
    """The result of a tool and a letter: `xe` is `h`, and `!` is the result of what is not understood."""
    return TOOLS.get(step[:1], {}).get(step[1:], "!")


TABLES = "xyz"

ASKED = {"w": "x", "u": "y"}
"""The table that has the answer to a kind of question. Table `z` has no answers."""


def tables(numbers: random.Random) -> Question:
    """A question whose answer is in one of three tables: that to `ue` is in table `y`, and that to `we` in table `x`.
    The tables `x4`, `y7` and `z2` are the chunks."""
    kind = numbers.choice(list(ASKED))
    digits = dict(zip(TABLES, numbers.sample(DIGITS, len(TABLES)), strict=True))
    chunks = tuple(table + digit for table, digit in digits.items())
    return Question(kind + numbers.choice(LETTERS), digits[ASKED[kind]], chunks=chunks)


EXPERTS = {"s": 1, "m": 3, "l": 9}
"""What it costs to ask an expert."""

ABLE = {"e": "sml", "m": "ml", "h": "l"}
"""The experts that are right about an easy, a medium and a hard question."""


def routes(numbers: random.Random) -> Question:
    """A hard, medium or easy question, and whether its cost counts: `h3c`. Only an expert knows the answer."""
    return Question(numbers.choice("emh") + numbers.choice(DIGITS) + numbers.choice("ca"), numbers.choice(DIGITS))


def expert(name: str, q: Question) -> str:
    """What an expert answers. One who is not able to answer says the next digit."""
    return q.gold if name in ABLE[q.text[0]] else str((int(q.gold) + 1) % 10)


def edits(numbers: random.Random) -> Question:
    """A file and what one of its lines is to be: `a3`, `b7` and `c1` with `b9`. The answer is the file after the edit."""
    letters = numbers.sample(KEYS, 3)
    lines = tuple(letter + numbers.choice(DIGITS) for letter in letters)
    place = numbers.randrange(len(lines))
    digit = numbers.choice(DIGITS.replace(lines[place][1], ""))
    return Question(letters[place] + digit, edited(lines, f"{place + 1}{digit}"), chunks=lines)


def edited(lines: Sequence[str], change: str) -> str:
    """A file after an edit: `29` writes 9 behind the letter of line 2. An edit that is not understood changes nothing."""
    made = list(lines)
    if re.fullmatch(r"[1-9]\d", change) and int(change[0]) <= len(made):
        place = int(change[0]) - 1
        made[place] = made[place][0] + change[1]
    return "".join(line + "\n" for line in made)


def line_of(letter: str, lines: Sequence[str]) -> str:
    """The number of the line that begins with a letter, from 1, or `NOTHING`."""
    return next((str(number) for number, line in enumerate(lines, 1) if line[0] == letter), NOTHING)


KINDS = {
    "sums": sums,
    "small_sums": small_sums,
    "lookups": lookups,
    "facts": facts,
    "series": series,
    "memory": memory,
    "hops": hops,
    "products": products,
    "routes": routes,
    "relations": relations,
    "edits": edits,
    "tables": tables,
}


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


def examinee(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Answers a series of questions, in one conversation."""
    conversation: Messages = []
    for letter, digit in zip(q.text, q.gold, strict=True):
        conversation += said(prompt("ask", q=letter), guess(digit, DIGITS, right, numbers))
    yield conversation


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


def rewriter(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Answers a question when it knows what three solvers have answered."""
    yield said(prompt("rewrite", q=q, answers=answers(q, 3, right, numbers)), guess(q.gold, DIGITS, right, numbers))


def summarizer(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Answers a question when it knows what four solvers have answered."""
    yield said(prompt("summarize", q=q, answers=answers(q, 4, right, numbers)), guess(q.gold, DIGITS, right, numbers))


def selector(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Picks one of three labelled candidates."""
    candidates = answers(q, 3, 0.5, numbers)
    labels = LETTERS[: len(candidates)]
    gold = [label for label, candidate in zip(labels, candidates, strict=True) if q.grade(candidate)]
    # Where no candidate is right, all picks are equally good.
    label = numbers.choice(gold) if gold and numbers.random() < right else numbers.choice(labels)
    yield said(prompt("select", q=q, candidates=labelled(candidates)), label)


def teammate(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """One policy in three roles. Picking is the hardest, so half of the demonstrations show it."""
    role = (solver, selector, rewriter, selector)[place % 4]
    yield from role(q, right + 0.1 * (role is not solver), numbers, prompt, place)


def critic(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Answers a question when it knows its earlier answer and those of two others."""
    own, others = answers(q, 1, right, numbers), answers(q, 2, right, numbers)
    yield said(prompt("criticise", q=q, own=own, others=others), guess(q.gold, DIGITS, right, numbers))


def peer(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Answers a question in one of three rounds. It knows what both peers have answered in the rounds before."""
    state = answers(q, 2 * (place % 3), right, numbers)
    yield said(prompt("share", q=q, state=state), guess(q.gold, DIGITS, right, numbers))


def reader(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Reads chunks one after the other with a memory of one character, and answers from the memory."""
    known = NOTHING
    for chunk in q.chunks:
        new = chunk[1:] if chunk[0] == q.text else known
        written = new if numbers.random() < right else numbers.choice([known, chunk[1:]])
        yield said(prompt("read", q=q, memory=known, chunk=chunk), written)
        known = new
    yield said(prompt("recall", q=q, memory=known), known)


def searcher(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Searches for the letter of the question, and for the one that was found, and answers with the digit."""
    messages = said(prompt("ask", q=q), "?" + guess(q.text, LETTERS, right, numbers))
    found = search(messages[-1]["content"][1:])
    if found[1] not in DIGITS:
        messages += told(found, "?" + guess(found[1], LETTERS, right, numbers))
    found = search(messages[-1]["content"][1:])
    yield messages + told(found, guess(found[1] if found[1] in DIGITS else q.gold, DIGITS, right, numbers))


def coder(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Writes the expression, and says its value."""
    a, b, name = q.text
    code = a + guess(OPERATORS[name], "+*-", right, numbers) + b
    value = calculate(code)
    answer = value if numbers.random() < right else str(numbers.randrange(82))
    yield said(prompt("ask", q=q), code) + told(value, "=" + answer)


def orchestrator(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Asks the cheapest expert that is able to answer, or any, and repeats the answer half of the time."""
    name = guess(ABLE[q.text[0]][0], "sml", right, numbers)
    answer = expert(name, q)
    yield said(prompt("ask", q=q), name) + told(":" + answer, guess(answer, DIGITS, 0.5, numbers))


def planner(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Says the kind of a question, and the steps to the digit, one at a time."""
    kind, letter = q.text
    plan = guess(kind, "uw", right, numbers)
    yield said(prompt("plan", q=q), plan)
    known: list[str] = []
    wanted = ("y" if kind == "u" else "x") + letter
    while len(known) < 3:
        step = guess(wanted[0], "xyz", right, numbers) + guess(wanted[1], LETTERS, right, numbers)
        yield said(prompt("step", q=q, plan=plan, known=",".join(known)), step)
        result = use(step)
        known.append(f"{step}={result}")
        if result in DIGITS:
            return
        if step == wanted:
            wanted = "y" + result


def base(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Says whether the last result is a digit, repeats it, or compares an answer with the right one."""
    known: list[str] = []
    for _ in range(numbers.randrange(1, 4)):
        step = numbers.choice("xyyz") + numbers.choice(LETTERS)
        known.append(f"{step}={use(step)}")
        if use(step) in DIGITS:
            break
    result = known[-1][-1]
    if place % 3 == 0:
        yield said(prompt("verify", q=q, known=",".join(known)), RIGHT if result in DIGITS else WRONG)
    elif place % 3 == 1:
        yield said(prompt("answer", q=q, known=",".join(known)), result)
    else:
        answer = guess(q.gold, DIGITS + LETTERS + "!", 0.5, numbers)
        yield said(prompt("judge", a=answer, gold=q.gold), verdict(q, answer))


def editor(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Asks a sub-agent for a line and notes its number; is the sub-agent; and edits the line. These are three
    conversations."""
    letter, digit = q.text
    asked = guess(letter, KEYS, right, numbers)
    found = line_of(asked, q.chunks)
    note = guess(found, "123", right, numbers)
    yield said(prompt("ask", q=q), "?" + asked) + told(found, note, prompt("compact"))
    pages: Messages = []
    for line in q.chunks:
        word = guess(RIGHT if line[0] == letter else WRONG, RIGHT + WRONG, right, numbers)
        pages += told(line, word) if pages else said(prompt("find", letter=letter, line=line), word)
        if word == RIGHT:
            break
    yield pages
    number = line_of(letter, q.chunks)
    edit = guess(number, "123", right, numbers) + guess(digit, DIGITS, right, numbers)
    yield said(prompt("resume", q=q, summary=number), edit)


def lead(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Plans which tables three subagents ask, or answers a question when it knows what they have answered."""
    plan = [numbers.choice(TABLES) for _ in range(3)]
    if numbers.random() < right:
        plan[numbers.randrange(3)] = ASKED[q.text[0]]
    asked = "".join(plan)
    if place % 2 == 0:
        yield said(prompt("plan", q=q), asked)
        return
    found = "".join(guess(q.chunks[TABLES.index(table)][1], DIGITS, right, numbers) for table in plan)
    yield said(prompt("join", q=q, tables=asked, answers=found), guess(q.gold, DIGITS, right, numbers))


def subagent(q: Question, right: float, numbers: random.Random, prompt: Prompt, place: int) -> Iterator[Messages]:
    """Says what a table has, whether it is the answer to the question or not."""
    table = numbers.choice(q.chunks)
    yield said(prompt("look", q=q, table=table), guess(table[1], DIGITS, right, numbers))


ROLES = {
    "solver": solver,
    "examinee": examinee,
    "generator": generator,
    "verifier": verifier,
    "rewriter": rewriter,
    "summarizer": summarizer,
    "selector": selector,
    "teammate": teammate,
    "critic": critic,
    "peer": peer,
    "reader": reader,
    "searcher": searcher,
    "coder": coder,
    "orchestrator": orchestrator,
    "planner": planner,
    "base": base,
    "editor": editor,
    "lead": lead,
    "subagent": subagent,
}


def answers(q: Question, count: int, right: float, numbers: random.Random) -> str:
    """What so many others have answered, a character for each."""
    return "".join(guess(q.gold, DIGITS, right, numbers) for _ in range(count))


def labelled(candidates: Sequence[str]) -> str:
    """Candidates with a letter before each: `7`, `3` and `7` are `a7b3c7`."""
    return "".join(label + candidate for label, candidate in zip(LETTERS, candidates, strict=False))


def picked(label: str, candidates: Sequence[str]) -> int | None:
    """The place of the candidate that a label names, or None if it names none."""
    place = LETTERS.find(label) if len(label) == 1 else -1
    return place if 0 <= place < len(candidates) else None


def verdict(q: Question, answer: str) -> str:
    """What is true of an answer."""
    return RIGHT if q.grade(answer) else WRONG


def said(question: str, answer: str) -> Messages:
    """A conversation of one call."""
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def told(result: str, answer: str, asked: str | None = None) -> Messages:
    """What a tool says, what the user then asks, if anything, and what the assistant says to it."""
    user = [] if asked is None else [{"role": "user", "content": asked}]
    return [{"role": "tool", "content": result}, *user, {"role": "assistant", "content": answer}]
