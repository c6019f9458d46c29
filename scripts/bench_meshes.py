"""What meshes of CPU devices do to throughput, each against the plain run on one device in the same process.

    python scripts/bench_meshes.py [--model M] [--mesh tensor=3 --mesh data=2 ...] [--json]

A CPU's devices share its cores and its memory, so nothing here says how fast a mesh is on chips. It shows what
splitting costs (the collectives of tensor parallelism, a pipeline's hand-over) and where the time of replicas, stages
and micro-batches goes. Ratios above 1 gain, below 1 lose. All is greedy and to full length; a mesh's bare replay stands
beside it.
"""

from __future__ import annotations

import argparse
import json
import os

import jax

MESHES = ("tensor=3", "data=2", "stage=2", "stage=2 (1 micro-batch)", "stage=2,tensor=3", "data=2,stage=2")


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput of meshes of CPU devices against one device.")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--mesh", action="append", help="may be repeated; the default is a list of kinds")
    parser.add_argument("--num-prompts", type=int, default=16)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    from jaxinfer.bench import throughput
    from jaxinfer.checkpoints.source import default_cache_dir
    from jaxinfer.config import EngineConfig
    from jaxinfer.engine.engine import Engine

    rows = []
    for name in (None, *(args.mesh or MESHES)):
        mesh = name and name.split(" ")[0]
        config = EngineConfig(
            model=args.model,
            dtype="float32",
            mesh=mesh,
            micro_batches=1 if name and "1 micro-batch" in name else None,
            max_num_seqs=16,
            max_num_batched_tokens=128,
            max_model_len=256,
        )
        with Engine.start(config, cache_dir=default_cache_dir(os.environ)) as engine:
            figures = throughput(
                engine,
                num_prompts=args.num_prompts,
                input_len=args.input_len,
                output_len=args.output_len,
                rounds=args.rounds,
            )
        rows.append({**figures, "mesh": name or "one device"})
        if not args.json:
            plain = rows[0]["output_tokens_per_s"]
            bubble = f", bubble {figures['bubble']:.2f}" if "bubble" in figures else ""
            print(
                f"{rows[-1]['mesh']:<26} {figures['output_tokens_per_s']:8.1f} tokens/s"
                f"  x{figures['output_tokens_per_s'] / plain:.2f}"
                f"  replay {figures['replay_tokens_per_s']:.1f}, TTFT p50 {figures['ttft_ms']['p50']:.0f} ms{bubble}",
                flush=True,
            )
    if args.json:
        print(json.dumps({"jax": jax.__version__, "cores": os.cpu_count(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
