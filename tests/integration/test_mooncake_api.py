"""Mooncake's API over a real store: the results are those that Mooncake 0.3.13 gives to the same calls."""

import contextlib
import logging
import re

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from kvcore.client.mooncake import (
    BufferHandle,
    MooncakeDistributedStore,
    MooncakeError,
    ReplicateConfig,
    SoftPinAction,
)
from kvcore.client.sync_client import StoreClient
from kvcore.errors import ConfigError, LocalProtocolError
from tests.integration.store_process import StoreProcess

NOT_FOUND = MooncakeError.OBJECT_NOT_FOUND
INVALID = MooncakeError.INVALID_PARAMS
SIZE = 4096


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    process = StoreProcess(tmp_path_factory.mktemp("mooncake"), pool="32mb").start()
    yield process
    assert process.stop() == 0


def connect(address: str, **options) -> MooncakeDistributedStore:
    store = MooncakeDistributedStore()
    assert store.setup("localhost", "P2PHANDSHAKE", 16 << 20, 16 << 20, "tcp", "", address, **options) == 0
    return store


@pytest.fixture
def store(process):
    store = connect(process.address)
    store.remove_all(True)
    yield store
    assert store.close() == 0


@pytest.fixture
def memory():
    return np.arange(SIZE, dtype=np.uint8)


def test_bytes_in_and_out(store):
    assert store.is_exist("k") == 0 and store.get("k") == b"" and store.get_buffer("k") is None
    assert store.get_size("k") == NOT_FOUND
    assert store.put("k", b"hello") == 0
    assert store.put("k", b"other") == 0, "the first writer wins and the second does not fail"
    assert store.is_exist("k") == 1 and store.get("k") == b"hello" and store.get_size("k") == 5
    assert store.put_parts("parts", b"a", bytearray(b"bc"), b"") == 0 and store.get("parts") == b"abc"
    assert store.put_batch(["b1", "b2"], [b"1", b"22"]) == 0
    assert store.get_batch(["b2", "no", "b1"]) == [b"22", b"", b"1"]
    assert store.batch_is_exist(["k", "no"]) == [1, 0] and store.batch_is_exist([]) == []


def test_buffers(store, memory):
    assert store.put("k", b"hello") == 0
    handle = store.get_buffer("k")
    assert isinstance(handle, BufferHandle)
    assert (handle.size(), len(handle), bytes(memoryview(handle))) == (5, 5, b"hello")
    assert store.put_from("copy", handle.ptr(), handle.size()) == 0 and store.get("copy") == b"hello"
    assert [h and bytes(h) for h in store.batch_get_buffer(["no", "k"])] == [None, b"hello"]


def test_memory_by_address(store, memory):
    into = np.zeros_like(memory)
    source, target = memory.ctypes.data, into.ctypes.data
    assert store.register_buffer(source, SIZE) == 0 and store.register_buffer(source, SIZE) == INVALID
    assert store.put_from("k", source, 100) == 0
    assert store.get_into("k", target, SIZE) == 100
    assert (into[:100] == memory[:100]).all() and not into[100:].any()
    assert store.get_into("no", target, SIZE) == NOT_FOUND
    assert store.get_into("k", target, 99) == INVALID
    assert store.batch_put_from(["a", "k"], [source, source], [10, 20]) == [0, 0]
    assert store.batch_get_into(["k", "no", "k"], [target] * 3, [SIZE, 10, 2]) == [100, NOT_FOUND, INVALID]
    assert store.unregister_buffer(source) == 0 and store.unregister_buffer(source) == INVALID


def test_several_buffers_for_one_object(store, memory):
    at = memory.ctypes.data
    put = store.batch_put_from_multi_buffers(["m", "n"], [[at, at + 1000], [at]], [[10, 20], [5]])
    assert put == [0, 0]
    assert store.get("m") == memory[:10].tobytes() + memory[1000:1020].tobytes()
    into = np.zeros(64, np.uint8)
    to = into.ctypes.data
    found = store.batch_get_into_multi_buffers(
        ["m", "no", "n"], [[to, to + 32], [to], [to]], [[12, 18], [5], [2]]
    )
    assert found == [30, NOT_FOUND, INVALID]
    assert into[:12].tobytes() + into[32:50].tobytes() == store.get("m")


def test_what_makes_no_sense_is_an_error_code(store, memory):
    at = memory.ctypes.data
    assert store.put("empty", b"") == INVALID and store.put("", b"x") == INVALID
    assert store.put_from("k", 0, 10) == INVALID and store.put_from("k", at, 0) == INVALID
    assert store.register_buffer(0, 10) == INVALID
    assert store.batch_put_from(["a", "k"], [at], [1, 1]) == [INVALID] * 2
    assert store.batch_get_into(["a", "k"], [at], [1]) == [INVALID] * 2
    assert store.batch_put_from_multi_buffers(["a"], [[at, at]], [[1]]) == [INVALID]
    assert store.put_batch(["a"], []) == INVALID
    assert store.put_batch(["good", "bad"], [b"1", b""]) == INVALID and store.get("good") == b"1"
    assert store.put("too large", bytes(40 << 20)) == INVALID
    assert store.batch_is_exist(["a", "k", "empty"]) == [0, 0, 0]


def test_removing(store):
    store.put_batch(["r1", "r2", "r3"], [b"1", b"2", b"3"])
    assert store.remove("r1") == 0 and store.remove("r1") == NOT_FOUND
    assert store.batch_remove(["r2", "no"], True) == [0, NOT_FOUND]
    assert store.remove_all() == 1 and store.is_exist("r3") == 0


def test_pins_of_a_replicate_config(store, process):
    config = ReplicateConfig()
    config.with_hard_pin = True
    assert store.put("pinned", b"1", config) == 0
    assert store.remove("pinned") == MooncakeError.OBJECT_HAS_LEASE
    assert store.remove("pinned", True) == 0
    config.with_hard_pin, config.soft_pin_action, config.soft_pin_ttl_ms = False, SoftPinAction.ENABLE, 60_000
    assert store.put_parts("soft", b"1", b"2", config=config) == 0
    assert store.remove("soft") == MooncakeError.OBJECT_HAS_LEASE
    assert store.remove_all() == 0 and store.remove_all(True) == 1
    with pytest.raises(AttributeError):
        config.replicas = 2


def test_what_a_store_of_one_node_cannot_do_is_said_once(store, caplog):
    config = ReplicateConfig()
    config.replica_num = 3
    with caplog.at_level(logging.WARNING, logger="kvcore"):
        assert store.put("a", b"1", config) == 0 and store.put("b", b"1", config) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "ReplicateConfig.replica_num=3 has no effect: this store keeps one copy"
    ]


def test_upserts_replace(store, memory):
    assert store.upsert("u", b"1") == 0 and store.upsert("u", b"22") == 0 and store.get("u") == b"22"
    assert store.upsert_parts("u", b"3", b"4") == 0 and store.get("u") == b"34"
    assert store.upsert_batch(["u", "v"], [b"5", b"6"]) == 0 and store.get_batch(["u", "v"]) == [b"5", b"6"]
    assert store.upsert_from("u", memory.ctypes.data, 3) == 0 and store.get("u") == memory[:3].tobytes()
    assert store.batch_upsert_from(["u"], [memory.ctypes.data], [0]) == [INVALID]
    assert store.get("u") == memory[:3].tobytes(), "a call that cannot succeed removes nothing"


def test_names_are_those_of_store_client_and_tenants_have_their_own(store, process):
    with contextlib.closing(connect(process.address, tenant_id="other")) as other:
        assert other.put("k", b"theirs") == 0 and store.put("k", b"ours") == 0
        with StoreClient.connect(process.address) as client:
            assert client.get("k") == b"ours"
            client.put(bytes(32), b"a block of an engine")
            assert store.remove_all(True) == 1
            assert client.get(bytes(32)) == b"a block of an engine"
        assert other.get("k") == b"theirs" and other.remove_all(True) == 1


def test_setup_by_dict_file_and_environment(process, tmp_path, monkeypatch):
    for name in ("MOONCAKE_MASTER", "MOONCAKE_CONFIG_PATH", "MOONCAKE_TENANT_ID"):
        monkeypatch.delenv(name, raising=False)
    store = MooncakeDistributedStore()
    with pytest.raises(ConfigError, match="MOONCAKE_MASTER"):
        store.setup({"local_hostname": "me", "metadata_server": "P2PHANDSHAKE"})
    with pytest.raises(ConfigError, match="unknown key 'master'"):
        store.setup({"master": process.address})
    with pytest.raises(ConfigError, match="a text, not 5"):
        store.setup({"master_server_addr": 5})
    with pytest.raises(ConfigError, match="etcd"):
        store.setup("me", "", 0, 0, "tcp", "", "etcd://10.0.0.1:2379")
    with pytest.raises(ConfigError, match="protocol 'efa'"):
        store.setup("me", "", 0, 0, "efa", "", process.address)
    assert store.setup({"local_hostname": "me", "master_server_addr": process.address}) == 0
    assert store.get_hostname() == "me" and store.health_check() == 0
    with pytest.raises(LocalProtocolError, match="set up already"):
        store.setup({"master_server_addr": process.address})
    store.close()
    file = tmp_path / "mooncake.json"
    file.write_text(f'{{"master_server_address": "{process.address}", "global_segment_size": "4gb"}}')
    monkeypatch.setenv("MOONCAKE_CONFIG_PATH", str(file))
    assert store.setup() == 0 and store.close() == 0
    monkeypatch.delenv("MOONCAKE_CONFIG_PATH")
    monkeypatch.setenv("MOONCAKE_MASTER", process.address)
    assert store.setup() == 0 and store.close() == 0


def test_before_setup_after_close_and_without_a_store(tmp_path, caplog, memory):
    process = StoreProcess(tmp_path, pool="16mb").start()
    store = MooncakeDistributedStore()
    assert store.health_check() == 1
    with pytest.raises(LocalProtocolError, match="setup"):
        store.get("k")
    assert store.setup(master_server_addr=process.address) == 0 and store.put("k", b"1") == 0
    process.kill()
    lost = MooncakeError.RPC_FAIL
    at = memory.ctypes.data
    assert store.put("k", b"1") == lost and store.get("k") == b"" and store.get_into("k", at, 5) == lost
    assert store.is_exist("k") == -1 and store.get_size("k") == lost and store.remove("k") == lost
    assert store.health_check() == 2 and store.remove_all() == 0
    assert store.close() == 0 and store.close() == 0 and store.health_check() == 1
    with caplog.at_level(logging.ERROR, logger="kvcore"):
        assert store.setup(master_server_addr=process.address) == lost
    assert f"no store at {process.address}" in caplog.text


def test_a_store_that_refuses_us(tmp_path, caplog, monkeypatch):
    process = StoreProcess(tmp_path, "--token", "secret", pool="16mb").start()
    store = MooncakeDistributedStore()
    with caplog.at_level(logging.ERROR, logger="kvcore"):
        assert store.setup(master_server_addr=process.address) == MooncakeError.RPC_FAIL
    assert "refuses us" in caplog.text
    monkeypatch.setenv("MOONCAKE_STORE_TOKEN", "secret")
    assert store.setup(master_server_addr=process.address) == 0 and store.put("k", b"1") == 0
    store.close()
    assert process.stop() == 0


def test_what_is_missing_says_what_to_do_instead(store):
    for name, hint in {
        "remove_by_regex": "remove_all",
        "put_tensor": "put_from",
        "batch_get_session_start": "read_layers",
        "mount_segment": "storage_levels",
        "get_replica_desc": "describe",
    }.items():
        assert not hasattr(store, name)
        with pytest.raises(AttributeError, match=f"{name} is not supported.*{re.escape(hint)}"):
            getattr(store, name)
    with pytest.raises(AttributeError, match="has no method put_form"):
        store.put_form("k", 1, 1)


NAMES = ["a", "b", "ä/ß", "d" * 300]
names = st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)
contents = st.binary(min_size=1, max_size=300)


class LikeADict(RuleBasedStateMachine):
    address = ""

    @initialize()
    def open(self):
        self.store = connect(self.address)
        self.store.remove_all(True)
        self.model: dict[str, bytes] = {}

    def teardown(self):
        if hasattr(self, "store"):
            self.store.close()

    @rule(keys=names, value=contents)
    def put(self, keys, value):
        assert self.store.put_batch(keys, [value] * len(keys)) == 0
        for key in keys:
            self.model.setdefault(key, value)

    @rule(keys=names, value=contents, cut=st.integers(0, 300))
    def put_multi_buffers(self, keys, value, cut):
        array = np.frombuffer(value, np.uint8)
        cut = min(cut, len(value))
        parts = [part for part in (array[:cut], array[cut:]) if part.size]
        codes = self.store.batch_put_from_multi_buffers(
            keys,
            [[part.ctypes.data for part in parts]] * len(keys),
            [[part.size for part in parts]] * len(keys),
        )
        assert codes == [0] * len(keys)
        for key in keys:
            self.model.setdefault(key, value)

    @rule(key=st.sampled_from(NAMES), value=contents)
    def upsert(self, key, value):
        assert self.store.upsert(key, value) == 0
        self.model[key] = value

    @rule(keys=names)
    def get(self, keys):
        assert self.store.get_batch(keys) == [self.model.get(key, b"") for key in keys]
        assert self.store.batch_is_exist(keys) == [int(key in self.model) for key in keys]
        assert [self.store.get_size(key) for key in keys] == [
            len(self.model[key]) if key in self.model else NOT_FOUND for key in keys
        ]

    @rule(keys=names, room=st.integers(1, 300))
    def get_into(self, keys, room):
        buffers = np.zeros((len(keys), room), np.uint8)
        found = self.store.batch_get_into(keys, [row.ctypes.data for row in buffers], [room] * len(keys))
        for key, row, size in zip(keys, buffers, found, strict=True):
            value = self.model.get(key)
            if value is None:
                assert size == NOT_FOUND
            elif len(value) > room:
                assert size == INVALID and not row.any()
            else:
                assert size == len(value) and row.tobytes() == value + bytes(room - size)

    @rule(keys=names)
    def remove(self, keys):
        expected = [0 if self.model.pop(key, None) is not None else NOT_FOUND for key in keys]
        assert self.store.batch_remove(keys) == expected

    @rule()
    def remove_all(self):
        assert self.store.remove_all() == len(self.model)
        self.model.clear()


@pytest.mark.timeout(600)
def test_it_is_like_a_dict(process):
    machine = type("LikeADictOfThisStore", (LikeADict,), {"address": process.address})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
