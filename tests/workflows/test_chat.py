"""`slipstream chat`: what the model is told, what the person sees, and how it ends."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from slipstream.errors import ConfigError
from slipstream.workflows.chat import ChatSession, ChatSettings


class Parrot:
    """Stands in for a model: says what it is told to, and remembers what it was asked."""

    def __init__(
        self, tokenizer: Any, *answers: Sequence[str | BaseException], context_tokens: int | None = 64
    ) -> None:
        self.tokenizer = tokenizer
        self.answers = list(answers)
        self.context_tokens = context_tokens
        self.was_cut = False
        self.asked: list[str] = []
        self.limits: list[int] = []
        self.temperatures: list[float] = []

    def answer(self, prompt: Sequence[int], *, temperature: float, max_tokens: int) -> Iterator[str]:
        self.asked.append(self.tokenizer.decode(list(prompt)))
        self.limits.append(max_tokens)
        self.temperatures.append(temperature)
        for piece in self.answers.pop(0) if self.answers else ["4"]:
            if isinstance(piece, BaseException):
                raise piece
            yield piece


class Talk:
    """A session on a parrot, and what is seen of it."""

    def __init__(self, model: Any, *, is_terminal: bool = False, **settings: Any) -> None:
        self.model = model
        self.output, self.notices = io.StringIO(), io.StringIO()
        self.session = ChatSession(
            model, ChatSettings(**settings), output=self.output, notices=self.notices, is_terminal=is_terminal
        )

    def say(self, *lines: str) -> "Talk":
        assert all(self.session.hear(line) for line in lines)
        return self


def test_the_model_is_told_the_conversation_by_its_template(tiny_tokenizer: Any) -> None:
    talk = Talk(Parrot(tiny_tokenizer, ["4"], ["5"]), temperature=0.5, max_response_tokens=7).say("2 + 2", "3 + 2")
    assert talk.model.asked == [
        "<|user|>2 + 2<|assistant|>",
        "<|user|>2 + 2<|assistant|>4<|end|><|user|>3 + 2<|assistant|>",
    ]
    assert talk.output.getvalue() == "4\n5\n"
    assert (talk.model.temperatures, talk.model.limits) == ([0.5, 0.5], [7, 7])


def test_reset_forgets_and_empty_lines_say_nothing(tiny_tokenizer: Any) -> None:
    talk = Talk(Parrot(tiny_tokenizer)).say("2 + 2", "", "  ", "/reset", "3 + 2")
    assert talk.model.asked[-1] == "<|user|>3 + 2<|assistant|>" and len(talk.model.asked) == 2


def test_commands_are_obeyed_and_a_space_before_a_slash_says_it(tiny_tokenizer: Any) -> None:
    talk = Talk(Parrot(tiny_tokenizer)).say("/help", "/foo bar", " /quit")
    assert talk.model.asked == ["<|user|>/quit<|assistant|>"]
    assert "/reset   forget the conversation" in talk.notices.getvalue()
    assert "unknown command /foo; /help lists them" in talk.notices.getvalue()
    assert talk.session.hear("/quit") is False


def test_control_characters_of_the_model_are_shown_not_obeyed_and_kept_as_they_were(tiny_tokenizer: Any) -> None:
    talk = Talk(Parrot(tiny_tokenizer, ["a\x1b[2J", "\tb\nc"])).say("go")
    assert talk.output.getvalue() == "a\\u001b[2J\tb\nc\n"
    assert talk.session.messages[-1]["content"] == "a\x1b[2J\tb\nc"


def test_the_oldest_exchanges_are_left_out_when_the_conversation_is_too_long(tiny_tokenizer: Any) -> None:
    talk = Talk(Parrot(tiny_tokenizer, *[["1" * 10]] * 4), max_response_tokens=16)
    talk.say("a" * 10, "b" * 10, "c" * 10, "d" * 10)
    first, *_, last = talk.model.asked
    assert "a" in first and "a" * 10 not in last and last.endswith("<|user|>" + "d" * 10 + "<|assistant|>")
    assert "its oldest exchanges (1) are left out" in talk.notices.getvalue()
    assert all(limit == 16 for limit in talk.model.limits)


def test_an_answer_gets_what_room_there_is_and_a_message_without_any_is_not_sent(tiny_tokenizer: Any) -> None:
    talk = Talk(Parrot(tiny_tokenizer), max_response_tokens=500).say("a" * 50, "b" * 80)
    assert talk.model.limits == [64 - 52]
    assert "not sent: it makes a prompt of 82 tokens, and the model takes 64" in talk.notices.getvalue()
    assert [message["role"] for message in talk.session.messages] == []
    assert Talk(Parrot(tiny_tokenizer, context_tokens=None)).say("a" * 600).model.limits == [512]


def test_control_c_stops_the_answer_in_a_terminal_and_ends_everything_in_a_pipe(tiny_tokenizer: Any) -> None:
    talk = Talk(Parrot(tiny_tokenizer, ["It is", KeyboardInterrupt()], ["4"]), is_terminal=True).say("2 + 2", "and?")
    assert "<|assistant|>It is<|end|><|user|>and?" in talk.model.asked[1]
    assert talk.output.getvalue() == "It is\n4\n" and "(stopped)" in talk.notices.getvalue()
    with pytest.raises(KeyboardInterrupt):
        Talk(Parrot(tiny_tokenizer, ["It is", KeyboardInterrupt()])).say("2 + 2")


def test_a_cut_answer_is_named(tiny_tokenizer: Any) -> None:
    talk = Talk(Parrot(tiny_tokenizer), max_response_tokens=3)
    talk.model.was_cut = True
    talk.say("2 + 2")
    assert "the answer was cut at 3 tokens" in talk.notices.getvalue()


def test_a_system_message_leads_and_one_that_is_not_taken_is_refused(tiny_tokenizer: Any) -> None:
    with pytest.raises(ConfigError, match="--system: the model's chat template refuses it: this chat template knows"):
        Talk(Parrot(tiny_tokenizer), system="Be brief.")
    template = tiny_tokenizer.chat_template
    try:
        tiny_tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}"
        talk = Talk(Parrot(tiny_tokenizer), system="Be brief.").say("2 + 2", "/reset", "3 + 3")
        assert talk.model.asked == ["system:Be brief.;user:2 + 2;", "system:Be brief.;user:3 + 3;"]
    finally:
        tiny_tokenizer.chat_template = template


def test_without_a_chat_template_each_line_is_completed_by_itself(tiny_tokenizer: Any) -> None:
    template = tiny_tokenizer.chat_template
    try:
        tiny_tokenizer.chat_template = None
        talk = Talk(Parrot(tiny_tokenizer)).say("2 + 2 =", "3 + 3 =")
        assert talk.model.asked == ["2 + 2 =", "3 + 3 ="]
        assert "each line is completed by itself" in talk.notices.getvalue()
        with pytest.raises(ConfigError, match="--system needs a model with a chat template"):
            Talk(Parrot(tiny_tokenizer), system="Be brief.")
    finally:
        tiny_tokenizer.chat_template = template


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "--temperature: found -1"),
        ({"temperature": float("nan")}, "--temperature: found nan"),
        ({"max_response_tokens": 0}, "--max_response_tokens: found 0"),
        ({"seed": -1}, "--seed: found -1"),
    ],
)
def test_settings_out_of_range_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatSettings(**settings).check()


CHAT = [sys.executable, "-m", "slipstream.cli", "chat"]


@pytest.mark.slow
def test_lines_from_a_pipe_are_answered_one_by_one_and_repeat_with_a_seed(tiny_policy: Path) -> None:
    arguments = [*CHAT, str(tiny_policy), "--seed", "3", "--max_response_tokens", "8"]
    lines = b"What is 2 + 2?\n/reset\n\xff\xfe?\n"
    done = [subprocess.run(arguments, input=lines, capture_output=True, timeout=120, check=True) for _ in range(2)]
    assert done[0].stdout == done[1].stdout and done[0].stdout.count(b"\n") >= 2
    assert b"Traceback" not in done[0].stderr
    ended = subprocess.run(
        [*arguments, "--temperature", "0"], input=b"/quit\nhello\n", capture_output=True, timeout=120
    )
    assert (ended.returncode, ended.stdout) == (0, b"")


class Terminal:
    """`slipstream chat` in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self.screen = ""
        self.child, self.descriptor = pty.fork()
        if self.child == 0:
            # A test run in the background of a shell ignores SIGINT, and its children would inherit that.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execv(sys.executable, [*CHAT, *arguments])

    def until(self, text: str) -> None:
        """Read the screen until `text` has come after what was read before."""
        self.screen = ""
        deadline = time.monotonic() + 120
        while text not in self.screen:
            assert time.monotonic() < deadline, self.screen
            if select.select([self.descriptor], [], [], 1)[0]:
                self.screen += os.read(self.descriptor, 4096).decode(errors="replace")

    def type(self, text: str) -> None:
        os.write(self.descriptor, text.encode())

    def exit_code_after(self, keys: str) -> int:
        """Type `keys`, and anew where the chat has not ended long after.

        A Ctrl-C that comes after the prompt is written and before Python waits for a key is seen at the next key only,
        and nothing on the screen says when that moment is over.
        """
        for _ in range(4):
            self.type(keys)
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                ended, status = os.waitpid(self.child, os.WNOHANG)
                if ended:
                    os.close(self.descriptor)
                    return os.waitstatus_to_exitcode(status)
                time.sleep(0.05)
        os.kill(self.child, signal.SIGKILL)
        raise AssertionError(f"the chat does not end; on its screen: {self.screen!r}")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\x03", "\x04", "/quit\n"], ids=["control c", "control d", "quit"])
def test_in_a_terminal_one_types_at_a_prompt_and_ends_it(tiny_policy: Path, end: str) -> None:
    terminal = Terminal(str(tiny_policy), "--max_response_tokens", "4")
    terminal.until("> ")
    terminal.type("What is 2 + 2?\n")
    terminal.until("\n> ")
    assert terminal.exit_code_after(end) == 0
