// The kernels for what every CPU of the architecture has.
#include "attention.h"
#include "write_kv.h"
