"""A throw-away Linux guest with soft-RoCE (rxe) RDMA devices: real ibverbs on a machine without such a card.

One room a file: cli (options), backends (which kernel runs, and why), uml (building a User-Mode-Linux
kernel), qemu (Debian's own kernel, emulated), debs (Debian packages, unpacked and not installed), initrd (the
archive a guest starts from), job (what one guest is told and says), machine (the process that is the guest).
guest/ holds what runs inside. Nothing here needs root or a package beyond Python's library.
"""
