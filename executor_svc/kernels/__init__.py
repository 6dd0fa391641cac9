"""Native CPU kernels: C sources, the build that makes one shared library of them, and the code that loads it."""
