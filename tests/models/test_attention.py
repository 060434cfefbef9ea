"""Packed attention is exact: each sequence sees itself alone, whatever lies beside it."""

import pytest
import torch

from slipstream.errors import ModelError
from slipstream.models import attention
from slipstream.models.attention import PACKED_ATTENTION, packed_attention, packed_sequences

# Equal neighbours (one batched call), equal strangers, one token, and longer than the sliding window of 4.
LENGTHS = [3, 3, 3, 7, 1, 12, 3, 5, 5]


def packed_logits(model, sequences):
    tokens = torch.cat(sequences).unsqueeze(0)
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences]).unsqueeze(0)
    return model(input_ids=tokens, position_ids=positions, attention_mask=None, use_cache=False).logits[0]


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
        ({"position_bias": torch.ones(1)}, "position bias"),
        ({"dropout": 0.1}, "dropout"),
        ({"is_causal": False}, "not causal"),
    ],
)
def test_variants_that_are_not_computed_are_refused_not_ignored(arguments, words):
    query = torch.randn(1, 2, 4, 16)
    with packed_sequences([4]), pytest.raises(ModelError, match=words):
        packed_attention(torch.nn.Module(), query, query, query, None, **arguments)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("extra", [{"softcap": 2.0}, {"s_aux": torch.tensor([1.5, -2.0, 0.0, 3.0])}])
def test_scores_some_queries_at_a_time_equal_all_at_once(extra, window, monkeypatch):
    def run():
        generator = torch.Generator().manual_seed(1)
        query = torch.randn(1, 4, sum(LENGTHS), 16, generator=generator, requires_grad=True)
        key = torch.randn(1, 2, sum(LENGTHS), 16, generator=generator, requires_grad=True)
        with packed_sequences(LENGTHS):
            output, _ = packed_attention(torch.nn.Module(), query, key, key, None, sliding_window=window, **extra)
            output.square().sum().backward()
        return output, query.grad, key.grad

    at_once = run()
    monkeypatch.setattr(attention, "SCORES_AT_A_TIME", 100)
    for found, expected in zip(run(), at_once, strict=True):
        torch.testing.assert_close(found, expected)


def test_the_whole_matrix_of_scores_never_exists_where_they_are_computed_in_the_open(monkeypatch):
    largest = []
    original = torch.tanh

    def measured(scores):
        largest.append(scores.numel())
        return original(scores)

    monkeypatch.setattr(torch, "tanh", measured)
    monkeypatch.setattr(attention, "SCORES_AT_A_TIME", 4 * 64 * 8)
    query = torch.randn(1, 4, 64, 16)
    with packed_sequences([64]):
        packed_attention(torch.nn.Module(), query, query, query, None, softcap=2.0)
    assert len(largest) == 8 and max(largest) == 4 * 64 * 8


def test_a_cap_so_high_that_it_caps_nothing_and_a_sink_so_low_that_nothing_goes_there_change_nothing():
    query, key = torch.randn(1, 4, sum(LENGTHS), 16), torch.randn(1, 2, sum(LENGTHS), 16)
    with packed_sequences(LENGTHS):
        plain, capped, sunk = (
            packed_attention(torch.nn.Module(), query, key, key, None, sliding_window=4, **extra)[0]
            for extra in ({}, {"softcap": 1e4}, {"s_aux": torch.full((4,), -1e4)})
        )
    torch.testing.assert_close(capped, plain, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(sunk, plain, rtol=1e-4, atol=1e-5)
