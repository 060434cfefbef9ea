"""Small tokenizers with the habits of real ones, made on the spot: no network, no files."""

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.data.tokenizer import train_tokenizer

QWEN_LIKE = """\
{%- set ns = namespace(last_query=-1) -%}
{%- for message in messages -%}{%- if message.role == 'user' -%}{%- set ns.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{%- set thinking = '' -%}{%- set content = message.content -%}
{%- if '</think>' in message.content -%}
{%- set content = message.content.split('</think>')[-1].lstrip('\\n') -%}
{%- set thinking = message.content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- endif -%}
{%- if loop.index0 > ns.last_query -%}
{{- '<|im_start|>assistant\\n<think>\\n' + thinking + '\\n</think>\\n\\n' + content + '<|im_end|>\\n' -}}
{%- else -%}{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' -}}{%- endif -%}
{%- else -%}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

LLAMA_LIKE = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{{- '<|start|>' + message.role + '<|head|>\\n\\n' + message.content | trim + '<|eot|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start|>assistant<|head|>\\n\\n' -}}{%- endif -%}"
)


def byte_tokenizer(
    special: dict[str, str],
    *,
    extra: tuple[str, ...],
    chat_template: str | None,
    adds_bos: bool,
    text: str = "the answer is four\n\nthe question is what\n",
) -> Any:
    """A tokenizer of 256 bytes, a few merges and the given special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    names = [*special.values(), *extra]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=names,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text] * 20, trainer)
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in names])
    if adds_bos:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=chat_template, clean_up_tokenization_spaces=False, **special
    )


@pytest.fixture(scope="session")
def qwen_like() -> Any:
    """No BOS; the template drops the thinking of earlier turns and adds empty thinking to the last."""
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return byte_tokenizer(special, extra=("<|im_start|>",), chat_template=QWEN_LIKE, adds_bos=False)


@pytest.fixture(scope="session")
def llama_like() -> Any:
    """The template writes BOS, the tokenizer would add another; turns end with a token that is not the EOS."""
    special = {"bos_token": "<|begin|>", "eos_token": "<|finish|>"}
    extra = ("<|start|>", "<|head|>", "<|eot|>")
    return byte_tokenizer(special, extra=extra, chat_template=LLAMA_LIKE, adds_bos=True)


@pytest.fixture(scope="session")
def line_merging() -> Any:
    """The llama-like template ends its prompt with two line ends: one token alone, two before a word."""
    special = {"bos_token": "<|begin|>", "eos_token": "<|finish|>"}
    extra = ("<|start|>", "<|head|>", "<|eot|>")
    text = "the answer is four\n\n"
    return byte_tokenizer(special, extra=extra, chat_template=LLAMA_LIKE, adds_bos=True, text=text)


@pytest.fixture(scope="session")
def base_model_like() -> Any:
    """Adds BOS, has no chat template."""
    special = {"bos_token": "<|begin|>", "eos_token": "<|finish|>"}
    return byte_tokenizer(special, extra=(), chat_template=None, adds_bos=True)


@pytest.fixture(scope="session")
def arithmetic_tokenizer() -> Any:
    """What the pipeline makes from its own questions."""
    return train_tokenizer([f"What is {a} + {b} =7" for a in range(30) for b in range(30)], 320)


@pytest.fixture
def unreachable_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No name resolves, nothing is cached, and it has not been asked before."""
    import datasets
    from huggingface_hub import constants

    from slipstream.data.hub import hub_answers

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    hub_answers.cache_clear()
    yield
    hub_answers.cache_clear()


@pytest.fixture
def rows_file(tmp_path: Path) -> Callable[..., str]:
    """Writes rows to a jsonl file and returns its path."""

    def write(*rows: dict[str, Any]) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
        return str(path)

    return write
