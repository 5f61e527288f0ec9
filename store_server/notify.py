"""Tells systemd how far the store is, as sd_notify(3) does, for units of Type=notify."""

import os
import socket


def notify(state: str) -> None:
    """`state`: "READY=1", "STOPPING=1" or "STATUS=...". Does nothing when systemd has not started us."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.connect(address)
        sock.sendall(state.encode())
