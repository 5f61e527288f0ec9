"""The copies that stand for SGLang's kernels on CPU: through every layout and back, byte for byte."""

from typing import Any

import pytest
import torch
from sglang_on_cpu.copies import OPERATORS

pytestmark = pytest.mark.sglang

LAYERS, SLOTS, HEADS, DIM, PAGE = 3, 32, 2, 4, 8
TOKEN_BYTES = HEADS * DIM * 2
# Whole pages, not in order, as an allocator hands them out.
SOURCE = torch.tensor([*range(16, 24), *range(8)])
TARGET = torch.tensor([*range(8, 16), *range(24, 32)])
HOST_SHAPES = {
    "lf": (LAYERS, SLOTS, HEADS, DIM),
    "pf": (SLOTS, LAYERS, HEADS, DIM),
    "direct_pf": (SLOTS // PAGE, LAYERS, PAGE, HEADS, DIM),
    "ph": (SLOTS // PAGE, HEADS, PAGE, LAYERS, DIM),
}


def random_layers(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (SLOTS, HEADS, DIM)
    return [torch.randn(shape, generator=generator).to(torch.bfloat16) for _ in range(LAYERS)]


def addresses(layers: Any) -> torch.Tensor:
    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64)


def token_of(layout: str, host: torch.Tensor, layer: int, slot: int) -> torch.Tensor:
    """[head, dim] of one token, by the definition of the layout."""
    page, inside = divmod(slot, PAGE)
    return {
        "lf": lambda: host[layer, slot],
        "pf": lambda: host[slot, layer],
        "direct_pf": lambda: host[page, layer, inside],
        "ph": lambda: host[page, :, inside, layer],
    }[layout]()


@pytest.mark.parametrize("layout", ["lf", "pf", "ph"])
def test_kernel_copies_of_mha(layout: str) -> None:
    k_layers, v_layers = random_layers(1), random_layers(2)
    k_host, v_host = (torch.zeros(HOST_SHAPES[layout], dtype=torch.bfloat16) for _ in "kv")
    paging = {"page_size": PAGE, "head_num": HEADS} if layout == "ph" else {}
    per_page = {} if layout == "lf" else {"dst_layout_dim": TOKEN_BYTES * LAYERS}
    hosts = {"dst_k": k_host, "dst_v": v_host}
    if layout == "lf":
        hosts = {"dst_k_layers": addresses(k_host), "dst_v_layers": addresses(v_host)}
    OPERATORS["transfer_kv_all_layer" + ("" if layout == "lf" else f"_lf_{layout}")](
        src_k_layers=addresses(k_layers),
        src_v_layers=addresses(v_layers),
        **hosts,
        src_indices=SOURCE,
        dst_indices=TARGET,
        item_size=TOKEN_BYTES,
        num_layers=LAYERS,
        **per_page,
        **paging,
    )
    check_host(layout, k_host, k_layers)
    check_host(layout, v_host, v_layers)

    for layer in range(LAYERS):
        k_back, v_back = (torch.zeros(SLOTS, HEADS, DIM, dtype=torch.bfloat16) for _ in "kv")
        from_pages = {} if layout == "lf" else {"layer_id": layer, "src_layout_dim": TOKEN_BYTES * LAYERS}
        OPERATORS["transfer_kv_per_layer" + ("" if layout == "lf" else f"_{layout}_lf")](
            src_k=k_host[layer] if layout == "lf" else k_host,
            dst_k=k_back,
            src_v=v_host[layer] if layout == "lf" else v_host,
            dst_v=v_back,
            src_indices=TARGET,
            dst_indices=SOURCE,
            item_size=TOKEN_BYTES,
            **from_pages,
            **paging,
        )
        assert torch.equal(k_back[SOURCE], k_layers[layer][SOURCE])
        assert torch.equal(v_back[SOURCE], v_layers[layer][SOURCE])


def test_direct_copies() -> None:
    k_layers, v_layers = random_layers(3), random_layers(4)
    hosts = [torch.zeros(HOST_SHAPES["direct_pf"], dtype=torch.bfloat16) for _ in "kv"]
    OPERATORS["transfer_kv_all_layer_direct_lf_pf"](
        src_ptrs=k_layers + v_layers, dst_ptrs=hosts, src_indices=SOURCE, dst_indices=TARGET, page_size=PAGE
    )
    check_host("direct_pf", hosts[0], k_layers)
    check_host("direct_pf", hosts[1], v_layers)
    for layer in range(LAYERS):
        back = [torch.zeros(SLOTS, HEADS, DIM, dtype=torch.bfloat16) for _ in "kv"]
        OPERATORS["transfer_kv_per_layer_direct_pf_lf"](
            src_ptrs=hosts,
            dst_ptrs=back,
            src_indices=TARGET,
            dst_indices=SOURCE,
            layer_id=layer,
            page_size=PAGE,
        )
        assert torch.equal(back[0][SOURCE], k_layers[layer][SOURCE])
        assert torch.equal(back[1][SOURCE], v_layers[layer][SOURCE])


@pytest.mark.parametrize("kind", ["mla", "mamba"])
def test_kernel_copies_of_one_tensor_a_layer(kind: str) -> None:
    layers = random_layers(5)
    host = torch.zeros(HOST_SHAPES["pf"], dtype=torch.bfloat16)
    to_host = "transfer_kv_mamba_lf_pf" if kind == "mamba" else "transfer_kv_all_layer_mla_lf_pf"
    from_host = "transfer_kv_mamba_pf_lf" if kind == "mamba" else "transfer_kv_per_layer_mla_pf_lf"
    OPERATORS[to_host](
        **{"src_ptrs" if kind == "mamba" else "src_layers": addresses(layers)},
        dst=host,
        src_indices=SOURCE,
        dst_indices=TARGET,
        item_size=TOKEN_BYTES,
        dst_layout_dim=TOKEN_BYTES * LAYERS,
        num_layers=LAYERS,
    )
    check_host("pf", host, layers)
    for layer in range(LAYERS):
        back = torch.zeros(SLOTS, HEADS, DIM, dtype=torch.bfloat16)
        OPERATORS[from_host](
            src=host,
            dst=back,
            src_indices=TARGET,
            dst_indices=SOURCE,
            layer_id=layer,
            item_size=TOKEN_BYTES,
            src_layout_dim=TOKEN_BYTES * LAYERS,
        )
        assert torch.equal(back[SOURCE], layers[layer][SOURCE])


def check_host(layout: str, host: torch.Tensor, layers: list[torch.Tensor]) -> None:
    """Every token of TARGET is that of SOURCE, and nothing else was written."""
    written = dict(zip(TARGET.tolist(), SOURCE.tolist(), strict=True))
    for layer in range(LAYERS):
        for slot in range(SLOTS):
            token = token_of(layout, host, layer, slot)
            if slot in written:
                assert torch.equal(token, layers[layer][written[slot]])
            else:
                assert not token.any()
