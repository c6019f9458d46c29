"""The network front of jaxinfer: `inference.proto`, the gRPC service, and typed clients.

    from server.client import Client

`server` is a common name: see `jaxinfer._shadowing` for what happens where another module has it.
"""
