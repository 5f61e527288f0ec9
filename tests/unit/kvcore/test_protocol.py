"""Mooncake's protocol and device_name."""

import pytest

from kvcore.errors import ConfigError
from kvcore.transport.choose import check_planes
from kvcore.transport.protocol import PLANES, device_of_rank, planes_of


@pytest.mark.parametrize("protocol", PLANES)
def test_every_protocol_ends_with_the_plane_that_always_works(protocol: str) -> None:
    planes = planes_of(protocol)
    assert planes[-1] == "tcp" and check_planes(planes) == list(planes)
    assert planes[0] == ("rdma" if protocol == "auto" else protocol)


def test_planes_go_before_the_protocol() -> None:
    assert planes_of("rdma", ["tcp"]) == ("tcp",)
    assert planes_of("") == planes_of("auto")


def test_protocols_that_are_not_ours_are_refused() -> None:
    with pytest.raises(ConfigError, match="'efa' is not one of auto, rdma, shm, tcp"):
        planes_of("efa")


def test_devices_may_differ_by_rank() -> None:
    by_rank = '{"0": "mlx5_0", "1": "mlx5_1,mlx5_2"}'
    assert device_of_rank(by_rank, 1) == "mlx5_1,mlx5_2"
    assert device_of_rank("mlx5_0,mlx5_1", 1) == "mlx5_0,mlx5_1" and device_of_rank("", 0) == ""
    for wrong in (by_rank, '{"2": 5}', "{2"):
        with pytest.raises(ConfigError, match="device_name"):
            device_of_rank(wrong, 2)
