import io
import re
from collections.abc import Callable

import pytest
from rich.console import Console

from slipstream.observe.console import RunConsole, evaluation_line, step_line, visible
from slipstream.observe.evaluations import Evaluation, EvaluationSample
from slipstream.observe.logs import get_logger

MakeEvaluation = Callable[..., Evaluation]
METRICS = {
    "step": 3,
    "reward/mean": 0.51234,
    "policy/kl": 0.00123,
    "policy/mismatch_k3": 2.5e-9,
    "response_length/mean": 6.25,
    "throughput/tokens_per_s": 1234.5,
    "time/generate": 0.8,
    "time/train": 1.25,
}
HOSTILE = "\x1b[31mred\x1b[0m [bold]not markup[/bold] \r\x07 {braces}"


def show_everything(console: RunConsole, make_evaluation: MakeEvaluation) -> None:
    def answering(accuracy: float, response: str, dataset: str = "held-out") -> Evaluation:
        samples = [EvaluationSample("What is 2 + 2?", "4", response, 1.0), EvaluationSample("[/red]", None, "x", None)]
        return make_evaluation(0, accuracy, greedy_accuracy=accuracy + 0.1, samples=samples, dataset=dataset)

    with console.phase("starting the rollout engine"):
        pass
    with console.progress("training", 80):
        console.step(3, 80, metrics=METRICS)
        console.evaluation(answering(0.46, "3"))
    compared = [(answering(0.46, "3", name), answering(0.9, HOSTILE, name)) for name in ("held-out", "math")]
    console.accuracy_table(compared)
    console.samples_table(*compared[0])
    console.line(HOSTILE)


def test_the_line_of_a_step_shows_what_there_is() -> None:
    assert step_line(3, 80, metrics=METRICS) == (
        "step  3/80 | reward 0.512 | KL 0.0012 | mismatch 2.5e-09 | length 6.2 | tokens/s 1,234 | "
        "generate 0.80 s, train 1.25 s"
    )
    assert step_line(3, 9, metrics={"loss": 1.5, "evaluation/loss": None}) == "step 3/9 | loss 1.5000"


def test_the_line_of_an_evaluation_names_its_set_and_the_largest_k(make_evaluation: MakeEvaluation) -> None:
    first = make_evaluation(20, 0.5, pass_at_k={"pass@1": 0.5, "pass@2": 0.6, "pass@4": 0.7})
    assert evaluation_line(first) == "held-out accuracy after step 20: sampled 50.0%, greedy 65.0%, pass@4 70.0%"
    second = make_evaluation(20, 0.5, dataset="math", pass_at_k={"pass@1": 0.5}, unscored=3)
    assert evaluation_line(second) == "math accuracy after step 20: sampled 50.0%, greedy 65.0% (3 answers not scored)"


def test_without_a_terminal_the_output_is_plain_lines(make_evaluation: MakeEvaluation) -> None:
    stream = io.StringIO()
    show_everything(RunConsole(stream=stream), make_evaluation)
    text = stream.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert step_line(3, 80, metrics=METRICS) + "\n" in text, "a long line is not wrapped"
    assert re.search(r"starting the rollout engine: \d+\.\d s\n", text)
    for shown in (
        "sampled (math, 256 prompts)",
        "46.0%",
        "90.0%",
        "+44.0%",
        "56.0%",
        "What is 2 + 2?",
        "[/red]",
        "not scored",
    ):
        assert shown in text
    assert r"\u001b[31mred\u001b[0m [bold]not markup[/bold] \r\u0007 {braces}" in text


def test_quiet_prints_nothing(make_evaluation: MakeEvaluation) -> None:
    stream = io.StringIO()
    show_everything(RunConsole(quiet=True, stream=stream), make_evaluation)
    assert stream.getvalue() == ""


def test_on_a_terminal_there_is_a_bar_and_hostile_text_stays_text(
    monkeypatch: pytest.MonkeyPatch, make_evaluation: MakeEvaluation
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    stream = io.StringIO()
    console = RunConsole(stream=stream)
    assert Console(file=stream).is_terminal
    show_everything(console, make_evaluation)
    text = stream.getvalue()
    assert "3/80" in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert "━" in text
    assert "\x1b[31mred" not in text and r"\u001b[31mred" in text


def test_an_exception_inside_the_progress_is_not_swallowed() -> None:
    with pytest.raises(KeyError), RunConsole(stream=io.StringIO()).progress("training", 3):
        raise KeyError


def test_visible_keeps_letters_lines_and_tabs() -> None:
    assert visible("é 漢\n\tx\x00\x9b\u202e") == "é 漢\n\tx\\u0000\\u009b\\u202e"


def test_a_log_line_has_a_message_and_fields_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("workflow").warning("saved", step=10, seconds=1.23456789, path="a b", text="x\ny=\x1b", none=None)
    get_logger("workflow").debug("not shown")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(
        r'\d\d:\d\d:\d\d WARNING workflow: saved step=10 seconds=1\.23457 path="a b" text="x\\ny=\\u001b" none=None\n',
        captured.err,
    )


def test_a_message_with_percent_signs_or_line_ends_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("a.b").error("100%s\nforged line")
    assert capsys.readouterr().err.endswith("ERROR a.b: 100%s\\nforged line\n")


def test_many_loggers_still_write_a_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    get_logger("one")
    get_logger("two").info("hello")
    assert capsys.readouterr().err.count("hello") == 1
