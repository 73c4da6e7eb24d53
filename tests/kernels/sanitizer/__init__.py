"""Small launches of every family of kernels, for NVIDIA's compute-sanitizer: `make sanitize`.

`python -m tests.kernels.sanitizer` makes them. It uses no pytest, and no torch operation that it
can do without: under the sanitizer each one costs seconds.
"""
