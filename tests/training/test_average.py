"""The moving average of the weights: what its formula says, in the export and the checkpoint, and nowhere else."""

import pytest
import torch
from safetensors.torch import load_file

from slipstream.algorithms.objective import SupervisedObjective
from slipstream.config.lora import LoraConfig
from slipstream.errors import RunDirectoryError
from slipstream.training.average import piece_of

SUPERVISED = SupervisedObjective()
STAGES = (0, 1, 2, 3)
DECAY = 0.6


@pytest.mark.parametrize("stage", STAGES)
def test_the_export_is_the_average_and_training_goes_on_as_if_there_were_none(
    stage, learner, model_folder, make_examples, helpers, tmp_path
):
    settings = {"zero_stage": stage}
    plain = learner(model_folder, training=settings)
    rank = learner(model_folder, training=settings | {"ema_decay": DECAY})
    expected = helpers.weights(plain)
    for seed in range(3):
        for each in (plain, rank):
            each.update([make_examples(seed=seed)], SUPERVISED)
        expected = {name: DECAY * expected[name] + (1 - DECAY) * w for name, w in helpers.weights(plain).items()}
        if seed == 1:
            rank.export(str(tmp_path / "between"))
    rank.export(str(tmp_path / "export"))
    assert helpers.relative_difference(helpers.exported(tmp_path / "export"), expected) <= 1e-6
    assert helpers.identical(helpers.weights(rank), helpers.weights(plain))
    rank.export(str(tmp_path / "live"), live=True)
    assert helpers.identical(helpers.exported(tmp_path / "live"), helpers.weights(plain))
    assert helpers.relative_difference(expected, helpers.weights(plain)) > 1e-3


@pytest.mark.parametrize("stage", STAGES)
def test_the_average_goes_on_bit_for_bit_from_a_checkpoint(
    stage, learner, model_folder, make_examples, helpers, tmp_path
):
    settings = {"zero_stage": stage, "ema_decay": DECAY}
    straight, resumed = (learner(model_folder, training=settings) for _ in range(2))
    straight.update([make_examples()], SUPERVISED)
    straight.save(str(tmp_path / "checkpoint"))
    resumed.load(str(tmp_path / "checkpoint"))
    for name, rank in (("straight", straight), ("resumed", resumed)):
        rank.update([make_examples(seed=1)], SUPERVISED)
        rank.export(str(tmp_path / name))
    assert helpers.identical(helpers.exported(tmp_path / "resumed"), helpers.exported(tmp_path / "straight"))


def test_a_skipped_step_is_not_taken_in(learner, model_folder, make_examples, helpers, tmp_path):
    rank = learner(model_folder, training={"ema_decay": DECAY})
    rank.update([make_examples()], SUPERVISED)
    rank.export(str(tmp_path / "before"))
    poisoned = make_examples()
    poisoned[0].token_fields["weight"][:] = float("nan")
    assert rank.update([poisoned], SUPERVISED)["skipped"] == 1
    rank.export(str(tmp_path / "after"))
    assert helpers.identical(helpers.exported(tmp_path / "after"), helpers.exported(tmp_path / "before"))


def test_bfloat16_weights_have_a_float32_average_that_small_steps_are_not_lost_in(
    learner, model_folder, make_examples, helpers, tmp_path
):
    rank = learner(model_folder, dtype="bfloat16", training={"ema_decay": 0.999, "learning_rate": 1e-3})
    before = {name: weight.float() for name, weight in helpers.weights(rank).items()}
    rank.update([make_examples()], SUPERVISED)
    after = helpers.weights(rank)
    rank.save(str(tmp_path))
    pieces = load_file(tmp_path / "average_rank_0.safetensors")
    for name, weight in after.items():
        expected = before[name] + 0.001 * (weight.float() - before[name])
        torch.testing.assert_close(pieces[name].view(weight.shape), expected, rtol=1e-6, atol=1e-8)
    rank.export(str(tmp_path / "export"))
    assert helpers.identical(helpers.weights(rank), after)


def test_of_an_adapter_the_average_is_of_its_factors(learner, model_folder, make_examples, tmp_path):
    rank = learner(model_folder, training={"ema_decay": DECAY}, lora=LoraConfig(rank=2))
    rank.update([make_examples()], SUPERVISED)
    rank.export(str(tmp_path / "average"))
    rank.export(str(tmp_path / "live"), live=True)
    name = "adapter/adapter_model.safetensors"
    average, live = load_file(tmp_path / "average" / name), load_file(tmp_path / "live" / name)
    for key, factor in live.items():
        if "lora_B" in key:
            # B starts as zeros.
            torch.testing.assert_close(average[key], (1 - DECAY) * factor)


def test_a_checkpoint_without_an_average_says_so(learner, model_folder, tmp_path):
    learner(model_folder).save(str(tmp_path))
    with pytest.raises(RunDirectoryError, match=r"no average of the weights.*training\.ema_decay"):
        learner(model_folder, training={"ema_decay": DECAY}).load(str(tmp_path))


@pytest.mark.parametrize(("numbers", "ranks"), [(7, 3), (6, 3), (1, 4), (2, 2)])
def test_pieces_are_of_equal_size_and_make_up_the_whole(numbers, ranks):
    tensor = torch.arange(1.0, numbers + 1)
    pieces = [piece_of(tensor, rank, ranks) for rank in range(ranks)]
    assert len({piece.numel() for piece in pieces}) == 1
    assert torch.equal(torch.cat(pieces)[:numbers], tensor)
