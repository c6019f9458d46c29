"""A client in another language, generated from `inference.proto`, says and hears the same."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine
from server_harness import run, serving

from jaxinfer.errors import QueueFullError
from jaxinfer.types import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).resolve().parent / "node_client"
INSTALL = ("npm", "install", "--no-package-lock", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("node") is None or shutil.which("npm") is None, reason="node or npm is not installed"
    ),
]


@pytest.fixture(scope="module")
def node_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the client, with what it needs and the code that was generated for it."""
    pytest.importorskip("grpc_tools")
    folder = tmp_path_factory.mktemp("node") / "client"
    shutil.copytree(SOURCE, folder)
    try:
        done = subprocess.run(INSTALL, cwd=folder, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not fetch the packages in 120 s")
    if done.returncode:
        pytest.skip(f"npm could not fetch the packages: {done.stderr.strip().splitlines()[:1]}")
    plugin = folder / "node_modules" / ".bin" / "protoc-gen-es"
    out = (f"--plugin=protoc-gen-es={plugin}", f"--es_out={folder}", "--es_opt=target=js")
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", ROOT, *out, "server/inference.proto"],
        check=True,
        cwd=ROOT,
        timeout=60,
    )
    assert (folder / "server" / "inference_pb.js").exists()
    return folder


async def ask(folder: Path, address: str, request: dict[str, Any]) -> dict[str, Any]:
    process = await asyncio.create_subprocess_exec(
        *("node", "client.js", f"http://{address}"),
        cwd=folder,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await asyncio.wait_for(process.communicate(json.dumps(request).encode()), 60)
    assert process.returncode == 0
    return json.loads(output)


def test_the_tokens_are_those_of_our_client(node_client: Path):
    async def main():
        engine = FakeEngine(step_s=0.002)
        async with serving(engine) as (server, client):
            answers = await ask(
                node_client,
                server.address,
                {
                    "text": "héllo 🌍",
                    "samplingParams": {"n": 2, "seed": str(2**62), "logitBias": {"7": -1.5}, "temperature": 0.5},
                },
            )
            params = engine.requests[-1].params
            assert params == SamplingParams(n=2, seed=2**62, logit_bias={7: -1.5}, temperature=0.5, max_tokens=None)
            ours = await client.unary_generate("héllo 🌍", params)
            *deltas, finished = answers["generate"]["ok"]
            for sample in ours.samples:
                mine = [each["delta"] for each in deltas if each["delta"].get("index", 0) == sample.output.index]
                assert "".join(each.get("text", "") for each in mine) == sample.output.text
                assert [token for each in mine for token in each["tokenIds"]] == list(sample.output.token_ids)
            assert finished["finished"]["ends"][0]["finishReason"] == "FINISH_REASON_STOP"
            assert int(finished["finished"]["usage"]["outputTokens"]) == ours.usage.output_tokens
            unary = answers["unary"]["ok"]["samples"]
            assert [each["output"]["text"] for each in unary] == [each.output.text for each in ours.samples]

    run(main(), timeout_s=90)


def test_errors_have_their_status_message_and_word(node_client: Path):
    async def main():
        engine = FakeEngine()
        async with serving(engine) as (server, _):
            answers = await ask(node_client, server.address, {"text": "a", "samplingParams": {"topP": 1.5}})
            for each in answers.values():
                assert (each["status"], each["word"]) == ("InvalidArgument", "invalid_argument")
                assert each["message"].startswith("top_p = 1.5 is not allowed: a number in (0, 1]")
            engine.refuse_with = QueueFullError("über 1024 wait")
            for each in (await ask(node_client, server.address, {"text": "a"})).values():
                assert each == {"status": "ResourceExhausted", "word": "queue_full", "message": "über 1024 wait"}

    run(main(), timeout_s=90)
