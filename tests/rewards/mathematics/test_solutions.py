"""Inequalities, and what they leave out, as the sets they describe."""

import pytest

from slipstream.rewards.mathematics.equivalence import same_answer


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("[-1,1]", "|x|\\le 1", True),
        ("(-1,3)", "|x-1|<2", True),
        ("(-1,3)", "|x-1|\\le 2", False),
        ("(-\\infty,-1]\\cup[3,\\infty)", "|x-1|\\ge 2", True),
        ("(-2,2)", "|x|<-2", False),
        ("(2,5)", "x>2\\text{ and }x<5", True),
        ("(2,5)", "x<5, x>2", True),
        ("2<x<5", "x>2, x<5", True),
        ("(2,5)", "x>2, y<5", False),
        ("(2,5)", "x\\ge2, x<5", False),
        ("x>2", "x>2, x<5", False),
        ("(-\\infty,2)\\cup(5,\\infty)", "x<2\\text{ or }x>5", True),
        ("(-\\infty,0)\\cup(0,\\infty)", "\\mathbb{R}\\setminus\\{0\\}", True),
        ("(-\\infty,-2)\\cup(-2,1)\\cup(1,\\infty)", "\\mathbb{R}\\setminus\\{1,-2\\}", True),
        ("(-\\infty,-2)\\cup(-2,1)\\cup(1,\\infty)", "x\\ne1, x\\ne-2", True),
        ("\\mathbb{R}\\setminus\\{1\\}", "x \\ne 1", True),
        ("\\mathbb{R}\\setminus\\{1\\}", "x \\ne 2", False),
        ("\\mathbb{R}", "\\mathbb{R}\\setminus\\{1\\}", False),
        ("\\mathbb{R}", "\\mathbb{R}\\setminus\\mathbb{Q}", False),
    ],
)
def test_a_set_in_two_notations(gold, answer, same):
    assert same_answer(gold, answer) == same
