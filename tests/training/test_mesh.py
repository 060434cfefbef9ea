"""How ranks are arranged: every rank has one place, and shares rows and weights with its neighbours."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.training.mesh import Mesh

SIZES = st.integers(1, 4)


@given(SIZES, SIZES, SIZES)
def test_every_rank_has_a_place_of_its_own_tensor_first_then_sequence_then_data(
    data: int, sequence: int, tensor: int
) -> None:
    mesh = Mesh(data, sequence, tensor)
    places = [
        (mesh.data_coordinate(rank), mesh.sequence_coordinate(rank), mesh.tensor_coordinate(rank))
        for rank in range(mesh.ranks)
    ]
    assert places == [
        (row, column, piece) for row in range(data) for column in range(sequence) for piece in range(tensor)
    ]


@given(SIZES, SIZES, SIZES)
def test_a_group_differs_in_one_coordinate_alone(data: int, sequence: int, tensor: int) -> None:
    mesh = Mesh(data, sequence, tensor)
    for rank in range(mesh.ranks):
        rows, weights = mesh.sequence_members(rank), mesh.tensor_members(rank)
        assert rows[mesh.sequence_coordinate(rank)] == rank and len(rows) == sequence
        assert weights[mesh.tensor_coordinate(rank)] == rank and len(weights) == tensor
        assert {mesh.data_coordinate(member) for member in rows + weights} == {mesh.data_coordinate(rank)}
        assert {mesh.tensor_coordinate(member) for member in rows} == {mesh.tensor_coordinate(rank)}
        assert {mesh.sequence_coordinate(member) for member in weights} == {mesh.sequence_coordinate(rank)}
        # Those that learn from the same sequences are neighbours, so the totals of one of them count.
        assert rank // mesh.ranks_per_share == mesh.data_coordinate(rank)
    assert mesh.averaged_ranks * tensor == mesh.ranks


def test_a_rank_that_shares_its_rows_or_its_weights_with_nobody_joins_no_group() -> None:
    assert Mesh(3, 1, 2).join_sequence_group(1, timeout_s=1.0) is None
    assert Mesh(3, 2, 1).join_tensor_group(1, timeout_s=1.0) is None


@pytest.mark.parametrize(("rank", "members"), [(0, (0, 1)), (1, (0, 1)), (2, (2, 3)), (5, (4, 5))])
def test_ranks_that_share_rows_are_neighbours(rank: int, members: tuple[int, ...]) -> None:
    assert Mesh(3, 2, 1).sequence_members(rank) == members


@pytest.mark.parametrize(
    ("rank", "rows", "weights"), [(0, (0, 2), (0, 1)), (3, (1, 3), (2, 3)), (6, (4, 6), (6, 7)), (7, (5, 7), (6, 7))]
)
def test_ranks_that_share_weights_stand_between_those_that_share_rows(
    rank: int, rows: tuple[int, ...], weights: tuple[int, ...]
) -> None:
    mesh = Mesh(2, 2, 2)
    assert (mesh.sequence_members(rank), mesh.tensor_members(rank)) == (rows, weights)
