"""Ways to write one thing, and things that are written much like another."""

import pytest

from slipstream.rewards.mathematics.equivalence import same_answer

SAME = {
    "marks between digits": [("1000000", "1_000_000"), ("1234", "1'234")],
    "decimals that go on": [
        *(("1/3", "0.333..."), ("1/3", "0.(3)"), ("1/6", "0.1666\\ldots"), ("4/33", "0.1212\\dots"), ("2", "2.000...")),
        *(("\\sqrt2", "1.41421356..."), ("e", "2.718281828...")),
    ],
    "fractions": [("\\frac32", "3\\over 2"), ("\\frac34x", "{3 \\over 4}x"), ("\\frac34", "\\nicefrac{3}{4}")],
    "binomials and factorials": [
        *(("120", "C(10,3)"), ("120", "{}_{10}C_3"), ("120", "10C3"), ("\\frac{10!}{3!7!}", "120"), ("15", "5!!")),
        *(("2^{10}\\cdot5^3", "2^{10}5^{3}"), ("72", "2^3 3^2")),
    ],
    "units": [
        *(
            ("12", "12\\ \\mathrm{cm^2}"),
            ("9.8", "9.8\\,\\mathrm{m/s^{2}}"),
            ("10", "10\\text{ N}"),
            ("5", "5\\ \\mathrm{m}"),
        ),
        *(
            ("5", "5 (miles)"),
            ("5", "5\\ (\\text{units})"),
            ("5", "Rs. 5"),
            ("3\\text{ inches}", '3"'),
            ("5\\text{ feet}", "5'"),
        ),
        *(("5 ft 6 in", "5'6\""), ("120", "120\u5143"), ("5\\text{ cm}", "5\u5398\u7c73"), ("5\\text{ m}", "5m")),
        ("9.8", "9.8\\text{ m}\\cdot\\text{s}^{-2}"),
    ],
    "bases, ratios": [
        *(("1011_2", "1011_{\\text{two}}"), ("1011_2", "1011\\text{ (base 2)}"), ("1011_2", "1011 in base 2")),
        *(("3:4", "3 to 4"), ("1:2:3", "2:4:6")),
    ],
    "brackets": [("(1,2)", "]1;2["), ("[1,2)", "[1,2["), ("\\begin{bmatrix}2\\\\-1\\end{bmatrix}", "(2,-1)^T")],
    "digits of a base, sets with a domain": [
        *(("1A_{16}", "1a_{16}"), ("\\text{AB}_{16}", "AB_{16}"), ("10", "\\binom52"), ("10", "5\\choose 2")),
        ("[-2,2]", "\\{x\\in\\mathbb{R}: -2\\le x\\le 2\\}"),
    ],
    "matrices": [
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix}1\\\\[4pt]2\\end{pmatrix}"),
        ("\\begin{pmatrix}1/2\\\\1\\end{pmatrix}", "\\frac12\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
        ("(-1,-2)", "-\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ],
    "ornaments": [
        *(
            ("5", "\\bm{5}"),
            ("5", "`5`"),
            ("5", '"5"'),
            ("5", "5 \\checkmark"),
            ("5", "5\\qquad\\blacksquare"),
            ("5", "\\therefore 5"),
        ),
        *(("5", "5\\tag{1}"), ("5", "\\ensuremath{5}"), ("\\mathbb{R}", "\\mathbf{R}")),
    ],
    "lists and sets": [
        *(
            ("\\{1,2\\}", "\\{2,1,1\\}"),
            ("\\emptyset", "\\text{no solution}"),
            ("\\text{No real solutions}", "\\emptyset"),
        ),
        *(("(1,3)", "y=3, x=1"), ("y=3, x=1", "(1,3)"), ("k\\pi, k\\in\\mathbb{Z}", "n\\pi\\ (n \\in \\mathbb{Z})")),
    ],
    "equations": [
        *(("f(x)=x^2", "y=x^2"), ("72", "= 8 \\times 9 = 72"), ("7", "\\sum_{i=1}^n a_i=7"), ("7", "f(g(2))=7")),
        *(("12", "a^2+b^2=12"), ("3.33", "x=10/3=3.33")),
    ],
    "options": [("ABD", "A, B, D"), ("A,C", "AC"), ("\\text{DNE}", "\\text{does not exist}")],
    "functions": [("e^{i\\pi/3}", "\\operatorname{cis}(60^\\circ)")],
}

DIFFERENT = {
    "digits": [
        ("12", "1\\, 2"),
        ("1.41", "1.41..."),
        ("0.333", "0.333..."),
        ("5", "5.5..."),
        ("12", "\\frac{1}{2}3"),
        ("2", "1/2 4"),
    ],
    "factorials": [("720", "3!!"), ("5!!", "120"), ("(10,3)", "C(10,3)")],
    "units": [
        *(
            ("5", "5m"),
            ("5", "5\\text{x}"),
            ("5", "5\\text{K}"),
            ("5", "5\\mathrm{e}"),
            ("5\\text{ m}", "5\\text{ s}"),
            ("5\\text{ m}", "5 s"),
        ),
        *(
            ("5", "5'6\""),
            ("5", "5\u4e07"),
            ("5", "5\u500d"),
            ("5\u7c73", "5\u5398\u7c73"),
            ("5", "5 (or 6)"),
            ("5", "5\\text{ (false)}"),
        ),
    ],
    "bases, ratios": [
        ("7", "7\\text{ in base }10"),
        ("1011_2", "1011_{\\text{three}}"),
        ("3:4", "4 to 3"),
        ("1:2:3", "1:2:4"),
        ("1:2:3", "1:2"),
    ],
    "brackets": [("[1,2]", "]1,2["), ("(1,2)", "[1,2[")],
    "matrices": [
        ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "-\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
        ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}^T"),
    ],
    "lists and sets": [
        *(
            ("\\{2,3\\}", "\\{2\\},\\{3\\}"),
            ("\\emptyset", "\\text{one solution}"),
            ("\\emptyset", "0"),
            ("R", "\\mathbb{R}"),
        ),
        *(("2k\\pi, k\\in\\mathbb{Z}", "n\\pi, n\\in\\mathbb{Z}"), ("(3,4)", "y=3, x=4")),
        *(("(2,-3)", "x=2\\text{ or }x=-3"), ("x=2\\text{ or }x=-3", "(2,-3)")),
    ],
    "equations": [("4", "x=3=4"), ("y=x^2", "g(x)=x^2"), ("12", "a^2=12")],
    "options": [("I", "i"), ("AB", "A"), ("A, B", "A, C"), ("AB", "BC")],
}


@pytest.mark.parametrize(("gold", "answer"), [pair for pairs in SAME.values() for pair in pairs])
def test_another_way_to_write_the_answer(gold, answer):
    assert same_answer(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), [pair for pairs in DIFFERENT.values() for pair in pairs])
def test_what_only_looks_like_it(gold, answer):
    assert not same_answer(gold, answer)
