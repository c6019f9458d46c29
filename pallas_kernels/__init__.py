"""Kernels, a folder an op. Each op has one contract (`api.py`), a float32 reference and implementations by backend."""
