"""Files of router.core.record lines: written by a router or by the simulator, replayed, made into traces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from kvcore.errors import ConfigError
from kvsim.trace import Trace, TraceRequest
from router.core.decision import Decision
from router.core.record import Arrival, CoreReplay, Header, Line, Progress
from router.core.recording import Write


@contextmanager
def written(path: Path) -> Iterator[Write]:
    """Takes lines and writes them, one by one: a record may be larger than memory."""
    encoder = msgspec.json.Encoder()
    try:
        file = path.open("wb")
    except OSError as error:
        raise ConfigError(f"--record {path}: cannot be written: {error.strerror}") from error

    def write(line: Line) -> None:
        file.write(encoder.encode(line) + b"\n")

    with file:
        yield write


def read_lines(path: Path) -> Iterator[Line]:
    """ConfigError naming the line that cannot be read."""
    decoder = msgspec.json.Decoder(Line)
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    yield decoder.decode(line)
                except msgspec.MsgspecError as error:
                    raise ConfigError(f"record {path}, line {number}: {error}") from error
    except OSError as error:
        raise ConfigError(f"record {path}: cannot be read: {error.strerror}") from error


def recorded_trace(lines: Iterable[Line], name: str) -> Trace:
    """The requests of a record, to be simulated on another cluster. Block hashes serve as hash ids; the rest
    of a prompt behind its last full block gets an id of its own."""
    requests, outputs, block_size = [], {}, 512
    arrivals: list[Arrival] = []
    for line in lines:
        if isinstance(line, Header):
            block_size = line.block_size_tokens or block_size
        elif isinstance(line, Arrival):
            if not line.request.waited_ms:  # else it was held, and has been here before
                arrivals.append(line)
        elif isinstance(line, Progress) and line.output_tokens:
            outputs[line.request_id] = line.output_tokens
    for number, arrival in enumerate(arrivals):
        view = arrival.request
        ids = list(view.block_hashes)
        if ids and len(ids) * block_size < view.prompt_tokens:
            ids.append((1 << 63) + number)
        output_tokens = outputs.get(view.request_id, 0) or view.max_tokens or 1
        requests.append(
            TraceRequest(
                arrival.at - arrivals[0].at,
                max(view.prompt_tokens, 1),
                output_tokens,
                tuple(ids),
                view.tenant,
                view.session_id,
                view.priority,
            )
        )
    if not requests:
        raise ConfigError(f"record {name}: holds no requests")
    return Trace(name, requests, block_size)


def replay(lines: Iterable[Line]) -> Iterator[tuple[Arrival, Decision]]:
    """(what was decided then, what the core decides now), one by one."""
    core: CoreReplay | None = None
    for line in lines:
        if isinstance(line, Header):
            core = CoreReplay(line)
            continue
        if core is None:
            raise ConfigError("a record must begin with its header")
        if isinstance(line, Arrival):
            yield line, core.decide(line)
        else:
            core.apply(line)
