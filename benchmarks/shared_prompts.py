"""Time of forward and backward pass of a group with its prompt once, with plain packing, and padded, in one run.

    python benchmarks/shared_prompts.py [--shapes 8:512:128 8:64:512 16:2048:128] [--hidden_size 256] [--layers 4]

A shape is answers:prompt tokens:answer tokens; answers are from half to one and a half times as long as that, evenly.
Prints a table to standard error and one JSON line last: seconds (the best of `--repeats`), tokens of all sequences per
second, tokens that were computed, and how far gradients with shared prompts are from those of plain packing, relative
to the largest of their tensor.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from slipstream.data.packing import pack
from slipstream.data.trajectory import TrainingExample
from slipstream.models.attention import PACKED_ATTENTION, packed_sequences
from slipstream.models.log_probs import logits_transform, token_log_probs
from slipstream.models.policy import PolicyModule

VOCABULARY, HEAD_SIZE, CHUNK_TOKENS = 4096, 64, 1024
SHAPES = ("8:512:128", "8:64:512", "16:2048:128")

Gradients = dict[str, torch.Tensor]


def main() -> None:
    """Measure every shape in all three ways."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    results = {}
    for shape in arguments.shapes:
        results[shape] = measure_shape(shape, arguments)
        ways = {way: result for way, result in results[shape].items() if isinstance(result, dict)}
        shown = "  ".join(f"{way} {result['seconds']:.2f} s" for way, result in ways.items())
        print(f"{shape:>14}  {shown}", file=sys.stderr)
    print(json.dumps({"benchmark": "shared_prompts", "threads": arguments.threads, "shapes": results}))


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--hidden_size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=2)
    return parser.parse_args(words)


def measure_shape(shape: str, arguments: argparse.Namespace) -> dict[str, object]:
    """Seconds and tokens of each way, and the difference of the gradients."""
    answers, prompt, answer = (int(part) for part in shape.split(":"))
    examples = make_group(answers, prompt, answer)
    total = sum(len(example.tokens) for example in examples)
    shared = [replace(example, shared_tokens=prompt) for example in examples]
    packed_model = make_model(arguments, PACKED_ATTENTION)
    ways: dict[str, tuple[Callable[[], int], torch.nn.Module]] = {
        "shared": (lambda: packed_pass(packed_model, shared), packed_model),
        "plain": (lambda: packed_pass(packed_model, examples), packed_model),
    }
    padded_model = make_model(arguments, "sdpa")
    ways["padded"] = (lambda: padded_pass(padded_model, examples), padded_model)
    results: dict[str, object] = {}
    gradients: dict[str, Gradients] = {}
    for way, (compute, model) in ways.items():
        seconds, computed, gradients[way] = timed(compute, model, arguments.repeats)
        results[way] = {
            "seconds": round(seconds, 3),
            "tokens_per_second": round(total / seconds),
            "computed_tokens": computed,
        }
    results["gradient_difference"] = difference(gradients["shared"], gradients["plain"])
    return results


def make_group(answers: int, prompt_length: int, answer_length: int) -> list[TrainingExample]:
    """Random answers to one random prompt, in ascending length, as they are packed."""
    generator = np.random.default_rng(0)
    prompt = generator.integers(1, VOCABULARY, prompt_length)
    lengths = np.linspace(0.5 * answer_length, 1.5 * answer_length, answers).round().astype(int)
    sequences = [np.concatenate([prompt, generator.integers(1, VOCABULARY, length)]) for length in lengths]
    return [
        TrainingExample(str(number), tokens, np.arange(len(tokens)) >= prompt_length)
        for number, tokens in enumerate(sequences)
    ]


def make_model(arguments: argparse.Namespace, attention: str) -> LlamaForCausalLM:
    """The same random weights at every call."""
    torch.manual_seed(0)
    heads = max(arguments.hidden_size // HEAD_SIZE, 1)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=arguments.hidden_size,
        intermediate_size=3 * arguments.hidden_size,
        num_hidden_layers=arguments.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(heads // 2, 1),
        max_position_embeddings=1 << 16,
    )
    model: LlamaForCausalLM = LlamaForCausalLM._from_config(config, attn_implementation=attention)
    return model


def packed_pass(model: LlamaForCausalLM, examples: list[TrainingExample]) -> int:
    """As the learner does it. Returns how many tokens were computed."""
    policy, packed = PolicyModule(model, chunk_tokens=CHUNK_TOKENS), pack(examples)
    arrays = (packed.tokens, packed.positions, packed.predictors, packed.targets)
    with packed_sequences(packed.lengths, packed.prompts):
        policy(*map(torch.from_numpy, arrays), 1.0)["log_probs"].mean().backward()
    return len(packed.tokens)


def padded_pass(model: LlamaForCausalLM, examples: list[TrainingExample]) -> int:
    """A row for each sequence, as long as the longest, with PyTorch's attention; the head sees the loss tokens only."""
    sequences = [torch.from_numpy(example.tokens) for example in examples]
    rows = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    mask = torch.arange(rows.shape[1]) < lengths.unsqueeze(-1)
    hidden = model.get_decoder()(input_ids=rows, attention_mask=mask.long(), use_cache=False).last_hidden_state
    learned = torch.nn.utils.rnn.pad_sequence([torch.from_numpy(e.loss_mask) for e in examples], batch_first=True)
    log_probs, _ = token_log_probs(
        hidden[:, :-1][learned[:, 1:]],
        model.lm_head.weight,
        rows[learned],
        transform=logits_transform(model.config),
        temperature=1.0,
        chunk_tokens=CHUNK_TOKENS,
    )
    log_probs.mean().backward()
    return rows.numel()


def timed(compute: Callable[[], int], model: torch.nn.Module, repeats: int) -> tuple[float, int, Gradients]:
    """Seconds of the fastest pass, the tokens that it computed, and its gradients."""
    seconds, computed = [], 0
    for _ in range(repeats):
        model.zero_grad()
        started = time.perf_counter()
        computed = compute()
        seconds.append(time.perf_counter() - started)
    return min(seconds), computed, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def difference(found: Gradients, expected: Gradients) -> float:
    """Largest difference, relative to the largest gradient of its tensor."""
    return max(float((found[n] - expected[n]).abs().max() / expected[n].abs().max()) for n in expected)


if __name__ == "__main__":
    main()
