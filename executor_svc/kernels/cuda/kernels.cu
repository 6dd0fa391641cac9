/* All kernels for one head size and element type: HEAD_SIZE is 64 or 128, ELEMENT_BF16 or ELEMENT_FP16 is defined. */
#ifdef EMULATED
#include "emulation/emulation.h"
#else
#include "primitives.cuh"
#endif

#define BLOCK_TOKENS 16

#include "blocks.cuh"
#include "merge.cuh"
#include "paged_decode.cuh"

#ifdef EMULATED
#include "emulation/machine.h"
EMULATE(write_kv)
EMULATE(move_blocks)
EMULATE(merge_splits)
EMULATE(paged_decode)
#endif
