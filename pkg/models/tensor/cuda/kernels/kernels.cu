// All kernels, one module.
#include "common.cuh"
#include "rows.cu"
#include "product.cu"
#include "attention.cu"
#include "mma.cu"
