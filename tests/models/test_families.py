"""Every family of docs/models.md: what the learner computes is what Transformers computes, and leaves as it came."""

import re
import subprocess
import sys
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slipstream.algorithms.objective import SupervisedObjective
from slipstream.config.schema import TrainingConfig
from slipstream.data.trajectory import TrainingExample
from slipstream.errors import ModelError
from slipstream.models.attention import packed_sequences
from slipstream.models.loading import load_policy
from slipstream.models.policy import PolicyModule
from slipstream.training.learner import LearnerRank, LearnerSpec
from slipstream.weights.plan import ChannelAddress
from slipstream.weights.shared_memory import SharedMemoryReceiver

# Equal neighbours (one batched call), equal strangers, one token, and longer than the sliding window of 4.
LENGTHS = [3, 3, 3, 7, 1, 12, 3, 5, 5]
FAMILIES = [
    "llama", "qwen2", "qwen3", "qwen3_moe", "mistral", "mixtral", "gemma2", "gemma3_text", "phi3", "olmo2", "gpt_neox",
    "gpt2", "smollm3", "granite", "cohere", "deepseek_v3", "gpt_oss",
]  # fmt: skip
REFUSALS = {
    "bloom": "computes something else on a packed row",
    "mpt": "cannot be run on packed rows",
    "gptj": "cannot load",
    "mamba": "layers of the kind linear_attention",
    "qwen3_next": "layers of the kind linear_attention",
    "llama4_text": "layers of the kind chunked_attention",
}
# Gradients smaller than this share of the largest are rounding: those of a bias of the keys, for one, are 0 in theory.
SMALLEST_SHARE = 1e-3
VLLM_TOLERANCE = 1e-4


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads that share the work of tiny matrices mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(families, tmp_path_factory):
    """folder(family): a tiny random model of it on disk, made once."""
    return cache(lambda family: families.save_model(family, tmp_path_factory.mktemp(family)))


def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()


def sequences(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 61, (length,), generator=generator) for length in LENGTHS]


def padded_logits(model, rows):
    """The logits of each token, [sum of lengths, V], by Transformers' own masks."""
    padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = torch.arange(padded.shape[1]) < torch.tensor([len(row) for row in rows]).unsqueeze(-1)
    return model(input_ids=padded, attention_mask=mask.long(), use_cache=False).logits[mask]


def packed(rows):
    return torch.cat(rows), torch.cat([torch.arange(len(row)) for row in rows])


def assert_gradients_equal(found, expected, names):
    largest = max(gradient.abs().max().item() for gradient in expected)
    for name, ours, theirs in zip(names, found, expected, strict=True):
        difference = (ours - theirs).abs().max().item()
        assert difference <= 1e-4 * max(theirs.abs().max().item(), SMALLEST_SHARE * largest), name


def test_the_document_tells_of_the_families_that_are_tried_here(families):
    assert list(families.FAMILIES) == FAMILIES and list(families.REFUSED) == list(REFUSALS)
    document = families.DOCUMENT.read_text(encoding="utf-8")
    assert families.updated(document) == document, "run `.venv/bin/python scripts/document_models.py`"


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_logits_and_gradients_equal_padded_ones(family, folder):
    direction = torch.randn(sum(LENGTHS), 61, generator=torch.Generator().manual_seed(0))
    plain, ours = plain_model(folder(family)), load_policy(str(folder(family)), dtype="float32")
    expected = padded_logits(plain, sequences())
    (expected * direction).sum().backward()
    tokens, positions = packed(sequences())
    with packed_sequences(LENGTHS):
        found = ours(input_ids=tokens[None], position_ids=positions[None], attention_mask=None, use_cache=False)
        (found.logits[0] * direction).sum().backward()
    torch.testing.assert_close(found.logits[0], expected, rtol=1e-4, atol=2e-5)
    learned = [name for name, parameter in plain.named_parameters() if parameter.grad is not None]
    gradients = [[dict(model.named_parameters())[name].grad for name in learned] for model in (ours, plain)]
    assert_gradients_equal(*gradients, learned)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_in_chunks_equal_those_of_whole_logits(family, folder):
    rows = [row for row in sequences() if len(row) > 1]
    plain = plain_model(folder(family))
    module = PolicyModule(load_policy(str(folder(family)), dtype="float32"), chunk_tokens=4)
    log_probs = torch.log_softmax(padded_logits(plain, rows) / 0.7, -1)
    tokens, positions = packed(rows)
    predictors = (positions[1:] > 0).nonzero()[:, 0]
    expected = log_probs[predictors].gather(-1, tokens[predictors + 1, None])[:, 0]
    expected.sum().backward()
    with packed_sequences([len(row) for row in rows]):
        found = module(tokens, positions, predictors, tokens[predictors + 1], 0.7)["log_probs"]
        found.sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5)
    head = (module.model.get_output_embeddings().weight.grad, plain.get_output_embeddings().weight.grad)
    assert_gradients_equal(head[:1], head[1:], ["head"])


def examples():
    """Sequences with a prompt of two tokens; weights are those of a mean over all loss tokens."""
    rows = [row.numpy() for row in sequences(seed=1) if len(row) > 2]
    total = sum(len(row) - 2 for row in rows)
    return [
        TrainingExample(f"e{i}", row, np.arange(len(row)) >= 2, {"weight": np.full(len(row), 1 / total, np.float32)})
        for i, row in enumerate(rows)
    ]


def plain_step(model, training):
    """One step on the same loss in plain PyTorch, an example at a time."""
    groups = [[p for p in model.parameters() if (p.dim() >= 2) == is_matrix] for is_matrix in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": group, "weight_decay": 0.0} for group in groups],
        lr=training.learning_rate,
        betas=tuple(training.betas),
        eps=training.epsilon,
    )
    for example in examples():
        tokens = torch.from_numpy(example.tokens)
        log_probs = torch.log_softmax(model(tokens[None], use_cache=False).logits[0, :-1], -1)
        chosen = log_probs.gather(-1, tokens[1:, None])[1:, 0]
        (-chosen * float(example.token_fields["weight"][0])).sum().backward()
    optimizer.step()
    return dict(model.named_parameters())


@pytest.fixture
def learner():
    started = []

    def make(folder, **changes):
        training = {"zero_stage": 1, "learning_rate": 1e-2, "epsilon": 1e-2, "gradient_clip": 1e3, "threads": 1}
        spec = LearnerSpec(
            model_path=str(folder), dtype="float32", training=TrainingConfig(**training), temperature=1.0,
            total_optimizer_steps=8, load_reference=False, seed=0, rank=0, timeout_s=60.0, **changes,
        )  # fmt: skip
        rank = LearnerRank(spec)
        started.append(rank)
        rank.start(rank.meeting_point("127.0.0.1"))
        return rank

    yield make
    for rank in started:
        rank.shutdown()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_equals_plain_pytorch_and_travels_whole_to_disk_and_to_engines(family, folder, learner, tmp_path):
    rank = learner(folder(family), router_loss_coefficient=0.0)
    metrics = rank.update([examples()[:3], examples()[3:]], SupervisedObjective())
    expected = plain_step(plain_model(folder(family)), rank._spec.training)
    trained = dict(rank._engine.module.model.named_parameters())
    assert metrics["skipped"] == 0 and trained.keys() == expected.keys()
    for name, weight in trained.items():
        assert (weight - expected[name]).abs().max() <= 2e-5 * max(1.0, expected[name].abs().max()), name

    rank.export(str(tmp_path / "export"))
    tokens = sequences()[5].numpy()
    with torch.no_grad():
        logits = plain_model(tmp_path / "export")(torch.from_numpy(tokens)[None]).logits[0, :-1]
    log_probs = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(tokens)[1:, None])[:, 0]
    np.testing.assert_allclose(rank.probe(tokens), log_probs.numpy(), atol=2e-5, rtol=1e-5)

    on_disk = load_file(tmp_path / "export" / "model.safetensors")
    arrived = published(rank, family)
    assert arrived.keys() == on_disk.keys() == load_file(folder(family) / "model.safetensors").keys()
    for name, tensor in on_disk.items():
        assert arrived[name].dtype == tensor.dtype and torch.equal(arrived[name], tensor), name


def test_balancing_experts_is_part_of_the_step_and_does_not_depend_on_how_it_is_cut(folder, learner):
    results = []
    for coefficient, cut in ((0.0, [9]), (10.0, [9]), (10.0, [2, 5, 9])):
        rank = learner(folder("qwen3_moe"), router_loss_coefficient=coefficient)
        bounds = [0, *cut]
        parts = [examples()[first:last] for first, last in pairwise(bounds)]
        metrics = [rank.update(parts, SupervisedObjective()) for _ in range(5)]
        results.append(([step["router_loss"] for step in metrics], metrics[-1]["router_largest_load"]))
    (unbalanced, _), (whole, load), (parts, load_of_parts) = results
    assert unbalanced[0] == pytest.approx(whole[0]) and whole[-1] < unbalanced[-1] - 0.01
    assert parts == pytest.approx(whole, rel=1e-4) and load_of_parts == pytest.approx(load, rel=1e-4) and load >= 1


def published(rank, family):
    """All weights as an engine receives them, by the names of the plan."""
    plan = rank.weight_plan(1 << 15, ChannelAddress("shared_memory", f"family-{family}"))
    arrived, receiver = {}, None
    for index, bucket in enumerate(plan.buckets):
        rank.fill_bucket(index)
        receiver = receiver or SharedMemoryReceiver(plan)
        arrived |= {name: tensor.clone() for name, tensor in receiver.receive(bucket)}
    return arrived


@pytest.mark.parametrize(("family", "words"), REFUSALS.items())
def test_a_family_that_packing_would_change_is_refused_when_it_is_loaded(family, words, folder):
    with pytest.raises(ModelError, match=f"{words}(.|\n)*What works is|{words}.*slipstream_packed"):
        load_policy(str(folder(family)), dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_vllm_computes_the_same_as_loaded_and_after_a_publish(family, families):
    answer = subprocess.run(
        [sys.executable, families.__file__, "--vllm", family], capture_output=True, text=True, timeout=300
    )
    differences = re.search(rf"{family}: (\S+) as loaded, (\S+) after a publish", answer.stdout)
    assert differences, answer.stdout[-500:] + answer.stderr[-3000:]
    assert all(float(difference) <= VLLM_TOLERANCE for difference in differences.groups())
