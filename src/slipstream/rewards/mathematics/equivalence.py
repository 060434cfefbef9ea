"""Whether a response's answer is the right one: the comparison of two values, gold first.

The last stage. Not symmetric where it should not be: a gold equation is not answered by its right side alone, but a
gold number is answered by "x = 5".
"""

import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import lru_cache

from slipstream.rewards.mathematics.equality import infinity_sign, proportional, same_expression, symbols
from slipstream.rewards.mathematics.expressions import (
    APPLIED,
    MINUS_ONE,
    BasedNumber,
    Call,
    Collection,
    Group,
    Matrix,
    Node,
    Number,
    Power,
    Product,
    Quantity,
    Ratio,
    Relation,
    Sum,
    Symbol,
    Text,
    Union,
    Value,
    difference,
)
from slipstream.rewards.mathematics.notation import simplify
from slipstream.rewards.mathematics.solutions import FLIPPED, exact_or_none, solution_set
from slipstream.rewards.mathematics.structures import LONGEST_ANSWER, modulus, normal_words, value_or_none
from slipstream.rewards.mathematics.units import conflicting

_HUNDREDTH = Number(Fraction(1, 100))
_IDLE_SPACE = re.compile(r"\s+(?![A-Za-z0-9])|(?<![A-Za-z0-9])\s+")  # not that of 11 5/6
_LIST_SPACE = re.compile(r"\d,\s+\d")
_DECIMAL_COMMA = re.compile(r"^(-?(?:0|\d+(?!,\d{3}$))),(\d+)$")
_OPTION = re.compile(r"\s*(?:\((?P<bracketed>[A-Z])\)|(?P<bare>[A-Z])\s*[.:)])\s*(?P<rest>\S.*)", re.DOTALL)
_OPTION_HEDGE = re.compile(
    r"(?:or|and|nor)\b|[,/&;+]|(?:is|was|are)\b.*\b(?:not|never|wrong|incorrect|false|impossible)\b|(?:is|was|are|ca)n't\b"
    r"|cannot\b",
    re.DOTALL,
)
"""What after the letter of an option takes it back, or adds another."""

_OPTION_LIST = re.compile(r"[A-H]{2,8}|\s?[A-H](?:\s?(?:,|and|,\s?and)\s?[A-H]){1,7}\s?")
_TO = re.compile(r"(\d)\s*(?:\\text\s?\{)?\s*to\s*\}?\s*(\d)")
_INTEGERS = re.compile(r"([a-zA-Z])\s?\\in\s?\\math(?:bb|bf)\s?\{?\s?Z\s?\}?[\s)$]{0,5}$")
_BEFORE_DOMAIN = re.compile(r"\\(?:q?quad|text\s?\{\s?(?:for|where|with|,)?\s?(?:any|all|some)?\s?\})$")
_SYNONYMS = {"dne": "doe not exist"}
_NO_SOLUTION = frozenset({"no solution", "no real solution", "there is no solution", "no such number"})
"""Words as `normal_words` leaves them."""

_OPTION_WORD = re.compile(r"^\s*(?:option|choice|answer)\s+(?=\(?[A-Z]\)?\s*$)", re.IGNORECASE)


def same_answer(gold: str, answer: str) -> bool:
    """Return whether an answer, as it was written, is equivalent to the gold answer.

    Texts that are too long, or that mean nothing here, are equal if they are written alike. Raises nothing.
    """
    if len(gold) > LONGEST_ANSWER or len(answer) > LONGEST_ANSWER:
        return gold.strip() == answer.strip()
    if _written(gold) == _written(answer) and (_LIST_SPACE.search(gold) or not _LIST_SPACE.search(answer)):
        return True
    moduli = {modulus(gold), modulus(answer)} - {None}
    if len(moduli) > 1:
        return False
    options = _options(gold), _options(answer)
    if options[0] and options[1]:
        return options[0] == options[1]
    gold, answer = _same_parameter(gold, answer)
    (gold_letter, gold_rest), (letter, rest) = _option(gold), _option(answer)
    if gold_letter and re.fullmatch(r"\(?[a-h]\)?", _written(answer)):
        letter = _written(answer).strip("()").upper()
    if gold_letter and letter and (gold_rest is None or rest is None or gold_letter != letter):
        return gold_letter == letter  # by the letters alone, whatever text one of them has with it
    return any(_same_text(*pair) for pair in {(gold, answer), (gold_rest or gold, rest or answer)})


def _same_text(gold: str, answer: str) -> bool:
    gold_value, value = value_or_none(gold), value_or_none(answer)
    if isinstance(gold_value, Text) or isinstance(value, Text):
        words, answered = (_SYNONYMS.get(words, words) for words in (normal_words(gold), normal_words(answer)))
        if _NO_SOLUTION & {words, answered} and Collection((), braces=True) in (gold_value, value):
            return True
        return any(map(str.isalpha, words)) and words == answered
    if isinstance(gold_value, Ratio):
        value = value_or_none(_TO.sub(r"\1:\2", simplify(answer)))
    elif isinstance(gold_value, Quantity) and len(gold_value.unit or "") == 1:
        value = (
            value_or_none(re.sub(rf"(?<=[\d}})])\s?{gold_value.unit}$", rf"\\text{{{gold_value.unit}}}", answer))
            or value
        )
    if gold_value is None or value is None:
        return _is_wordy(gold) and _is_wordy(answer) and normal_words(gold) == normal_words(answer)
    if isinstance(gold_value, Quantity) and isinstance(gold_value.expression, Number) and gold_value.expression.digits:
        decimal = value_or_none(_DECIMAL_COMMA.sub(r"\1.\2", simplify(answer)))
        if decimal is not None and equivalent(gold_value, decimal):
            return True
    return equivalent(gold_value, value)


def _is_wordy(text: str) -> bool:
    """Whether a text is words and numerals without any sign, such as June 20 or 5 million."""
    plain = simplify(text).replace("\\text{", "").replace("}", "")
    return re.fullmatch(r"[\w\s,.']*", plain) is not None and any(map(str.isalpha, plain))


@lru_cache(maxsize=1024)
def _written(text: str) -> str:
    return _IDLE_SPACE.sub("", " ".join(simplify(text).split()))


def _options(text: str) -> set[str]:
    """The letters of several options of a multiple choice, 'ABD' or 'A, B, D'; empty for everything else."""
    letters = re.findall(r"[A-H]", text)
    listed = _OPTION_LIST.fullmatch(simplify(text).replace("\\text{", "").replace("}", ""))
    return set(letters) if listed and letters == sorted(set(letters)) else set()


def _same_parameter(gold: str, answer: str) -> tuple[str, str]:
    """Both texts without 'k \\in \\mathbb{Z}', and the integer of the answer by the name it has in the gold answer."""
    domains = [_INTEGERS.search(text) for text in (gold, answer)]
    if domains[0] is None or domains[1] is None:
        return gold, answer
    name, other = domains[0].group(1), domains[1].group(1)
    gold, answer = (
        _undomained(text[: domain.start()]) for text, domain in zip((gold, answer), domains, strict=True) if domain
    )
    alone = r"(?<![A-Za-z\\]){}(?![A-Za-z])"
    if name != other and not re.search(alone.format(name), answer):
        answer = re.sub(alone.format(other), f" {name} ", answer)
    return gold, answer


def _undomained(text: str) -> str:
    """A text without what leads over to the domain of its parameter: a comma, a bracket, space, 'for all'."""
    return _BEFORE_DOMAIN.sub("", text.rstrip(" ,;$(")).rstrip(" ,;$(")


def _option(text: str) -> tuple[str | None, str | None]:
    """The letter of an option and the text it is written with: 'C', '(C)', 'E: a polygenic score', '(C) 12'."""
    text = _OPTION_WORD.sub("", simplify(text).replace("\\text{", "").replace("}", "", 1)).strip()
    if re.fullmatch(r"\(?[A-Z]\)?", text):
        return text.strip("()"), None
    match = _OPTION.fullmatch(text)
    if match is None or re.search(r"\([A-Z]\)", match["rest"]) or _OPTION_HEDGE.match(match["rest"]):
        return None, None
    return match["bracketed"] or match["bare"], match["rest"]


def equivalent(gold: Value, answer: Value) -> bool:
    """Return whether a value answers the question that the gold value answers."""
    if not isinstance(gold, Collection) or len(gold.items) == 1:
        gold, answer = _single(gold), _single(answer)
    if isinstance(gold, Relation) or isinstance(answer, Relation):
        return _same_relation(gold, answer)
    if isinstance(gold, Collection | Union | Group) and isinstance(answer, Collection | Union | Group):
        return _same_items(gold, answer)
    match gold, answer:
        case Quantity(), Quantity():
            return _same_quantity(gold, answer)
        case BasedNumber(), BasedNumber():
            return gold == answer
        case Text(), Text():
            return gold == answer
        case Matrix(), Matrix():
            return gold.determinant == answer.determinant and _all_equivalent(
                [Group("(", ")", row) for row in gold.rows], [Group("(", ")", row) for row in answer.rows]
            )
        case ((Matrix() | Group()), (Matrix() | Group())):
            if any(isinstance(each, Group) and (each.left == "(") != (each.right == ")") for each in (gold, answer)):
                return False
            return _all_equivalent(_entries(gold), _entries(answer))
        case Ratio(), Ratio():
            return _same_ratio(gold, answer)
        case ((Ratio() | Quantity()), (Ratio() | Quantity())):
            return _same_quantity(_quotient(gold), _quotient(answer))
    return False


def _single(value: Value) -> Value:
    """A list that says one thing several times is that thing, 1/2 or 0.5, and so is a set of one."""
    if isinstance(value, Collection) and len(value.items) == 1:
        return value.items[0]
    if isinstance(value, Collection) and not value.braces and value.items:
        first, *others = value.items
        if not isinstance(first, Collection) and all(equivalent(first, other) for other in others):
            return first
    return value


def _same_quantity(gold: Quantity, answer: Quantity) -> bool:
    """Equal values and no conflict of units. 28% is 0.28, and 28 where one side leaves the sign out."""
    plain = answer if gold.percent else gold
    if (gold.percent != answer.percent and plain.unit) or conflicting(gold.unit, answer.unit):
        return False
    if same_expression(gold.expression, answer.expression):
        return True
    if gold.percent == answer.percent:
        return False
    scaled = [Product((each.expression, _HUNDREDTH)) if each.percent else each.expression for each in (gold, answer)]
    return same_expression(*scaled)


def _all_equivalent(golds: Sequence[Value], answers: Sequence[Value]) -> bool:
    return len(golds) == len(answers) and all(map(equivalent, golds, answers))


def _same_member(gold: Value, answer: Value) -> bool:
    """Equal as members of lists: there {2} is not 2."""
    sets = [isinstance(each, Collection) and each.braces for each in (gold, answer)]
    return sets[0] == sets[1] and equivalent(gold, answer)


def _same_unordered(golds: Sequence[Value], answers: Sequence[Value]) -> bool:
    """Whether each gold item has an answer of its own."""
    if len(golds) != len(answers):
        return False
    left = list(answers)
    for gold in golds:
        found = next((index for index, answer in enumerate(left) if _same_member(gold, answer)), None)
        if found is None:
            return False
        del left[found]
    return True


def _same_items(gold: Collection | Union | Group, answer: Collection | Union | Group) -> bool:
    """Lists and sets in any order, tuples and intervals in theirs; inequalities among them as the sets they are."""
    if isinstance(gold, Union) or isinstance(answer, Union):
        sets = [_as_union(gold), _as_union(answer)]
        return sets[0] is not None and sets[1] is not None and _same_unordered(sets[0], sets[1])
    if isinstance(gold, Collection) and isinstance(answer, Collection):
        if len(_names(gold)) == len(gold.items) > 1 and not _names(answer):  # x = 3, y = 4 has an order
            return _all_equivalent(gold.items, answer.items)
        return _same_unordered(*(_distinct(each) if each.braces else each.items for each in (gold, answer)))
    if isinstance(gold, Group) and isinstance(answer, Group):
        return _same_brackets(gold, answer) and _all_equivalent(gold.items, answer.items)
    listing, group = (gold, answer) if isinstance(gold, Collection) else (answer, gold)
    assert isinstance(listing, Collection) and isinstance(group, Group)
    if (described := solution_set(listing)) is not None:
        return _same_items(group, described[1]) if isinstance(described[1], Group) else False
    if listing.braces or (group.left, group.right) not in (("(", ")"), ("\\langle", "\\rangle")):
        return False
    names = [item.name for item in listing.items if isinstance(item, Relation) and item.name]
    items = list(listing.items)
    if len(set(names)) == len(items):
        items.sort(key=lambda item: (item.name or "").lstrip("\\") if isinstance(item, Relation) else "")
    elif names:  # x = 2 or x = -3 is no point, nor is a point named in part
        return False
    listed, grouped = [[_unnamed(item) for item in each] for each in (items, group.items)]
    return _all_equivalent(grouped, listed) if gold is group else _all_equivalent(listed, grouped)


def _distinct(members: Collection) -> tuple[Value, ...]:
    """The members of a set, each once."""
    found: list[Value] = []
    for member in members.items:
        if not any(equivalent(each, member) for each in found):
            found.append(member)
    return tuple(found)


def _names(listing: Collection) -> set[str]:
    return {item.name for item in listing.items if isinstance(item, Relation) and item.name}


def _in_order(name: str) -> bool:
    """Whether the name of a point, such as (x, y), has its coordinates in the usual order; true for other names."""
    return not name.startswith("(") or _ordered(name.strip("()").split(","))


def _ordered(names: Sequence[str]) -> bool:
    """Whether names of coordinates are in the order of the alphabet: x, y, z; r, theta; a, b."""
    plain = [name.lstrip("\\") for name in names]
    return plain == sorted(plain)


def _as_union(value: Value) -> tuple[Value, ...] | None:
    if isinstance(value, Union):
        return value.items
    found = solution_set(value)
    return found[1].items if found is not None and isinstance(found[1], Union) else None


def _same_brackets(gold: Group, answer: Group) -> bool:
    """Whether the brackets mean the same; at infinity an interval is open however it is written."""
    vectors = [each.left == "\\langle" for each in (gold, answer)]
    if any(vectors):
        return all(vectors) or {gold.left, answer.left} == {"(", "\\langle"}
    ends = [isinstance(item, Quantity) and infinity_sign(item.expression) is not None for item in gold.items]
    left, right = gold.left == answer.left, gold.right == answer.right
    return (left or ends[0]) and (right or ends[-1])


def _unnamed(value: Value) -> Value:
    """The value of 'x = 3'."""
    return value.parts[-1] if isinstance(value, Relation) and value.name and set(value.signs) == {"="} else value


def _entries(value: Matrix | Group) -> tuple[Value, ...]:
    """The entries of a vector; a matrix of several rows and columns has its rows."""
    if isinstance(value, Group):
        return value.items
    if len(value.rows) == 1:
        return value.rows[0]
    if len(value.rows[0]) == 1:
        return tuple(row[0] for row in value.rows)
    return tuple(Group("[", "]", row) for row in value.rows)


def _same_ratio(gold: Ratio, answer: Ratio) -> bool:
    if gold.clock or answer.clock:
        meridiems = {gold.meridiem, answer.meridiem} - {""}
        return gold.clock == answer.clock and len(meridiems) < 2 and _all_equivalent(gold.parts, answer.parts)
    if len(gold.parts) == len(answer.parts) == 2:
        return _same_quantity(_quotient(gold), _quotient(answer))
    firsts = [Ratio((each.parts[0], part), clock=False) for each in (gold, answer) for part in each.parts[1:]]
    half = len(firsts) // 2
    return len(gold.parts) == len(answer.parts) and all(map(_same_ratio, firsts[:half], firsts[half:]))


def _quotient(value: Ratio | Quantity) -> Quantity:
    """3:2 as 3/2. A time of day, or a ratio of more parts, is no number: a quantity that equals nothing."""
    if isinstance(value, Quantity):
        return value
    nodes = [part.expression for part in value.parts if isinstance(part, Quantity)]
    if value.clock or len(nodes) != 2 or len(value.parts) != 2:
        return Quantity(Power(Number(Fraction(0)), Number(Fraction(-1))))
    return Quantity(Product((nodes[0], Power(nodes[1], Number(Fraction(-1))))))


def _same_relation(gold: Value, answer: Value) -> bool:
    if isinstance(gold, Relation) and isinstance(answer, Relation):
        return _same_statement(gold, answer)
    if isinstance(gold, Relation):
        if set(gold.signs) == {"="}:
            return _stands_for_value(gold) and equivalent(gold.parts[-1], answer)
        found = solution_set(gold)
        return found is not None and equivalent(found[1], answer)
    assert isinstance(answer, Relation)
    if set(answer.signs) == {"="}:
        first = answer.parts[0]
        if answer.name is None and isinstance(first, Quantity):
            if not symbols(first.expression):  # 1/2 = 0.5; a wrong equation such as 3 = 4 answers nothing
                return all(equivalent(gold, part) for part in answer.parts)
            if not _is_asked_for(first.expression):
                return False
        if _contradicts_itself(answer.parts[1:]):
            return False
        return _in_order(answer.name or "") and equivalent(gold, answer.parts[-1])
    found = solution_set(answer)
    return found is not None and equivalent(gold, found[1])


def _contradicts_itself(parts: Sequence[Value]) -> bool:
    """Whether a chain such as x = 3 = 4 says two different numbers; rounding, as in 10/3 = 3.33, does not."""
    bare = [part.expression for part in parts if isinstance(part, Quantity) and not part.unit and not part.percent]
    values = [value for value in map(exact_or_none, bare) if value is not None]
    return any(abs(value - values[-1]) * 100 > abs(values[-1]) for value in values)


def _stands_for_value(gold: Relation) -> bool:
    """Whether the right side of a gold equation says all of it: k = 6, y = 2x + 1, 0.56 = 56%; not 2x + z = 1."""
    first, last = gold.parts[0], gold.parts[-1]
    variables = symbols(last.expression) if isinstance(last, Quantity) else set()
    if gold.name is not None:
        return gold.name not in variables
    return not variables and isinstance(first, Quantity) and not symbols(first.expression)


def _is_asked_for(node: Node) -> bool:
    """Whether a left side is what a question asks for, such as a + b or sin x; not one to be solved, 2x = 5."""
    match node:
        case Call(name="sin" | "cos" | "tan" | "cot" | "sec" | "csc" | "abs", arguments=(Symbol(),)):
            return True
        case Sum() | Product():
            leaves = list(_leaves(node))
            names = [leaf for leaf in leaves if isinstance(leaf, Symbol)]
            others = [leaf for leaf in leaves if not isinstance(leaf, Symbol) and leaf != MINUS_ONE]
            return not others and len(names) == len(set(names)) > 1
        case _:
            return isinstance(node, Symbol) or (isinstance(node, Call) and node.name in APPLIED)


def _leaves(node: Node) -> Iterator[Node]:
    """The parts that are added and multiplied, in the end."""
    match node:
        case Sum(terms=nodes) | Product(factors=nodes):
            for each in nodes:
                yield from _leaves(each)
        case Power(base=Symbol() as base, exponent=Number()):
            yield base
        case _:
            yield node


def _same_statement(gold: Relation, answer: Relation) -> bool:
    """Equations up to a factor, definitions of the same name, inequalities up to direction or as sets, equal chains."""
    equations = set(gold.signs) == set(answer.signs) == {"="}
    if equations and gold.name and (gold.name == answer.name or {gold.name, answer.name} == {"y", "f(x)"}):
        return equivalent(gold.parts[-1], answer.parts[-1])
    if len(gold.parts) == len(answer.parts) == 2:
        left, right = _difference(gold), _difference(answer)
        factor = proportional(left, right) if left is not None and right is not None else None
        if factor is not None and gold.signs[0] == (answer.signs[0] if factor > 0 else FLIPPED[answer.signs[0]]):
            return True
    sets = solution_set(gold), solution_set(answer)
    if sets[0] is not None and sets[1] is not None:
        return sets[0][0] == sets[1][0] and equivalent(sets[0][1], sets[1][1])
    if gold.signs == answer.signs:
        return _all_equivalent(gold.parts, answer.parts)
    flipped = tuple(FLIPPED[sign] for sign in reversed(answer.signs))
    return gold.signs == flipped and _all_equivalent(gold.parts, answer.parts[::-1])


def _difference(relation: Relation) -> Node | None:
    left, right = relation.parts
    if isinstance(left, Quantity) and isinstance(right, Quantity):
        return difference(left.expression, right.expression)
    return None
