"""Numbers in words."""

from fractions import Fraction

import pytest

from slipstream.rewards.mathematics.equivalence import same_answer
from slipstream.rewards.mathematics.numerals import number_in_words


@pytest.mark.parametrize(
    ("words", "value"),
    [
        *(("zero", 0), ("six", 6), ("sixteen", 16), ("twenty", 20), ("twenty-five", 25), ("one hundred", 100)),
        *(
            ("two hundred five", 205),
            ("three thousand four hundred twelve", 3412),
            ("one million two thousand", 1002000),
        ),
        *(("minus one", -1), ("negative twelve", -12), ("half", Fraction(1, 2)), ("two thirds", Fraction(2, 3))),
        ("three quarters", Fraction(3, 4)),
    ],
)
def test_words_that_are_a_number(words, value):
    assert number_in_words(words) == value


@pytest.mark.parametrize(
    "words",
    [
        *(
            "",
            "third",
            "second",
            "twenty fifth",
            "five twenty",
            "one two",
            "twenty zero",
            "hundred hundred",
            "six people",
        ),
        *("two thousand three million", "minus", "five halves and", " ".join(["one"] * 20)),
    ],
)
def test_words_that_are_none(words):
    assert number_in_words(words) is None


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("25", "\\text{twenty-five}", True),
        ("-1", "\\text{negative one}", True),
        ("1/2", "half", True),
        ("1/3", "\\text{one third}", True),
        ("3", "\\text{third}", False),
        ("1500000", "\\$1.5\\text{ million}", True),
        ("3\\text{ thousand}", "3000", True),
        ("500", "5 hundred dollars", True),
        ("5", "5 hundred", False),
        ("1.5\\text{ million}", "1.5", False),
        ("\\text{two lines}", "\\text{two circles}", False),
        ("2", "\\text{two lines}", False),
    ],
)
def test_words_in_an_answer(gold, answer, same):
    assert same_answer(gold, answer) == same
