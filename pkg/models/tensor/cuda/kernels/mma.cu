// Products and attention in bf16 on tensor cores: factors are bf16, sums float32. The
// order of a sum is that of the hardware within 16 products, and ascending from there.
// Rows of bf16 matrices begin at multiples of 8 elements; what lies beyond the last
// column is not read.

DEVICE void load_matrices(u32 (&r)[4], u64 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(a) : "memory");
}
DEVICE void load_transposed(u32 (&r)[4], u64 a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "l"(a) : "memory");
}
DEVICE void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
// A block of 256 threads makes 128 x 128 elements, in slabs of 32 of k, two in flight.
// Warp w makes rows 64 (w/4) to +63, columns 32 (w%4) to +31, in tiles of 16 x 8.
enum { MMA_TILE = 128, MMA_SLAB = 32, MMA_ROW = 40 };

union __attribute__((aligned(16))) MmaTile {
  struct {
    bf16 a[2][MMA_TILE][MMA_ROW], b[2][MMA_TILE][MMA_ROW];
  };
  float sum[32][MMA_TILE + 4];
};

// Slab is rows of a matrix, from the first of a tile on.
struct Slab {
  const bf16* p;
  int stride, first, rows, k;
  __attribute__((device, always_inline)) void load(bf16 (*tile)[MMA_ROW], int k0) const {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int chunk = thread_x() + 256 * i, row = chunk / 4, col = k0 + chunk % 4 * 8;
      int bytes = first + row < rows ? clamp(2 * (k - col), 0, 16) : 0;
      copy16(in_shared(&tile[row][chunk % 4 * 8]), bytes > 0 ? p + (u64)(first + row) * stride + col : p, bytes);
    }
  }
};

// product_bf16 is dst [m, n] = a [m, k] w[n, k]^T with an epilogue in float32.
template <class A>
DEVICE void product_bf16(MmaTile& tile, Place at, const A& x, const bf16* w, int w_stride, void* dst, int dst_stride, int m, int n, int k,
                         const Epilogue& e, int types) {
  int t = thread_x(), warp = t / 32, lane = t % 32;
  int row0 = at.row, col0 = at.col, wm = warp / 4 * 64, wn = warp % 4 * 32;
  float sum[4][4][4];
#pragma unroll
  for (int i = 0; i < 4; i++)
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) sum[i][j][e] = 0;

  int slabs = (k + MMA_SLAB - 1) / MMA_SLAB;
  Slab weights = {w, w_stride, col0, n, k};
  x.load(tile.a[0], 0);
  weights.load(tile.b[0], 0);
  commit();
  for (int s = 0; s < slabs; s++) {
    if (s + 1 < slabs) {
      x.load(tile.a[(s + 1) & 1], (s + 1) * MMA_SLAB);
      weights.load(tile.b[(s + 1) & 1], (s + 1) * MMA_SLAB);
    }
    commit();
    wait<1>();
    sync_block();
    u64 as = in_shared(&tile.a[s & 1][wm + lane % 16][lane / 16 * 8]);
    u64 bs = in_shared(&tile.b[s & 1][wn + lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8]);
#pragma unroll
    for (int kk = 0; kk < MMA_SLAB; kk += 16) {
      u32 b[2][4];
#pragma unroll
      for (int j = 0; j < 2; j++) load_matrices(b[j], bs + (j * 16 * MMA_ROW + kk) * 2);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        u32 a[4];
        load_matrices(a, as + (i * 16 * MMA_ROW + kk) * 2);
#pragma unroll
        for (int j = 0; j < 4; j++) mma(sum[i][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
    sync_block();
  }

  wait<0>(); // without a k nothing has waited for the first slab
  sync_block();

  // Through shared memory, 16 rows of each half at a time, so that rows are written whole.
#pragma unroll
  for (int i = 0; i < 4; i++) {
    int r = warp / 4 * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      int c = wn + j * 8 + lane % 4 * 2;
      tile.sum[r][c] = sum[i][j][0];
      tile.sum[r][c + 1] = sum[i][j][1];
      tile.sum[r + 8][c] = sum[i][j][2];
      tile.sum[r + 8][c + 1] = sum[i][j][3];
    }
    sync_block();
    int col = t % MMA_TILE;
    for (int q = t / MMA_TILE; q < 32; q += 2) {
      int row = row0 + q / 16 * 64 + i * 16 + q % 16;
      if (row < m && col0 + col < n)
        put(dst, types & DST_BF16, (u64)row * dst_stride + col0 + col, finish(e, row, col0 + col, tile.sum[q][col]));
    }
    sync_block();
  }
}

KERNEL(256) linear_bf16(void* dst, int dst_stride, const bf16* x, int x_stride, const bf16* w, int w_stride, int m, int n,
                        int k, const float* bias, int act, const float* gate, int gate_stride, const int* group,
                        const float* residual, int residual_stride, int types) {
  SHARED MmaTile tile;
  Epilogue e = {bias, act, gate, gate_stride, group, residual, residual_stride};
  Place at = Place::of(n, MMA_TILE);
  Slab rows = {x, x_stride, at.row, m, k};
  product_bf16(tile, at, rows, w, w_stride, dst, dst_stride, m, n, k, e, types);
}

// PixelSlab is Pixels of bf16, c a multiple of 8: 8 columns are channels of one pixel.
struct PixelSlab {
  const bf16* x;
  const int *picture, *top, *left; // of each row of the tile: its first row of x, or -1; its corner
  int h, w, c, kw, k;
  __attribute__((device, always_inline)) void load(bf16 (*tile)[MMA_ROW], int k0) const {
    int col = k0 + thread_x() % 4 * 8, position = col / c, channel = col - position * c;
    int dy = position / kw, dx = position - dy * kw;
#pragma unroll
    for (int i = 0; i < 2; i++) {
      int row = thread_x() / 4 + 64 * i, y = top[row] + dy, column = left[row] + dx, n = picture[row];
      bool in = col < k && n >= 0 && (u32)y < (u32)h && (u32)column < (u32)w;
      copy16(in_shared(&tile[row][thread_x() % 4 * 8]), in ? x + ((u64)(n + y) * w + column) * c + channel : x, in ? 16 : 0);
    }
  }
};

// conv_bf16 is conv_f32 of x and w [oc, kh, kw, c] in bf16.
KERNEL(256) conv_bf16(void* dst, const bf16* x, const bf16* weights, int n, int h, int w, int c, int oh, int ow, int oc, int kh,
                      int kw, int stride, int top, int left, const float* bias, int act, const float* gate, int gate_stride,
                      const int* group, const float* residual, int residual_stride, int types) {
  SHARED MmaTile tile;
  SHARED int picture[MMA_TILE], first_y[MMA_TILE], first_x[MMA_TILE];
  Place at = Place::of(oc, MMA_TILE);
  int t = thread_x(), m = n * oh * ow, k = kh * kw * c;
  if (t < MMA_TILE) {
    int row = at.row + t, line = row / ow, image = line / oh;
    picture[t] = row < m ? image * h : -1;
    first_y[t] = (line - image * oh) * stride - top;
    first_x[t] = (row - line * ow) * stride - left;
  }
  sync_block();
  Epilogue e = {bias, act, gate, gate_stride, group, residual, residual_stride};
  PixelSlab pixels = {x, picture, first_y, first_x, h, w, c, kw, k};
  product_bf16(tile, at, pixels, weights, k, dst, oc, m, oc, k, e, types);
}

// Flash attention. A block of 8 warps takes up to 128 queries that see the first of one
// list of keys, one head, and V columns of its values; a warp 16 queries, keys in chunks of K,
// as many as fit the memory of V columns of the queries twice. As in
// attention_f32 the maximum moves from chunk to chunk; weights of keys are bf16 when they
// meet the values, float32 in their sum: lane 4r+c adds keys 8i+2c, 8i+2c+1 of a chunk in
// their order, then the four lanes of a row are added as warp_sum does.
enum { QUERIES = 128 };

// Rows of a head to shared memory; bytes beyond d, and rows that are not there, are zeros.
template <int D>
DEVICE void load_rows(bf16 (*tile)[D + 8], const bf16* p, int stride, const int* rows, int step, int n, int most, int d) {
  for (u32 i = thread_x(); i < (u32)most * (D / 8); i += 2 * QUERIES) {
    int row = i / (D / 8), col = i % (D / 8) * 8;
    int bytes = row < n ? clamp(2 * (d - col), 0, 16) : 0;
    copy16(in_shared(&tile[row][col]), bytes > 0 ? p + (u64)rows[row * step] * stride + col : p, bytes);
  }
}

template <int V, class T>
DEVICE void write_row(T* out, const float (&acc)[V / 8][4], int half, int d, float factor) {
#pragma unroll
  for (int i = 0; i < V / 8; i++)
    if (i * 8 < d)
#pragma unroll
      for (int e = 0; e < 2; e++) put(out + i * 8 + thread_x() % 4 * 2 + e, acc[i][2 * half + e] * factor);
}

template <int D, int V, int K>
DEVICE void flash(bf16* shared, void* dst, int dst_stride, const bf16* q, int q_stride, const bf16* k, int k_stride, const bf16* v,
                  int v_stride, const int* tiles, const int* queries, const int* keys, int heads, int kv_heads, int d, float scale, int types) {
  int lane = thread_x() % 32, warp = thread_x() / 32, part = D > V ? block_y() / heads : 0, head = block_y() - part * heads;
  int kv = head * kv_heads / heads, values = d - part * V; // columns from the first of this block on
  int first_query = tiles[2 * block_x()], n = tiles[2 * block_x() + 1];
  queries += 3 * first_query;
  keys += queries[1];
  int most = queries[3 * n - 1]; // counts do not fall
  q += head * d;
  k += kv * d;
  v += kv * d + part * V;

  u32 qf[D / 16][4];
#pragma unroll
  for (int from = 0; from < D; from += V) {
    bf16(*slab)[V + 8] = (bf16(*)[V + 8])shared;
    load_rows<V>(slab, q + from, q_stride, queries, 3, n, QUERIES, d - from);
    commit();
    wait<0>();
    sync_block();
#pragma unroll
    for (int i = 0; i < V / 16; i++) load_matrices(qf[from / 16 + i], in_shared(&slab[warp * 16 + lane % 16][i * 16 + lane / 16 * 8]));
    sync_block();
  }

  int mine = warp * 16 + lane / 4; // and mine + 8
  int count[2] = {mine < n ? queries[3 * mine + 2] : 0, mine + 8 < n ? queries[3 * (mine + 8) + 2] : 0};
  float top[2] = {0, 0}, total[2] = {0, 0}, acc[V / 8][4];
#pragma unroll
  for (int i = 0; i < V / 8; i++)
#pragma unroll
    for (int e = 0; e < 4; e++) acc[i][e] = 0;
  scale = scale * 1.44269504088896341f; // powers of 2 from here on

  enum { STAGE = K * (D + 8 + V + 8) };
  int chunks = (most + K - 1) / K;
  for (int c = -1; c < chunks; c++) {
    // stage c & 1: keys, then values
    if (c + 1 < chunks) {
      bf16* stage = shared + ((c + 1) & 1) * STAGE;
      int from = (c + 1) * K, left = most - from;
      load_rows<D>((bf16(*)[D + 8])stage, k, k_stride, keys + from, 1, left, K, d);
      load_rows<V>((bf16(*)[V + 8])(stage + K * (D + 8)), v, v_stride, keys + from, 1, left, K, values);
    }
    commit();
    if (c < 0) continue;
    wait<1>();
    sync_block();
    u64 ks = in_shared(shared + (c & 1) * STAGE), vs = ks + K * (D + 8) * 2;
    float s[K / 8][4];
#pragma unroll
    for (int j = 0; j < K / 8; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[j][e] = 0;
#pragma unroll
    for (int i = 0; i < D / 16; i++)
#pragma unroll
      for (int j = 0; j < K / 16; j++) {
        u32 b[4];
        load_matrices(b, ks + ((j * 16 + lane % 8 + lane / 16 * 8) * (D + 8) + i * 16 + lane / 8 % 2 * 8) * 2);
        mma(s[2 * j], qf[i], b[0], b[1]);
        mma(s[2 * j + 1], qf[i], b[2], b[3]);
      }

    u32 p[K / 16][4];
#pragma unroll
    for (int half = 0; half < 2; half++) { // rows lane/4 and lane/4 + 8
      float here = -__builtin_inff();
#pragma unroll
      for (int j = 0; j < K / 8; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          int key = c * K + j * 8 + lane % 4 * 2 + e;
          float x = s[j][2 * half + e] * scale;
          s[j][2 * half + e] = key < count[half] ? x : -__builtin_inff();
          here = larger(here, s[j][2 * half + e]);
        }
      here = larger(here, from_partner(here, 1));
      here = larger(here, from_partner(here, 2));
      // A row that sees no key of this chunk keeps what it has.
      float now = c == 0 ? here : larger(top[half], here);
      bool any = now > -__builtin_inff();
      float shrink = c > 0 && any ? exp2_approx(top[half] - now) : 0.0f;
      top[half] = now;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < K / 8; j++) {
        float p0 = any ? exp2_approx(s[j][2 * half] - now) : 0.0f, p1 = any ? exp2_approx(s[j][2 * half + 1] - now) : 0.0f;
        sum = sum + p0;
        sum = sum + p1;
        p[j / 2][j % 2 * 2 + half] = to_bf16x2(p0, p1);
      }
      total[half] = fma(total[half], shrink, sum);
#pragma unroll
      for (int i = 0; i < V / 8; i++) {
        acc[i][2 * half] = acc[i][2 * half] * shrink;
        acc[i][2 * half + 1] = acc[i][2 * half + 1] * shrink;
      }
    }
#pragma unroll
    for (int j = 0; j < K / 16; j++)
#pragma unroll
      for (int i = 0; i < V / 16; i++) {
        u32 b[4];
        load_transposed(b, vs + ((j * 16 + lane % 16) * (V + 8) + i * 16 + lane / 16 * 8) * 2);
        mma(acc[2 * i], p[j], b[0], b[1]);
        mma(acc[2 * i + 1], p[j], b[2], b[3]);
      }
    sync_block();
  }

#pragma unroll
  for (int half = 0; half < 2; half++) {
    float sum = total[half] + from_partner(total[half], 2);
    sum = sum + from_partner(sum, 1);
    int row = mine + 8 * half;
    if (row < n) {
      u64 out = (u64)queries[3 * row] * dst_stride + head * d + part * V;
      float one = count[half] > 0 ? divide(1.0f, sum) : 0.0f;
      if (types & DST_BF16) write_row<V>((bf16*)dst + out, acc, half, values, one);
      else write_row<V>((float*)dst + out, acc, half, values, one);
    }
  }
}

// attention_bf16_D is for heads of at most D columns, a multiple of 8. tiles are pairs:
// the first query, and how many; queries and keys are those of attention_f32. Beyond 128
// columns a head has a block for each 128 of its values, all of the first ones before the next.
// A thread has the registers that BLOCKS of a multiprocessor leave: an assembler that is not told spills to have one more.
#define ATTENTION(D, V, K, BLOCKS)                                                                                                          \
  RESIDENT(2 * QUERIES, BLOCKS) attention_bf16_##D(void* dst, int dst_stride, const bf16* q, int q_stride, const bf16* k, int k_stride,     \
                                         const bf16* v, int v_stride, const int* tiles, const int* queries, const int* keys,                \
                                         int heads, int kv_heads, int d, float scale, int types) {                                          \
    SHARED __attribute__((aligned(16))) bf16 shared[QUERIES * (V + 8)];                                                                     \
    flash<D, V, K>(shared, dst, dst_stride, q, q_stride, k, k_stride, v, v_stride, tiles, queries, keys, heads, kv_heads, d, scale, types); \
  }

ATTENTION(32, 32, 32, 2)
ATTENTION(64, 64, 32, 2)
ATTENTION(128, 128, 32, 1)
ATTENTION(384, 128, 16, 1)
