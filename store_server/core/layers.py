"""Who waits for which layers: readers follow a writer without polling.

A ticket is a parked request. It may wait for keys that nobody has reserved yet: a decode engine asks for the
layers of a block before the prefill engine has begun to compute it.
"""

from collections import OrderedDict
from collections.abc import Iterable

from kvcore.wire.messages import Acquire, Await, Read, Status
from store_server.core.deadlines import Agenda, Deadlines
from store_server.core.objects import Session, StoredObject

WaitingRequest = Read | Await | Acquire

# A reader's request may arrive just after the writer gave up; without a memory it would wait in vain for all
# of its wait_ms. Long enough for a request under way, short enough not to turn away a new writer's readers.
GIVEN_UP_S = 2.0
MAX_GIVEN_UP_KEYS = 65_536


class Ticket:
    """`outcomes` holds how keys ended that will not become ready; the others are looked at again when the
    request is finished. `held` are objects that count as used until then."""

    __slots__ = ("has_timed_out", "held", "num_keys", "open_keys", "outcomes", "request", "session")

    def __init__(self, session: Session, request: WaitingRequest) -> None:
        self.session = session
        self.request = request
        self.open_keys: set[bytes] = set()
        self.num_keys = 0
        self.outcomes: dict[bytes, Status] = {}
        self.has_timed_out = False
        self.held: list[StoredObject] = []


class Waiters:
    """`finished` collects the tickets that can be answered; the shell takes them after each call."""

    def __init__(self, agenda: Agenda) -> None:
        self.finished: list[Ticket] = []
        self._by_key: dict[bytes, list[tuple[int, Ticket]]] = {}
        self._deadlines = Deadlines[Ticket](agenda)
        self._given_up_at: OrderedDict[bytes, float] = OrderedDict()

    def park(self, ticket: Ticket, keys: Iterable[bytes], layer_end: int, deadline: float) -> None:
        """Waits for `layer_end` layers (0: all) of each key until `deadline` (seconds)."""
        ticket.open_keys = set(keys)
        ticket.num_keys = len(ticket.open_keys)
        ticket.session.num_waiting_keys += ticket.num_keys
        for key in ticket.open_keys:
            self._by_key.setdefault(key, []).append((layer_end, ticket))
        self._deadlines.set(ticket, deadline)

    def advance(self, key: bytes, layers_ready: int, num_layers: int) -> None:
        """The object was reserved (layers_ready 0), or more of its layers were committed."""
        if self._given_up_at:
            self._given_up_at.pop(key, None)
        waiting = self._by_key.get(key)
        if waiting is None:
            return
        still_waiting: list[tuple[int, Ticket]] = []
        for layer_end, ticket in waiting:
            if layer_end > num_layers:
                ticket.outcomes[key] = Status.INVALID
                self._close(key, ticket)
            elif (layer_end or num_layers) <= layers_ready:
                self._close(key, ticket)
            else:
                still_waiting.append((layer_end, ticket))
        if still_waiting:
            self._by_key[key] = still_waiting
        else:
            del self._by_key[key]

    def hold(self, obj: StoredObject) -> None:
        """It stays until the last of the requests that wait for it now is answered."""
        for _, ticket in self._by_key.get(obj.key, ()):
            obj.users += 1
            ticket.held.append(obj)

    def resolve(self, key: bytes, status: Status) -> None:
        """Nobody will write this key (now); whoever waits for it learns `status`."""
        for _, ticket in self._by_key.pop(key, ()):
            ticket.outcomes[key] = status
            self._close(key, ticket)

    def give_up(self, key: bytes, now: float) -> None:
        """Its writer will not deliver: who waits learns ABANDONED, and so does who asks within GIVEN_UP_S."""
        self.resolve(key, Status.ABANDONED)
        self._given_up_at[key] = now
        self._given_up_at.move_to_end(key)
        while len(self._given_up_at) > MAX_GIVEN_UP_KEYS or (
            next(iter(self._given_up_at.values())) + GIVEN_UP_S < now
        ):
            self._given_up_at.popitem(last=False)

    def was_given_up(self, key: bytes, now: float) -> bool:
        return self._given_up_at.get(key, float("-inf")) + GIVEN_UP_S >= now

    def expire(self, now: float) -> None:
        for ticket in self._deadlines.pop_due(now):
            ticket.has_timed_out = True
            self._forget(ticket)
            self._finish(ticket)

    def close_session(self, session: Session) -> list[StoredObject]:
        """Forgets all its tickets, finished ones too: there is nobody to answer. Returns what they held."""
        tickets = {ticket for waiting in self._by_key.values() for _, ticket in waiting}
        dropped = [ticket for ticket in tickets if ticket.session is session]
        for ticket in dropped:
            self._forget(ticket)
            self._deadlines.drop(ticket)
        dropped += [ticket for ticket in self.finished if ticket.session is session]
        self.finished = [ticket for ticket in self.finished if ticket.session is not session]
        return [obj for ticket in dropped for obj in ticket.held]

    def next_deadline(self) -> float:
        return self._deadlines.next()

    def __len__(self) -> int:
        return len(self._deadlines)

    def _close(self, key: bytes, ticket: Ticket) -> None:
        ticket.open_keys.discard(key)
        if not ticket.open_keys:
            self._deadlines.drop(ticket)
            self._finish(ticket)

    def _finish(self, ticket: Ticket) -> None:
        ticket.session.num_waiting_keys -= ticket.num_keys
        self.finished.append(ticket)

    def _forget(self, ticket: Ticket) -> None:
        for key in ticket.open_keys:
            remaining = [entry for entry in self._by_key[key] if entry[1] is not ticket]
            if remaining:
                self._by_key[key] = remaining
            else:
                del self._by_key[key]
        ticket.open_keys = set()
