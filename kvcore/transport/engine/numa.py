"""On which NUMA node memory lies."""

import ctypes
import platform

from kvcore.transport.topology import ANYWHERE

# get_mempolicy(2), which the C library does not wrap.
_CALLS = {"x86_64": 239, "aarch64": 236}
_NODE_OF_ADDRESS = 1 | 2  # MPOL_F_NODE | MPOL_F_ADDR


def place_of(address: int) -> str:
    """ "cpu:N", by the page at `address`, which is touched. ANYWHERE when the kernel does not say (containers
    often forbid the question)."""
    number = _CALLS.get(platform.machine())
    if number is None:
        return ANYWHERE
    node = ctypes.c_int(-1)
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(number, ctypes.byref(node), None, 0, ctypes.c_void_p(address), _NODE_OF_ADDRESS)
    return ANYWHERE if failed or node.value < 0 else f"cpu:{node.value}"
