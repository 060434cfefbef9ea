from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import RunDirectoryError
from slipstream.observe.ledger import Ledger, LedgerBalance, LedgerError, read_balance

groups = st.lists(
    st.tuples(
        st.sampled_from(["pending", "trained", "filtered", "failed"]), st.sampled_from(["too long", "no reward"])
    ),
    max_size=30,
)


def play(ledger: Ledger, fates: list[tuple[str, str]], *, first: int = 0) -> None:
    for index, (fate, why) in enumerate(fates, start=first):
        group = f"0-{index}"
        ledger.issued(group)
        if fate == "trained":
            ledger.trained(group, step=index)
        elif fate == "filtered":
            ledger.filtered(group, why)
        elif fate == "failed":
            ledger.failed(group, why, kind="raised")


@given(fates=groups)
def test_the_balance_holds_and_is_the_same_after_reading_the_file(
    tmp_path_factory: pytest.TempPathFactory, fates: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    ledger = Ledger(path)
    play(ledger, fates)
    balance = ledger.balance()
    kinds = [fate for fate, _ in fates]
    assert balance.issued == balance.accounted == len(fates)
    assert balance.trained == kinds.count("trained")
    assert sum(balance.filtered.values()) == kinds.count("filtered")
    assert sum(balance.failed.values()) == kinds.count("failed")
    assert balance.pending == kinds.count("pending")
    assert read_balance(path) == balance == Ledger(path).balance()
    ledger.check(ledger.pending)


@given(before=groups, after=groups)
def test_restoring_forgets_what_came_after_the_checkpoint(
    tmp_path_factory: pytest.TempPathFactory, before: list[tuple[str, str]], after: list[tuple[str, str]]
) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger.jsonl"
    ledger = Ledger(path)
    play(ledger, before)
    state, balance = ledger.state(), ledger.balance()
    play(ledger, after, first=len(before))
    ledger.close()
    resumed = Ledger(path)
    resumed.restore(state)
    assert resumed.balance() == balance == read_balance(path)
    play(resumed, after, first=len(before))  # The same groups can be issued again.
    assert resumed.balance().issued == len(before) + len(after)


def test_reasons_are_counted_apart(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    play(ledger, [("filtered", "a"), ("filtered", "b"), ("filtered", "a"), ("failed", "a"), ("trained", "")])
    assert ledger.balance() == LedgerBalance(5, 1, {"a": 2, "b": 1}, {"a": 1}, 0)


def test_a_group_is_closed_only_once_and_only_after_it_was_issued(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(LedgerError, match="'0-1' is trained, but it was never issued"):
        ledger.trained("0-1", step=1)
    ledger.issued("0-1")
    with pytest.raises(LedgerError, match="issued a second time"):
        ledger.issued("0-1")
    ledger.trained("0-1", step=1)
    with pytest.raises(LedgerError, match="'0-1' is failed, but it is already closed"):
        ledger.failed("0-1", "engine died", kind="killed")
    with pytest.raises(LedgerError, match="issued a second time"):
        ledger.issued("0-1")
    assert read_balance(tmp_path / "ledger.jsonl") == LedgerBalance(1, 1, {}, {}, 0), "refused events are not written"


def test_a_group_that_the_controller_lost_is_noticed(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.issued("0-1")
    ledger.issued("0-2")
    ledger.check({"0-1", "0-2"})
    with pytest.raises(LedgerError, match=r"1 groups are pending but not in flight \['0-1'\]"):
        ledger.check({"0-2"})
    with pytest.raises(LedgerError, match=r"1 are in flight but not pending \['0-3'\]"):
        ledger.check({"0-1", "0-2", "0-3"})


def test_a_file_shorter_than_its_checkpoint_is_an_error(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.jsonl")
    with pytest.raises(RunDirectoryError, match="the checkpoint was taken at byte 99"):
        ledger.restore({"offset": 99})


def test_a_file_that_contradicts_itself_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"event": "trained", "group": "0-1", "step": 1}\n')
    with pytest.raises(RunDirectoryError, match=r"contradicts itself \(group '0-1' is trained, but it was never"):
        Ledger(path)
