// The kernels for AVX2 and FMA.
#include "attention.h"
#include "write_kv.h"
