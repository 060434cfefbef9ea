# examples/rlhf/make_data.py
"""Writes the data of the RLHF example beside this file: descriptions of animals, and which of two is the kinder one."""

import json
import random
from collections.abc import Iterable
from itertools import product
from pathlib import Path

COLORS = ("black", "blue", "brown", "golden", "green", "grey", "orange", "pink", "purple", "red", "white", "yellow")
ANIMALS = ("bear", "cat", "cow", "dog", "duck", "fox", "frog", "goat", "hen", "horse", "lion", "mouse", "owl", "pig")
KIND = ("calm", "gentle", "kind", "patient", "polite", "warm")
UNKIND = ("cruel", "greedy", "grumpy", "lazy", "mean", "rude")


def main(folder: Path) -> None:
    """Write the rows of all files; the same ones every time."""
    chance = random.Random(0)
    subjects = [f"The {color} {animal}" for color, animal in product(COLORS, ANIMALS)]
    chance.shuffle(subjects)
    held_out, training = subjects[:40], subjects[40:]
    write(folder / "demonstrations.jsonl", (demonstration(each, chance) for each in training for _ in range(6)))
    write(folder / "pairs.jsonl", (pair(each, chance) for each in training for _ in range(4)))
    write(folder / "held_out_pairs.jsonl", (pair(each, chance) for each in held_out for _ in range(2)))
    write(folder / "prompts.jsonl", (row(each) for each in training))
    write(folder / "held_out_prompts.jsonl", (row(each) for each in held_out))


def row(subject: str) -> dict[str, str]:
    """A question; the label is how an answer must begin."""
    return {"prompt": f"Describe {subject.replace('The', 'the')}.", "label": subject}


def description(subject: str, chance: random.Random) -> tuple[str, int]:
    """A sentence with three words that say nothing about kindness as a whole, and how kind they happen to be."""
    words = chance.sample(KIND + UNKIND, 3)
    return f"{subject} is {words[0]}, {words[1]} and {words[2]}.", sum(word in KIND for word in words)


def demonstration(subject: str, chance: random.Random) -> dict[str, str]:
    """A question with an answer as kind as chance will have it."""
    return row(subject) | {"response": description(subject, chance)[0]}


def pair(subject: str, chance: random.Random) -> dict[str, str]:
    """A question with two answers, of which the kinder one is chosen."""
    while True:
        (first, kind), (second, other) = description(subject, chance), description(subject, chance)
        if kind != other:
            chosen, rejected = (first, second) if kind > other else (second, first)
            return row(subject) | {"chosen": chosen, "rejected": rejected}


def write(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """One JSON object a line."""
    path.write_text("".join(json.dumps(each) + "\n" for each in rows), encoding="utf-8")


if __name__ == "__main__":
    main(Path(__file__).parent)
