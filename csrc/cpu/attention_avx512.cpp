// The kernels for AVX-512 F, BW, DQ and VL.
#include "attention.h"
#include "write_kv.h"
