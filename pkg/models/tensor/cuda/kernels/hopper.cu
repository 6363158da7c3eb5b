// Flash attention for GPUs of compute capability 9.0 (Hopper). Products of a warpgroup (wgmma) read their factors from
// shared memory and run beside the instructions that follow them. What is computed, and the lists of queries and keys,
// are those of flash in mma.cu.
//
// A block takes up to 128 queries of one head, and keys in chunks of 128. Two warpgroups have 64 queries each; a third
// one loads keys and values into stages of shared memory, so that neither of the two waits for the other. While the
// scores of a chunk become weights, the product of the weights before and their values runs.
//
// A tile of shared memory is panels of 64 columns: rows of 128 bytes, in which 16 bytes lie at their place XOR the row
// (modulo 8), as the products want it.
#include "common.cuh"

enum { QUERIES = 128, CHUNK = 128, LOADERS = 128, THREADS = LOADERS + 2 * 128, PANEL = 128 * 128 };

// Copies 16 bytes to shared memory.
DEVICE void copy_whole(u64 to, u64 from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"l"(to), "l"(from) : "memory");
}

extern __attribute__((shared)) __attribute__((aligned(1024))) char dynamic[];

// d += a b^T of 64 rows and 16 columns; without add d is new. a and b are described.
DEVICE void multiply(float (&d)[64], u64 a, u64 b, int add) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "%64, %65, p, 1, 1, 0, 0;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "l"(a), "l"(b), "r"(add));
}
// d += a b with a of registers, as mma has it; b is described.
DEVICE void accumulate(float (&d)[64], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
      "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
      "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
      "{%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
        "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
        "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
        "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
        "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}
DEVICE void accumulate(float (&d)[32], const u32 (&a)[4], u64 b) {
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
      "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
      "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
      "{%32, %33, %34, %35}, %36, p, 1, 1, 1;\n}"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
        "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
        "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
        "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(1));
}
DEVICE void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// What this thread has written to shared memory is there for products.
DEVICE void fence_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void start() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most N batches of products run. d is what they have made: nothing reads it before.
template <int N>
DEVICE void finish(float (&d)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
                 "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
                 "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
                 "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
                 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
               : "n"(N) : "memory");
}
template <int N>
DEVICE void finish(float (&d)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
                 "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
                 "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "n"(N) : "memory");
}

// What a product is told of a tile: where it begins, the bytes from one panel to the next, 1024 from 8 rows to the next,
// all in units of 16; and that rows of 128 bytes are swizzled. The word is the lower one.
DEVICE u32 low_word(u64 at) { return (u32)(at >> 4 & 0x3fff) | (PANEL >> 4) << 16; }
DEVICE u64 describe(u32 low) {
  u64 x;
  asm("mov.b64 %0, {%1, %2};" : "=l"(x) : "r"(low), "r"(1024 >> 4 | 1 << 30));
  return x;
}

// Piece is what a thread loads of each row of a tile of D columns: 16 bytes at the same place, of rows AT_ONCE apart.
template <int D>
struct Piece {
  enum { PIECES = D / 8, AT_ONCE = LOADERS / PIECES, ROWS = 128 / AT_ONCE };
  int first, column, bytes; // bytes beyond d are zeros
  bool whole; // d is D
  u64 place;
  __attribute__((device, always_inline)) Piece(int d) {
    int thread = thread_x() % LOADERS, piece = thread % PIECES;
    first = thread / PIECES;
    whole = d == D;
    column = 8 * piece;
    bytes = clamp(2 * (d - column), 0, 16);
    if (bytes == 0) column = 0;
    place = piece / 8 * PANEL + first * 128 + ((piece % 8 ^ first % 8) << 4);
  }
  // Loads the rows that n of a list name; rows from n on are zeros.
  __attribute__((device, always_inline)) void load(u64 tile, const bf16* p, int stride, const int* list, int n) const {
    u64 to = tile + place;
    u64 from = (u64)(p + column);
    u32 step = 2 * stride;
    list += first;
    if (n >= 128 && whole) {
#pragma unroll
      for (int i = 0; i < ROWS; i++) copy_whole(to + i * AT_ONCE * 128, from + (u64)(u32)list[i * AT_ONCE] * step);
    } else {
      asm volatile(""); // a branch: most chunks are whole
#pragma unroll
      for (int i = 0; i < ROWS; i++) {
        int row = first + i * AT_ONCE < n ? list[i * AT_ONCE] : 0;
        copy16(to + i * AT_ONCE * 128, (const bf16*)(from + (u64)(u32)row * step), first + i * AT_ONCE < n ? bytes : 0);
      }
    }
  }
};

// The 64 queries of a warpgroup, by itself: nobody else reads them.
template <int D>
DEVICE void load_queries(u64 tile, const bf16* q, int stride, const int* queries, int n, int d) {
  Piece<D> piece(d);
#pragma unroll
  for (int i = 0; i < Piece<D>::ROWS / 2; i++) {
    int row = piece.first + i * Piece<D>::AT_ONCE;
    copy16(tile + piece.place + i * Piece<D>::AT_ONCE * 128,
           q + piece.column + (row < n ? (u64)queries[3 * row] * stride : 0), row < n ? piece.bytes : 0);
  }
  commit();
  wait<0>();
  fence_proxy();
}

// Rows are what a thread has of two queries: row lane/4 of its warp's 16, and 8 further.
struct Rows {
  int count[2];            // keys that they see
  float top[2], total[2];  // the highest score so far; this thread's part of the sum of weights
};

// As exp2_approx, and where it is written: not after the wait for a product that is to run beside it.
DEVICE float exp2_here(float x) { float y; asm volatile("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }

// Makes weights of the scores of a chunk; shrink is what the sums so far are to be multiplied by.
DEVICE void weigh(float (&s)[64], Rows& r, float (&shrink)[2], int chunk, bool cut, float scale) {
  if (cut) {
    asm volatile(""); // a branch: most chunks are whole
#pragma unroll
    for (int i = 0; i < 64; i++)
      if (chunk * CHUNK + i / 4 * 8 + thread_x() % 4 * 2 + i % 2 >= r.count[i / 2 % 2]) s[i] = -__builtin_inff();
  }
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float now = r.top[half], also = r.top[half];
#pragma unroll
    for (int i = 0; i < 16; i++) now = larger(now, s[4 * i + 2 * half]), also = larger(also, s[4 * i + 2 * half + 1]);
    now = larger(now, also);
    now = larger(now, from_partner(now, 1));
    now = larger(now, from_partner(now, 2));
    float offset = now > -__builtin_inff() ? now * scale : 0.0f; // without a key so far all weights are 0
    shrink[half] = exp2_approx(fma(r.top[half], scale, -offset));
    r.top[half] = now;
    float sum[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 16; i++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float p = exp2_here(fma(s[4 * i + 2 * half + e], scale, -offset));
        s[4 * i + 2 * half + e] = p;
        sum[e] = sum[e] + p;
      }
    r.total[half] = fma(r.total[half], shrink[half], sum[0] + sum[1]);
  }
}

// s is the scores of 64 queries and a chunk of keys; the words describe their tiles.
template <int D>
DEVICE void score(float (&s)[64], u32 q, u32 k) {
#pragma unroll
  for (int c = 0; c < D; c += 16) {
    int at = (c / 64 * PANEL + c % 64 * 2) >> 4;
    multiply(s, describe(q + at), describe(k + at), c);
  }
}

// Adds the values of a chunk by their weights p to acc.
template <int N>
DEVICE void add_values(float (&acc)[N], const u32 (&p)[8][4], u32 v) {
#pragma unroll
  for (int j = 0; j < 8; j++) accumulate(acc, p[j], describe(v + (j * 16 * 128 >> 4)));
}

// Elements i and i + 1 of a matrix; aligned says that i and where the matrix begins are even.
DEVICE void put_pair(void* p, int half, bool aligned, u64 i, float x, float y) {
  if (aligned && half) {
    *(u32*)((bf16*)p + i) = to_bf16x2(x, y);
  } else if (aligned) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"((float*)p + i), "f"(x), "f"(y) : "memory");
  } else {
    put(p, half, i, x);
    put(p, half, i + 1, y);
  }
}

// Barriers: FULL + 2 stage + warpgroup, where the loaders arrive and a warpgroup waits; EMPTY + stage, the other way, both
// warpgroups.
enum { STAGES = 3, FULL = 1, EMPTY = FULL + 2 * STAGES };
DEVICE void arrive(int barrier, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }
DEVICE void await(int barrier, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory"); }

// What the loaders do: chunk c of keys and chunk c - 1 of values share a stage, since they are used together. A stage is
// announced when the next one is under way.
template <int D>
DEVICE void load_chunks(u64 stages, const bf16* k, int k_stride, const bf16* v, int v_stride, const int* keys, int most,
                        int chunks, int d) {
  Piece<D> piece(d);
  enum { STAGE = 2 * (D / 64) * PANEL };
  for (int c = 0, stage = 0; c <= chunks; c++, stage = stage + 1 < STAGES ? stage + 1 : 0) {
    if (c >= STAGES) await(EMPTY + stage, THREADS);
    u64 at = stages + stage * STAGE;
    if (c < chunks) piece.load(at, k, k_stride, keys + c * CHUNK, most - c * CHUNK);
    if (c > 0) piece.load(at + STAGE / 2, v, v_stride, keys + (c - 1) * CHUNK, most - (c - 1) * CHUNK);
    commit();
    if (c == 0) continue;
    wait<1>();
    fence_proxy();
    int before = stage > 0 ? stage - 1 : STAGES - 1;
    arrive(FULL + 2 * before, 2 * 128);
    arrive(FULL + 2 * before + 1, 2 * 128);
    if (c < chunks) continue;
    wait<0>();
    fence_proxy();
    arrive(FULL + 2 * stage, 2 * 128);
    arrive(FULL + 2 * stage + 1, 2 * 128);
  }
}

template <int D>
DEVICE void flash_wgmma(void* dst, int dst_stride, const bf16* q, int q_stride, const bf16* k, int k_stride, const bf16* v,
                        int v_stride, const int* tiles, const int* queries, const int* keys, int heads, int kv_heads, int d,
                        float scale, int types) {
  enum { TILE = D / 64 * PANEL };
  int lane = thread_x() % 32, head = block_y(), kv = head * kv_heads / heads;
  int first_query = tiles[2 * block_x()], n = tiles[2 * block_x() + 1];
  queries += 3 * first_query;
  keys += queries[1];
  int most = queries[3 * n - 1], least = queries[2]; // counts do not fall
  int chunks = (most + CHUNK - 1) / CHUNK;
  u64 qs = in_shared(dynamic); // queries, then stages of keys and values
  int warpgroup = from_lane((int)thread_x() / 128, 0);
  if (warpgroup == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    load_chunks<D>(qs + TILE, k + kv * d, k_stride, v + kv * d, v_stride, keys, most, chunks, d);
    return;
  }
  asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
  u32 q_low = low_word(qs + warpgroup * (64 * 128)), k_low = low_word(qs + TILE), v_low = low_word(qs + 2 * TILE);
  load_queries<D>(qs + warpgroup * (64 * 128), q + head * d, q_stride, queries + 3 * 64 * warpgroup, n - 64 * warpgroup, d);

  int mine = thread_x() / 32 * 16 + lane / 4; // and mine + 8
  Rows r;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    r.count[half] = mine + 8 * half < n ? queries[3 * (mine + 8 * half) + 2] : 0;
    r.top[half] = -__builtin_inff();
    r.total[half] = 0;
  }
  float acc[D / 2], s[64], shrink[2];
#pragma unroll
  for (int i = 0; i < D / 2; i++) acc[i] = 0;
  u32 p[8][4];
  scale = scale * 1.44269504088896341f; // powers of 2 from here on

  if (chunks > 0) {
    await(FULL + warpgroup, 2 * 128);
    fence();
    score<D>(s, q_low, k_low);
    start();
    finish<0>(s);
    weigh(s, r, shrink, 0, CHUNK > least, scale);
    if (STAGES <= chunks) arrive(EMPTY, THREADS);
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
      for (int i = 0; i < 4; i++) p[j][i] = to_bf16x2(s[8 * j + 2 * i], s[8 * j + 2 * i + 1]);
    int stage = 1;
    for (int c = 1; c < chunks; c++) {
      u32 at = stage * (2 * TILE >> 4);
      await(FULL + 2 * stage + warpgroup, 2 * 128);
      fence();
      score<D>(s, q_low, k_low + at);
      start();
      add_values(acc, p, v_low + at);
      start();
      finish<1>(s);
      weigh(s, r, shrink, c, (c + 1) * CHUNK > least, scale);
      // Never true. In a block of its own the wait stays after the weights, which the product is to run beside.
      if (r.total[0] < 0 || r.total[1] < 0) sync_warp();
      finish<0>(acc);
      if (c + STAGES <= chunks) arrive(EMPTY + stage, THREADS);
      stage = stage + 1 < STAGES ? stage + 1 : 0;
      if (shrink[0] != 1.0f || shrink[1] != 1.0f) {
        asm volatile(""); // a branch: a new maximum is rare
#pragma unroll
        for (int i = 0; i < D / 2; i++) acc[i] = acc[i] * shrink[i / 2 % 2];
      }
#pragma unroll
      for (int j = 0; j < 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[j][i] = to_bf16x2(s[8 * j + 2 * i], s[8 * j + 2 * i + 1]);
    }
    await(FULL + 2 * stage + warpgroup, 2 * 128);
    fence();
    add_values(acc, p, v_low + stage * (2 * TILE >> 4));
    start();
    finish<0>(acc);
  }

  bool pairs = dst_stride % 2 == 0 && (u64)dst % 8 == 0;
#pragma unroll
  for (int half = 0; half < 2; half++) {
    float sum = r.total[half] + from_partner(r.total[half], 2);
    sum = sum + from_partner(sum, 1);
    int row = mine + 8 * half;
    if (row < n) {
      u64 out = (u64)queries[3 * row] * dst_stride + head * d;
      float one = r.count[half] > 0 ? divide(1.0f, sum) : 0.0f;
#pragma unroll
      for (int i = 0; i < D / 8; i++)
        if (i * 8 < d)
          put_pair(dst, types & DST_BF16, pairs, out + i * 8 + lane % 4 * 2, acc[4 * i + 2 * half] * one,
                   acc[4 * i + 2 * half + 1] * one);
    }
  }
}

// attention_wgmma_D is attention_bf16_D for heads of at most D columns, and a positive scale.
#define ATTENTION(D)                                                                                                       \
  RESIDENT(THREADS, 1) attention_wgmma_##D(void* dst, int dst_stride, const bf16* q, int q_stride, const bf16* k,          \
                                           int k_stride, const bf16* v, int v_stride, const int* tiles,                    \
                                           const int* queries, const int* keys, int heads, int kv_heads, int d,            \
                                           float scale, int types) {                                                       \
    flash_wgmma<D>(dst, dst_stride, q, q_stride, k, k_stride, v, v_stride, tiles, queries, keys, heads, kv_heads, d,       \
                   scale, types);                                                                                          \
  }

ATTENTION(64)
ATTENTION(128)
