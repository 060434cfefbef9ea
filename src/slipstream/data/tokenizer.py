"""Tokenizers: loading one, which tokens end a response, and making a small one from a task's own text.

Everything that turns text into tokens gets its tokenizer from here. Leaves out rendering (`data/prompts.py`).
"""

import json
import re
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.data.hub import hub_or_cache
from slipstream.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

PAD, USER, ASSISTANT, END = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (PAD, USER, ASSISTANT, END)

# A user turn needs no end: the next role token ends it. <|end|> is only ever written by the policy.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{ '<|user|>' + message['content'] }}
{%- elif message['role'] == 'assistant' -%}{{ '<|assistant|>' }}
{%- generation -%}{{ message['content'] + '<|end|>' }}{%- endgeneration -%}
{%- else -%}{{ raise_exception('this chat template knows the roles user and assistant, not ' + message['role']) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """The tokenizer of a model folder or hub name. Raises ModelError if there is none or it has no EOS token."""
    from transformers import AutoTokenizer

    folder = Path(path).expanduser()
    if folder.is_dir():
        if not any(folder.glob("tokenizer*")) and not any(folder.glob("vocab*")):
            found = ", ".join(sorted(file.name for file in folder.iterdir())[:10]) or "nothing"
            raise ModelError(
                f"model.path: no tokenizer in {path} (found: {found}); save one there with tokenizer.save_pretrained"
            )
        path = str(folder)
    elif re.fullmatch(r"[\w.-]+(/[\w.-]+)?", path) is None or path.startswith("."):
        raise ModelError(f"model.path: no folder {path!r} (looked from {Path.cwd()}), and it is no hub name either")
    try:
        with hub_or_cache() if not folder.is_dir() else nullcontext(True) as hub_answers:
            tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError) as error:
        if not folder.is_dir() and not hub_answers:
            raise ModelError(
                f"model.path: {path!r} is no folder here, and the Hugging Face hub cannot be reached (this machine is "
                "offline) nor is the model in the local cache; give the path of a model folder"
            ) from error
        reason = str(error).strip().split("\n")[0]
        raise ModelError(f"model.path: cannot load a tokenizer from {path!r}: {reason}") from error
    if tokenizer.eos_token_id is None:
        raise ModelError(f"model.path: the tokenizer of {path!r} has no EOS token, so no response could end; set one")
    return tokenizer


def require_same_tokens(path: str, policy_path: str, *, key: str, exactly: bool = False) -> None:
    """Raise ModelError unless the tokenizer of `path` knows every token of the policy's, under the same id.

    For a model that is given the policy's tokens as they are; with `exactly` it may have no others either, since it
    gives a probability to each of its own. `key` is the configuration key of `path`.
    """
    try:
        theirs = load_tokenizer(path).get_vocab()
    except ModelError as error:
        # It does not know which key its path stands in.
        raise ModelError(str(error).replace("model.path:", f"{key}:", 1)) from None
    ours = load_tokenizer(policy_path).get_vocab()
    differing = [token for token, number in ours.items() if theirs.get(token) != number]
    if exactly:
        differing += [token for token in theirs if token not in ours]
    if differing:
        raise ModelError(
            f"{key}: the tokenizer of {path!r} has other tokens than that of model.path {policy_path!r} "
            f"({len(differing)} of {len(ours)} differ, such as {min(differing)!r}): it would read another text; use a "
            "model of the same family"
        )


def end_token_ids(path: str, tokenizer: "PreTrainedTokenizerBase") -> tuple[int, ...]:
    """Every token that ends a response: the tokenizer's EOS first, then those of the model's own configuration.

    Instruct models often end a turn with another token than the tokenizer's EOS and list both in
    generation_config.json; who knows only one of them takes finished responses for cut ones.
    """
    found: list[int] = [] if tokenizer.eos_token_id is None else [int(tokenizer.eos_token_id)]
    for name in ("generation_config.json", "config.json"):
        declared = _read_model_file(path, name).get("eos_token_id")
        if isinstance(declared, int):
            declared = [declared]
        found.extend(int(token) for token in declared or [])
    return tuple(dict.fromkeys(found))


def _read_model_file(path: str, name: str) -> dict[str, Any]:
    """Content of a JSON file of a model folder or (cached) hub model; empty if it has no such file."""
    from transformers.utils.hub import cached_file

    folder = Path(path).expanduser()
    if folder.is_dir():
        file = str(folder / name) if (folder / name).is_file() else None
    else:
        with hub_or_cache():
            file = cached_file(
                path,
                name,
                _raise_exceptions_for_missing_entries=False,
                _raise_exceptions_for_connection_errors=False,
            )
    if file is None:
        return {}
    try:
        content = json.loads(Path(file).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}") from error
    return content if isinstance(content, dict) else {}


def control_tokens(tokenizer: "PreTrainedTokenizerBase") -> frozenset[int]:
    """Tokens that no ordinary text contains. <think> and tool tags are added tokens, but not control."""
    special = {int(token) for token, added in tokenizer.added_tokens_decoder.items() if added.special}
    return frozenset(special | {int(token) for token in tokenizer.all_special_ids})


def adds_bos(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the tokenizer itself puts a BOS token before a plain text."""
    if tokenizer.bos_token_id is None:
        return False
    tokens = tokenizer("a")["input_ids"]
    return len(tokens) > 1 and tokens[0] == tokenizer.bos_token_id


def tokenize_plain(tokenizer: "PreTrainedTokenizerBase", text: str) -> tuple[list[int], str]:
    """Tokens of a text that no chat template made, and the text they spell.

    One BOS comes first if the tokenizer adds one or the text begins with one; never two. Nothing is appended.
    """
    if adds_bos(tokenizer) and not text.startswith(str(tokenizer.bos_token)):
        text = str(tokenizer.bos_token) + text
    return list(tokenizer(text, add_special_tokens=False)["input_ids"]), text


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> "PreTrainedTokenizerFast":
    """A lossless byte-level BPE tokenizer made from the task's own text, with a chat template.

    Every digit is a token of its own, and an operator with the spaces around it is never merged with anything else,
    so that arithmetic always looks the same. Words are not split before merging: the fixed sentence of a task becomes
    one token, which keeps the sequences of a small model short. `vocabulary_size` counts 256 bytes, four special
    tokens and merges. The same texts give the same tokenizer.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}| ?[-+*/=] ?"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        min_frequency=2,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[USER, ASSISTANT],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )
