"""The contract of paged attention; see `reference.py` for its plainest form and `layout.py` for the pool.

Dimension letters: T packed tokens, N query heads, K KV heads, G = N / K, H head dim, L layers, P pages,
S sequences, M pages of a sequence.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.dispatch import KernelError, choose, current_device
from pallas_kernels.paged_attention import reference, xla
from pallas_kernels.paged_attention.layout import KV, QUANTIZED, PageLayout, QuantizedKV, values_of


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
      KernelError: shapes or dtypes do not fit each other, no implementation or not the forced one serves the call, or,
        where the step's arrays are no tracers, `check_step` refuses them.
    """
    T, N, H = q_TNH.shape
    K = k_TKH.shape[1]
    _check_shapes(q_TNH, k_TKH, v_TKH, pool, page_table_SM, kv_lens_S, query_starts_S1)
    layout = PageLayout.of(pool, K, H)
    step = (page_table_SM, kv_lens_S, query_starts_S1, num_seqs)
    if not any(isinstance(each, jax.core.Tracer) for each in step):
        table, lens, starts = (np.asarray(each) for each in step[:3])
        check_step(table, lens, starts, int(num_seqs), pool_shape=values_of(pool).shape, num_tokens=T)
    if (window is not None and window < 1) or (soft_cap is not None and not soft_cap > 0):
        raise KernelError(f"window is {window} and soft_cap {soft_cap}; each is above 0, or None")
    call = (layout, q_TNH.dtype, pool, N // K)
    implementations: dict[str, tuple[Callable[[], Callable], Callable[[], str | None]]] = {
        "tpu": (partial(_function, "tpu"), partial(_refusal, "tpu", *call)),
        "gpu": (partial(_function, "gpu"), partial(_refusal, "gpu", *call)),
        "xla": (lambda: xla.paged_attention, lambda: None),
        "reference": (lambda: reference.paged_attention, lambda: None),
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
    device = current_device()
    if device.platform != platform:
        return f"the device is no {platform.upper()} but {device.kind}"
    return _kernel(platform).refusal(device, *call)


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
    in_use = np.arange(M) * page_size < lens[:, None]
    wrong = in_use & ((page_table_SM[:num_seqs] < 0) | (page_table_SM[:num_seqs] >= num_pages))
    if wrong.any():
        s, m = map(int, np.argwhere(wrong)[0])
        raise KernelError(f"page_table[{s}, {m}] is {page_table_SM[s, m]}; page ids go from 0 to {num_pages - 1}")


def _check_shapes(q_TNH, k_TKH, v_TKH, pool: KV, page_table_SM, kv_lens_S, query_starts_S1) -> None:
    T, N, H = q_TNH.shape
    K, S = k_TKH.shape[1], page_table_SM.shape[0]
    if k_TKH.shape != (T, K, H) or v_TKH.shape != k_TKH.shape:
        raise KernelError(f"q {q_TNH.shape}, k {k_TKH.shape} and v {v_TKH.shape} do not fit together")
    if N % K:
        raise KernelError(f"{N} query heads are no multiple of {K} KV heads")
    if not q_TNH.dtype == k_TKH.dtype == v_TKH.dtype:
        raise KernelError(f"q, k and v have dtypes {q_TNH.dtype}, {k_TKH.dtype} and {v_TKH.dtype}; one is needed")
    if kv_lens_S.shape != (S,) or query_starts_S1.shape != (S + 1,):
        raise KernelError(f"for {S} sequences, kv_lens is {kv_lens_S.shape} and query_starts {query_starts_S1.shape}")
    dtype, quantized = jnp.dtype(values_of(pool).dtype), isinstance(pool, QuantizedKV)
    has_scales = dtype in QUANTIZED or dtype == jnp.uint8
    if quantized != has_scales or not (quantized or jnp.issubdtype(dtype, jnp.floating)):
        kinds = ", ".join(map(str, QUANTIZED))
        raise KernelError(
            f"a pool of {dtype} {'with' if quantized else 'without'} scales; {kinds} have scales, floats none"
        )
    if isinstance(pool, QuantizedKV):
        L, P, _, page_size, _ = pool.values.shape
        *others, row = pool.scales.shape
        if others != [L, P, 2 * K] or row < page_size:
            raise KernelError(
                f"the pool's scales are {pool.scales.shape}, not {(L, P, 2 * K, page_size)}, or longer rows"
            )


def _pad_heads(x_TNH: jax.Array, to: int) -> jax.Array:
    return jnp.pad(x_TNH, ((0, 0), (0, 0), (0, to - x_TNH.shape[-1]))) if x_TNH.shape[-1] < to else x_TNH
