"""Host pools as SGLang builds them, of numpy memory, and a backend on a store in memory."""

import hashlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.client.fake import FakeStore, FakeStoreClient
from sglang_hicache_backend.attachment import Attachment
from sglang_hicache_backend.config import BackendConfig
from sglang_hicache_backend.keys import EngineFacts, RankFacts

ITEM_BYTES = 2
Slots = npt.NDArray[np.int64]


class HostTensor:
    """What the plugin uses of a torch tensor in host memory."""

    def __init__(self, array: npt.NDArray[np.uint16], device: str = "cpu") -> None:
        self.array = array
        self.device = SimpleNamespace(type=device)

    def data_ptr(self) -> int:
        return self.array.ctypes.data

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self.array.itemsize

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def contiguous(self) -> "HostTensor":
        return HostTensor(np.ascontiguousarray(self.array), self.device.type)


class MhaPool:
    """Keys and values of a rank, in one of SGLang's layouts. `runs` finds the bytes of a page the plain way,
    by indexing. `gives_addresses` False: as state pools in layer_first."""

    def __init__(
        self,
        layout: str = "page_first",
        *,
        num_pages: int = 8,
        page_size: int = 4,
        layers: int = 3,
        heads: int = 2,
        dim: int = 4,
        gives_addresses: bool = True,
        fill: int | None = None,
    ) -> None:
        self.layout = layout
        self.page_size = page_size
        self.dtype = "bfloat16"
        self.layer_num, self.start_layer, self.end_layer = layers, 0, layers
        self.gives_addresses = gives_addresses
        self._shape = {
            "layer_first": (2, layers, num_pages, page_size, heads, dim),
            "page_first": (2, num_pages, page_size, layers, heads, dim),
            "page_first_direct": (2, num_pages, layers, page_size, heads, dim),
            "page_head": (2, num_pages, heads, page_size, layers, dim),
        }[layout]
        self._heads = heads
        random = np.random.default_rng(fill)
        values = random.integers(0, 1 << 16, self._shape, dtype=np.uint16)
        self.array = values if fill is not None else np.zeros(self._shape, dtype=np.uint16)
        self.kv_buffer = HostTensor(self.array)

    def slots(self, *pages: int) -> Slots:
        starts = np.array(pages, dtype=np.int64) * self.page_size
        return (starts[:, None] + np.arange(self.page_size)).reshape(-1)

    def page(self, page: int) -> npt.NDArray[np.uint16]:
        if self.layout == "layer_first":
            return self.array[:, :, page]
        return self.array[:, page]

    def get_page_buffer_meta(self, indices: Slots) -> tuple[list[int], list[int]]:
        if not self.gives_addresses:
            raise ValueError(f"Unsupported layout: {self.layout}")
        pages = [int(index) // self.page_size for index in indices[:: self.page_size]]
        if self.layout == "layer_first":
            runs = [
                self.array[part, layer, page]
                for page in pages
                for layer in range(self.layer_num)
                for part in range(2)
            ]
        else:
            runs = [self.array[part, page] for page in pages for part in range(2)]
        return [run.ctypes.data for run in runs], [run.nbytes for run in runs]

    def get_split_heads_page_buffer_meta(
        self, indices: Slots, split_factor: int
    ) -> tuple[list[int], list[int]]:
        pages = [int(index) // self.page_size for index in indices[:: self.page_size]]
        share = self._heads // split_factor
        runs = [
            self.array[part, page, first : first + share]
            for page in pages
            for first in range(0, self._heads, share)
            for part in range(2)
        ]
        return [run.ctypes.data for run in runs], [run.nbytes for run in runs]

    def get_data_page(self, index: int) -> HostTensor:
        return HostTensor(self.page(index // self.page_size).flatten())

    def get_dummy_flat_data_page(self) -> HostTensor:
        return HostTensor(np.zeros(self.page(0).size, dtype=np.uint16))

    def set_from_flat_data_page(self, index: int, data_page: HostTensor) -> None:
        place = self.page(index // self.page_size)
        place[...] = data_page.array.reshape(place.shape)


class LogicalPool:
    """Hands out indices and has no memory, as the anchor of DeepSeek V4."""

    layout, page_size, dtype, layer_num, kv_buffer = "layer_first", 4, "uint8", 0, None

    def get_page_buffer_meta(self, indices: Slots) -> None:
        return None

    def get_dummy_flat_data_page(self) -> HostTensor:
        return HostTensor(np.zeros(0, dtype=np.uint16))


class Engine:
    """One rank's backend. `clients` are its connections, by purpose."""

    def __init__(self, store: FakeStore, pool: Any, *, rank: RankFacts | None = None, **options: Any) -> None:
        self.clients: dict[str, FakeStoreClient] = {}
        self.store = store
        self.pool = pool
        extra_config = {"interface_v1": 1, **options.pop("extra_config", {})}
        facts = options.pop("engine", engine_facts())
        self.backend = Attachment(
            extra_config,
            rank or RankFacts(),
            options.pop("identify", lambda config: facts),
            connect=self._connect,
            is_metered=True,
            **options,
        )
        self.add_pool(pool, "kv")

    def add_pool(self, pool: Any, name: str) -> None:
        self.backend.add_pool(pool, name, np.arange(pool.page_size))

    def _connect(self, config: BackendConfig, client_name: str) -> FakeStoreClient:
        client = FakeStoreClient(self.store, timeout_ms=200)
        self.clients[client_name.rsplit(" ", 1)[-1]] = client
        return client


def engine_facts(**changes: Any) -> EngineFacts:
    return EngineFacts(**{"architecture": "LlamaForCausalLM", "weights_id": "w", "engine": "{}", **changes})


def page_hashes(count: int, salt: int = 0) -> list[str]:
    """As SGLang's: hex of 32 bytes."""
    return [hashlib.sha256(f"{salt} {number}".encode()).hexdigest() for number in range(count)]
