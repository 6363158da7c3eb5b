// What all kernels share. No header of a toolkit is included: clang and NVRTC both take
// these files. Nothing is contracted (-ffp-contract=off): what is fused says fma.
//
// Kernels in float32 use IEEE operations only, so that a GPU and an interpreter of the PTX
// give the same bits. Each says the order of its sums.

#define DEVICE static __attribute__((device, always_inline)) inline
#define SHARED __attribute__((shared))
#ifdef __clang__
#define KERNEL(threads) extern "C" __attribute__((global, launch_bounds(threads))) void
#define RESIDENT(threads, blocks) extern "C" __attribute__((global, launch_bounds(threads, blocks))) void
#else
#define KERNEL(threads) extern "C" __global__ void __launch_bounds__(threads)
#define RESIDENT(threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks)
#endif

typedef unsigned int u32;
typedef unsigned long long u64;

struct bf16 {
  unsigned short bits;
};

DEVICE int thread_x() { int x; asm("mov.u32 %0, %%tid.x;" : "=r"(x)); return x; }
DEVICE int block_x() { int x; asm("mov.u32 %0, %%ctaid.x;" : "=r"(x)); return x; }
DEVICE int block_y() { int x; asm("mov.u32 %0, %%ctaid.y;" : "=r"(x)); return x; }
DEVICE int block_z() { int x; asm("mov.u32 %0, %%ctaid.z;" : "=r"(x)); return x; }
DEVICE void sync_block() { asm volatile("bar.sync 0;" ::: "memory"); }
DEVICE void sync_warp() { asm volatile("bar.warp.sync -1;" ::: "memory"); }

DEVICE float from_bits(u32 x) { float y; asm("mov.b32 %0, %1;" : "=f"(y) : "r"(x)); return y; }
DEVICE float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
DEVICE float root(float a) { float d; asm("sqrt.rn.f32 %0, %1;" : "=f"(d) : "f"(a)); return d; }
DEVICE float divide(float a, float b) { float d; asm("div.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b)); return d; }
DEVICE float nearest(float a) { float d; asm("cvt.rni.f32.f32 %0, %1;" : "=f"(d) : "f"(a)); return d; }
DEVICE int to_int(float a) { int d; asm("cvt.rni.s32.f32 %0, %1;" : "=r"(d) : "f"(a)); return d; }
DEVICE float larger(float a, float b) { float d; asm("max.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b)); return d; }
DEVICE float from_lane(float a, int lane) { float d; asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, -1;" : "=f"(d) : "f"(a), "r"(lane)); return d; }
DEVICE int from_lane(int a, int lane) { int d; asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, -1;" : "=r"(d) : "r"(a), "r"(lane)); return d; }
DEVICE float from_partner(float a, int mask) { float d; asm volatile("shfl.sync.bfly.b32 %0, %1, %2, 31, -1;" : "=f"(d) : "f"(a), "r"(mask)); return d; }

// The address of shared memory in its own space, and loads from there.
DEVICE u64 in_shared(const void* p) { u64 a; asm("cvta.to.shared.u64 %0, %1;" : "=l"(a) : "l"(p)); return a; }
DEVICE void load4(float* x, u64 a) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "l"(a) : "memory");
}

// Rounds to nearest, ties to even.
DEVICE bf16 to_bf16(float x) { bf16 y; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); return y; }
// The first argument is the lower half.
DEVICE u32 to_bf16x2(float low, float high) { u32 y; asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low)); return y; }

DEVICE void put(float* p, float x) { *p = x; }
DEVICE void put(bf16* p, float x) { *p = to_bf16(x); }

// Element i of a matrix in float32, or in bf16 where half is not 0.
DEVICE float get(const void* p, int half, u64 i) {
  return half ? from_bits((u32)((const bf16*)p)[i].bits << 16) : ((const float*)p)[i];
}
DEVICE void put(void* p, int half, u64 i, float x) {
  if (half) put((bf16*)p + i, x);
  else put((float*)p + i, x);
}

// The types argument of a kernel has a bit for each matrix that may be in bf16, in their
// order, set where it is.
enum { DST_BF16 = 1, X_BF16 = 2, Y_BF16 = 4 };

// Eight elements of a matrix from i on, a multiple of 8; as get and put.
DEVICE void get8(float (&x)[8], const void* p, int half, u64 i) {
  if (half) {
    u32 y[4];
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(y[0]), "=r"(y[1]), "=r"(y[2]), "=r"(y[3]) : "l"((const bf16*)p + i));
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = from_bits(j % 2 ? y[j / 2] & 0xffff0000 : y[j / 2] << 16);
  } else {
#pragma unroll
    for (int j = 0; j < 8; j += 4)
      asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[j]), "=f"(x[j + 1]), "=f"(x[j + 2]), "=f"(x[j + 3]) : "l"((const float*)p + i + j));
  }
}
DEVICE void put8(void* p, int half, u64 i, const float (&x)[8]) {
  if (half) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"((bf16*)p + i), "r"(to_bf16x2(x[0], x[1])), "r"(to_bf16x2(x[2], x[3])),
                 "r"(to_bf16x2(x[4], x[5])), "r"(to_bf16x2(x[6], x[7])) : "memory");
  } else {
#pragma unroll
    for (int j = 0; j < 8; j += 4)
      asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"((float*)p + i + j), "f"(x[j]), "f"(x[j + 1]), "f"(x[j + 2]), "f"(x[j + 3]) : "memory");
  }
}

// The sum over a warp in all lanes: ((lane + lane^16) + ^8) + ^4 ...
DEVICE float warp_sum(float x) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2) x = x + from_partner(x, m);
  return x;
}

DEVICE float warp_max(float x) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2) x = larger(x, from_partner(x, m));
  return x;
}

// e^x to about a unit in the last place: 2^n times a polynomial of Cephes' expf.
DEVICE float exponential(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  float n = nearest(x * 1.44269504088896341f);
  float r = fma(n, -0.693359375f, x);
  r = fma(n, 2.12194440e-4f, r);
  float p = 1.9875691500e-4f;
  p = fma(p, r, 1.3981999507e-3f);
  p = fma(p, r, 8.3334519073e-3f);
  p = fma(p, r, 4.1665795894e-2f);
  p = fma(p, r, 1.6666665459e-1f);
  p = fma(p, r, 5.0000001201e-1f);
  p = fma(p, r * r, r) + 1.0f;
  int e = to_int(n), half = e >> 1;
  return p * from_bits((u32)(half + 127) << 23) * from_bits((u32)(e - half + 127) << 23);
}

// Activations, numbered as tensor.Activation.
DEVICE float activate(int act, float x) {
  if (act == 1) return divide(x, 1.0f + exponential(-x));
  if (act == 2) {
    // x/2 (1 + tanh u) = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3)
    float u = 1.5957691216057308f * fma(0.044715f * x * x, x, x);
    return divide(x, 1.0f + exponential(-u));
  }
  return x;
}

// What follows a product: residual + gate[group] * act(y + bias). 0 is an absent part.
struct Epilogue {
  const float* bias;
  int act;
  const float* gate;
  int gate_stride;
  const int* group;
  const float* residual;
  int residual_stride;
};

DEVICE float finish(const Epilogue& e, int i, int j, float y) {
  if (e.bias) y = y + e.bias[j];
  y = activate(e.act, y);
  if (e.gate) y = y * e.gate[(u64)(e.group ? e.group[i] : 0) * e.gate_stride + j];
  if (e.residual) y = y + e.residual[(u64)i * e.residual_stride + j];
  return y;
}

// Copies up to 16 bytes to shared memory, the rest of 16 is zeros.
DEVICE void copy16(u64 to, const bf16* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"l"(to), "l"(from), "r"(bytes) : "memory");
}
DEVICE void commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int N>
DEVICE void wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }

DEVICE float exp2_approx(float x) { float y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

DEVICE int clamp(int x, int low, int high) { return x < low ? low : x > high ? high : x; }
