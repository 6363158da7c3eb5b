// Products in float32. Each element of the result is one chain of fma over k, ascending,
// whatever the tile. A block of 64 threads makes 64 x 64 elements, 8 x 8 a thread: rows
// and columns 4t to 4t+3 and 32+4t to 32+4t+3 of its tile.

enum { TILE = 64, SLAB = 16, PAD = 68 };

// Tile is the shared memory of a block: slabs of both operands, k by k, then the sums.
union __attribute__((aligned(16))) Tile {
  struct {
    float a[SLAB][PAD], b[SLAB][PAD];
  };
  float sum[TILE][PAD];
};

// Place is the first row and column of the tile that a block of a product makes. Blocks are counted in x alone, along the
// columns first: a grid has 2^31 blocks there, and only 65535 in y, which are fewer than the tiles of an image.
struct Place {
  int row, col;
  DEVICE Place of(int n, int tile) {
    int columns = (n + tile - 1) / tile, row = block_x() / columns;
    Place p = {row * tile, (block_x() - row * columns) * tile};
    return p;
  }
};

DEVICE void quarter(float (&sum)[8][8], int i0, int j0, const float (&x)[8], const float (&w)[8]) {
#pragma unroll
  for (int i = i0; i < i0 + 4; i++)
#pragma unroll
    for (int j = j0; j < j0 + 4; j++) sum[i][j] = fma(x[i], w[j], sum[i][j]);
}

// multiply leaves a tile of sums over all k in shared memory. a.at and b.at give elements
// of m rows and n columns, here and beyond; halves of a tile that are not there are not
// computed.
template <class A, class B>
DEVICE void multiply(Tile& tile, Place at, int m, int n, int k_end, const A& a, const B& b) {
  bool tall = m - at.row > 32, wide = n - at.col > 32;
  int t = thread_x(), tx = t % 8 * 4, ty = t / 8 * 4;
  u64 xs = in_shared(&tile.a[0][ty]), ws = in_shared(&tile.b[0][tx]);
  float sum[8][8];
#pragma unroll
  for (int i = 0; i < 8; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) sum[i][j] = 0;
  for (int k0 = 0; k0 < k_end; k0 += SLAB) {
    int k = k0 + t % SLAB;
    typename A::Column ca = a.column(k);
#pragma unroll 4
    for (int i = t / SLAB; i < TILE; i += 64 / SLAB) {
      tile.a[t % SLAB][i] = k < k_end ? a.at(ca, i) : 0.0f;
      tile.b[t % SLAB][i] = k < k_end ? b.at(k, i) : 0.0f;
    }
    sync_block();
#pragma unroll 2
    for (int kk = 0; kk < SLAB; kk++) {
      float x[8], w[8];
      load4(x, xs + kk * (4 * PAD));
      load4(x + 4, xs + kk * (4 * PAD) + 128);
      load4(w, ws + kk * (4 * PAD));
      load4(w + 4, ws + kk * (4 * PAD) + 128);
      quarter(sum, 0, 0, x, w);
      if (wide) quarter(sum, 0, 4, x, w);
      if (tall) quarter(sum, 4, 0, x, w);
      if (wide && tall) quarter(sum, 4, 4, x, w);
    }
    sync_block();
  }
#pragma unroll
  for (int i = 0; i < 8; i++)
#pragma unroll
    for (int j = 0; j < 8; j++) tile.sum[ty + i % 4 + i / 4 * 32][tx + j % 4 + j / 4 * 32] = sum[i][j];
  sync_block();
}

// store writes the tile, a row at a time.
DEVICE void store(const Tile& tile, Place at, float* dst, int dst_stride, int m, int n, const Epilogue& e) {
  int col = at.col + thread_x(), row = at.row;
  if (col >= n) return;
  for (int i = 0; i < TILE && row + i < m; i++)
    dst[(u64)(row + i) * dst_stride + col] = finish(e, row + i, col, tile.sum[i][thread_x()]);
}

// finish_f32 is the epilogue of products that were made elsewhere.
KERNEL(128) finish_f32(void* dst, int dst_stride, const float* y, int y_stride, int m, int n, const float* bias, int act,
                       const float* gate, int gate_stride, const int* group, const float* residual, int residual_stride, int types) {
  int i = block_x() * 128 + thread_x();
  if (i >= m * n) return;
  int row = i / n, col = i - row * n;
  Epilogue e = {bias, act, gate, gate_stride, group, residual, residual_stride};
  put(dst, types & DST_BF16, (u64)row * dst_stride + col, finish(e, row, col, y[(u64)row * y_stride + col]));
}

// finish_wide is finish_f32 as the wide kernels of rows.cu are.
KERNEL(128) finish_wide(void* dst, int dst_stride, const float* y, int y_stride, int m, int n, const float* bias, int act,
                        const float* gate, int gate_stride, const int* group, const float* residual, int residual_stride, int types) {
  int i = block_x() * 128 + thread_x(), pieces = n / 8;
  if (i >= m * pieces) return;
  int row = i / pieces, col = 8 * (i - row * pieces);
  float v[8], e[8];
  get8(v, y, 0, (u64)row * y_stride + col);
  if (bias) {
    get8(e, bias, 0, col);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = v[j] + e[j];
  }
#pragma unroll
  for (int j = 0; j < 8; j++) v[j] = activate(act, v[j]);
  if (gate) {
    get8(e, gate, 0, (u64)(group ? group[row] : 0) * gate_stride + col);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = v[j] * e[j];
  }
  if (residual) {
    get8(e, residual, 0, (u64)row * residual_stride + col);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = v[j] + e[j];
  }
  put8(dst, types & DST_BF16, (u64)row * dst_stride + col, v);
}

// Rows are rows of a matrix, from the first of a tile on.
struct Rows {
  typedef int Column;
  const float* p;
  int stride, left;
  DEVICE Rows from(const float* p, int stride, int first, int rows) {
    Rows r;
    r.p = p + (u64)first * stride;
    r.stride = stride;
    r.left = rows - first;
    return r;
  }
  __attribute__((device, always_inline)) int column(int k) const { return k; }
  __attribute__((device, always_inline)) float at(int k, int row) const { return row < left ? p[(u64)row * stride + k] : 0.0f; }
};

// linear_f32 is dst [m, n] = x [m, k] w[n, k]^T with an epilogue.
KERNEL(64) linear_f32(float* dst, int dst_stride, const float* x, int x_stride, const float* w, int m, int n, int k,
                      const float* bias, int act, const float* gate, int gate_stride, const int* group,
                      const float* residual, int residual_stride) {
  SHARED Tile tile;
  Epilogue e = {bias, act, gate, gate_stride, group, residual, residual_stride};
  Place at = Place::of(n, TILE);
  multiply(tile, at, m, n, k, Rows::from(x, x_stride, at.row, m), Rows::from(w, k, at.col, n));
  store(tile, at, dst, dst_stride, m, n, e);
}

// Pixels are the inputs of output pixels, from the first of a tile on: column k is channel
// k % c of kernel position k / c.
struct Pixels {
  struct Column {
    int dy, dx, channel;
  };
  const float* x;
  const int *picture, *top, *left; // of each row of the tile: its first row of x, or -1; its corner
  int h, w, c, kw;
  __attribute__((device, always_inline)) Column column(int k) const {
    Column q;
    int position = k / c;
    q.channel = k - position * c;
    q.dy = position / kw;
    q.dx = position - q.dy * kw;
    return q;
  }
  __attribute__((device, always_inline)) float at(const Column& q, int row) const {
    int y = top[row] + q.dy, column = left[row] + q.dx, n = picture[row];
    if (n < 0 || (u32)y >= (u32)h || (u32)column >= (u32)w) return 0.0f;
    return x[((u64)(n + y) * w + column) * c + q.channel];
  }
};

// conv_f32 convolves x [n, h, w, c] with zeros around it; w is [oc, kh, kw, c].
KERNEL(64) conv_f32(float* dst, const float* x, const float* weights, int n, int h, int w, int c, int oh, int ow, int oc,
                    int kh, int kw, int stride, int top, int left, const float* bias, int act, const float* gate,
                    int gate_stride, const int* group, const float* residual, int residual_stride) {
  SHARED Tile tile;
  SHARED int picture[TILE], first_y[TILE], first_x[TILE];
  Place at = Place::of(oc, TILE);
  int t = thread_x(), m = n * oh * ow, row = at.row + t;
  int line = row / ow, image = line / oh;
  picture[t] = row < m ? image * h : -1;
  first_y[t] = (line - image * oh) * stride - top;
  first_x[t] = (row - line * ow) * stride - left;
  sync_block();
  Pixels pixels;
  pixels.x = x;
  pixels.picture = picture;
  pixels.top = first_y;
  pixels.left = first_x;
  pixels.h = h;
  pixels.w = w;
  pixels.c = c;
  pixels.kw = kw;
  Epilogue e = {bias, act, gate, gate_stride, group, residual, residual_stride};
  int k = kh * kw * c;
  multiply(tile, at, m, oc, k, pixels, Rows::from(weights, k, at.col, oc));
  store(tile, at, dst, oc, m, oc, e);
}
