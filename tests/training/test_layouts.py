"""One optimizer step has one gradient, however the ranks are arranged: data x sequence x tensor, at every stage.

What one rank computes is compared with plain PyTorch elsewhere (test_learner.py, test_critic.py, test_sft.py); here it
is what every layout must agree with. Processes are the slow part, so those of a layout run its cases one after the
other: some of them, each stage and each algorithm among them, and with `--every-layout` all.
"""

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from slipstream.algorithms.objective import DistillationObjective, Objective, PolicyObjective, SupervisedObjective
from slipstream.algorithms.preference_loss import PairObjective
from slipstream.algorithms.reward_model_loss import RewardModelObjective
from slipstream.algorithms.value_loss import ValueObjective
from slipstream.config.lora import LoraConfig
from slipstream.data.preferences import PreferencePair, answer_examples, pair_examples
from slipstream.data.trajectory import TrainingExample
from slipstream.training.checkpoint_weights import read_weights
from slipstream.training.learner import LearnerRank
from slipstream.training.mesh import Mesh
from slipstream.training.reference import TeacherSpec
from slipstream.weights.checksum import tensor_checksum
from slipstream.weights.plan import ChannelAddress

TIMEOUT_S = 600
STAGES = (0, 1, 2, 3)
MESHES = (Mesh(1, 2, 1), Mesh(2, 2, 1), Mesh(2, 1, 1), Mesh(1, 1, 2), Mesh(1, 2, 2), Mesh(2, 1, 2))
# A first step of AdamW then moves the weights by a multiple of the gradient, see test_critic.py: by one so large that
# what the weights are rounded to does not matter.
STEP_IS_GRADIENT = {"learning_rate": 1e6, "epsilon": 1e3, "gradient_clip": 1e9, "logits_chunk_tokens": 4}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * TIMEOUT_S)]


@pytest.fixture(scope="module")
def folders(helpers: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy and a critic. Larger weights than these blow rounding up, on one rank as on several.

    Three heads of keys and values, which two ranks cannot share evenly.
    """
    policy = helpers.save_tiny_model(
        tmp_path_factory.mktemp("policy"), initializer_range=0.1, hidden_size=96, heads=(6, 3)
    )
    model = AutoModelForSequenceClassification.from_pretrained(policy, num_labels=1)
    torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(3))
    critic = tmp_path_factory.mktemp("critic")
    model.save_pretrained(critic)
    other = helpers.save_tiny_model(tmp_path_factory.mktemp("other"), initializer_range=0.2)
    return {"policy": policy, "critic": critic, "other policy": other}


@dataclass(frozen=True)
class Case:
    """What is learned, from what, by which model in which role. `options` are of the learner."""

    folder: Path
    objective: Objective
    examples: list[TrainingExample]
    options: dict[str, Any] = field(default_factory=dict)


def with_fields(
    examples: Sequence[TrainingExample], *names: str, around: dict[str, np.ndarray] | None = None
) -> list[TrainingExample]:
    """Examples with further numbers for each token: by chance, or near those given for the loss tokens."""
    generator = np.random.default_rng(11)
    found = []
    for example in examples:
        fields = dict(example.token_fields)
        for name in names:
            fields[name] = generator.normal(0, 0.3, len(example.tokens)).astype(np.float32)
            if around is not None:
                fields[name][example.loss_mask] += around[example.example_id]
        found.append(replace(example, token_fields=fields))
    return found


@pytest.fixture(scope="module")
def examples(make_examples: Callable[..., list[TrainingExample]]) -> list[TrainingExample]:
    """None of whose lengths, nor the length of the row, is a multiple of the number of chunks."""
    return make_examples((5, 9, 13, 14, 4), seed=2)


@pytest.fixture
def cases(
    examples: list[TrainingExample], folders: dict[str, Path], learner: Callable[..., LearnerRank]
) -> dict[str, Case]:
    """SFT; GRPO with a KL term to a reference; both halves of PPO."""
    near = learner(folders["policy"]).log_probs([examples], "policy")
    grpo = PolicyObjective(clip_low=0.2, clip_high=0.2, kl_coefficient=0.1)
    ppo, values = PolicyObjective(clip_low=0.2, clip_high=0.2), ValueObjective(value_clip=0.2)
    policy, critic = folders["policy"], folders["critic"]
    of_values = with_fields(examples, "returns", "old_values")
    return {
        "sft": Case(policy, SupervisedObjective(), examples),
        "grpo": Case(policy, grpo, with_fields(examples, "old_log_probs", "reference_log_probs", around=near)),
        "ppo policy": Case(policy, ppo, with_fields(examples, "old_log_probs", around=near)),
        "ppo critic": Case(critic, values, of_values, {"role": "critic"}),
    }


def shares(examples: list[TrainingExample], mesh: Mesh) -> list[list[list[TrainingExample]]]:
    """Unequal ones; with two of them one has a micro-batch of weight zero."""
    if mesh.data == 1:
        return [[examples[:2], examples[2:]]]
    return [[examples[:2], examples[2:4]], [examples[4:], []]]


def compare(
    mesh: Mesh,
    cells: dict[str, tuple[Case, int]],
    learner: Callable[..., LearnerRank],
    helpers: Any,
    folder: Path,
) -> None:
    """One step of each cell, a case at a ZeRO stage, has the gradient and the metrics of one rank at stage 0."""
    jobs = []
    for rank in range(mesh.ranks):
        jobs.append([])
        for case, stage in cells.values():
            share = shares(case.examples, mesh)[mesh.data_coordinate(rank)]
            layout = {
                "data_parallel": mesh.data,
                "sequence_parallel": mesh.sequence,
                "tensor_parallel": mesh.tensor,
                "rank": rank,
            }
            spec = helpers.make_spec(
                case.folder, training=STEP_IS_GRADIENT | {"zero_stage": stage}, **layout, **case.options
            )
            calls = [("before", "weights", ()), ("update", "update", (share, case.objective)), ("after", "weights", ())]
            jobs[-1].append((spec, calls))
    results = helpers.run_ranks(jobs, folder, timeout_s=TIMEOUT_S)
    differences, wrong_metrics = {}, []
    for place, (name, (case, _)) in enumerate(cells.items()):
        single = learner(case.folder, training=STEP_IS_GRADIENT | {"zero_stage": 0}, **case.options)
        before = helpers.weights(single)
        metrics = single.update([case.examples], case.objective)
        expected = {name: before[name] - after for name, after in helpers.weights(single).items()}
        for answers in (result[place] for result in results):
            assert "error" not in answers, answers["error"]
            found = {name: answers["before"][name] - after for name, after in answers["after"].items()}
            # Beside an adapter most weights stay as they are.
            moved = [weight for weight, values in expected.items() if values.any()]
            assert moved and all(not values.any() for weight, values in found.items() if weight not in moved), name
            both = ({weight: gradient[weight] for weight in moved} for gradient in (found, expected))
            difference = helpers.relative_difference(*both)
            assert not math.isnan(difference), name
            differences[name] = max(differences.get(name, 0.0), difference)
            wrong_metrics += [
                (name, metric, answers["update"][metric], value)
                for metric, value in metrics.items()
                if metric != "seconds" and answers["update"][metric] != pytest.approx(value, rel=1e-4, abs=1e-6)
            ]
    assert max(differences.values()) <= 1e-5, differences
    assert not wrong_metrics


@pytest.mark.parametrize("mesh", MESHES, ids=lambda mesh: f"{mesh.data}x{mesh.sequence}x{mesh.tensor}")
def test_sft_grpo_and_ppo_have_the_gradient_of_one_rank_at_every_stage(
    mesh: Mesh,
    cases: dict[str, Case],
    learner: Callable[..., LearnerRank],
    helpers: Any,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    if mesh == Mesh(2, 1, 2):
        require_turn(mesh, request)
    table = list(product(enumerate(cases), STAGES))
    if not request.config.getoption("--every-layout"):
        # Each algorithm once and each stage once; at another one for each layout.
        table = [((number, name), stage) for (number, name), stage in table if (number + mesh.ranks + stage) % 4 == 0]
    cells = {f"{name} at stage {stage}": (cases[name], stage) for (_, name), stage in table}
    compare(mesh, cells, learner, helpers, tmp_path)


def require_turn(mesh: Mesh, request: pytest.FixtureRequest) -> None:
    """Skip a layout with pieces of weights that is only tried where all are."""
    if mesh.tensor > 1 and not request.config.getoption("--every-layout"):
        pytest.skip("runs with --every-layout")


def pairs(generator: np.random.Generator) -> list[PreferencePair]:
    """Two answers each, from the third token on, of unequal lengths."""
    found = []
    for row in range(3):
        answers = [generator.integers(1, 60, length) for length in (5 + row, 9 - row)]
        found.append(PreferencePair(str(row), *answers, *(np.arange(len(answer)) >= 2 for answer in answers)))
    return found


def weighted(examples: list[TrainingExample], **numbers: float) -> list[TrainingExample]:
    """Examples with weights that make a mean, and other fields that are the same for all tokens."""
    total = sum(int(example.loss_mask.sum()) for example in examples)
    numbers = {"weight": 1 / total, **numbers}
    return [
        replace(e, token_fields=e.token_fields | {k: np.full(len(e.tokens), v, np.float32) for k, v in numbers.items()})
        for e in examples
    ]


def of_one_prompt() -> list[TrainingExample]:
    """Answers of a group, whose prompt of six tokens lies in the row once."""
    generator = np.random.default_rng(4)
    prompt, found = generator.integers(1, 60, 6), []
    for member, length in enumerate((3, 5, 3, 2, 7)):
        tokens = np.concatenate([prompt, generator.integers(1, 60, length)])
        fields = {"weight": np.full(len(tokens), 0.05), "advantages": np.full(len(tokens), generator.normal())}
        fields = {name: values.astype(np.float32) for name, values in fields.items()}
        found.append(TrainingExample(str(member), tokens, np.arange(len(tokens)) >= 6, fields, shared_tokens=6))
    return found


@pytest.mark.parametrize("mesh", [Mesh(1, 2, 1), Mesh(1, 1, 2)], ids=lambda mesh: f"1x{mesh.sequence}x{mesh.tensor}")
def test_whatever_is_learned_two_ranks_that_share_rows_or_weights_have_the_gradient_of_one(
    mesh: Mesh,
    examples: list[TrainingExample],
    folders: dict[str, Path],
    families: Any,
    learner: Callable[..., LearnerRank],
    helpers: Any,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> None:
    """Losses over whole sequences, scores of last tokens, teachers, adapters, shared prompts, windows, experts."""
    require_turn(mesh, request)
    policy, generator = folders["policy"], np.random.default_rng(1)
    near = learner(policy).log_probs([examples], "policy")
    plain = PolicyObjective(clip_low=0.2, clip_high=0.2)
    gspo = replace(plain, policy_loss="sequence_clip", clip_low=0.01, clip_high=0.01)
    answers = [answer for pair in pairs(generator) for answer in answer_examples(pair)]
    scored = weighted(pair_examples(pairs(generator)))
    teacher = TeacherSpec(str(folders["other policy"]), "teacher.path", "forward", 2.0)
    cells = {
        "gspo": (Case(policy, gspo, with_fields(examples, "old_log_probs", around=near)), 1),
        "dpo": (Case(policy, PairObjective(loss="dpo", beta=0.3), weighted(answers, reference_log_probs=-4.0)), 2),
        "reward model": (Case(folders["critic"], RewardModelObjective(), scored, {"role": "reward_model"}), 3),
        "teacher": (
            Case(policy, DistillationObjective(coefficient=0.7, temperature=2.0), examples, {"teacher": teacher}),
            3,
        ),
        "entropy": (Case(policy, replace(plain, entropy_coefficient=0.5), examples), 2),
        "adapter": (Case(policy, plain, examples, {"lora": LoraConfig(rank=4)}), 1),
        "adapter in pieces": (Case(policy, plain, examples, {"lora": LoraConfig(rank=4)}), 3),
        "checkpointing": (Case(policy, plain, examples, {"activation_checkpointing": True}), 3),
        "shared prompt": (Case(policy, plain, of_one_prompt()), 2),
    }
    tried = (("gemma2", 1), ("mistral", 3), ("gpt_oss", 2), ("qwen3_moe", 2), ("deepseek_v3", 1))
    for family, stage in tried if mesh.tensor == 1 else ():
        # Larger weights than these blow rounding up, on one rank as on several.
        folder = families.save_model(family, tmp_path_factory.mktemp(family), initializer_range=0.1)
        options = {"router_loss_coefficient": 0.5} if family in ("gpt_oss", "qwen3_moe") else {}
        cells[family] = (Case(folder, plain, examples, options), stage)
    if mesh.tensor > 1:
        # Refused, see tests/config/test_lora.py; families have a test of their own below.
        del cells["adapter"], cells["adapter in pieces"]
    compare(mesh, cells, learner, helpers, tmp_path)


def test_every_family_that_can_be_divided_has_the_gradient_of_one_rank(
    examples: list[TrainingExample],
    families: Any,
    learner: Callable[..., LearnerRank],
    helpers: Any,
    tmp_path: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Those that docs/models.md says are; the others are refused (tests/models/test_tensor_plan.py)."""
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2)
    cells = {}
    for number, (name, family) in enumerate(families.FAMILIES.items()):
        if family.in_pieces:
            # Larger weights than these blow rounding up, on one rank as on several.
            folder = families.save_model(name, tmp_path_factory.mktemp(name), initializer_range=0.1)
            cells[name] = (Case(folder, objective, examples), STAGES[number % 4])
    compare(Mesh(1, 1, 2), cells, learner, helpers, tmp_path)


@pytest.mark.parametrize(
    ("mesh", "stage"),
    [(Mesh(1, 3, 1), 3), (Mesh(1, 1, 2), 3), (Mesh(1, 1, 2), 1), (Mesh(1, 1, 2), 0), (Mesh(1, 2, 2), 3)],
    ids=lambda value: f"{value.data}x{value.sequence}x{value.tensor}" if isinstance(value, Mesh) else f"stage{value}",
)
def test_ranks_that_share_rows_or_weights_save_go_on_export_publish_and_skip_as_one_does(
    mesh: Mesh,
    stage: int,
    examples: list[TrainingExample],
    folders: dict[str, Path],
    learner: Callable[..., LearnerRank],
    helpers: Any,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    """One set of processes, in which a second learner goes on from the checkpoint of the first."""
    if stage < 3 or mesh.ranks > 3:
        require_turn(mesh, request)
    objective = PolicyObjective(clip_low=0.2, clip_high=0.2)
    fields = {**examples[2].token_fields, "advantages": np.full(13, np.nan, np.float32)}
    poisoned = [*examples[:2], replace(examples[2], token_fields=fields)]
    checkpoint, export = str(tmp_path / "checkpoint"), str(tmp_path / "export")
    channel = ChannelAddress("shared_memory", f"test-layouts-{os.getpid()}-{mesh.tensor}-{stage}")
    probe = np.arange(1, 8)
    step = ("third", "update", ([examples[1:], examples[:1]], objective))
    first = [
        ("update", "update", ([examples], objective)),
        ("weights", "weights", ()),
        ("nan", "update", ([poisoned, examples[3:]], objective)),
        ("weights after nan", "weights", ()),
        ("log_probs", "log_probs", ([examples[:2], examples[2:]], "policy")),
        ("refreshed", "refresh_reference", ()),
        ("of reference", "log_probs", ([examples[:2], examples[2:]], "reference")),
        ("probe", "probe", (probe,)),
        # A token less than there are ranks.
        ("shortest probe", "probe", (probe[:2],)),
        ("plan", "weight_plan", (1 << 30, channel)),
        ("checksums", "fill_bucket", (0,)),
        ("export", "export", (export,)),
        ("save", "save", (checkpoint,)),
        step,
        ("last", "weights", ()),
    ]
    second = [("load", "load", (checkpoint,)), step, ("last", "weights", ())]
    jobs = []
    layout = {"sequence_parallel": mesh.sequence, "tensor_parallel": mesh.tensor, "load_reference": True}
    for rank in range(mesh.ranks):
        spec = helpers.make_spec(folders["policy"], training={"zero_stage": stage}, rank=rank, **layout)
        jobs.append([(spec, first), (spec, second)])
    results = helpers.run_ranks(jobs, tmp_path, timeout_s=TIMEOUT_S)
    single = learner(folders["policy"], training={"zero_stage": stage})
    single.update([examples], objective)
    log_probs = single.log_probs([examples], "policy")
    exported = learner(export)
    for ours, resumed in results:
        assert helpers.relative_difference(ours["weights"], helpers.weights(single)) <= 1e-5
        assert ours["nan"]["skipped"] == 1 and ours["nan"]["nonfinite_examples"] == ["e2"]
        assert helpers.identical(ours["weights after nan"], ours["weights"])
        assert helpers.identical(ours["weights"], helpers.weights(exported))
        assert helpers.identical(resumed["last"], ours["last"])
        assert {**resumed["third"], "seconds": 0} == {**ours["third"], "seconds": 0}
        for name, values in log_probs.items():
            np.testing.assert_allclose(ours["log_probs"][name], values, atol=1e-5)
            np.testing.assert_allclose(ours["of reference"][name], values, atol=1e-5)
        np.testing.assert_allclose(ours["probe"], exported.probe(probe), atol=1e-5)
        np.testing.assert_allclose(ours["shortest probe"], exported.probe(probe[:2]), atol=1e-5)
    weights = results[0][0]["weights"]
    checksums = results[0][0]["checksums"]
    assert checksums == {name: tensor_checksum(weights[name]) for name in checksums} and len(checksums) > 10
    assert results[1][0]["checksums"] == {}
    on_disk = read_weights(Path(checkpoint))
    assert helpers.identical({name: on_disk[name] for name in weights}, weights)
