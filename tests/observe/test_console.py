import io
import re

import pytest
from rich.console import Console

from slipstream.observe.console import RunConsole, step_line, visible
from slipstream.observe.evaluations import Evaluation, EvaluationSample
from slipstream.observe.logs import get_logger

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


def make_evaluation(accuracy: float, response: str) -> Evaluation:
    samples = [EvaluationSample("What is 2 + 2?", "4", response, 1.0), EvaluationSample("[/red]", None, "x", None)]
    return Evaluation(0, 0, accuracy, accuracy + 0.1, 256, 3.0, 0.0, samples)


def show_everything(console: RunConsole) -> None:
    with console.phase("starting the rollout engine"):
        pass
    with console.progress("training", 80):
        console.step(3, 80, metrics=METRICS)
    console.accuracy_table(make_evaluation(0.46, "3"), make_evaluation(0.9, "4"))
    console.samples_table(make_evaluation(0.46, "3"), make_evaluation(0.9, HOSTILE))
    console.line(HOSTILE)


def test_the_line_of_a_step_shows_what_there_is() -> None:
    assert step_line(3, 80, metrics=METRICS) == (
        "step  3/80 | reward 0.512 | KL 0.0012 | mismatch 2.5e-09 | length 6.2 | tokens/s 1,234 | "
        "generate 0.80 s, train 1.25 s"
    )
    assert step_line(3, 9, metrics={"loss": 1.5, "evaluation/loss": None}) == "step 3/9 | loss 1.5000"


def test_without_a_terminal_the_output_is_plain_lines() -> None:
    stream = io.StringIO()
    show_everything(RunConsole(stream=stream))
    text = stream.getvalue()
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert step_line(3, 80, metrics=METRICS) + "\n" in text, "a long line is not wrapped"
    assert re.search(r"starting the rollout engine: \d+\.\d s\n", text)
    for shown in ("46.0%", "90.0%", "+44.0%", "56.0%", "What is 2 + 2?", "[/red]", "not scored"):
        assert shown in text
    assert r"\u001b[31mred\u001b[0m [bold]not markup[/bold] \r\u0007 {braces}" in text


def test_quiet_prints_nothing() -> None:
    stream = io.StringIO()
    show_everything(RunConsole(quiet=True, stream=stream))
    assert stream.getvalue() == ""


def test_on_a_terminal_there_is_a_bar_and_hostile_text_stays_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "150")
    stream = io.StringIO()
    console = RunConsole(stream=stream)
    assert Console(file=stream).is_terminal
    show_everything(console)
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
