"""The contract of paged attention; see `reference.py` for its plainest form and `layout.py` for the pool.

Dimension letters: T packed tokens, N query heads, K KV heads, G = N / K, H head dim, L layers, P pages,
S sequences, M pages of a sequence.
"""

from __future__ import annotations

import importlib
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import Implementation, KernelError, choose, current_device
from pallas_kernels.paged_attention import reference, xla
from pallas_kernels.paged_attention.layout import KV, QUANTIZED, PageLayout, QuantizedKV, values_of

FLOATS = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


def paged_attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    pool: KV,
    layer: int | jax.Array,
    page_table_SM: jax.Array,
    kv_lens_S: jax.Array,
    query_starts_S1: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    implementation: str | None = None,
) -> tuple[KV, jax.Array]:
    """Writes the step's keys and values into `pool[layer]`, then attends causally over each sequence's pages.

    Tokens of all sequences are packed; sequence s owns tokens `query_starts[s]` to `query_starts[s + 1] - 1`, which
    are the last of its `kv_lens[s]` positions. Decodes and prefill chunks mix freely. Tokens from
    `query_starts[num_seqs]` on are padding: they write nothing and their outputs are 0.

    Args:
      q_TNH, k_TKH, v_TKH: rotated queries and keys, and values; N is a multiple of K.
      pool: `pool_spec(...)` says how the device wants it; donate it, it is aliased. Positions never written may hold
        any bytes, NaN too. Into a `QuantizedKV` keys and values go rounded, with a scale for each token and head.
      layer: index into the pool's first axis.
      page_table_SM: int32, page ids of each sequence in order of position; entries past its length are ignored.
      kv_lens_S: int32, tokens of each sequence, those of this step included; 0 for padding rows.
      query_starts_S1: int32, non-decreasing.
      num_seqs: int32 scalar, rows in use.
      scale: multiplies the scores.
      window: a token sees only its last `window` positions, itself included.
      soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
      implementation: force one by name, instead of choosing by device.

    Returns:
      (pool, out_TNH) with out of q's dtype.

    Raises:
      KernelError: shapes, dtypes or options do not fit each other, no implementation or not the forced one serves the
        call, or, where the layer or the step's arrays are no tracers, they are out of range.
    """
    step = (page_table_SM, kv_lens_S, query_starts_S1, num_seqs)
    _check_arrays(q_TNH, k_TKH, v_TKH, *step)
    _check_pool(pool, k_TKH.shape[1])
    _check_options(layer, len(values_of(pool)), scale, window, soft_cap)
    (T, N, H), K = q_TNH.shape, k_TKH.shape[1]
    layout = PageLayout.of(pool, K, H)
    if not any(isinstance(each, jax.core.Tracer) for each in step):
        table, lens, starts = (np.asarray(each) for each in step[:3])
        check_step(table, lens, starts, int(num_seqs), pool_shape=values_of(pool).shape, num_tokens=T)
    call = (layout, q_TNH.dtype, pool, N // K)
    implementations = {
        **{
            platform: Implementation(partial(_function, platform), partial(_refusal, platform, *call), platform)
            for platform in ("tpu", "gpu")
        },
        "xla": Implementation(lambda: xla.paged_attention),
        "reference": Implementation(lambda: reference.paged_attention),
    }
    function = choose("paged_attention", implementations, forced=implementation)
    pad = partial(_pad_heads, to=layout.head_dim)
    rows = layout.rows(pad(k_TKH), pad(v_TKH), values_of(pool).dtype)
    pool, out_TNH = function(
        pad(q_TNH), rows, pool, layout, layer, *step, scale=scale, window=window, soft_cap=soft_cap
    )
    return pool, out_TNH[..., :H]


def _kernel(platform: str) -> Any:
    """The module of a platform's kernels; imported on the devices it is for, since Pallas takes its time."""
    return importlib.import_module(f"pallas_kernels.paged_attention.{platform}")


def _function(platform: str) -> Any:
    return _kernel(platform).paged_attention


def _refusal(platform: str, *call: Any) -> str | None:
    return _kernel(platform).refusal(current_device(), *call)


def check_step(
    page_table_SM: np.ndarray,
    kv_lens_S: np.ndarray,
    query_starts_S1: np.ndarray,
    num_seqs: int,
    *,
    pool_shape: tuple[int, ...],
    num_tokens: int,
) -> None:
    """Checks what a trace cannot: the values of a step's arrays, before they go to the device.

    Raises:
      KernelError: names the row, the value and the limit.
    """
    num_pages, page_size = pool_shape[1], pool_shape[3]
    S, M = page_table_SM.shape
    if not 0 <= num_seqs <= S:
        raise KernelError(f"num_seqs is {num_seqs}; the page table has {S} rows")
    starts, lens = query_starts_S1[: num_seqs + 1], kv_lens_S[:num_seqs]
    query_lens = np.diff(starts)
    if starts[0] != 0 or (query_lens < 0).any() or starts[-1] > num_tokens:
        raise KernelError(f"query_starts {starts.tolist()} do not rise from 0 to at most {num_tokens} tokens")
    for wrong, limit in (
        (lens > M * page_size, f"{M} pages of {page_size} tokens"),
        (lens < query_lens, "not below the tokens of this step"),
    ):
        if wrong.any():
            s = int(wrong.argmax())
            raise KernelError(f"kv_lens[{s}] is {lens[s]}, with {query_lens[s]} tokens in this step; limit: {limit}")
    table = page_table_SM[:num_seqs]
    if num_seqs == 0 or (table.min() >= 0 and table.max() < num_pages):
        return
    wrong = (np.arange(M) * page_size < lens[:, None]) & ((table < 0) | (table >= num_pages))
    if wrong.any():
        s, m = map(int, np.argwhere(wrong)[0])
        raise KernelError(f"page_table[{s}, {m}] is {page_table_SM[s, m]}; page ids go from 0 to {num_pages - 1}")


def _check_arrays(q_TNH, k_TKH, v_TKH, page_table_SM, kv_lens_S, query_starts_S1, num_seqs) -> None:
    tokens = {"q": q_TNH, "k": k_TKH, "v": v_TKH}
    step = {"page_table": page_table_SM, "kv_lens": kv_lens_S, "query_starts": query_starts_S1, "num_seqs": num_seqs}
    ranks = {**dict.fromkeys(tokens, 3), "page_table": 2, "kv_lens": 1, "query_starts": 1, "num_seqs": 0}
    for name, array in {**tokens, **step}.items():
        if jnp.ndim(array) != ranks[name] or 0 in jnp.shape(array):
            raise KernelError(f"{name} has shape {jnp.shape(array)}; it has {ranks[name]} axes, none of them empty")
    for name, array in step.items():
        if not jnp.issubdtype(jnp.result_type(array), jnp.integer):
            raise KernelError(f"{name} is of {jnp.result_type(array)}; it is of int32")
    T, N, H = q_TNH.shape
    K, S = k_TKH.shape[1], page_table_SM.shape[0]
    if k_TKH.shape != (T, K, H) or v_TKH.shape != k_TKH.shape:
        raise KernelError(f"q {q_TNH.shape}, k {k_TKH.shape} and v {v_TKH.shape} do not fit together")
    if N % K:
        raise KernelError(f"{N} query heads are no multiple of {K} KV heads")
    if not q_TNH.dtype == k_TKH.dtype == v_TKH.dtype:
        raise KernelError(f"q, k and v have dtypes {q_TNH.dtype}, {k_TKH.dtype} and {v_TKH.dtype}; one is needed")
    if q_TNH.dtype not in FLOATS:
        raise KernelError(f"q, k and v are of {q_TNH.dtype}; they are of {', '.join(map(str, FLOATS))}")
    if kv_lens_S.shape != (S,) or query_starts_S1.shape != (S + 1,):
        raise KernelError(f"for {S} sequences, kv_lens is {kv_lens_S.shape} and query_starts {query_starts_S1.shape}")


def _check_pool(pool: KV, K: int) -> None:
    if not isinstance(pool, QuantizedKV) and not hasattr(pool, "shape"):
        raise KernelError(f"the pool is a {type(pool).__name__}; it is an array or a QuantizedKV")
    dtype, quantized = jnp.dtype(values_of(pool).dtype), isinstance(pool, QuantizedKV)
    has_scales = dtype in QUANTIZED or dtype == jnp.uint8
    if quantized != has_scales or not (quantized or dtype in FLOATS):
        with_scales, without = (", ".join(map(str, kinds)) for kinds in (QUANTIZED, FLOATS))
        raise KernelError(
            f"a pool of {dtype} {'with' if quantized else 'without'} scales; "
            f"{with_scales} have scales, {without} none, and there are no others"
        )
    if len(values_of(pool).shape) != 5 or 0 in values_of(pool).shape:
        raise KernelError(f"the pool has shape {values_of(pool).shape}; it has 5 axes, none of them empty")
    if isinstance(pool, QuantizedKV):
        *outer, _, page_size, _ = pool.values.shape
        *others, row = pool.scales.shape
        if others != [*outer, 2 * K] or row < page_size:
            wanted = (*outer, 2 * K, page_size)
            raise KernelError(f"the pool's scales are {pool.scales.shape}, not {wanted}, or longer rows")
        if pool.scales.dtype != jnp.float32:
            raise KernelError(f"the pool's scales are of {pool.scales.dtype}; they are of float32")


def _check_options(layer, num_layers: int, scale: float, window: int | None, soft_cap: float | None) -> None:
    if jnp.ndim(layer) or not jnp.issubdtype(jnp.result_type(layer), jnp.integer):
        raise KernelError(f"layer is {layer}; it is an integer, or a scalar array of integers")
    if not isinstance(layer, jax.core.Tracer) and not 0 <= int(layer) < num_layers:
        raise KernelError(f"layer is {layer}; the pool's layers go from 0 to {num_layers - 1}")
    if not math.isfinite(scale):
        raise KernelError(f"scale is {scale}; it is a finite number")
    if window is not None and (window < 1 or window != int(window)):
        raise KernelError(f"window is {window}; it is an integer above 0, or None")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise KernelError(f"soft_cap is {soft_cap}; it is a finite number above 0, or None")


def _pad_heads(x_TNH: jax.Array, to: int) -> jax.Array:
    return jnp.pad(x_TNH, ((0, 0), (0, 0), (0, to - x_TNH.shape[-1]))) if x_TNH.shape[-1] < to else x_TNH
