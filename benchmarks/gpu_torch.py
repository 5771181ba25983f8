"""Rivals that are PyTorch's; it takes JAX's arrays where they lie, through DLPack."""

import importlib.util
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from gpu_load import SM_SCALE, Arrays, Load
from gpu_rivals import Program, Refused

WORKSPACE_BYTES = 128 << 20
"""What FlashInfer's documents ask for."""

Pools = list[tuple[jax.Array, jax.Array]]
Call = Callable[[Any, int], Any]
"""From queries and a layer to outputs [S, H, D], as tensors."""


def load(package: str, is_interpreted: bool) -> Any:
    """PyTorch, if it and the package are there and it has a GPU."""
    for name in ("torch", package):
        if importlib.util.find_spec(name) is None:
            raise Refused("not installed")
    import torch

    if is_interpreted or not torch.cuda.is_available():
        raise Refused("needs PyTorch with a GPU")
    return torch


def chain(torch: Any, call: Call, load: Load, q: jax.Array, num_calls: int) -> Program:
    """The calls captured in one CUDA graph."""
    queries = _tensor(torch, q)

    def calls() -> Any:
        out = queries
        for i in range(num_calls):
            out = call(out, i % load.num_layers)
        return out

    # What is made at the first call must not be made while a graph is captured.
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        calls()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        last = calls()

    def run() -> Any:
        graph.replay()
        torch.cuda.synchronize()
        return last

    def read(out: Any) -> np.ndarray:
        return out.float().cpu().numpy()

    return Program(run=run, read=read)


def flashinfer_call(torch: Any, load: Load, arrays: Arrays, pools: Pools) -> Call:
    """K and V [N, K, P, D], which it calls HND; planned once for all layers, as it is meant."""
    from flashinfer import BatchDecodeWithPagedKVCacheWrapper

    shape, device = load.shape, torch.device("cuda")
    last_len = load.length - (load.blocks_per_row - 1) * load.block_size
    starts = torch.arange(load.batch + 1, dtype=torch.int32, device=device) * load.blocks_per_row
    indices = _tensor(torch, arrays.block_tables.reshape(-1)).clone()
    last_lens = torch.full((load.batch,), last_len, dtype=torch.int32, device=device)
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device),
        "HND",
        use_cuda_graph=True,
        use_tensor_cores=shape.num_heads // shape.num_kv_heads >= 4,
        paged_kv_indptr_buffer=torch.empty_like(starts),
        paged_kv_indices_buffer=torch.empty_like(indices),
        paged_kv_last_page_len_buffer=torch.empty_like(last_lens),
    )
    dtype = getattr(torch, shape.dtype)
    wrapper.plan(
        starts,
        indices,
        last_lens,
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        load.block_size,
        pos_encoding_mode="NONE",
        q_data_type=dtype,
        kv_data_type=dtype,
        sm_scale=SM_SCALE,
    )
    caches = [tuple(_tensor(torch, half) for half in pair) for pair in pools]
    return lambda q, layer: wrapper.run(q, caches[layer])


def vllm_call(torch: Any, load: Load, arrays: Arrays, pools: Pools) -> Call:
    """K and V [N, P, K, D], by the newest FlashAttention of vLLM's that the device has."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, is_fa_version_supported

    version = next((v for v in (3, 2) if is_fa_version_supported(v)), None)
    if version is None:
        raise Refused("neither FlashAttention 3 nor 2 is built for this device")
    caches = [tuple(_tensor(torch, half) for half in pair) for pair in pools]
    starts = torch.arange(load.batch + 1, dtype=torch.int32, device="cuda")
    lens, tables = _tensor(torch, arrays.context_lens), _tensor(torch, arrays.block_tables)

    def call(q: Any, layer: int) -> Any:
        return flash_attn_varlen_func(
            q,
            *caches[layer],
            max_seqlen_q=1,
            cu_seqlens_q=starts,
            max_seqlen_k=load.length,
            seqused_k=lens,
            block_table=tables,
            softmax_scale=SM_SCALE,
            causal=True,
            fa_version=version,
        )

    return call


def _tensor(torch: Any, array: jax.Array) -> Any:
    return torch.from_dlpack(jax.block_until_ready(array))
