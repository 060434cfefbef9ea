"""`slipstream chat`: a conversation with a model, in the terminal or line by line from a pipe.

What the model said is shown with its control characters spelled out and kept as it was said. When the conversation has
grown too long for the model, its oldest exchanges are left out, which is said.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from slipstream.errors import ConfigError, ModelError
from slipstream.observe.console import visible
from slipstream.workflows.model_folder import ModelFolder, find_model, started_in

if TYPE_CHECKING:
    from slipstream.models.chat_model import ChatModel

PROMPT = "> "
HELP = """\
/reset   forget the conversation
/help    this text
/quit    end; so does Ctrl-D, and Ctrl-C at the prompt
Ctrl-C while the model answers stops the answer. A line that begins with a space is said as it is, slash or not."""


@dataclass(frozen=True)
class ChatSettings:
    """How answers are drawn: `temperature` 0 is greedy, `seed` None gives other answers each time."""

    temperature: float = 1.0
    max_response_tokens: int = 512
    system: str | None = None
    seed: int | None = None

    def check(self) -> None:
        """Raise ConfigError for values out of range."""
        if not 0 <= self.temperature <= 10:
            raise ConfigError(f"--temperature: found {self.temperature:g}, expected 0 (greedy) to 10")
        if self.max_response_tokens < 1:
            raise ConfigError(f"--max_response_tokens: found {self.max_response_tokens}, expected at least 1")
        if self.seed is not None and not 0 <= self.seed < 1 << 63:
            raise ConfigError(f"--seed: found {self.seed}, expected a whole number of at least 0")


def chat(name: str, settings: ChatSettings) -> None:
    """Talk with the model that `name` means (see `find_model`), on standard input and output, until the input ends.

    Raises ConfigError for settings that do not fit, ModelError and RunDirectoryError for what is no model.
    """
    settings.check()
    folder = find_model(name)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    print(f"loading {visible(folder.shown)} ...", file=sys.stderr)
    session = ChatSession(load_model(folder), settings, output=sys.stdout, notices=sys.stderr, is_terminal=is_terminal)
    if is_terminal:
        print("/help says what there is besides talking", file=sys.stderr)
    for line in _typed_lines() if is_terminal else _piped_lines(sys.stdin):
        if not session.hear(line):
            return


def load_model(folder: ModelFolder) -> ChatModel:
    """The model of a folder or, of a checkpoint, the model it was begun from with the checkpoint's weights."""
    from slipstream.models.chat_model import ChatModel

    if folder.learner is None:
        assert folder.path is not None
        return ChatModel(folder.path)
    from slipstream.training.checkpoint_weights import read_description, read_weights

    base = str(read_description(folder.learner)["model_path"])
    home = started_in(folder.learner)
    if home is not None and (home / base).is_dir():
        base = str(home / base)
    try:
        return ChatModel(base, weights=read_weights(folder.learner))
    except ModelError as error:
        raise ModelError(
            f"the checkpoint {folder.learner} was begun from {base!r}, whose configuration and tokenizer are needed: "
            f"{error}"
        ) from error


class ChatSession:
    """The conversation: what has been said, as far as the model can still be told."""

    def __init__(
        self, model: ChatModel, settings: ChatSettings, *, output: TextIO, notices: TextIO, is_terminal: bool
    ) -> None:
        """Raises ConfigError for a system message that the model cannot be given."""
        self.messages: list[dict[str, str]] = []
        self._model = model
        self._settings = settings
        self._output = output
        self._notices = notices
        self._is_terminal = is_terminal
        self._has_template = model.tokenizer.chat_template is not None
        if settings.seed is not None:
            import torch

            torch.manual_seed(settings.seed)
        if settings.system is not None:
            self._check_system(settings.system)
        if not self._has_template:
            self._notice("this model has no chat template: each line is completed by itself")

    def hear(self, line: str) -> bool:
        """Obey a command or answer a line; False if that was the end."""
        if line.startswith("/"):
            return self._obey(line.strip())
        text = line.strip()
        if text:
            self._answer(text)
        return True

    def _obey(self, command: str) -> bool:
        if command == "/quit":
            return False
        if command == "/reset":
            self.messages.clear()
            self._notice("the conversation begins anew")
        elif command == "/help":
            self._notice(HELP)
        else:
            self._notice(f"unknown command {command.split()[0]}; /help lists them")
        return True

    def _answer(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})
        prompt, room = self._fitted()
        if room < 1:
            self.messages.pop()
            self._notice(
                f"not sent: it makes a prompt of {len(prompt)} tokens, and the model takes {len(prompt) + room} with "
                "the answer; shorten it"
            )
            return
        answer = self._stream(prompt, min(self._settings.max_response_tokens, room))
        self.messages.append({"role": "assistant", "content": answer})

    def _stream(self, prompt: list[int], max_tokens: int) -> str:
        """Show the answer as it comes; returns what there was of it when it ended or was stopped."""
        said: list[str] = []
        pieces = self._model.answer(prompt, temperature=self._settings.temperature, max_tokens=max_tokens)
        try:
            for piece in pieces:
                said.append(piece)
                print(visible(piece), end="", file=self._output, flush=True)
        except KeyboardInterrupt:
            if not self._is_terminal:
                raise
            print(" (stopped)", end="", file=self._notices, flush=True)
        finally:
            pieces.close()
            print(file=self._output, flush=True)
        if self._model.was_cut:
            self._notice(f"the answer was cut at {max_tokens} tokens")
        return "".join(said)

    def _fitted(self) -> tuple[list[int], int]:
        """Tokens of the prompt and of the room for its answer, once enough of the oldest exchanges is left out.

        Enough room is what an answer may have, at most half of what the model takes. There is room for an answer of any
        length where the model does not say what it takes.
        """
        prompt = self._render()
        limit, wanted = self._model.context_tokens, self._settings.max_response_tokens
        if limit is None:
            return prompt, wanted
        left_out = 0
        while self._has_template and limit - len(prompt) < min(wanted, limit // 2) and len(self.messages) > 2:
            del self.messages[:2]
            left_out += 1
            prompt = self._render()
        if left_out:
            self._notice(f"the conversation is too long for the model: its oldest exchanges ({left_out}) are left out")
        return prompt, limit - len(prompt)

    def _render(self) -> list[int]:
        """The tokens of the prompt: of the whole conversation, or of the last line alone without a chat template."""
        from slipstream.data.tokenizer import tokenize_plain

        tokenizer = self._model.tokenizer
        if not self._has_template:
            return tokenize_plain(tokenizer, self.messages[-1]["content"])[0]
        system = [] if self._settings.system is None else [{"role": "system", "content": self._settings.system}]
        text = tokenizer.apply_chat_template([*system, *self.messages], tokenize=False, add_generation_prompt=True)
        # The template has written all special tokens there shall be.
        return list(tokenizer(str(text), add_special_tokens=False)["input_ids"])

    def _check_system(self, system: str) -> None:
        from jinja2 import TemplateError

        if not self._has_template:
            raise ConfigError("--system needs a model with a chat template, which this one has not")
        messages = [{"role": "system", "content": system}, {"role": "user", "content": ""}]
        try:
            self._model.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except (TemplateError, TypeError) as error:
            raise ConfigError(f"--system: the model's chat template refuses it: {error}") from error

    def _notice(self, text: str) -> None:
        print(visible(text), file=self._notices, flush=True)


def _typed_lines() -> Iterator[str]:
    """Lines typed at a prompt, with a history, until Ctrl-D or Ctrl-C."""
    import readline  # noqa: F401  gives `input` its line editing

    while True:
        try:
            yield input(PROMPT)
        except (EOFError, KeyboardInterrupt):
            print()
            return


def _piped_lines(stream: TextIO) -> Iterator[str]:
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="replace")
    for line in stream:
        yield line.rstrip("\n")
