"""What is measured. All sizes follow from these."""

import msgspec

DTYPE_BYTES = 2


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """KV of one rank of a model, and a prompt of it. `heads` are KV heads."""

    name: str
    layers: int
    heads: int
    head_dim: int
    page_tokens: int
    prompt_tokens: int
    prompts: int

    @property
    def page_bytes(self) -> int:
        return 2 * self.layers * self.heads * self.head_dim * DTYPE_BYTES * self.page_tokens

    @property
    def prompt_bytes(self) -> int:
        return self.page_bytes * (self.prompt_tokens // self.page_tokens)

    def smaller(self) -> "Shape":
        return msgspec.structs.replace(self, prompt_tokens=self.prompt_tokens // 4, prompts=2)


# Llama 3.1 8B, whole and one of eight tensor-parallel ranks; pages of 64 tokens as SGLang's guide to HiCache
# has them. Prompts take turns and are more than a CPU's caches hold: nobody gains by having just moved one.
SHAPES = (
    Shape(name="8b", layers=32, heads=8, head_dim=128, page_tokens=64, prompt_tokens=1024, prompts=4),
    Shape(name="8b-tp8", layers=32, heads=1, head_dim=128, page_tokens=64, prompt_tokens=8192, prompts=4),
)
OURS = ("ours", "ours-tcp")
PEERS = ("file", "mooncake")
TARGET_RATIO = 1.5


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One worker process: a host pool of `shape` and SGLang's `backend` with its extra config."""

    shape: Shape
    backend: str
    extra_config: dict[str, str | int | bool | list[str]]
    layout: str = "page_first"
    io_backend: str = "kernel"


class Prefetched(msgspec.Struct, frozen=True, kw_only=True):
    """`seconds` from the request until all pages were in the host pool; `digest`: of the bytes there."""

    seconds: float
    tokens: int
    digest: int


class Serving(msgspec.Struct, frozen=True, kw_only=True):
    """What servers are asked. Prompts are whole pages and one token more: one is always computed."""

    page_tokens: int = 64
    prompt_pages: int = 64
    answer_tokens: int = 32
    rounds: int = 4

    @property
    def prompt_tokens(self) -> int:
        return self.prompt_pages * self.page_tokens + 1

    @property
    def device_tokens(self) -> int:
        """Room for two prompts."""
        return 2 * (self.prompt_pages + 2) * self.page_tokens

    @property
    def room_bytes(self) -> int:
        """Of a storage: every prompt and answer, generously."""
        pages = (self.rounds + 2) * (self.prompt_pages + self.answer_tokens // self.page_tokens + 1)
        return pages * self.page_tokens * KV_BYTES_PER_TOKEN * 3 // 2 + (256 << 20)

    def prompt(self, number: int) -> list[int]:
        """No two have a page in common."""
        return [4 + (number * 89 + i * (31 + 2 * number)) % 250 for i in range(self.prompt_tokens)]


# Of scripts/make_model.py, for servers: little to compute and much to move, to tell storages apart.
SERVED_MODEL = ("--dtype", "bfloat16", "--layers", "16", "--heads", "8", "--kv-heads", "8")
KV_BYTES_PER_TOKEN = 2 * 16 * 8 * 64 * DTYPE_BYTES
