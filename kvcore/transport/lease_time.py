"""How long a lease can be relied on."""

# The store's clock and ours are the same one, but not read at the same moment.
LEASE_MARGIN_S = 0.05


def safe_end_s(asked_at_s: float, lease_ms: int) -> float:
    """A lease began somewhere between the request and its answer: the request is the safe guess."""
    lease_s = lease_ms / 1e3
    return asked_at_s + lease_s - min(LEASE_MARGIN_S, lease_s / 4)
