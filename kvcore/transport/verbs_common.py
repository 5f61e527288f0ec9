"""What the verbs bindings have in common: numbers of the ABI, and what the kernel's refusals mean."""

import errno
import os
import secrets

from kvcore.transport import verbs_sysfs
from kvcore.transport.verbs import RdmaUnavailable
from kvcore.units import format_size

SEND_SIGNALED = 2
SEND_INLINE = 8
RECEIVED_WITH_IMMEDIATE = 129
ACCESS_LOCAL = 1
ACCESS_REMOTE = 1 | 2 | 4  # local write, remote write, remote read

INLINE_BYTES = 64
"""Asked of every queue pair. More would make each of its requests larger, also the many that inline
nothing."""


def port_of(device_name: str) -> verbs_sysfs.Port:
    port = verbs_sysfs.read_port(device_name)
    if port is None:
        raise RdmaUnavailable(f"{device_name} has no GID: is its interface up, and does it have an address?")
    return port


def new_packet_number() -> int:
    """Random, so that packets of an old connection with the same numbers are not taken for its
    successor's."""
    return secrets.randbelow(1 << 24)


def set_nonblocking(fd: int) -> None:
    os.set_blocking(fd, False)


def explain_registration(device_name: str, size_bytes: int, error: OSError | Exception) -> str:
    code = getattr(error, "errno", None) or getattr(error, "error_code", None)
    hint = ""
    if code in (errno.ENOMEM, errno.EPERM, errno.EAGAIN):
        hint = ": raise the limit of locked memory (ulimit -l unlimited, LimitMEMLOCK=infinity)"
    return f"{device_name} cannot register {format_size(size_bytes)} ({error}){hint}"
