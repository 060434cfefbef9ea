"""Packed attention is exact: each sequence sees itself alone, whatever lies beside it."""

import pytest
import torch

from slipstream.errors import ModelError
from slipstream.models.attention import PACKED_ATTENTION, packed_attention, packed_sequences

# Equal neighbours (one batched call), equal strangers, one token, and longer than the sliding window of 4.
LENGTHS = [3, 3, 3, 7, 1, 12, 3, 5, 5]
FAMILIES = ["llama", "qwen2", "qwen3", "mistral", "gemma3_text", "granite", "cohere"]


def packed_logits(model, sequences):
    tokens = torch.cat(sequences).unsqueeze(0)
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences]).unsqueeze(0)
    return model(input_ids=tokens, position_ids=positions, attention_mask=None, use_cache=False).logits[0]


def padded_logits(model, sequences):
    rows = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    mask = torch.arange(rows.shape[1]) < lengths.unsqueeze(-1)
    logits = model(input_ids=rows, attention_mask=mask.long(), use_cache=False).logits
    return logits[mask]


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_and_gradients_equal_padded_ones(family, make_model):
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(1, 61, (length,), generator=generator) for length in LENGTHS]
    direction = torch.randn(sum(LENGTHS), 61, generator=generator)
    padded, packed = make_model(family, "eager"), make_model(family, PACKED_ATTENTION)
    expected = padded_logits(padded, sequences)
    (expected * direction).sum().backward()
    with packed_sequences(LENGTHS):
        found = packed_logits(packed, sequences)
        (found * direction).sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for (name, ours), theirs in zip(packed.named_parameters(), padded.parameters(), strict=True):
        difference = (ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max().clamp_min(1e-9)
        assert difference <= 2e-5, name


def test_a_change_in_one_sequence_is_not_seen_by_another(make_model):
    model = make_model("llama", PACKED_ATTENTION)
    sequences = [torch.arange(1, length + 1) for length in LENGTHS]
    changed = [torch.full_like(s, 9) if index == 3 else s for index, s in enumerate(sequences)]
    with torch.no_grad(), packed_sequences(LENGTHS):
        before, after = packed_logits(model, sequences), packed_logits(model, changed)
    is_changed = torch.repeat_interleave(torch.arange(len(LENGTHS)) == 3, torch.tensor(LENGTHS))
    assert torch.equal(after[~is_changed], before[~is_changed])
    assert not torch.allclose(after[is_changed], before[is_changed])


def test_a_run_of_equal_lengths_is_one_call(make_model, monkeypatch):
    calls = []
    original = torch.nn.functional.scaled_dot_product_attention

    def counting(query, *arguments, **options):
        calls.append(tuple(query.shape))
        return original(query, *arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
    query, key = torch.randn(1, 4, 20, 16), torch.randn(1, 2, 20, 16)
    with packed_sequences([4, 4, 4, 8]):
        packed_attention(torch.nn.Module(), query, key, key, None)
    assert calls == [(3, 4, 4, 16), (1, 4, 8, 16)]


def test_the_inner_context_wins_and_the_outer_one_comes_back(make_model):
    query = torch.randn(1, 2, 6, 16)
    with packed_sequences([2, 4]):
        outer, _ = packed_attention(torch.nn.Module(), query, query, query, None)
        with packed_sequences([6]):
            inner, _ = packed_attention(torch.nn.Module(), query, query, query, None)
        again, _ = packed_attention(torch.nn.Module(), query, query, query, None)
    assert torch.equal(again, outer) and not torch.allclose(inner, outer)


def test_outside_the_context_it_is_an_error(make_model):
    with pytest.raises(ModelError, match="outside packed_sequences"):
        make_model("llama", PACKED_ATTENTION)(torch.arange(4).unsqueeze(0))


@pytest.mark.parametrize("shape", [(2, 4), (1, 5)])
def test_more_than_one_row_or_another_length_is_an_error(shape, make_model):
    tokens = torch.ones(shape, dtype=torch.int64)
    with packed_sequences([4]), pytest.raises(ModelError, match="one row of 4 tokens"):
        make_model("llama", PACKED_ATTENTION)(tokens, use_cache=False)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"softcap": 50.0}, "soft-capping"),
        ({"s_aux": torch.ones(2)}, "attention sinks"),
        ({"position_bias": torch.ones(1)}, "position bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_variants_that_are_not_computed_are_refused_not_ignored(arguments, words):
    query = torch.randn(1, 2, 4, 16)
    with packed_sequences([4]), pytest.raises(ModelError, match=words):
        packed_attention(torch.nn.Module(), query, query, query, None, **arguments)


def test_gemma_2_is_refused_for_its_soft_capped_scores(make_model):
    model = make_model("gemma2", PACKED_ATTENTION)
    with packed_sequences([4]), pytest.raises(ModelError, match="soft-capping of attention scores"):
        model(torch.ones(1, 4, dtype=torch.int64), use_cache=False)
