"""States and weights in host memory: the same updates, checkpoints and exports as without."""

from itertools import product

import pytest

from slipstream.algorithms.objective import PolicyObjective

POLICY = PolicyObjective(clip_low=0.2, clip_high=0.2)
CASES = [
    *product((1, 2, 3), (False,)),
    (3, True),
]


@pytest.mark.parametrize(("stage", "offload_parameters"), CASES)
def test_what_is_offloaded_is_updated_as_without_and_goes_on_bit_for_bit(
    stage, offload_parameters, learner, model_folder, make_examples, helpers, tmp_path
):
    settings = {"zero_stage": stage, "weight_decay": 0.1, "gradient_clip": 0.5}
    offload = {"offload_optimizer": True, "offload_parameters": offload_parameters, "optimizer": "fused_adamw"}
    plain, offloaded = learner(model_folder, training=settings), learner(model_folder, training=settings | offload)
    for seed in range(2):
        examples = make_examples(seed=seed)
        steps = [rank.update([examples[:2], examples[2:]], POLICY) for rank in (plain, offloaded)]
        for name in steps[0].keys() - {"seconds"}:
            assert steps[1][name] == pytest.approx(steps[0][name], rel=1e-5, abs=1e-6), name
    assert helpers.relative_difference(helpers.weights(offloaded), helpers.weights(plain)) <= 1e-5

    offloaded.save(str(tmp_path / "checkpoint"))
    resumed = learner(model_folder, training=settings | offload)
    resumed.load(str(tmp_path / "checkpoint"))
    for rank in (offloaded, resumed):
        rank.update([make_examples(seed=2)], POLICY)
    assert helpers.identical(helpers.weights(resumed), helpers.weights(offloaded))
    offloaded.export(str(tmp_path / "export"))
    exported = learner(tmp_path / "export")
    assert helpers.identical(helpers.weights(exported), helpers.weights(offloaded))


def test_a_step_that_is_not_finite_is_skipped_where_states_are_offloaded(learner, model_folder, make_examples, helpers):
    rank = learner(model_folder, training={"zero_stage": 2, "offload_optimizer": True})
    before = helpers.weights(rank)
    examples = make_examples()
    examples[1].token_fields["advantages"][:] = float("nan")
    assert rank.update([examples], POLICY)["skipped"] == 1
    assert helpers.identical(helpers.weights(rank), before)
    assert rank.update([make_examples()], POLICY)["skipped"] == 0
    assert not helpers.identical(helpers.weights(rank), before)


def test_bfloat16_weights_with_offloaded_states_learn_as_with_states_beside_them(
    learner, model_folder, make_examples, helpers
):
    settings = {"zero_stage": 2, "optimizer": "fused_adamw"}
    ranks = [
        learner(model_folder, dtype="bfloat16", training=settings | {"offload_optimizer": offload})
        for offload in (False, True)
    ]
    for seed in range(2):
        for rank in ranks:
            rank.update([make_examples(seed=seed)], POLICY)
    plain, offloaded = map(helpers.weights, ranks)
    assert helpers.relative_difference(offloaded, plain) <= 2**-7, "the last bit of a bfloat16 number"
