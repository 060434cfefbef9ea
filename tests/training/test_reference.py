"""The reference: what it is at the start, after a refresh, and after a resume."""

import numpy as np
import pytest

from slipstream.algorithms.objective import PolicyObjective
from slipstream.errors import TrainingError
from slipstream.training.reference import REFERENCE_FILE

STAGES = (0, 1, 2, 3)
POLICY = PolicyObjective(clip_low=0.2, clip_high=0.2)


def equal(found, expected):
    return found.keys() == expected.keys() and all(np.array_equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("stage", STAGES)
def test_a_refreshed_reference_is_the_policy_of_that_moment(stage, learner, untied_model_folder, make_examples):
    rank, examples = learner(untied_model_folder, load_reference=True, training={"zero_stage": stage}), make_examples()
    first = rank.log_probs([examples], "reference")
    rank.update([examples], POLICY)
    rank.refresh_reference()
    policy, reference = rank.log_probs([examples], "policy"), rank.log_probs([examples], "reference")
    assert equal(reference, policy) and not equal(reference, first)
    rank.update([examples], POLICY)
    assert equal(rank.log_probs([examples], "reference"), reference), "it does not follow the policy"
    assert not equal(rank.log_probs([examples], "policy"), reference)


@pytest.mark.parametrize("stage", STAGES)
def test_a_refreshed_reference_comes_back_bit_for_bit_with_a_checkpoint(
    stage, learner, model_folder, make_examples, tmp_path
):
    examples = make_examples()
    straight, resumed = (learner(model_folder, load_reference=True, training={"zero_stage": stage}) for _ in range(2))
    straight.update([examples], POLICY)
    straight.refresh_reference()
    straight.update([examples], POLICY)
    straight.save(str(tmp_path))
    resumed.load(str(tmp_path))
    for role in ("reference", "policy"):
        assert equal(resumed.log_probs([examples], role), straight.log_probs([examples], role)), role


def test_a_reference_that_was_never_refreshed_takes_no_room_in_a_checkpoint(learner, model_folder, tmp_path):
    rank = learner(model_folder, load_reference=True)
    rank.save(str(tmp_path / "before"))
    rank.refresh_reference()
    rank.save(str(tmp_path / "after"))
    assert not (tmp_path / "before" / REFERENCE_FILE).exists()
    assert (tmp_path / "after" / REFERENCE_FILE).exists()


def test_a_checkpoint_from_before_the_refresh_brings_the_first_reference_back(
    learner, model_folder, make_examples, tmp_path
):
    rank, examples = learner(model_folder, load_reference=True), make_examples()
    first = rank.log_probs([examples], "reference")
    rank.save(str(tmp_path))
    rank.update([examples], POLICY)
    rank.refresh_reference()
    rank.load(str(tmp_path))
    assert equal(rank.log_probs([examples], "reference"), first)


def test_without_a_reference_there_is_nothing_to_refresh(learner, model_folder):
    with pytest.raises(TrainingError, match="no reference model"):
        learner(model_folder).refresh_reference()
