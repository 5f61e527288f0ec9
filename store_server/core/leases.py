"""Leases: a reader's promise of stable bytes, which ends by release, by time, or with its session."""

from collections.abc import Callable

import msgspec

from store_server.core.deadlines import Agenda, Deadlines
from store_server.core.objects import Session, StoredObject


class Lease(msgspec.Struct, eq=False):
    session: Session
    objects: list[StoredObject]


class Leases:
    """`release_objects` gets the objects of an ended lease; they count as used until then."""

    def __init__(self, agenda: Agenda, release_objects: Callable[[list[StoredObject]], None]) -> None:
        self._release_objects = release_objects
        self._leases: dict[int, Lease] = {}
        self._deadlines = Deadlines[int](agenda)
        self._last_number = 0

    def grant(self, session: Session, objects: list[StoredObject], until: float) -> int:
        """The lease's number, from 1. The bytes of `objects` stay as they are until the time `until`."""
        self._last_number += 1
        self._leases[self._last_number] = Lease(session, objects)
        session.lease_numbers.add(self._last_number)
        for obj in objects:
            obj.users += 1
            obj.leases += 1
        self._deadlines.set(self._last_number, until)
        return self._last_number

    def renew(self, session: Session, number: int, until: float) -> bool:
        """False when the lease is over already (or belongs to another session)."""
        if number not in session.lease_numbers:
            return False
        self._deadlines.set(number, until)
        return True

    def release(self, session: Session, number: int) -> bool:
        if number not in session.lease_numbers:
            return False
        self._deadlines.drop(number)
        self._end(number)
        return True

    def expire(self, now: float) -> int:
        """How many leases ended by time."""
        due = self._deadlines.pop_due(now)
        for number in due:
            self._end(number)
        return len(due)

    def close_session(self, session: Session) -> None:
        for number in list(session.lease_numbers):
            self.release(session, number)

    def next_deadline(self) -> float:
        return self._deadlines.next()

    def __len__(self) -> int:
        return len(self._leases)

    def _end(self, number: int) -> None:
        lease = self._leases.pop(number)
        lease.session.lease_numbers.discard(number)
        for obj in lease.objects:
            obj.leases -= 1
        self._release_objects(lease.objects)
