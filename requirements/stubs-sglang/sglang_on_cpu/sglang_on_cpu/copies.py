"""SGLang's copies between KV cache and HiCache host pool, in torch.

SGLang binds them (`sgl_kernel.kvcacheio`) on CUDA, ROCm and XPU only. On CPU both sides are host memory, and
the same copy is an index and an assignment. Names and arguments are those of SGLang 0.5.23; `indices` are
slots of tokens. Layouts: lf (layer first) is [layer][slot, ...]; pf (page first) is [slot, layer, ...], and
for the "direct" copies [page, layer, slot of page, ...]; ph (page head) is [page, head, slot of page, layer,
dim].
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def _rows_at(address: Tensor | int, indices: Tensor, row_bytes: int) -> Tensor:
    """uint8[slots, row_bytes] over the memory at `address`, as far as `indices` reach; it is borrowed."""
    num_rows = int(indices.max()) + 1 if indices.numel() else 0
    raw = (ctypes.c_uint8 * (num_rows * row_bytes)).from_address(int(address))
    return (
        torch.frombuffer(raw, dtype=torch.uint8).view(num_rows, row_bytes)
        if num_rows
        else torch.empty(0, row_bytes)
    )


def _put(target: Tensor, indices: Tensor, values: Tensor) -> None:
    target[indices] = values.view(len(indices), *target.shape[1:])


def _bytes_of_slots(pool: Tensor) -> Tensor:
    """A page first pool as uint8[slots, layers * item_size]."""
    return pool.view(pool.shape[0], -1).view(torch.uint8)


# ---- direct: whole tensors


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        _put(target, dst_indices.long(), source[src_indices.long()])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    slots = src_indices.long()
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        _put(target, dst_indices.long(), source[:, layer_id][slots // page_size, slots % page_size])


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """`src_ptrs` holds every layer of the first target, then every layer of the next."""
    slots = dst_indices.long()
    num_layers = len(src_ptrs) // len(dst_ptrs)
    for i, source in enumerate(src_ptrs):
        target = dst_ptrs[i // num_layers][:, i % num_layers]
        values = source[src_indices.long()]
        target[slots // page_size, slots % page_size] = values.view(len(slots), *target.shape[2:])


# ---- kernel, one tensor a layer (MLA, Mamba)


def transfer_kv_per_layer_mla(
    src: Tensor, dst: Tensor, src_indices: Tensor, dst_indices: Tensor, item_size: int, **tuning: Any
) -> None:
    transfer_kv_direct([src], [dst], src_indices, dst_indices, 1)


def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    **tuning: Any,
) -> None:
    """`src_layers`, `dst_layers`: uint64 addresses, one a layer."""
    sources, targets = src_indices.long(), dst_indices.long()
    for layer in range(num_layers):
        rows = _rows_at(src_layers[layer], sources, item_size)[sources]
        _put(_rows_at(dst_layers[layer], targets, item_size), targets, rows)


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    **tuning: Any,
) -> None:
    _put(dst, dst_indices.long(), src[:, layer_id][src_indices.long()])


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    **tuning: Any,
) -> None:
    sources, pool = src_indices.long(), _bytes_of_slots(dst)
    for layer in range(num_layers):
        rows = _rows_at(src_layers[layer], sources, item_size)[sources]
        _put(pool[:, layer * item_size : (layer + 1) * item_size], dst_indices.long(), rows)


def transfer_kv_mamba_pf_lf(src: Tensor, dst: Tensor, **arguments: Any) -> None:
    transfer_kv_per_layer_mla_pf_lf(src, dst, **arguments)


def transfer_kv_mamba_lf_pf(src_ptrs: Tensor, dst: Tensor, **arguments: Any) -> None:
    transfer_kv_all_layer_mla_lf_pf(src_ptrs, dst, **arguments)


# ---- kernel, a K and a V tensor a layer (MHA): the same, twice


def _for_k_and_v(copy: Callable[..., None], source: str, target: str) -> Callable[..., None]:
    """`copy` for MHA. `source`, `target`: what the MHA form calls its arguments, with {} for k or v."""
    names = copy.__code__.co_varnames

    def copy_both(**arguments: Any) -> None:
        for which in "kv":
            given = {names[0]: arguments[source.format(which)], names[1]: arguments[target.format(which)]}
            shared = {
                n: v for n, v in arguments.items() if not n.startswith(("src_k", "src_v", "dst_k", "dst_v"))
            }
            copy(**given, **shared)

    return copy_both


def _per_layer_ph_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    **tuning: Any,
) -> None:
    slots = src_indices.long()
    # Advanced indices on both sides of a slice come first in the result: [slot, head, dim].
    _put(dst, dst_indices.long(), src[slots // page_size, :, slots % page_size, layer_id])


def _all_layer_lf_ph(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    **tuning: Any,
) -> None:
    sources, slots = src_indices.long(), dst_indices.long()
    for layer in range(num_layers):
        rows = _rows_at(src_layers[layer], sources, item_size)[sources]
        values = rows.view(len(sources), head_num, -1).view(dst.dtype)
        dst[slots // page_size, :, slots % page_size, layer] = values


transfer_kv_per_layer = _for_k_and_v(transfer_kv_per_layer_mla, "src_{}", "dst_{}")
transfer_kv_per_layer_pf_lf = _for_k_and_v(transfer_kv_per_layer_mla_pf_lf, "src_{}", "dst_{}")
transfer_kv_per_layer_ph_lf = _for_k_and_v(_per_layer_ph_lf, "src_{}", "dst_{}")
transfer_kv_all_layer = _for_k_and_v(transfer_kv_all_layer_mla, "src_{}_layers", "dst_{}_layers")
transfer_kv_all_layer_lf_pf = _for_k_and_v(transfer_kv_all_layer_mla_lf_pf, "src_{}_layers", "dst_{}")
transfer_kv_all_layer_lf_ph = _for_k_and_v(_all_layer_lf_ph, "src_{}_layers", "dst_{}")

OPERATORS: dict[str, Callable[..., None]] = {
    name: value for name, value in globals().items() if name.startswith("transfer_kv_")
}
