"""Answers to one prompt, which lies in the row once: logits and gradients are those of each sequence alone."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.nn import functional

from slipstream.data.packing import pack
from slipstream.data.trajectory import TrainingExample
from slipstream.errors import ModelError
from slipstream.models import attention
from slipstream.models.attention import PACKED_ATTENTION, packed_attention, packed_sequences
from slipstream.models.merged_attention import merged_attention
from slipstream.models.policy import PolicyModule
from slipstream.models.row_layout import RowLayout

FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt_oss", "granite", "cohere"]
# (prompt length, answer lengths): equal neighbours, one answer, one token of prompt or answer; the sliding window of 4
# ends in prompts, at their end and in answers.
GROUPS = [(5, [3, 3, 6]), (1, [4, 1, 1]), (7, [2]), (3, [9, 1, 2, 2])]


def make_examples(groups=GROUPS, *, shared: bool = True) -> list[TrainingExample]:
    generator = np.random.default_rng(0)
    examples = []
    for number, (prompt_length, answers) in enumerate(groups):
        prompt = generator.integers(3, 61, prompt_length)
        for answer in answers:
            tokens = np.concatenate([prompt, generator.integers(3, 61, answer)])
            mask = np.arange(len(tokens)) >= prompt_length
            name = f"{number}/{len(examples)}"
            examples.append(TrainingExample(name, tokens, mask, shared_tokens=prompt_length if shared else 0))
    return examples


def packed_loss(model, examples, directions):
    """Log-probs of all loss tokens, and the gradients of their weighted sum."""
    policy, packed = PolicyModule(model, chunk_tokens=5), pack(examples)
    arrays = (packed.tokens, packed.positions, packed.predictors, packed.targets)
    with packed_sequences(packed.lengths, packed.prompts):
        log_probs = policy(*map(torch.from_numpy, arrays), 0.7)["log_probs"]
        (log_probs * directions).sum().backward()
    return log_probs.detach(), {name: p.grad for name, p in model.named_parameters()}, len(packed.tokens)


def lonely_loss(model, examples, directions):
    """The same from the model's own forward pass on each sequence alone."""
    found = []
    for example in examples:
        row = torch.from_numpy(example.tokens).unsqueeze(0)
        logits = model(input_ids=row, use_cache=False).logits[0, :-1] / 0.7
        log_probs = torch.log_softmax(logits, -1).gather(-1, row[0, 1:].unsqueeze(-1)).squeeze(-1)
        found.append(log_probs[torch.from_numpy(example.loss_mask[1:])])
    log_probs = torch.cat(found)
    (log_probs * directions).sum().backward()
    return log_probs.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_equal_gradients(found, expected):
    for name, theirs in expected.items():
        difference = (found[name] - theirs).abs().max() / theirs.abs().max().clamp_min(1e-9)
        assert difference <= 1e-5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_and_gradients_equal_those_of_plain_packing_and_of_each_sequence_alone(family, make_model):
    examples = make_examples()
    directions = torch.randn(sum(int(e.loss_mask.sum()) for e in examples), generator=torch.Generator().manual_seed(1))
    # Larger weights than these blow rounding up.
    packed, packed_plainly = (make_model(family, PACKED_ATTENTION, initializer_range=0.15) for _ in range(2))
    shared, gradients, tokens = packed_loss(packed, examples, directions)
    plain, plain_gradients, plain_tokens = packed_loss(packed_plainly, make_examples(shared=False), directions)
    lonely, lonely_gradients = lonely_loss(make_model(family, initializer_range=0.15), examples, directions)
    assert (tokens, plain_tokens) == (50, 50 + 2 * 5 + 2 * 1 + 3 * 3)
    torch.testing.assert_close(shared, plain, rtol=0, atol=1e-5)
    torch.testing.assert_close(shared, lonely, rtol=0, atol=1e-5)
    assert_equal_gradients(gradients, plain_gradients)
    assert_equal_gradients(gradients, lonely_gradients)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_activation_checkpointing_computes_the_same_again(family, make_model):
    examples, directions = make_examples(), torch.ones(34)
    plain, frugal = make_model(family, PACKED_ATTENTION).train(), make_model(family, PACKED_ATTENTION).train()
    frugal.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected, expected_gradients, _ = packed_loss(plain, examples, directions)
    found, gradients, _ = packed_loss(frugal, examples, directions)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert_equal_gradients(gradients, expected_gradients)


LAYOUT = RowLayout([4, 3, 3, 2, 5, 1, 2, 2], [None, 0, 0, 0, None, None, 5, 5])


def reference_attention(query, key, value, window):
    """Over the whole row, with the mask that neither kernel builds."""
    segment = torch.repeat_interleave(torch.arange(8), torch.tensor(LAYOUT.lengths))
    prompts = torch.tensor([-1, 0, 0, 0, -1, -1, 5, 5])[segment]
    position = torch.tensor([0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5, 0, 1, 2, 3, 4, 0, 1, 2, 1, 2])
    belongs = (segment == segment.unsqueeze(1)) | (segment == prompts.unsqueeze(1))
    distance = position.unsqueeze(1) - position
    sees = belongs & (distance >= 0) & (distance < window)
    return functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 0), value.repeat_interleave(2, 0), attn_mask=sees, scale=0.3
    ).transpose(0, 1)


def random_heads():
    generator = torch.Generator().manual_seed(2)
    shapes = ((4, 22, 8), (2, 22, 8), (2, 22, 8))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]


@pytest.mark.parametrize(
    ("kernel", "window"), [("merged", None), ("masked", None), ("masked", 1), ("masked", 3), ("masked", 5)]
)
def test_both_ways_to_compute_it_equal_the_whole_matrix(kernel, window):
    ours, theirs = random_heads(), random_heads()
    is_merged = kernel == "merged"
    found = merged_attention(*ours, LAYOUT, 0.3) if is_merged else attention._sdpa(*ours, LAYOUT, 0.3, window)
    expected = reference_attention(*theirs, window=100 if window is None else window)
    direction = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    for output in (found, expected):
        (output * direction).sum().backward()
    torch.testing.assert_close(found, expected)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("window", [None, 3])
def test_the_variable_length_kernel_is_given_each_sequence_with_its_prompt(window, monkeypatch):
    """The kernel itself needs a GPU: what it is documented to compute stands in for it."""

    def documented(query, key, value, ends, seen_ends, most, most_seen, *, scale, window_size, enable_gqa):
        outputs = []
        for (start, stop), (seen_start, seen_stop) in zip(pairwise(ends), pairwise(seen_ends), strict=True):
            own, keys, values = query[start:stop], key[seen_start:seen_stop], value[seen_start:seen_stop]
            assert len(own) <= most and len(keys) <= most_seen and enable_gqa
            distance = torch.arange(len(own)).unsqueeze(1) + len(keys) - len(own) - torch.arange(len(keys))
            sees = (distance >= 0) & ((distance <= window_size[0]) | (window_size[0] < 0))
            heads = [part.transpose(0, 1) for part in (own, keys, values)]
            output = functional.scaled_dot_product_attention(*heads, attn_mask=sees, scale=scale, enable_gqa=True)
            outputs.append(output.transpose(0, 1))
        return torch.cat(outputs)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", documented)
    heads = [tensor.detach() for tensor in random_heads()]
    expected = reference_attention(*heads, window=100 if window is None else window)
    torch.testing.assert_close(attention._varlen(*heads, LAYOUT, 0.3, window), expected)


@pytest.mark.parametrize(("window", "is_merged"), [(None, True), (7, True), (6, False)])
def test_a_window_longer_than_every_sequence_is_none(window, is_merged, monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "merged_attention", lambda *args: calls.append(1) or merged_attention(*args))
    query, key, value = (tensor.detach().unsqueeze(0) for tensor in random_heads())
    with packed_sequences(LAYOUT.lengths, [None, 0, 0, 0, None, None, 5, 5]):
        found, _ = packed_attention(torch.nn.Module(), query, key, value, None, scaling=0.3, sliding_window=window)
    expected = reference_attention(query[0], key[0], value[0], window=100 if window is None else window)
    torch.testing.assert_close(found[0], expected)
    assert bool(calls) == is_merged


@pytest.mark.parametrize(
    ("lengths", "prompts", "words"),
    [
        ([2, 2], [None, 1], "segment 1 of a packed row continues segment 1"),
        ([2, 2, 2], [None, 0, 1], "segment 2 of a packed row continues segment 1"),
        ([2, 2], [None], "2 segments was given the prompts of 1"),
    ],
)
def test_a_layout_that_is_none_is_refused(lengths, prompts, words):
    with pytest.raises(ModelError, match=words), packed_sequences(lengths, prompts):
        pass
