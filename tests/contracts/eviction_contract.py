"""What every eviction policy must do, whatever its order. A test class inherits it and sets `policy_name`."""

import random

from store_server.core.eviction import POLICIES, EvictionPolicy


class Entry:
    def __init__(self, key: bytes, size_bytes: int = 1) -> None:
        self.key = key
        self.size_bytes = size_bytes

    def __repr__(self) -> str:
        return f"Entry({self.key!r})"


def anything(_: object) -> bool:
    return True


def evict(policy: EvictionPolicy) -> bytes:
    """One eviction as the store does it: ask for the victim, then say that it is gone."""
    entry = policy.victim(anything)
    assert entry is not None
    policy.on_remove(entry.key, evicted=True)
    return entry.key


class EvictionContract:
    policy_name: str

    def new_policy(self) -> EvictionPolicy:
        return POLICIES[self.policy_name]()

    def test_an_empty_policy_has_no_victim(self) -> None:
        policy = self.new_policy()
        assert policy.victim(anything) is None
        assert len(policy) == 0

    def test_every_object_is_a_victim_exactly_once(self) -> None:
        policy = self.new_policy()
        keys = {b"key %d" % number for number in range(50)}
        for key in keys:
            policy.on_insert(Entry(key))
        assert {evict(policy) for _ in range(50)} == keys
        assert policy.victim(anything) is None

    def test_a_victim_stays_known_until_it_is_removed(self) -> None:
        policy = self.new_policy()
        policy.on_insert(Entry(b"only"))
        victim = policy.victim(anything)
        assert victim is not None and victim.key == b"only"
        assert b"only" in policy and len(policy) == 1

    def test_only_evictable_objects_are_named(self) -> None:
        policy = self.new_policy()
        for number in range(10):
            policy.on_insert(Entry(b"%d" % number))
        named = policy.victim(lambda entry: entry.key == b"7")
        assert named is not None and named.key == b"7"
        assert policy.victim(lambda entry: False) is None
        assert len(policy) == 10

    def test_the_entry_itself_comes_back(self) -> None:
        policy = self.new_policy()
        entry = Entry(b"mine", 4096)
        policy.on_insert(entry)
        assert policy.victim(anything) is entry

    def test_a_removed_object_is_never_named(self) -> None:
        policy = self.new_policy()
        for number in range(20):
            policy.on_insert(Entry(b"%d" % number))
        for number in range(0, 20, 2):
            policy.on_remove(b"%d" % number)
        assert {evict(policy) for _ in range(10)} == {b"%d" % number for number in range(1, 20, 2)}

    def test_unknown_keys_are_ignored(self) -> None:
        policy = self.new_policy()
        policy.on_access([b"nobody"])
        policy.on_remove(b"nobody")
        assert b"nobody" not in policy and policy.victim(anything) is None

    def test_an_object_may_come_back_after_eviction(self) -> None:
        policy = self.new_policy()
        policy.on_insert(Entry(b"again"))
        assert evict(policy) == b"again"
        policy.on_insert(Entry(b"again"))
        assert b"again" in policy
        assert evict(policy) == b"again"

    def test_an_object_never_used_again_goes_before_one_in_constant_use(self) -> None:
        policy = self.new_policy()
        for number in range(20):
            policy.on_insert(Entry(b"%d" % number))
        for _ in range(5):
            policy.on_access([b"3"])
        order = [evict(policy) for _ in range(20)]
        assert order.index(b"3") >= 10

    def test_membership_follows_a_long_random_history(self) -> None:
        policy, known, source = self.new_policy(), set[bytes](), random.Random(7)
        for step in range(3000):
            key = b"%d" % source.randrange(80)
            action = source.randrange(4)
            if action == 0 and key not in known:
                policy.on_insert(Entry(key))
                known.add(key)
            elif action == 1:
                policy.on_access([key])
            elif action == 2 and step % 3 == 0:
                policy.on_remove(key)
                known.discard(key)
            elif action == 3 and len(known) > 40:
                known.remove(evict(policy))
            assert len(policy) == len(known)
        assert all(key in policy for key in known)
