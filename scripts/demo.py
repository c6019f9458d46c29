"""Several streamed chat requests at once, through our own client, to a server that this starts and stops."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from jaxinfer.types import Delta, Finished, SamplingParams
from server.client import AsyncClient

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Why is the sky blue? One sentence.",
    "Write one line about the sea.",
]


class Lines:
    """Prints pieces of several answers as they come, a line at a time so that they stay readable."""

    def __init__(self) -> None:
        self._pending: dict[int, str] = {}

    def add(self, number: int, text: str, *, last: bool = False) -> None:
        pending = self._pending.get(number, "") + text
        while "\n" in pending or len(pending) > 72 or (last and pending):
            cut = pending.find("\n")
            if cut < 0 or cut > 72:
                cut = len(pending) if len(pending) <= 72 else max(pending.rfind(" ", 0, 72), 24)
            if line := pending[:cut].strip():
                print(f"  [{number}] {line}", flush=True)
            pending = pending[cut + 1 :] if pending[cut : cut + 1] == "\n" else pending[cut:]
        self._pending[number] = pending


async def ask(client: AsyncClient, number: int, question: str, lines: Lines) -> tuple[int, Finished]:
    params = SamplingParams(temperature=0.0, max_tokens=64)
    async with client.generate([{"role": "user", "content": question}], params) as events:
        async for event in events:
            if isinstance(event, Delta):
                lines.add(number, event.text)
            elif isinstance(event, Finished):
                lines.add(number, "", last=True)
                return number, event
    raise RuntimeError("the stream ended without its last event")


async def talk(address: str) -> None:
    async with AsyncClient(address) as client:
        await client.wait_ready(timeout_s=600.0)
        print(f"\nAsking {len(QUESTIONS)} questions at once:", flush=True)
        for number, question in enumerate(QUESTIONS, 1):
            print(f"  [{number}] > {question}", flush=True)
        lines = Lines()
        begun = time.perf_counter()
        ends = await asyncio.gather(*(ask(client, n, q, lines) for n, q in enumerate(QUESTIONS, 1)))
        seconds = time.perf_counter() - begun
        print("\n  answer   first token   output tokens   tokens/s")
        for number, end in ends:
            rate = (end.usage.output_tokens - 1) / max(end.timings.total_s - end.timings.first_token_s, 1e-9)
            first_ms = 1e3 * end.timings.first_token_s
            print(f"  [{number}] {first_ms:12.0f} ms {end.usage.output_tokens:15d} {rate:10.1f}")
        tokens = sum(end.usage.output_tokens for _, end in ends)
        print(f"  all together: {tokens} tokens in {seconds:.1f} s, {tokens / seconds:.1f} tokens/s\n", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m-instruct", help="what to serve")
    arguments = parser.parse_args()
    command = [str(Path(sys.executable).with_name("jaxinfer")), "serve", "--port", "0", "--model", arguments.model]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ)
    assert server.stdout is not None
    try:
        address = None
        for line in server.stdout:
            print(line, end="", flush=True)
            if "listening on" in line:
                address = line.split("listening on")[1].strip()
            if "first token" in line:
                break
        if address is None or server.poll() is not None:
            print("the server did not start", file=sys.stderr)
            return 1
        asyncio.run(talk(address))
    finally:
        if server.poll() is None:
            server.send_signal(signal.SIGTERM)
        for line in server.stdout:
            print(line, end="", flush=True)
        code = server.wait(timeout=60)
    print(f"The server ended with exit code {code}.")
    return code


if __name__ == "__main__":
    sys.exit(main())
