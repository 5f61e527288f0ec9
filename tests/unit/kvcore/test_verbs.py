"""The verbs layer without a device: the fake binding, the choice of a binding, sysfs."""

from pathlib import Path

import pytest

from kvcore.errors import ConfigError, StoreUnavailable
from kvcore.transport import verbs, verbs_sysfs
from kvcore.transport.verbs import RdmaUnavailable, choose_devices, load_binding
from kvcore.transport.verbs_fake import FakeFabric
from tests.contracts.verbs_contract import VerbsContract


class TestFakeVerbs(VerbsContract):
    @pytest.fixture
    def binding(self) -> FakeFabric:
        return FakeFabric("near0", "far0")

    @pytest.fixture
    def device_names(self) -> tuple[str, str]:
        return "near0", "far0"


def make_port(root: Path, name: str, gids: list[tuple[str, str]], *, state: str = "4: ACTIVE") -> None:
    port = root / name / "ports" / "1"
    (port / "gids").mkdir(parents=True)
    (port / "gid_attrs" / "types").mkdir(parents=True)
    (port / "state").write_text(state + "\n")
    (port / "link_layer").write_text("Ethernet\n")
    (port / "lid").write_text("0x0\n")
    for index, (gid, kind) in enumerate(gids):
        (port / "gids" / str(index)).write_text(gid + "\n")
        (port / "gid_attrs" / "types" / str(index)).write_text(kind + "\n")


ZERO = "0000:0000:0000:0000:0000:0000:0000:0000"
LINK_LOCAL = "fe80:0000:0000:0000:0202:c9ff:fe00:0001"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a4d:0001"
IPV6 = "fd00:0000:0000:0000:0000:0000:0000:0001"


@pytest.mark.parametrize(
    ("gids", "index"),
    [
        ([(LINK_LOCAL, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2"), (IPV4, "IB/RoCE v1"), (IPV4, "RoCE v2")], 3),
        ([(LINK_LOCAL, "RoCE v2"), (IPV6, "RoCE v2"), (IPV4, "RoCE v2")], 2),
        ([(LINK_LOCAL, "RoCE v2"), (ZERO, "RoCE v2"), (IPV6, "RoCE v2")], 2),
        ([(IPV4, "IB/RoCE v1"), (LINK_LOCAL, "RoCE v2")], 1),
        ([(LINK_LOCAL, "IB/RoCE v1")], 0),
    ],
)
def test_the_gid_that_is_routed_most_often_is_taken(
    tmp_path: Path, gids: list[tuple[str, str]], index: int
) -> None:
    make_port(tmp_path, "mlx5_0", gids)
    port = verbs_sysfs.read_port("mlx5_0", tmp_path)
    assert port is not None and port.gid.position == index and port.is_ethernet and port.is_active


def test_a_port_without_an_address_is_none(tmp_path: Path) -> None:
    make_port(tmp_path, "mlx5_0", [(ZERO, "RoCE v2")])
    assert verbs_sysfs.read_port("mlx5_0", tmp_path) is None
    assert verbs_sysfs.read_port("mlx5_1", tmp_path) is None


def test_devices_are_all_active_ones_or_those_named() -> None:
    fabric = FakeFabric("mlx5_0", "mlx5_1", "mlx5_2")
    fabric.devices["mlx5_0"].active = False
    assert choose_devices(fabric, "") == ["mlx5_1", "mlx5_2"]
    assert choose_devices(fabric, "mlx5_2, mlx5_0") == ["mlx5_2", "mlx5_0"]
    with pytest.raises(ConfigError, match="'mlx5_9' is not on this host: there is mlx5_0, mlx5_1, mlx5_2"):
        choose_devices(fabric, "mlx5_9")
    fabric.devices["mlx5_1"].active = fabric.devices["mlx5_2"].active = False
    with pytest.raises(RdmaUnavailable, match="none of the RDMA devices has an active port"):
        choose_devices(fabric, "")


def test_without_a_device_the_reason_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs_sysfs, "device_names", list)
    with pytest.raises(RdmaUnavailable, match="no RDMA device on this host"):
        load_binding()
    assert issubclass(RdmaUnavailable, StoreUnavailable)


def test_without_a_binding_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs_sysfs, "device_names", lambda: ["mlx5_0"])
    with pytest.raises(
        RdmaUnavailable, match=r"ibverbs is not installed; pyverbs is not installed\. Install"
    ):
        load_binding(is_installed=lambda package: None)
    with pytest.raises(RdmaUnavailable, match="unknown verbs binding 'libfabric'"):
        load_binding("libfabric")


def test_a_binding_that_cannot_load_its_library_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verbs_sysfs, "device_names", lambda: ["mlx5_0"])
    fabric = FakeFabric("mlx5_0")

    class Module:
        BINDING = fabric

    def load(module: str) -> type[Module]:
        if module.endswith("verbs_ibverbs"):
            raise ImportError("libibverbs.so.1: cannot open shared object file")
        return Module

    monkeypatch.setattr(verbs, "import_module", load)
    assert load_binding(is_installed=bool) is fabric
    with pytest.raises(RdmaUnavailable, match=r"ibverbs does not work: libibverbs\.so"):
        load_binding("ibverbs", is_installed=bool)
