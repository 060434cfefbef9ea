"""How ranks are arranged: every rank has one place, and shares rows with its neighbours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.training.mesh import Mesh


@given(st.integers(1, 6), st.integers(1, 6))
def test_every_rank_has_a_place_of_its_own_and_is_in_the_group_of_its_data(data: int, sequence: int) -> None:
    mesh = Mesh(data, sequence)
    places = [(mesh.data_coordinate(rank), mesh.sequence_coordinate(rank)) for rank in range(mesh.ranks)]
    assert places == [(row, column) for row in range(data) for column in range(sequence)]
    for rank in range(mesh.ranks):
        members = mesh.sequence_members(rank)
        assert members[mesh.sequence_coordinate(rank)] == rank and len(members) == sequence
        assert {mesh.data_coordinate(member) for member in members} == {mesh.data_coordinate(rank)}


def test_a_rank_that_shares_its_rows_with_nobody_joins_no_group() -> None:
    assert Mesh(3, 1).join_sequence_group(1, timeout_s=1.0) is None


@pytest.mark.parametrize(("rank", "members"), [(0, (0, 1)), (1, (0, 1)), (2, (2, 3)), (5, (4, 5))])
def test_ranks_that_share_rows_are_neighbours(rank: int, members: tuple[int, ...]) -> None:
    assert Mesh(3, 2).sequence_members(rank) == members
