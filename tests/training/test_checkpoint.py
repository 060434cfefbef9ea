"""Saving, going on from what was saved, exporting, and what happens when the disk does not cooperate."""

import errno
import json
import resource
import signal
from contextlib import contextmanager
from itertools import permutations

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream.algorithms.objective import PolicyObjective
from slipstream.errors import RunDirectoryError, TrainingError
from slipstream.training.checkpoint import storage_errors

STAGES = (0, 1, 2, 3)
POLICY = PolicyObjective(clip_low=0.2, clip_high=0.2)


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_bit_for_bit_from_a_checkpoint(stage, learner, model_folder, make_examples, helpers, tmp_path):
    settings = {"zero_stage": stage, "schedule": "cosine", "warmup_steps": 1}
    steps = [make_examples(seed=seed) for seed in range(4)]
    straight = learner(model_folder, training=settings)
    for examples in steps[:2]:
        straight.update([examples[:2], examples[2:]], POLICY)
    straight.save(str(tmp_path / "checkpoint"))
    expected = [straight.update([examples[:2], examples[2:]], POLICY) for examples in steps[2:]]

    resumed = learner(model_folder, training=settings)
    resumed.load(str(tmp_path / "checkpoint"))
    found = [resumed.update([examples[:2], examples[2:]], POLICY) for examples in steps[2:]]
    assert helpers.identical(helpers.weights(resumed), helpers.weights(straight))
    for before, after in zip(expected, found, strict=True):
        assert {**after, "seconds": 0} == {**before, "seconds": 0}


def test_random_states_are_part_of_a_checkpoint(learner, model_folder, tmp_path):
    rank = learner(model_folder)
    rank.save(str(tmp_path))
    expected = torch.rand(3), np.random.rand(3)
    torch.manual_seed(99)
    np.random.seed(99)
    rank.load(str(tmp_path))
    torch.testing.assert_close(torch.rand(3), expected[0], rtol=0, atol=0)
    np.testing.assert_array_equal(np.random.rand(3), expected[1])


def test_a_folder_without_a_checkpoint_is_refused(learner, model_folder, tmp_path):
    with pytest.raises(RunDirectoryError, match=r"learner.json is missing"):
        learner(model_folder).load(str(tmp_path))


def test_a_checkpoint_of_another_model_names_both_and_the_weight(learner, model_folder, helpers, tmp_path):
    wide = helpers.save_tiny_model(tmp_path / "wide", hidden_size=96)
    learner(wide).save(str(tmp_path / "checkpoint"))
    with pytest.raises(RunDirectoryError) as caught:
        learner(model_folder).load(str(tmp_path / "checkpoint"))
    message = str(caught.value)
    assert "'model.embed_tokens.weight' has shape [61, 96] there and [61, 64]" in message
    assert str(wide) in message and str(model_folder) in message


def test_a_checkpoint_of_another_model_of_the_same_shape_names_both(learner, model_folder, helpers, tmp_path):
    other = helpers.save_tiny_model(tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    save_file({name: 2 * weight for name, weight in weights.items()}, other / "model.safetensors", {"format": "pt"})
    learner(other).save(str(tmp_path / "checkpoint"))
    with pytest.raises(RunDirectoryError) as caught:
        learner(model_folder).load(str(tmp_path / "checkpoint"))
    assert f"it was written for {other}, this run has {model_folder}; " in str(caught.value)


def test_a_model_that_changed_where_it_lies_is_noticed_and_one_that_was_moved_is_not(learner, helpers, tmp_path):
    source = helpers.save_tiny_model(tmp_path / "source")
    learner(source).save(str(tmp_path / "checkpoint"))
    source.rename(tmp_path / "moved")
    learner(tmp_path / "moved").load(str(tmp_path / "checkpoint"))

    source = helpers.save_tiny_model(tmp_path / "source")
    (source / "config.json").write_text((source / "config.json").read_text().replace("0.3", "0.4"))
    with pytest.raises(RunDirectoryError, match="whose files have changed since"):
        learner(source).load(str(tmp_path / "checkpoint"))


@pytest.mark.parametrize(("written", "read"), [(0, 1), (2, 0)])
def test_stage_0_and_others_do_not_go_over_into_each_other(written, read, learner, model_folder, tmp_path):
    learner(model_folder, training={"zero_stage": written}).save(str(tmp_path / "checkpoint"))
    message = rf"ZeRO stage {written}, this run has ZeRO stage {read}: .*set training\.zero_stage"
    with pytest.raises(RunDirectoryError, match=message):
        learner(model_folder, training={"zero_stage": read}).load(str(tmp_path / "checkpoint"))


STAGE_CHANGES = list(permutations((1, 2, 3), 2))


@pytest.mark.parametrize(("written", "read"), STAGE_CHANGES)
def test_training_goes_on_at_another_stage(
    written, read, learner, model_folder, make_examples, helpers, tmp_path, request
):
    if (written, read) not in ((1, 3), (3, 2)) and not request.config.getoption("--every-layout"):
        pytest.skip("one of the others covers each step of it; --every-layout runs all")
    settings = {"weight_decay": 0.1}
    straight = learner(model_folder, training=settings | {"zero_stage": written})
    for seed in range(2):
        straight.update([make_examples(seed=seed)], POLICY)
    folder = tmp_path / "step" / "learner"
    straight.save(str(folder))
    resumed = learner(model_folder, training=settings | {"zero_stage": read})
    assert resumed.load(str(folder)) == f"ZeRO stage {written} to {read}"
    assert helpers.identical(helpers.weights(resumed), helpers.weights(straight))
    for seed in range(2, 5):
        expected, found = (rank.update([make_examples(seed=seed)], POLICY) for rank in (straight, resumed))
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    assert helpers.relative_difference(helpers.weights(resumed), helpers.weights(straight)) <= 1e-5
    assert [group["weight_decay"] for group in resumed._engine.optimizer.param_groups] == [0.1, 0.0]
    assert list(tmp_path.iterdir()) == [tmp_path / "step"], "the conversion is removed"


def test_a_checkpoint_that_cannot_be_converted_says_why(learner, model_folder, tmp_path):
    folder = tmp_path / "step" / "learner"
    learner(model_folder, training={"zero_stage": 1}).save(str(folder))
    next((folder / "engine").glob("*optim_states.pt")).write_bytes(b"damaged")
    with pytest.raises(RunDirectoryError, match=r"cannot be converted for another number of ranks or ZeRO stage: "):
        learner(model_folder, training={"zero_stage": 2}).load(str(folder))
    assert list(tmp_path.iterdir()) == [tmp_path / "step"]


@contextmanager
def no_room():
    """Files of this process cannot grow past 4 KiB: every larger write fails, as on a full disk.

    Held for the one call under test and no longer: pytest's own output may be a file, too.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("method", ["save", "export"])
@pytest.mark.parametrize("stage", (2, 3))
def test_a_write_that_fails_is_a_training_error_that_names_the_folder(stage, method, learner, model_folder, tmp_path):
    rank = learner(model_folder, training={"zero_stage": stage})
    with pytest.raises(TrainingError) as caught, no_room():
        getattr(rank, method)(str(tmp_path / "full"))
    assert str(tmp_path / "full") in str(caught.value) and "free space" in str(caught.value)


def test_a_full_disk_is_said_in_the_words_of_the_system(tmp_path):
    with pytest.raises(TrainingError, match="No space left on device"), storage_errors(tmp_path, "a checkpoint"):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_other_errors_while_saving_stay_what_they_are(tmp_path):
    with pytest.raises(ZeroDivisionError), storage_errors(tmp_path, "a checkpoint"):
        raise ZeroDivisionError


@pytest.mark.parametrize("stage", STAGES)
def test_an_export_loads_in_transformers_with_the_trained_weights(
    stage, learner, model_folder, make_examples, helpers, tmp_path
):
    rank = learner(model_folder, training={"zero_stage": stage})
    rank.update([make_examples()], POLICY)
    rank.export(str(tmp_path / "export"))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert helpers.identical(dict(model.named_parameters()), helpers.weights(rank))
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert list((tmp_path / "export").glob("*.safetensors"))


def test_an_export_keeps_the_files_and_settings_of_the_model_it_came_from(learner, helpers, tmp_path):
    source = helpers.save_tiny_model(tmp_path / "source")
    config = AutoConfig.from_pretrained(source)
    config.attention_dropout = 0.1
    config.save_pretrained(source)
    # Not valid for saving (a temperature without sampling), yet shipped by real models.
    settings = {"eos_token_id": [5, 6], "temperature": 0.5, "do_sample": False}
    (source / "generation_config.json").write_text(json.dumps(settings))
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")

    learner(source).export(str(tmp_path / "export"))
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "export" / name).read_bytes() == (source / name).read_bytes(), name
    exported = AutoConfig.from_pretrained(tmp_path / "export")
    assert exported.attention_dropout == 0.1 and exported.use_cache
    assert exported.dtype == torch.float32
