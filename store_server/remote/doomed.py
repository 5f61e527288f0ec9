"""Keys that clients have had removed while it could not be seen whether the remote holds them: it was down,
or another store wrote them since the last listing. When a listing shows them they are deleted.

Written down beside the SSD's segments, as long as there are any, so that a restart does not forget them: at
the price that one that was put again just before may be deleted, which is a miss. Without an SSD path they
live as long as the process.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

logger = logging.getLogger(__name__)

MAX_KEYS = 100_000  # beyond it the oldest are forgotten, and may come back
_MAX_FILE_BYTES = 256 * 2 * MAX_KEYS
_LONGEST_KEY_BYTES = 255


class DoomedKeys:
    """Used in one loop; files are written by a thread of its own. `listing` is the number of the listing that
    began last: one that begins later shows whatever is there."""

    def __init__(self) -> None:
        self._keys: OrderedDict[bytes, int] = OrderedDict()
        self._files: list[Path] = []
        self._is_written = False
        self._num_forgotten = 0
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="remote-removals")

    def open(self, directories: Sequence[Path], remote: str) -> None:
        """Reads what was left by earlier processes, for this `remote`. Blocks."""
        name = f"removed-from-{xxhash.xxh3_64_hexdigest(remote.encode())}"
        self._files = [directory / name for directory in directories]
        for path in self._files:
            try:
                found = decode(path.read_bytes())
            except FileNotFoundError:
                continue
            except OSError as error:
                logger.warning("%s cannot be read: %s", path, error)
                continue
            self._is_written = True
            self._keys.update(dict.fromkeys(found, 0))
        self._bound()

    def close(self, unsure: Iterable[bytes]) -> None:
        """`unsure`: keys of which it is not known that they are gone. Blocks."""
        keys = [*unsure]
        if keys:
            self._writer.submit(self._append, encode(keys))
        self._writer.shutdown(wait=True)

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: bytes) -> bool:
        return key in self._keys

    def add(self, keys: Sequence[bytes], listing: int) -> None:
        for key in keys:
            self._keys[key] = listing
            self._keys.move_to_end(key)
        self._bound()
        if keys:
            self._is_written = True
            self._writer.submit(self._append, encode(keys))

    def discard(self, key: bytes) -> None:
        """It is wanted again."""
        self._keys.pop(key, None)

    def listed(self, listing: int, *, all_deleted: bool) -> None:
        """This listing is complete. `all_deleted`: nothing that it showed has yet to be deleted."""
        for key in [key for key, since in self._keys.items() if since < listing]:
            del self._keys[key]
        if self._is_written and all_deleted and not self._keys:
            self._is_written = False
            self._writer.submit(self._remove_files)

    # ---- inside ----------------------------------------------------------------------------------------

    def _bound(self) -> None:
        while len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)
            self._num_forgotten += 1
            if self._num_forgotten == 1:
                logger.warning("too many removals wait for the remote: the oldest are forgotten")

    def _append(self, data: bytes) -> None:
        for path in self._files:
            try:
                with path.open("ab") as file:
                    if file.tell() < _MAX_FILE_BYTES:
                        file.write(data)
                return
            except OSError as error:
                logger.warning("%s: removals are not written down there: %s", path, error)

    def _remove_files(self) -> None:
        for path in self._files:
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                logger.warning("%s cannot be removed: %s", path, error)


def encode(keys: Sequence[bytes]) -> bytes:
    """A length byte and the key, for each."""
    return b"".join(bytes([len(key)]) + key for key in keys if len(key) <= _LONGEST_KEY_BYTES)


def decode(data: bytes) -> list[bytes]:
    """What a crash has cut short is left out."""
    keys, at = [], 0
    while at < len(data):
        end = at + 1 + data[at]
        if end <= len(data) and data[at]:
            keys.append(data[at + 1 : end])
        at = end
    return keys
