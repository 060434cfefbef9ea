"""Which answers are the same: pairs by kind, and laws that hold for all."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.rewards.mathematics.equivalence import same_answer

SAME = {
    "numbers": [
        *(("1080", "1,080"), ("10,\\!080", "10080"), ("2{,}016{,}532", "2016532"), ("1\\,000", "1000"), ("0.4", ".4")),
        *(
            ("16", "016"),
            ("-7", "\u22127"),
            ("72", "\uff17\uff12"),
            ("72", "7\u200b2"),
            ("72", "٧٢"),
            ("1000.99", "1000,99"),
        ),
        *(
            ("1.2e5", "120000"),
            ("1.5\\times10^{-3}", "0.0015"),
            ("6.02 \\cdot 10^{23}", "6.02e23"),
            ("6", "\\text{six}"),
        ),
        *(("\\frac{1}{2}", "\\dfrac12"), ("\\frac{3}{2}", "3/2"), ("-\\frac{1}{2}", "\\frac{1}{-2}"), ("1/2", "½")),
        *(("1\\frac{4}{5}", "\\frac{9}{5}"), ("-1\\frac{1}{2}", "-1.5"), ("9004/9", "1 000 4/9"), ("0", "-0")),
        *(("0.\\overline{3}", "1/3"), ("0.1\\overline{6}", "\\frac16"), ("10!", "3628800"), ("20", "\\binom{6}{3}")),
    ],
    "decimals": [
        *(("\\frac13", "0.333333"), ("\\frac23", "0.6666667"), ("\\sqrt{17}", "4.123105625617661"), ("1.0", "1")),
        *(("0.1+0.2", "0.30000000000000004"), ("(1,\\frac{9}{2})", "(1, 4.5)"), ("\\pi", "3.14159265358979")),
    ],
    "expressions": [
        *(
            ("\\frac{\\sqrt{2}}{2}", "1/\\sqrt2"),
            ("2+\\sqrt{3}", "√3+2"),
            ("0", "\\sqrt{8}-2\\sqrt{2}"),
            ("2", "e^{\\ln 2}"),
        ),
        *(("x^2 - 2x + 2", "(x-1)^2+1"), ("\\frac{x+2}{7}", "\\frac{x}{7}+\\frac{2}{7}"), ("1", "\\sin^2 x+\\cos^2 x")),
        *(("\\tan^2(y)+1", "\\sec^2(y)"), ("2 \\sin 5x \\cos x", "2(\\cos x)\\sin(5x)"), ("\\sqrt[3]{-8}", "-2")),
        *(("\\frac{1}{3\\sqrt[3]{x}^2}", "\\frac{1}{3x^{2/3}}"), ("|x|", "\\sqrt{x^2}"), ("n!", "n(n-1)!")),
        *(("\\frac34i", "3i/4"), ("3\\sqrt{2}i", "3i\\sqrt2"), ("e^{i\\pi}", "-1"), ("\\sqrt{-4}", "2i")),
        *(("\\log_2 8", "3"), ("|{-3}|", "3"), ("\\lfloor 2.7\\rfloor", "2"), ("\\frac12", "\\sin 30^\\circ")),
        *(
            ("9^{9^{9^9}}", "9^{9^{9^9}}"),
            ("\\alpha", "\u03b1"),
            ("x_1", "x_{1}"),
            ("72", "(" * 300 + "72" + ")" * 300),
        ),
        ("\\tfrac{1}{2} +\\! \\frac1{72}", "\\\\dfrac{1}{2} +\\frac{1}{72}"),
    ],
    "units": [
        *(
            ("125", "125\\textnormal{ miles}"),
            ("10\\text{ units}", "10"),
            ("5", "5 more"),
            ("5", "**5**"),
            ("10", "\\$10"),
            ("5", "€5"),
            ("382", "382 dollars"),
        ),
        *(("15\\mbox{ cm}^2", "15 cm^2"), ("15\\mbox{ cm}^2", "15 square centimeters"), ("5", "5\\text{ m/s}^2")),
        *(("90^\\circ", "90"), ("90", "90°"), ("90^\\circ", "90 \\text{ degrees}"), ("72", "72 km/h"), ("3rd", "3")),
        *(("28\\%", "0.28"), ("28\\%", "28"), ("28", "28\\%"), ("0.5", "50 percent"), ("40/900", "4 4/9\\%")),
    ],
    "lists, sets, tuples": [
        *(
            ("3, 5, 7", "7, 3, 5"),
            ("6, 8\\text{, and }10", "6, 8 and 10"),
            ("\\pm 2021", "-2021, 2021"),
            ("72", "\\{72\\}"),
        ),
        *(
            ("1 \\pm \\sqrt{19}", "1+\\sqrt{19}, 1-\\sqrt{19}"),
            ("\\{1,2\\}", "2, 1"),
            ("-12 \\text{ or } -30", "-30, -12"),
        ),
        *(("\\{1\\pm\\sqrt{5},-2\\}", "\\{-2, 1-\\sqrt5, 1+\\sqrt5\\}"), ("(-4, 27);(2, 15)", "(2,15), (-4,27)")),
        *(
            ("(3,4)", "x=3, y=4"),
            ("(3,4)", "(x,y)=(3,4)"),
            ("\\langle 1,2\\rangle", "(1,2)"),
            ("1/2", "1/2 \\text{ or } 0.5"),
        ),
        *(
            ("\\emptyset", "\\{\\}"),
            ("\\{1,3\\} \\cup \\{2,4\\}", "\\{1,2,3,4\\}"),
            ("x=1,y=2", "y=2,x=1"),
            ("2,3", "x=2\\text{ or }x=3"),
            ("(100,101)", "(100, 101)"),
        ),
    ],
    "intervals and inequalities": [
        ("(5,\\infty)", "\\{x \\mid x > 5\\}"),
        ("-2 < x", "\\{x : x > -2\\}"),
        *(
            ("(5,\\infty)", "x>5"),
            ("x \\in [-2,7]", "-2 \\le x \\le 7"),
            ("[2,3]", "3 \\ge x \\ge 2"),
            ("x<1", "-x > -1"),
        ),
        *(("(-\\infty, -\\frac74) \\cup (2,\\infty)", "(2,\\infty) \\cup (-\\infty,-1.75)"), ("x \\ne 3", "x != 3")),
        *(("(-\\infty,-1)\\cup(2,\\infty)", "x<-1 \\text{ or } x>2"), ("(-\\infty,3)\\cup(3,\\infty)", "x \\neq 3")),
        *(("\\mathbb{R}", "(-\\infty,\\infty)"), ("s^2 \\le 8r^2", "8r^2 \\ge s^2"), ("(0,5]", "0<x\\le5")),
    ],
    "equations": [
        *(("2x+4y-3=0", "y=-\\frac{1}{2}x+\\frac{3}{4}"), ("x^2/4 + y^2/3 = 1", "x^2/16 + y^2/12 = 1/4"), ("k=6", "6")),
        *(
            ("5", "x = 5"),
            ("11", "x = 5+5+1 = 11"),
            ("1/3", "x=1/3\\approx0.3"),
            ("x^2", "f(x) = x^2"),
            ("f(x)=x^2", "x^2"),
        ),
        *(("7", "a+b=7"), ("5", "f(3) = 5"), ("0.56 = 56\\%", "0.56"), ("f(2) < f(1)", "f(1) > f(2)"), ("y=5", "y=5")),
    ],
    "matrices": [
        (
            "\\begin{pmatrix} -1/3 \\\\ 2/3 \\end{pmatrix}",
            "\\begin{bmatrix} -\\frac{1}{3} \\\\ \\frac{2}{3} \\end{bmatrix}",
        ),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\left[\\begin{array}{cc}1&2\\\\3&4\\end{array}\\right]"),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "[[1,2],[3,4]]"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "(1, 2)"),
    ],
    "words, options, bases, ratios": [
        *(
            ("\\text{Evelyn}", "evelyn"),
            ("\\text{two lines}", "two lines"),
            ("\\text{No real solutions}", "no real solution"),
        ),
        *(
            ("\\text{(C)}", "C"),
            ("E", "\\text{E}"),
            ("C", "(C) 12"),
            ("12", "\\textbf{(C) }12"),
            ("\\textbf{(C) }12", "C"),
        ),
        *(
            ("\\text{A,B,E}", "E, B, A"),
            ("C", "Option C"),
            ("C", "(c)"),
            ("2516_8", "2516_{8}"),
            ("\\text{A5}_{11}", "A5_{11}"),
        ),
        *(("3:2", "3 : 2"), ("3:2", "6:4"), ("3:5", "\\frac35"), ("12:00", "12:00"), ("9:30", "9:30 \\text{ a.m.}")),
    ],
    "words beside a number": [
        *(
            ("18", "\\text{18 dollars}"),
            ("72", "\\textbf{72 clips}"),
            ("50\\%", "\\text{50 percent}"),
            ("5", "\\approx 5"),
        ),
        *(
            ("-5", "\\text{negative }5"),
            ("9", "5\\text{ plus }4"),
            ("5/4", "5\\text{ over 4}"),
            ("7", "\\text{Total: }7"),
        ),
        *(
            ("5\\text{ feet }3\\text{ inches}", "5 ft 3 in"),
            ("\\text{June 20}", "June 20"),
            ("\\$5", "5\\text{ dollars}"),
        ),
        *(("12:30 PM", "12:30"), ("5:12", "10:24"), ("2", "x=2\\text{ (double root)}"), ("7", "7 = x")),
    ],
    "congruences": [("5", "x \\equiv 5 \\pmod{7}"), ("5 \\pmod 7", "5"), ("3", "3 \\text{ (mod 7)}")],
    "applied functions": [("f(x-4)+1", "1+f(-4+x)"), ("3/5", "\\sin A = \\frac35"), ("f'(x)", "f'(x)")],
    "other ways to write it": [
        *(("5000", "5 x 10^3"), ("\\infty", "\\text{infinity}"), ("101_2", "(101)_2"), ("81, 256", "81,256")),
        *(("3", "3\\ (\\text{mod } 7)"), ("5 mph", "5\\text{ miles per hour}"), ("28\\%", "28\\%\\text{ more}")),
    ],
    "far points": [("\\sqrt{x-10}", "(x-10)^{1/2}"), ("0", "\\sin\\pi")],
    "names of values": [("y=x+2", "x+2"), ("y = 2x + 1", "y - 1 = 2x")],
    "what is not read, written alike": [
        ("\\sum_{k=0}^{n} F_k", "\\sum_{k=0}^{n}F_k"),
        ("\\int_0^1 x dx", "\\int_0^1 x\\,dx"),
    ],
}

DIFFERENT = {
    "several options, or none": [
        *(("B", "(B) or C"), ("B", "(B)\\text{ or C}"), ("B", "B. or C."), ("B", "(B) / D"), ("B", "(B), C")),
        *(("B", "(B) and D"), ("B", "(B) is incorrect"), ("B", "(B) cannot be"), ("B", "(B) isn't it")),
    ],
    "relations without a left side": [
        *(("4", ">4"), ("4", "\\neq 4"), ("4", "\\le 4"), ("3", "x \\not= 3"), ("4", "x \\not= 4")),
    ],
    "words beside a number": [
        *(
            ("5", f"5\\text{{ {word}}}")
            for word in ("million", "thousand", "hundred", "dozen eggs", "halves", "squared")
        ),
        *(("5", f"5\\text{{ {word}}}") for word in ("factorial", "over 4", "plus 4", "minus 4", "times 4", "out of 9")),
        *(("5", f"5\\text{{ {word} 4}}") for word in ("divided by", "choose", "mod", "or", "if n =")),
        *(
            ("5", f"\\text{{{word} }}5")
            for word in ("half of", "twice", "one over", "opposite of", "multiples of", "up to")
        ),
        *(
            ("5", f"\\text{{{word} }}5")
            for word in ("over", "below", "square root of", "between 1 and", "1 or", "negative")
        ),
        *(("3", "3\\text{ apples and }2\\text{ oranges}"), ("5", "5\\text{ cm} \\times 3\\text{ cm}")),
        *(("2", "2 \\text{ hours } 3 \\text{ minutes}"), ("3", "3\\text{ min } 1\\text{ s}")),
        *(
            ("5 \\text{ feet } 3 \\text{ inches}", "5 \\text{ feet } 2 \\text{ inches}"),
            ("3", "\\text{between 1 and }5"),
        ),
        *(("\\text{angle }\\alpha", "\\text{angle }\\beta"), ("\\angle ABC", "\\angle BAC"), ("1200", "1200\\pi")),
        *(("3:30\\text{ p.m.}", "3:30\\text{ a.m.}"), ("12:00", "12:00\\pi"), ("1:15", "2:30")),
        *(("5.4 \\text{ cents}", "\\$5.4"), ("15\\text{ cm}^2", "15\\text{ cm}^3"), ("5\\text{ euros}", "\\$5")),
    ],
    "congruences": [("5 \\pmod 7", "5 \\pmod 8"), ("12", "12\\text{ mod }7")],
    "applied functions": [
        *(("f(4 - x)", "-f(x-4)"), ("g(f(x))", "f(g(x))"), ("P(A)+P(B)", "P(A+B)"), ("2f(x)", "f(2x)")),
        *(("1/f(x)", "f^{-1}(x)"), ("f(x)", "f'(x)"), ("y/x", "\\frac{dy}{dx}")),
    ],
    "what is neither the same thing": [
        *(("5\\text{ mph}", "5\\text{ km/h}"), ("3\\text{ p.m.}", "3\\text{ a.m.}"), ("90^\\circ", "90\\%")),
        *(("5^\\circ C", "5^\\circ F"), ("1,234", "1, 234"), ("x=3,y=4", "4,3"), ("3", "\\not\\approx 3")),
        *(("(0,1]", "\\begin{pmatrix}0\\\\1\\end{pmatrix}"), ("5", "5 x 10^3")),
    ],
    "far and close": [("|x-5|", "5-x"), ("0", "e^{-300}"), ("1", "1+e^{-100}")],
    "names of coordinates": [
        *(("(3,4)", "y=3, x=4"), ("(3,4)", "(y,x)=(3,4)"), ("(3,\\pi/2)", "\\theta=3, r=\\pi/2")),
        *(("-2, 1", "[-2, 1]"), ("[0,1)", "0,1")),
    ],
    "equations to be solved": [
        *(
            ("5", "-x = 5"),
            ("5", "x + x = 5"),
            ("5", "\\ln x = 5"),
            ("5", "\\log_2 x = 5"),
            ("5", "e^x = 5"),
            ("5", "x! = 5"),
        ),
    ],
    "numbers": [
        *(
            ("500", "9,500"),
            ("-7", "7"),
            ("1\\frac{1}{2}", "-1\\frac12"),
            ("12", "11 6/6"),
            ("4", "4 4/0"),
            ("139/90", "11/10 4/9"),
        ),
        *(
            ("32349", "32, 349"),
            ("115/6", "11 5/6"),
            ("5", "\\text{not }5"),
            ("5", "5\\text{ is wrong}"),
            ("5", "\\text{at least }5"),
            ("5", "\\infty"),
            ("\\infty", "-\\infty"),
            ("5", "\\text{nan}"),
            ("10^{9}", "10^{8}"),
        ),
        *(
            ("2006!", "2004!"),
            ("72", "9**9**9**9"),
            ("72", "(10^{9})!"),
            ("9^{9^{9^9}}", "9^{9^{9^8}}"),
            ("0", "0/0"),
            ("72", "72?"),
        ),
    ],
    "decimals": [
        ("\\frac13", "0.33"),
        ("\\frac13", "0.33333"),
        ("\\pi", "3.14159"),
        ("1", "1.0000001"),
        ("0.3", "0.31"),
        ("7.78", "70/9"),
    ],
    "expressions": [
        *(
            ("x+2n+1", "x+1"),
            ("1+\\frac1e", "1-\\frac1e"),
            ("(a+5)(b+2)", "(+5)(b+2)"),
            ("2+3i", "2-3i"),
            ("|x|", "x"),
            ("x^2", "x^3"),
        ),
        *(
            ("f(x)", "f(y)"),
            ("x", "X"),
            ("x_1", "x_2"),
            ("\\frac{\\pi}{2^{99}}", "\\frac{\\pi}{2^{98}}"),
            ("2", "\\frac{1+\\sqrt5}{2}"),
        ),
    ],
    "units": [
        ("10\\text{ units}", "100"),
        ("5\\text{ cm}", "5\\text{ m}"),
        ("28\\%", "2.8\\%"),
        ("0.28", "28"),
        ("28", "0.28"),
        ("50\\%", "0.5\\%"),
    ],
    "lists, sets, tuples": [
        *(
            ("3, 5, 7", "3, 5"),
            ("1,2", "1,2,3"),
            ("4", "3 \\text{ or } 4 \\text{ or } 5"),
            ("3 \\pm 2 \\sqrt{2}", "3+2\\sqrt{2}"),
        ),
        *(
            ("(3,5)", "(5,3)"),
            ("(1,2),(3,4)", "(2,1),(3,4)"),
            ("\\{1,2\\}", "(1,2)"),
            ("(2,3)", "3,2"),
            ("1,1,2", "1,2,2"),
            ("5", "5 (or 6)"),
        ),
    ],
    "intervals and inequalities": [
        *(
            ("[0,1)", "[0,1]"),
            ("(0,9)", "[0,9)"),
            ("x>5", "x<5"),
            ("x \\ge 2", "(2,\\infty)"),
            ("x>2", "y>2"),
            ("x<1", "x>-1"),
            ("1", "-[0,1)"),
        ),
    ],
    "equations": [
        *(
            ("3x-y+13=0", "3x+4y+14=0"),
            ("2x+z=1", "1"),
            ("7 = 11a+c", "11a+c"),
            ("y=x+2", "2x+2"),
            ("x=x+2", "x+2"),
            ("5", "2x=5"),
            ("5", "4=5"),
            ("x=5", "y=5"),
        ),
    ],
    "matrices": [
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&2\\\\3&5\\end{pmatrix}"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\end{pmatrix}"),
        ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}"),
    ],
    "words, options, bases, ratios": [
        *(
            ("\\text{Evelyn}", "Briana"),
            ("\\text{CBAD}", "ABCD"),
            ("C", "D. C is wrong"),
            ("A", "(A) (B) (C)"),
            ("\\textbf{(C) }12", "D"),
            ("E", "d"),
        ),
        *(
            ("2516_8", "2516_9"),
            ("2516_8", "1358"),
            ("2516_8", "2516"),
            ("12:00", "1:00"),
            ("12:00", "12"),
            ("3:2", "2:3"),
            ("1:2:3", "1:3:2"),
        ),
    ],
}


@pytest.mark.parametrize(("gold", "answer"), [pair for pairs in SAME.values() for pair in pairs])
def test_the_same_answer_written_in_another_way(gold, answer):
    assert same_answer(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), [pair for pairs in DIFFERENT.values() for pair in pairs])
def test_another_answer(gold, answer):
    assert not same_answer(gold, answer)


rationals = st.fractions(max_denominator=10**6).filter(lambda value: abs(value) < 10**9)


def written(value: Fraction, form: str) -> str:
    sign, top, bottom = "-" if value < 0 else "", abs(value.numerator), value.denominator
    if form == "mixed" and top > bottom > 1:
        return f"{sign}{top // bottom}\\frac{{{top % bottom}}}{{{bottom}}}"
    return {"plain": f"{sign}{top}/{bottom}", "tuple": f"{sign}{top}/{bottom}"}.get(
        form, f"{sign}\\{form if form != 'mixed' else 'frac'}{{{top}}}{{{bottom}}}"
    )


forms = st.sampled_from(["plain", "frac", "dfrac", "mixed"])


@given(rationals, rationals, forms, forms)
def test_two_rational_numbers_are_the_same_answer_exactly_if_they_are_equal(first, second, form, other_form):
    assert same_answer(written(first, form), written(first, other_form))
    assert same_answer(written(first, form), written(second, other_form)) == (first == second)


@given(st.lists(st.integers(-99, 99), min_size=2, max_size=6, unique=True), st.randoms())
def test_lists_and_sets_have_no_order_and_tuples_have_one(values, random):
    shuffled = random.sample(values, len(values))
    one, other = ", ".join(map(str, values)), ", ".join(map(str, shuffled))
    assert same_answer(one, other)
    assert same_answer(f"\\{{{one}\\}}", f"\\{{{other}\\}}")
    assert same_answer(f"({one})", f"({other})") == (values == shuffled)
    assert not same_answer(one, ", ".join(map(str, values[1:])))


polynomials = st.lists(st.integers(-9, 9), min_size=1, max_size=5)


def polynomial(coefficients: list[int]) -> str:
    return " + ".join(f"({value})x^{{{power}}}" for power, value in enumerate(coefficients))


@given(polynomials, polynomials)
def test_polynomials_are_the_same_exactly_if_their_coefficients_are(first, second):
    length = max(len(first), len(second))
    padded = [values + [0] * (length - len(values)) for values in (first, second)]
    assert same_answer(polynomial(first), polynomial(second)) == (padded[0] == padded[1])
    product = [0] * (len(first) + len(second) - 1)
    for i, a in enumerate(first):
        for j, b in enumerate(second):
            product[i + j] += a * b
    assert same_answer(polynomial(product), f"({polynomial(first)})({polynomial(second)})")


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_roots_are_compared_by_their_value(first, second):
    assert same_answer(f"\\sqrt{{{first * first * second}}}", f"{first}\\sqrt{{{second}}}")
    assert same_answer(f"\\sqrt{{{first}}}", f"\\sqrt{{{second}}}") == (first == second)


@given(st.text(max_size=60), st.text(alphabet="0123456789+-*/^(){}[]\\frac sqrt,=<>!%xyzpi.|_ ", max_size=60))
def test_every_text_is_the_same_as_itself_and_none_raises(text, formula):
    assert same_answer(text, text) and same_answer(formula, formula)
    assert same_answer(text, formula) in (True, False)
