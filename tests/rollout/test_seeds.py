"""Seeds of sampling depend on the run, the purpose and the group, and on nothing else."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from slipstream.rollout.seeds import group_seed


@given(st.integers(0, 2**40), st.text(), st.text())
def test_a_seed_and_its_group_fit_a_32_bit_generator(run_seed: int, group_id: str, purpose: str) -> None:
    assert 0 <= group_seed(run_seed, group_id, purpose=purpose) < 2**31


def test_the_same_arguments_give_the_same_seed_in_every_process() -> None:
    assert group_seed(1, "0-3", purpose="training") == group_seed(1, "0-3", purpose="training")
    assert group_seed(0, "0-0", purpose="training") == 2022702818


def test_each_argument_changes_the_seed() -> None:
    seeds = {
        group_seed(run_seed, f"0-{group}", purpose=purpose)
        for run_seed in range(5)
        for group in range(50)
        for purpose in ("training", "evaluation")
    }
    assert len(seeds) == 500


def test_neighbouring_groups_of_eight_samples_share_no_seed() -> None:
    starts = sorted(group_seed(0, f"0-{group}", purpose="training") for group in range(200))
    assert all(later - earlier >= 8 for earlier, later in pairwise(starts))
