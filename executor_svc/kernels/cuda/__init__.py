"""CUDA kernels: block moves, KV writes and split-KV paged decode; on a GPU through CuPy, or emulated on the CPU.

`kernels.cu` is one translation unit a variant (variants.py). `launch.py` is the seam: who compiles it and runs its
kernels. `paged.py` has the kernels as functions over tensors, which is all that an attention backend needs.
"""
