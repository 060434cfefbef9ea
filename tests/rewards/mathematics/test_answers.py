"""Which part of a response is its answer."""

import pytest

from slipstream.rewards.mathematics.answers import find_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("so \\boxed{34}", "34"),
        ("so \\boxed{\n34\n}", "34"),
        ("so \\fbox{34}.", "34"),
        ("so \\boxed{\\frac{1}{\\sqrt{2}}} in all", "\\frac{1}{\\sqrt{2}}"),
        ("so \\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("The answer is $\\boxed 7$.", "7"),
        ("\\boxed{\\boxed{7}}", "\\boxed{7}"),
        ("\\boxed{3}. No, that is wrong: \\boxed{4}", "4"),
        ("\\boxed{4}, which is \\boxed{4}", "4"),
        ("\\boxed{4}, so I put it within \\boxed{}.", "4"),
        ("x = \\boxed{3} or x = \\boxed{4}", "3, 4"),
        ("\\[ \\boxed{-2} \\quad \\text{and} \\quad \\boxed{1}. \\]", "-2, 1"),
        ("\\boxed{10} \\boxed{11} \\boxed{12}", "10, 11, 12"),
        ("\\boxed{The answer is 5}", "5"),
        ("\\boxed{\\text{The answer is D}}", "D"),
        ("2 \\boxed{5} and then no more: 7", "5"),
        ("x = -\\boxed{5}", "-(5)"),
        ("- \\boxed{5}", "5"),
        ("$\\boxed{5}\\%$", "5\\%"),
        ("x = 2 + 3 = \\boxed{5}", "5"),
        ("The answer is:\n\n2\n\\boxed{5}", "5"),
        ("Answer - \\boxed{5} - as required", "5"),
        ("\\boxed{5}m", "5"),
        ("**\\boxed{5}**", "5"),
        ("It is \\boxed{5}, not \\boxed{4}", "5"),
        ("It is \\boxed{5} rather than \\boxed{4}.", "5"),
    ],
)
def test_a_box_holds_the_answer_and_boxes_side_by_side_are_one(response, answer):
    assert find_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("36 * 30 = 1080\n#### 1,080", "1,080"),
        ("#### $1,200.50 in all", "1,200.50"),
        ("#### -7", "-7"),
        ("#### \u22127", "-7"),
        ("####72", "72"),
        ("#### **72**", "72"),
        ("الجواب #### ٧٢", "72"),
        ("#### The answer is 72", "72"),
        ("#### 5\nno, wait\n#### 6", "6"),
        ("#### Step 1: compute 2+2\n2+2 = 4.\n#### Step 2: multiply by 5\n4*5 = 20.\n\nThe answer is 20.", "20"),
        ("So \\boxed{7}.\n\n#### Verification with x = 2\nWe get 2*2+3=7.", "7"),
        ("#### Case $n=2$\nThen 20.\n\nFinal Answer: 20", "20"),
        ("#### 72\n#### Check of step 3\nIt is right.", "72"),
        ("#### less than 5", "less than 5"),
        ("#### 3 dozen", "3 dozen"),
        ("#### 12 13", "12 13"),
        ("#### <12", "<12"),
        ("#### 12+", "12+"),
        ("\\boxed{5}\n#### 6", "6"),
        ("#### 6\nor rather \\boxed{5}", "5"),
        ("#### Step 3: add\n2 + 3 = \\boxed{5}", "5"),
        ("#### 3. Compute\n2 + 3 = \\boxed{5}", "5"),
        ("\\boxed{5}\n#### Check\n2 + 3 is right", "5"),
    ],
)
def test_four_hashes_mark_an_answer_and_not_a_heading(response, answer):
    assert find_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("Consistent.\n\nFinal Answer: **73**", "73"),
        ("**Final Answer**\n\n73", "73"),
        ("### Final answer\n$\\frac{1}{2}$", "$\\frac{1}{2}$"),
        ("Answer: 34\n\nThis can be checked. " + "Again and again. " * 60, "34"),
        ("The answer is 12. It took 3 steps.", "12"),
        ("The answer is 4 4/9.", "4 4/9"),
        ("The final answer is $28 \\%$. I hope it is correct.", "$28 \\%$"),
        ("The final answer is\n\n\\[\n5\n\\]", "\\[\n5\n\\]"),
        ("Final Answer: The largest $n$ is 34.", "34"),
        ("Final Answer: Jane started growing Sphere 3 hours ago.", "3"),
        ("The answers are 3 and 5.", "3 and 5"),
        ("The answer is (C).", "(C)"),
        ("The answer is B because A is wrong.", "B"),
        ("**Answer: (C) 12**", "(C) 12"),
        ("The answer is east.", "east"),
        ("The answer is no.", "no"),
        ("\\boxed{\\Delta E > 0}\n\n**Answer: D**", "D"),
        ("\\boxed{5}. The answer is consistent.", "5"),
        ("Answer: 34\nThe answer is consistent with what was given, as we saw.", "34"),
        ("The answer is negative 5.", "negative 5"),
        ("The answer is at least 5.", "at least 5"),
        ("The answer is 5 over 4.", "5 over 4"),
        ("The answer is 3 weeks and 2 days.", "3 weeks and 2 days"),
        ("The answer can't be 5.", None),
        ("The answer is 5 because 2 + 3 = 5.", "5"),
        ("The answer is $11,\\! 111$.", "$11,\\! 111$"),
        ("The answer is \\begin{pmatrix} -2 \\\\ -7 \\end{pmatrix}.", "\\begin{pmatrix} -2 \\\\ -7 \\end{pmatrix}"),
        ("The answer is B, not C.", "B"),
        ("The answer is not 71 but 72.", "72"),
        ("The answer is 72, which is the total.", "72"),
        ("The answer is $k\\pi$, where $k$ is an integer.", "$k\\pi$"),
        ("My answer is 5 (or maybe 6).", "5, 6"),
        ("If the answer is 72, this is too much. The answer is 73.", "73"),
        ("The answer is 5 and a half.", "5 and a half"),
        ("The answer is multiples of 5.", "multiples of 5"),
        ("The answer is 70 percent.", "70%"),
        ("The answer is 72 clips in 2 months.", "72"),
        ("#### \u2265 3", "\\ge  3"),
        ("We compute 12. So the choice is (C).", "(C)"),
        ("<answer>72</answer>", "72"),
        ("<answer> so \\boxed{72} </answer> 5", "72"),
    ],
)
def test_words_that_announce_the_answer_are_followed_by_it(response, answer):
    assert find_answer(response) == answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("It is certainly not 42; working it through I get 17.", "17"),
        ("I get 17, not 42", "17"),
        ("worth 80,000 + 150% of 80,000 = 200,000, so the profit is $70,000.", "70,000"),
        ("The sum 10 - 14 = -4 it is", "-4"),
        ("that makes 3.50.", "3.50"),
        ("So we get .5", ".5"),
        ("It costs $.50.", ".50"),
        ("So 72, see step 3.", "72"),
        ("We get 72 in step 3 again", "72"),
        ("Total fruits: 7 (3 apples and 4 pears).", "7"),
        ("We get 8. Perhaps 9?", "8"),
        ("It is $12$, so we are done.", "12"),
        ("that is 15cm", "15cm"),
        ("it grows by 28 percent", "28%"),
        ("we need 11 5/6 of it", "11 5/6"),
        ("The area is 24 cm^2.", "24"),
        ("that is 10^5.", "10^5"),
        ("The length is 3\u221a2.", "3\\sqrt 2"),
        ("The length is $3\\sqrt{2}$.", "3\\sqrt{2}"),
        ("The point is (3, 4).", "(3, 4)"),
        ("It is 3 or 4 or 5.", "3, 4, 5"),
        ("答案是72。", "72"),
        ("So $x=-2$ or $x=1$.", "x=-2, x=1"),
        ("So y = 2x + 3.", "y = 2x + 3"),
        ("So y = 2 + 3.", "y = 2 + 3"),
        ("so x >= 3", "x >= 3"),
        ("so x^2 = 3", "x^2 = 3"),
        ("The value is 3 pi.", "3 pi"),
        ("result: - 5", "- 5"),
        ("So it is 5 instead of 4.", "5"),
        ("She makes 9 * 2 = $<<9*2=18>>18 every day.", "18"),
        ("n = 7, so 2n+1 = 15. Hence, the required value is $\\pi$.", "\\pi"),
        ("Thus it is 72. I hope this helps!", "72"),
        ("The solutions are x = -2 and x = 1.", "x = -2, x = 1"),
        ("She takes $10 - $6 = $4 home.", "4"),
        ("- **Result:** 84", "84"),
        ("It takes 39 months to write.", "39"),
        ("=> 5", "5"),
    ],
)
def test_without_any_mark_the_last_number_is_the_answer_with_the_formula_it_is_in(response, answer):
    assert find_answer(response) == answer
    assert find_answer(response, last_number=False) is None


@pytest.mark.parametrize("response", ["72", " 72\n", "$\\frac{1}{2}$", "(C)", "[0, 1)", "Paris", "3 or 4", "yes"])
def test_a_response_that_is_nothing_but_an_answer_needs_no_mark(response):
    assert find_answer(response, last_number=False) == response.strip()


@pytest.mark.parametrize(
    "response",
    [
        "",
        "   \n\n",
        "I don't know.",
        "The code word is AZYUK2A",
        "It is not 42.",
        "The answer is not 42.",
        "It can't be 42.",
        "We obtain 12/4 = 3. Therefore, no such integer exists.",
        "The probability is 3 out of 4.",
        "The odds are 1 : 2",
        "The odds are 1 to 2",
        "It is at least 5.",
        "They need 5 dozen.",
        "They need 5 or more.",
        "It is 5 and a half.",
        "It is divisible by 5.",
        "It takes 2 hours and 30 minutes.",
        "Let n = 7. I cannot solve this problem.",
        "La respuesta no es 5.",
        *("Therefore 9 is not the answer.", "9 cannot be right.", "9 is wrong.", "9? No.", "It is <12", "so 8 9"),
        "\\boxed{3} + \\boxed{4}",
        "\\frac{\\boxed{3}}{\\boxed{4}}",
        "\\boxed{3}\\text{ or possibly }\\boxed{4}",
        "答案是3\uff0c而不是5。",
        "\\boxed{5}\\times 10^3",
        "$\\sqrt{\\boxed{5}}$",
        *("2\\boxed{3}", "1/\\boxed{3}", "x \\cdot \\boxed{3}", "\\boxed{3}x", "\\boxed{3}\\pi", "\\boxed{3}/4"),
        *("\\boxed{3} + 1", "\\boxed{3} - 1", "\\boxed{3}\\text{ million}", "\\boxed{3} or more"),
        *(
            "x \\ne \\boxed{3}",
            "The answer is not \\boxed{3}.",
            "I don't think the answer is 72.",
            "We can't say the answer is 5.",
            "Step 12: done",
        ),
        "7 it is\n#### unknown, since there is too little to go by",
        "7\n\\boxed{}",
        "7\n\\boxed{ }",
        "7\n\\boxed",
        "7 so \\boxed{7",
        "\\boxed{1} and in the end \\boxed{7",
    ],
)
def test_responses_without_an_answer(response):
    assert find_answer(response) is None


@pytest.mark.parametrize(
    ("prompt", "response", "answer"),
    [
        ("", "<think>Maybe \\boxed{7}? No.</think>It must be \\boxed{9}", "9"),
        ("", "so it is \\boxed{7}.</think>\\boxed{9}", "9"),
        ("", "<think>Maybe \\boxed{7}", None),
        ("", "\\boxed{7}\n<think>Let me check", None),
        ("", "<think>Maybe \\boxed{7}? Yes.</think>", None),
        ("", "<thinking>Maybe \\boxed{7}", None),
        ("<|assistant|><think>\n", "Maybe \\boxed{7}", None),
        ("<|assistant|><think>\n", "Maybe \\boxed{7}. </think> \\boxed{9}", "9"),
        ("Do not <think>, answer:", "\\boxed{7}", "7"),
    ],
)
def test_only_what_follows_the_thinking_counts_and_thinking_without_an_end_has_no_answer(prompt, response, answer):
    assert find_answer(response, prompt=prompt) == answer


@pytest.mark.parametrize("token", ["<|endoftext|>", "<|im_end|>", "</s>", "<|eot_id|>"])
def test_nothing_after_an_end_token_counts(token):
    assert find_answer(f"\\boxed{{42}}{token}") == "42"
    assert find_answer(f"42{token}") == "42"
    assert find_answer(f"\\boxed{{42}}{token}\n<|im_start|>user\nand \\boxed{{5}}?") == "42"
