"""The reward `math`: its labels, its score, and the cases that other graders got wrong in public."""

import math as floats
import os
import subprocess
import sys

import pytest

from slipstream.rewards.mathematics.verifier import gold_answer


def test_the_score_has_the_answer_as_it_was_written(grade):
    right, wrong, none = grade("1/2", "\\boxed{0.50}"), grade("1/2", "\\boxed{0.51}"), grade("1/2", "I have no idea")
    assert (right.reward, right.answer) == (1.0, "0.50")
    assert (wrong.reward, wrong.answer) == (0.0, "0.51")
    assert (none.reward, none.answer) == (0.0, None)
    assert grade("72", "it makes 72").reward == 1.0
    assert grade("72", "it makes 72", last_number=False).answer is None


LINE = "\\begin{pmatrix}1\\\\2\\end{pmatrix}+t\\begin{pmatrix}1\\\\0\\end{pmatrix}"
CASES = "\\begin{cases}x & x>0 \\\\ 0 & x \\le 0\\end{cases}"


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        (72, "72"),
        (0.1, "0.1"),
        (" 72 ", "72"),
        ("$6$", "$6$"),
        ("Half of 48 is 24.\n#### 72", "72"),
        ("so $x = \\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}"),
        ("\\text{Evelyn}", "\\text{Evelyn}"),
        ("does not exist", "does not exist"),
        ("\\text{the number of ways is even}", "\\text{the number of ways is even}"),
        ("-12 \\text{ or } -30", "-12 \\text{ or } -30"),
        ("\\sum_{k=0}^{n-1} F_k", "\\sum_{k=0}^{n-1} F_k"),
        ("10^{10^{10}}", "10^{10^{10}}"),
        ("The answer is 72.", "72"),
        ("Answer: 72", "72"),
        ("**Answer:** C", "C"),
        ("2 hours 30 minutes", "2 hours 30 minutes"),
        (LINE, LINE),
        (CASES, CASES),
    ],
)
def test_a_label_is_a_number_an_answer_or_a_solution_with_its_answer_marked(label, answer):
    assert gold_answer(label) == answer


@pytest.mark.parametrize(
    "label",
    [
        *(None, "", "  ", True, floats.nan, floats.inf, [5], "None", "nan", "N/A"),
        *("see the solution above", "\\text{see above}", "Proof.", "see solution", "..", "{", "$$", "1/0"),
        *("The function is increasing on the whole interval", "Let x be a number such that 5 divides it"),
        *("\\boxed{}", "so it is \\boxed{5", "#### ", "a" * 3000),
    ],
)
def test_a_label_without_an_answer_is_a_failure_and_pays_nobody(grade, label):
    with pytest.raises(ValueError, match=r"the label must be a number or a text with an answer, .* found"):
        grade(label, "\\boxed{5}")


PUBLIC_CASES = {
    "huggingface/Math-Verify#2, #14, #34, #41, #60, #69, #81 and its tests": [
        ("\\frac{1}{12}", "\\boxed{0.0833333333333333}", True),
        ("2.5", "\\boxed{2\\frac{1}{2}}", True),
        ("\\frac{71}{6}", "\\boxed{11 5/6}", True),
        ("10", "\\boxed{4 10/3}", False),
        ("4", "The answer is 4 4/9.", False),
        ("\\frac{1}{2004!}", "\\boxed{\\frac{1}{2006!}}", False),
        ("\\frac{1}{2^{99}}", "\\boxed{\\frac{1}{2^{98}}}", False),
        ("1-\\frac{1}{\\mathrm{e}}", "\\boxed{1+\\frac{1}{\\mathrm{e}}}", False),
        ("19, 46, \\text{ and } 82", "\\boxed{21, 36, and 82}", False),
        ("12:00", "\\boxed{1:00}", False),
        ("A", "A. Because B is not valid", True),
        ("B", "A. Because B is not valid", False),
        ("3x-y+13=0", "\\boxed{3x+4y+14=0}", False),
        ("34x+45y-20z+100=0", "\\boxed{-34x-45y+20z-100=0}", True),
        ("14-i", "\\boxed{14.0 + -1.0i}", True),
        ("4", "\\boxed{4\\sqrt{2}}", False),
        ("2x + z = 1", "\\boxed{1}", False),
        ("32349", "\\boxed{32, 349}", False),
        ("11111111100", "\\boxed{11,\\! 111,\\! 111,\\! 100}", True),
        ("1112112_3", "\\boxed{1112122_3}", False),
        ("2", "$2^{10}.$", False),
        ("1, 2, 3", "$1, 2, 3, ...$", False),
        ("1000", "\\boxed{1 000}", True),
        ("1000.99", "the number is not 10 which is 1,000.99€", True),
        ("4951077", "{@Qx 1276915 4951077 国 增高 {1,1-3-10鼓励);5个_GENERAL2. _HEADERS1 Or}", False),
        ("72", " ".join(f"\\boxed{{{value}}}" for value in range(2000)), False),
    ],
    "open-compass/opencompass#2426, #2647; allenai/open-instruct#1530; PrimeIntellect-ai/verifiers#1028": [
        ("500", "\\boxed{9,500}", False),
        ("70000", "80,000 + 150% of 80,000 = 200,000. So the profit is $70,000.", True),
        ("-7", "The temperature falls by 7 degrees.\n#### 7", False),
        ("5", "She has 5 apples, buys 7 more and gives none away.\n#### 12", False),
        ("42", "It is certainly not 42; working it through I get 17.", False),
    ],
    "NVIDIA-NeMo/Skills#1074, NVIDIA-NeMo/Gym#1844, NVIDIA-NeMo/RL#3635": [
        ("16", "\\boxed{016}", True),
        ("E", "\\boxed{E: a polygenic score}", True),
        ("\\text{(C)}", "\\boxed{C}", True),
        ("72", "I don't know.", False),
    ],
    "THUDM/slime#2219, its graders and tests; Liuziyu77/Visual-RFT#79": [
        ("72", "The sum is 72 so \\boxed{72}.", True),
        ("7", "<think>Maybe \\boxed{7}? No.</think>It must be \\boxed{9}", False),
        ("42", "\\boxed{42}<|endoftext|>", True),
        ("12", "Candidates: \\boxed{10} \\boxed{11} \\boxed{12} \\boxed{13} \\boxed{14}", False),
        ("4", "\\boxed{3 \\text{ or } 4 \\text{ or } 5}", False),
    ],
    "rllm-org/rllm#95, LLM360/Reasoning360#109, huggingface/trl#5773": [
        ("72", "\\boxed{9**9**9**9}", False),
        ("72", "\\boxed{(10^{9})!}", False),
        ("5", "\\boxed{\\text{nan}}", False),
        ("\\infty", "\\boxed{-\\infty}", False),
    ],
}


@pytest.mark.parametrize(
    ("label", "response", "correct"), [case for cases in PUBLIC_CASES.values() for case in cases], ids=repr
)
def test_cases_that_graders_were_reported_for(grade, label, response, correct):
    assert grade(label, response).reward == float(correct)


def test_the_verifier_loads_no_library_that_evaluates_text():
    code = (
        "import sys, slipstream.rewards.mathematics.verifier;"
        "print([name for name in ('sympy', 'math_verify', 'antlr4', 'torch', 'ray') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.strip() == "[]"
