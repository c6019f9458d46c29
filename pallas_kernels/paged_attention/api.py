"""The contract of paged attention; see `reference.py` for its plainest form.

Dimension letters: T packed tokens, N query heads, K KV heads, G = N / K, H head dim, L layers, P pages,
S sequences, M pages of a sequence.
"""

from __future__ import annotations

import jax

from pallas_kernels.dispatch import KernelError, choose
from pallas_kernels.paged_attention import reference, xla


def pool_shape(num_layers: int, num_pages: int, page_size: int, num_kv_heads: int, head_dim: int) -> tuple[int, ...]:
    """How the pool lies in memory: [L, P, 2K, page_size, H], axis 2 holding k0, v0, k1, v1, ...

    K and V of a head are neighbours, so that a shard over heads means the same on any mesh.
    """
    return (num_layers, num_pages, 2 * num_kv_heads, page_size, head_dim)


def paged_attention(
    q_TNH: jax.Array,
    k_TKH: jax.Array,
    v_TKH: jax.Array,
    pool: jax.Array,
    layer: int,
    page_table_SM: jax.Array,
    kv_lens_S: jax.Array,
    query_starts_S1: jax.Array,
    num_seqs: jax.Array,
    *,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    k_scale: float | None = None,
    v_scale: float | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes the step's keys and values into `pool[layer]`, then attends causally over each sequence's pages.

    Tokens of all sequences are packed; sequence s owns tokens `query_starts[s]` to `query_starts[s + 1] - 1`, which
    are the last of its `kv_lens[s]` positions. Decodes and prefill chunks mix freely. Tokens from
    `query_starts[num_seqs]` on are padding: they write nothing and their outputs are 0.

    Args:
      q_TNH, k_TKH, v_TKH: rotated queries and keys, and values; N is a multiple of K.
      pool: `pool_shape(...)`; donate it, it is aliased. Positions never written may hold any bytes, NaN too.
      layer: index into the pool's first axis.
      page_table_SM: int32, page ids of each sequence in order of position; entries past its length are ignored.
      kv_lens_S: int32, tokens of each sequence, those of this step included; 0 for padding rows.
      query_starts_S1: int32, non-decreasing.
      num_seqs: int32 scalar, rows in use.
      scale: multiplies the scores.
      window: a token sees only its last `window` positions, itself included.
      soft_cap: scores become `soft_cap * tanh(scores / soft_cap)`.
      k_scale, v_scale: of a quantized pool (not served yet).
      implementation: force one by name, instead of choosing by device.

    Returns:
      (pool, out_TNH) with out of q's dtype.

    Raises:
      KernelError: shapes do not fit each other, or the forced implementation cannot serve the call.
    """
    T, N, H = q_TNH.shape
    K = k_TKH.shape[1]
    S = page_table_SM.shape[0]
    if k_TKH.shape != (T, K, H) or v_TKH.shape != k_TKH.shape:
        raise KernelError(f"q {q_TNH.shape}, k {k_TKH.shape} and v {v_TKH.shape} do not fit together")
    if N % K:
        raise KernelError(f"{N} query heads are no multiple of {K} KV heads")
    if pool.ndim != 5 or pool.shape[2] != 2 * K or pool.shape[4] != H:
        raise KernelError(f"pool {pool.shape} is not [L, P, {2 * K}, page_size, {H}]")
    if kv_lens_S.shape != (S,) or query_starts_S1.shape != (S + 1,):
        raise KernelError(f"for {S} sequences, kv_lens is {kv_lens_S.shape} and query_starts {query_starts_S1.shape}")

    def refusal() -> str | None:
        if k_scale is not None or v_scale is not None:
            return "a quantized pool (k_scale, v_scale) is not served yet"
        return None

    function = choose(
        "paged_attention",
        {"xla": (xla.paged_attention, refusal), "reference": (reference.paged_attention, refusal)},
        order=("xla",),
        forced=implementation,
    )
    return function(
        q_TNH,
        k_TKH,
        v_TKH,
        pool,
        layer,
        page_table_SM,
        kv_lens_S,
        query_starts_S1,
        num_seqs,
        scale=scale,
        window=window,
        soft_cap=soft_cap,
    )
