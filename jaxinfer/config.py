"""Settings of the engine, checked once here; everything above takes them as they are."""

from __future__ import annotations

from dataclasses import dataclass

from jaxinfer.errors import InvalidArgumentError

MIN_SCORING_ROWS = 64
# What `kv_cache_dtype` may be -> dtype of the pages' values; None is that of activations.
KV_CACHE_DTYPES = {"auto": None, "int8": "int8", "fp8": "float8_e4m3fn"}


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding of a layer. `factors` ([rotary_dim / 2], float) divide the inverse frequencies."""

    theta: float = 10_000.0
    factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpec:
    """One decoder layer, described. A family differs from another by what stands here, not by code.

    Attributes:
      window: how many positions back a token sees, itself included; None sees all.
      attention_bias: whether the q, k and v projections add a bias; `output_bias` the same for the output one.
      mlp_bias: whether the MLP's projections add one.
    """

    rope: RopeConfig = RopeConfig()
    window: int | None = None
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only model's shape: D model, N query heads, K KV heads, H head dim, F feed-forward, V vocabulary."""

    family: str
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    layers: tuple[LayerSpec, ...]
    rms_norm_eps: float
    max_position: int
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(name, getattr(self, name), "a positive integer")
        if self.num_heads % self.num_kv_heads:
            raise InvalidArgumentError("num_kv_heads", self.num_kv_heads, f"a divisor of num_heads = {self.num_heads}")
        if not self.layers:
            raise InvalidArgumentError("layers", 0, "at least one layer")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of the queue.

    Attributes:
      max_num_seqs: most sequences that run at once (device rows).
      max_num_batched_tokens: token budget of a step, prefill chunks and decodes together.
      max_model_len: longest sequence, prompt and output together.
      page_size: tokens a page.
      num_pages: pages in the pool that sequences may use.
      prefix_caching: whether full pages are kept and shared between equal prefixes.
      max_waiting: most requests that may wait; one more is refused.
      max_waiting_tokens: most prompt tokens that may wait; one request alone always may.
      kv_dtype: of the pages' values, and part of a prefix's identity; None is that of activations.
      kv_token_bytes: what a token takes in the pages of all devices together; 0 where nobody has said.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    page_size: int
    num_pages: int
    prefix_caching: bool = True
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 20
    kv_dtype: str | None = None
    kv_token_bytes: int = 0

    def __post_init__(self) -> None:
        for name in (
            *("max_num_seqs", "max_num_batched_tokens", "page_size", "num_pages", "max_waiting"),
            "max_waiting_tokens",
        ):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(name, getattr(self, name), "a positive integer")
        if self.max_model_len < 2:
            raise InvalidArgumentError("max_model_len", self.max_model_len, "at least 2: one prompt token, one output")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidArgumentError(
                "max_num_batched_tokens",
                self.max_num_batched_tokens,
                f"at least max_num_seqs = {self.max_num_seqs}, so that every running sequence gets its token",
            )

    @property
    def max_prompt_tokens(self) -> int:
        """Most tokens of a prompt: one at least is generated."""
        return min(self.max_model_len - 1, self.num_pages * self.page_size)

    def check_prompt(self, num_tokens: int) -> None:
        """Raises InvalidArgumentError if a prompt of so many tokens can never run."""
        longest, pool_tokens = self.max_model_len - 1, self.num_pages * self.page_size
        if num_tokens < 1:
            raise InvalidArgumentError("prompt", "", "at least one token")
        if num_tokens > longest:
            allowed = f"at most {longest} tokens: the context is {longest + 1}, prompt and output together"
            raise InvalidArgumentError("prompt", f"{num_tokens} tokens", allowed)
        if num_tokens > pool_tokens:
            allowed = f"at most {pool_tokens} tokens, all that the page pool holds"
            raise InvalidArgumentError("prompt", f"{num_tokens} tokens", allowed)

    @property
    def max_rows(self) -> int:
        """Most logits of a step: one for each running sequence, and some at least to score prompts by."""
        return max(self.max_num_seqs, min(MIN_SCORING_ROWS, self.max_num_batched_tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How to serve a model; None lets the engine choose by model and device, and it says what it chose.

    Attributes:
      model: a Hugging Face folder, a .gguf file, a folder that `jaxinfer convert` wrote, a hub id or an alias.
      dtype: of weights and activations: "auto" (the checkpoint's own), "float32", "bfloat16" or "float16".
      mesh: mesh axes and sizes, as "data=2,stage=2,tensor=4", or a TOML file that also has a rules table (see
        `sharding.mesh`); None is one device.
      micro_batches: parts of each step where the mesh has stages; None is as many as there are stages.
      quantize: what becomes of matrices: "int8", "w8a8" (activations in int8 too), "int4" (in groups of 128; "int4:64"
        in groups of 64), "fp8", or "float"; None keeps what the checkpoint has.
      quantize_rules: "PATTERN=KIND", the first that fits a matrix's name, as "layers.0.*=int8" or "head=int8"; without
        one, embedding and head stay in floats.
      packed: keep quantized matrices packed in memory. None does so, but on a CPU, which multiplies others faster as
        floats, only with "int8" and "w8a8".
      max_model_len: longest sequence, prompt and output together; None is the model's own limit.
      max_num_seqs: most sequences that run at once in a replica.
      max_num_batched_tokens: token budget of a replica's step.
      page_size: tokens a page of the KV cache.
      kv_cache_dtype: of keys and values in the cache: "auto" (that of activations), or "int8" or "fp8" (e4m3), either
        with a float32 scale for each token and head.
      kv_cache_bytes: memory of the page pool on each device; None takes 1 GiB of a CPU's memory for all devices
        together, else what is left of the device's memory.
      prefix_caching: share full pages between equal prefixes.
      max_waiting: most requests that may wait.
      max_waiting_tokens: most prompt tokens that may wait, of all requests together; one request alone always may.
      stuck_after_s: seconds at one step after which the engine counts as stuck until the step ends.
      scan_layers: roll the layers into one loop, which on CPUs compiles and runs faster; None does so there.
      compile_cache: keep compiled programs on disk.
    """

    model: str = "smollm2-135m-instruct"
    dtype: str = "auto"
    mesh: str | None = None
    micro_batches: int | None = None
    quantize: str | None = None
    quantize_rules: tuple[str, ...] = ()
    packed: bool | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 256
    page_size: int = 32
    kv_cache_dtype: str = "auto"
    kv_cache_bytes: int | None = None
    prefix_caching: bool = True
    max_waiting: int = 1024
    max_waiting_tokens: int = 1 << 20
    stuck_after_s: float = 8.0
    scan_layers: bool | None = None
    compile_cache: bool = True

    def __post_init__(self) -> None:
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise InvalidArgumentError("kv_cache_dtype", self.kv_cache_dtype, f"one of {', '.join(KV_CACHE_DTYPES)}")
        least = {
            **{"max_num_seqs": 1, "max_num_batched_tokens": 1, "page_size": 1, "max_waiting": 1},
            "max_waiting_tokens": 1,
        }
        for name, low in {**least, "max_model_len": 2, "kv_cache_bytes": 1, "micro_batches": 1}.items():
            value = getattr(self, name)
            if value is None and name not in least:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise InvalidArgumentError(name, value, f"an integer of at least {low}")
        if not isinstance(self.stuck_after_s, (int, float)) or not self.stuck_after_s > 0:
            raise InvalidArgumentError("stuck_after_s", self.stuck_after_s, "a number of seconds above 0")
