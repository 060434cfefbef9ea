"""The account of every prompt: issued = trained + filtered (why) + failed (why) + pending.

Each change is one line of `ledger.jsonl`, so a prompt that vanished without a trace cannot happen unnoticed. The
ledger counts groups (prompt occurrences), not single trajectories.
"""

import threading
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from slipstream.errors import RunDirectoryError
from slipstream.observe.files import JsonLinesFile, read_json_lines

LedgerEvent = Literal["issued", "trained", "filtered", "failed"]


class LedgerError(RuntimeError):
    """The account does not balance, or a group is closed that is not open: a defect of the controller."""


@dataclass(frozen=True)
class LedgerBalance:
    """How many groups were issued and what became of them. `filtered` and `failed` count by reason."""

    issued: int = 0
    trained: int = 0
    filtered: dict[str, int] = field(default_factory=dict)
    failed: dict[str, int] = field(default_factory=dict)
    pending: int = 0

    @property
    def accounted(self) -> int:
        """The right-hand side of the balance; equals `issued`."""
        return self.trained + sum(self.filtered.values()) + sum(self.failed.values()) + self.pending


class _Account:
    """The state that the lines of a ledger add up to."""

    def __init__(self, events: Iterable[dict[str, Any]] = ()) -> None:
        self.issued = 0
        self.trained = 0
        self.filtered: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.pending: set[str] = set()
        self.closed: set[str] = set()
        for record in events:
            self.check(record["event"], record["group"])
            self.apply(record["event"], record["group"], why=record.get("why", ""))

    def check(self, event: LedgerEvent, group_id: str) -> None:
        """Raise LedgerError if the event cannot happen to this group now."""
        if event == "issued":
            if group_id in self.pending or group_id in self.closed:
                raise LedgerError(f"group {group_id!r} is issued a second time")
        elif group_id in self.closed:
            raise LedgerError(f"group {group_id!r} is {event}, but it is already closed")
        elif group_id not in self.pending:
            raise LedgerError(f"group {group_id!r} is {event}, but it was never issued")

    def apply(self, event: LedgerEvent, group_id: str, *, why: str) -> None:
        if event == "issued":
            self.issued += 1
            self.pending.add(group_id)
            return
        self.pending.remove(group_id)
        self.closed.add(group_id)
        if event == "trained":
            self.trained += 1
        elif event == "filtered":
            self.filtered[why] += 1
        else:
            self.failed[why] += 1

    def balance(self) -> LedgerBalance:
        return LedgerBalance(self.issued, self.trained, dict(self.filtered), dict(self.failed), len(self.pending))


class Ledger:
    """Writes the account and knows its balance. Opening an existing file continues it.

    Raises RunDirectoryError if the file's lines contradict each other.
    """

    def __init__(self, path: Path) -> None:
        self._file = JsonLinesFile(path)
        # In an asynchronous run prompts are issued and dropped while the loop enters what it trained on.
        self._lock = threading.Lock()
        self._account = _replay(path)

    def issued(self, group_id: str) -> None:
        """A prompt occurrence was sent to a rollout engine. Raises LedgerError if it had been before."""
        self._record("issued", group_id)

    def trained(self, group_id: str, step: int) -> None:
        """The group was in the batch of `step`. Raises LedgerError if the group is not pending."""
        self._record("trained", group_id, step=step)

    def filtered(self, group_id: str, why: str) -> None:
        """The group was left out on purpose (constant rewards, too long). Raises LedgerError if it is not pending."""
        self._record("filtered", group_id, why=why)

    def failed(self, group_id: str, why: str, *, kind: str) -> None:
        """The group was lost to a fault of that kind (`FailureKind`). Raises LedgerError if it is not pending."""
        self._record("failed", group_id, why=why, kind=kind)

    @property
    def pending(self) -> frozenset[str]:
        """The groups that are issued and not closed yet."""
        return frozenset(self._account.pending)

    def balance(self) -> LedgerBalance:
        """The counts so far."""
        return self._account.balance()

    def check(self, in_flight: Collection[str]) -> None:
        """Raise LedgerError unless the account balances and exactly the groups `in_flight` are pending.

        `in_flight` is what the controller itself still waits for: the ledger alone could not notice a lost group.
        """
        balance = self.balance()
        if balance.issued != balance.accounted:
            raise LedgerError(f"issued {balance.issued} groups but can account for {balance.accounted}: {balance}")
        held = set(in_flight)
        if held != self._account.pending:
            lost, unknown = sorted(self._account.pending - held), sorted(held - self._account.pending)
            raise LedgerError(
                f"the ledger does not balance: {len(lost)} groups are pending but not in flight {lost[:5]}, "
                f"{len(unknown)} are in flight but not pending {unknown[:5]}"
            )

    def state(self) -> dict[str, int]:
        """For a checkpoint: how far the file reached. The file is made durable, so that it reaches at least there."""
        self._file.sync()
        return {"offset": self._file.offset}

    def restore(self, state: dict[str, int]) -> None:
        """Forget everything after the checkpoint. Raises RunDirectoryError if the file is shorter than it was."""
        self._file.truncate(state["offset"])
        self._account = _replay(self._file.path)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _record(
        self, event: LedgerEvent, group_id: str, *, why: str = "", kind: str = "", step: int | None = None
    ) -> None:
        record: dict[str, Any] = {"event": event, "group": group_id}
        if kind:
            record["kind"] = kind
        if why:
            record["why"] = why
        if step is not None:
            record["step"] = step
        with self._lock:
            self._account.check(event, group_id)
            # Written before it is counted: if the disk is full, the account stays what the file says.
            self._file.write(record)
            self._account.apply(event, group_id, why=why)


def read_balance(path: Path) -> LedgerBalance:
    """The balance of a ledger file, without opening it for writing; all zero if it does not exist."""
    return _replay(path).balance()


def _replay(path: Path) -> _Account:
    try:
        return _Account(read_json_lines(path))
    except (KeyError, LedgerError) as error:
        raise RunDirectoryError(f"{path} contradicts itself ({error}): it was changed after it was written") from error
