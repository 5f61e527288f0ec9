"""Python imports this first, where an engine's PYTHONPATH names this folder.

A User-Mode-Linux guest asks its host for a mapping wherever two neighbouring pages of a process do not lie
side by side in the guest's memory, and the host allows 65,530 (vm.max_map_count). Pages touched one at a time
lie anywhere: importing vLLM takes 67,000 mappings. Locked memory is filled when mapped, all at once: 3,300.
"""

import ctypes
import os

_MCL_FUTURE = 2

_libc = ctypes.CDLL(None, use_errno=True)
if _libc.mlockall(_MCL_FUTURE):
    raise OSError(ctypes.get_errno(), f"mlockall: {os.strerror(ctypes.get_errno())}")
