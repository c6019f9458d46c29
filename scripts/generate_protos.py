"""Regenerates the Python stubs beside `server/inference.proto`, or checks that they fit it.

    python scripts/generate_protos.py           # writes server/inference_pb2.py, .pyi and inference_pb2_grpc.py
    python scripts/generate_protos.py --check   # exits 1 if the committed stubs are not what the .proto says

Generated code asks at import for a gRPC and a protobuf at least as new as its generator, so run the first form with
the oldest grpcio-tools that pyproject.toml allows (1.80), and everyone's installation can import the result. The check
compares descriptors and methods instead of bytes, so it works with any version of the generator.
"""

from __future__ import annotations

import argparse
import ast
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROTO = "server/inference.proto"
STUBS = ("server/inference_pb2.py", "server/inference_pb2.pyi", "server/inference_pb2_grpc.py")


def generate(target: Path) -> None:
    """Writes the three stubs under `target`; exits if the .proto does not compile."""
    from grpc_tools import protoc

    outputs = [f"--{kind}_out={target}" for kind in ("python", "pyi", "grpc_python")]
    include = str(files("grpc_tools") / "_proto")
    if protoc.main(["protoc", f"-I{ROOT}", f"-I{include}", *outputs, PROTO]):
        sys.exit(f"{PROTO} does not compile: see above")


def serialized_descriptor(stub: Path) -> bytes:
    """The file descriptor inside an `_pb2.py`, read without importing it: one pool takes a file name only once."""
    for node in ast.walk(ast.parse(stub.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "AddSerializedFile":
            return ast.literal_eval(node.args[0])
    raise ValueError(f"{stub} holds no descriptor")


def methods(stub: Path) -> list[str]:
    """The full names of the methods that a `_pb2_grpc.py` calls, in order."""
    strings = (node.value for node in ast.walk(ast.parse(stub.read_text())) if isinstance(node, ast.Constant))
    return sorted(text for text in strings if isinstance(text, str) and text.startswith("/jaxinfer."))


def declared(stub: Path) -> list[str]:
    """The classes and fields that a `.pyi` declares."""
    found = []
    for node in ast.walk(ast.parse(stub.read_text())):
        if isinstance(node, ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.AnnAssign):
            found.append(ast.unparse(node.target))
    return sorted(found)


def differences(committed: Path, fresh: Path) -> list[str]:
    """The stubs under `committed` that do not say what those under `fresh` say."""
    readers = zip(STUBS, (serialized_descriptor, declared, methods), strict=True)
    return [
        name
        for name, read in readers
        if not (committed / name).exists() or read(committed / name) != read(fresh / name)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with the committed stubs instead of writing them")
    if not parser.parse_args().check:
        generate(ROOT)
        return
    with tempfile.TemporaryDirectory() as folder:
        generate(Path(folder))
        stale = differences(ROOT, Path(folder))
    if stale:
        sys.exit(f"not what {PROTO} says: {', '.join(stale)}\nrun: python scripts/generate_protos.py")
    print(f"the stubs fit {PROTO}")


if __name__ == "__main__":
    main()
