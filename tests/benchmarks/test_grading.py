"""The grading benchmark on a few rows: both verifiers are counted by the same rows, and a bad file is named."""

import json
import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "grading.py"

GRADED = [
    ("72", "so \\boxed{72}", True),
    ("72", "so \\boxed{73}", False),
    ("72", "I think it is \\boxed{72}", False),  # judged wrongly in the file, so a false positive of everyone
    ("\\frac{1}{2}", "so \\boxed{0.5}", True),
    ("\\text{Evelyn}", "so \\boxed{Briana}", False),
    ("see the solution above", "so \\boxed{5}", False),  # a failure of ours: no answer in the label
]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(BENCHMARK), *arguments], capture_output=True, text=True, timeout=120)


def test_both_verifiers_are_measured_on_the_same_rows(tmp_path: Path) -> None:
    file = tmp_path / "graded.jsonl"
    rows = [
        {"prompt": "", "label": label, "response": response, "correct": correct} for label, response, correct in GRADED
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    done = run(str(file), "--disagreements", "5")
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line.pop("benchmark") == "grading"
    assert set(line) == {"slipstream", "math_verify"}
    for result in line.values():
        assert result["rows"] == 6
        assert result["microseconds"] > 0
        assert result["false_positives"] >= 1
        disagreements = result["false_positives"] + result["false_negatives"]
        assert result["agreement"] == round(1 - disagreements / 6, 6)
    ours = line["slipstream"]
    assert (ours["false_positives"], ours["false_negatives"], ours["failures"]) == (1, 0, 1)
    assert "slipstream says True: label '72', response ...'I think it is" in done.stderr


def test_a_file_without_graded_rows_is_refused_by_line(tmp_path: Path) -> None:
    file = tmp_path / "graded.jsonl"
    file.write_text('{"prompt": "", "label": "1", "response": "1"}\n', encoding="utf-8")
    done = run(str(file))
    assert done.returncode == 2
    assert "line 1 lacks correct; expected prompt, label, response, correct" in done.stderr
    assert "Traceback" not in done.stderr
