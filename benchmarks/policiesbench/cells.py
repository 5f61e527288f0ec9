"""What is compared with what: which engines, and how a router uses them."""

from typing import NamedTuple

from policiesbench.workload import Plan

LOCAL, SHARED = "own caches", "and a store"
MIXED, SPLIT = "2 mixed", "1 prefill + 1 decode"


class Cell(NamedTuple):
    """`engines`: LOCAL or SHARED. `routed`: a policy over two mixed engines, or MIXED or SPLIT, which are
    routed by global_cache_aware."""

    engines: str
    routed: str

    @property
    def policy(self) -> str:
        return "global_cache_aware" if self.routed in (MIXED, SPLIT) else self.routed


# Each should be faster than the one before it: the paper's order.
PAPER = (
    Cell(LOCAL, "random"),
    Cell(LOCAL, "least_loaded"),
    Cell(LOCAL, "cache_aware"),
    Cell(SHARED, "global_cache_aware"),
)
STORE_FOR_ALL = tuple(Cell(SHARED, cell.routed) for cell in PAPER[:3])
LAYOUTS = (Cell(SHARED, MIXED), Cell(SHARED, SPLIT))

# Longer answers, so that there is a time between tokens to look at; less load, because one engine has to do
# all the prefills; and caches in which everything has room, since it is not caches that are compared.
LAYOUTS_PLAN = Plan(requests=40, documents=8, cached_documents=12.0, max_running=8, max_tokens=32, load=0.5)


def order(cells: tuple[Cell, ...], round_number: int) -> tuple[Cell, ...]:
    """Who begins changes with the round."""
    first = round_number % len(cells)
    return (*cells[first:], *cells[:first])
