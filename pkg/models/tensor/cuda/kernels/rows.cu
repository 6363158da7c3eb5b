// Operations on rows. A warp takes a row, or a group of columns of one: lane l has columns
// l, l+32, ... in ascending order, and the lanes are added as warp_sum does.

KERNEL(128) layer_norm_f32(void* dst, int dst_stride, const void* x, int x_stride, const float* scale, int scale_stride,
                            const float* shift, int shift_stride, const int* group, int rows, int cols, float eps, int types) {
  int row = block_x() * 4 + thread_x() / 32, lane = thread_x() % 32;
  if (row >= rows) return;
  u64 from = (u64)row * x_stride, to = (u64)row * dst_stride;
  float sum = 0;
  for (int j = lane; j < cols; j += 32) sum = sum + get(x, types & X_BF16, from + j);
  float mean = divide(warp_sum(sum), (float)cols);
  float squares = 0;
  for (int j = lane; j < cols; j += 32) {
    float d = get(x, types & X_BF16, from + j) - mean;
    squares = fma(d, d, squares);
  }
  float deviation = root(divide(warp_sum(squares), (float)cols) + eps);
  int g = group ? group[row] : 0;
  scale += (u64)g * scale_stride;
  shift += (u64)g * shift_stride;
  for (int j = lane; j < cols; j += 32)
    put(dst, types & DST_BF16, to + j, fma(divide(get(x, types & X_BF16, from + j) - mean, deviation), 1.0f + scale[j], shift[j]));
}

// norm divides groups of n columns by the root of their mean square plus eps, or, with
// length, by the length, at least eps, over the root of n; and multiplies by w.
KERNEL(128) norm_f32(void* dst, int dst_stride, const void* x, int x_stride, const float* w, int rows, int groups, int n,
                     int length, float eps, int act, int types) {
  int item = block_x() * 4 + thread_x() / 32, lane = thread_x() % 32;
  if (item >= rows * groups) return;
  int row = item / groups, first = (item - row * groups) * n;
  u64 from = (u64)row * x_stride + first, to = (u64)row * dst_stride + first;
  float squares = 0;
  for (int j = lane; j < n; j += 32) {
    float v = get(x, types & X_BF16, from + j);
    squares = fma(v, v, squares);
  }
  squares = warp_sum(squares);
  float divisor = length ? larger(root(squares), eps) : root(divide(squares, (float)n) + eps);
  float factor = length ? root((float)n) : 1.0f;
  for (int j = lane; j < n; j += 32)
    put(dst, types & DST_BF16, to + j, activate(act, divide(get(x, types & X_BF16, from + j) * factor, divisor) * w[j]));
}

// norm_rope is norm by the root mean square, then rope of adjacent columns, of heads of
// 2 half columns. Lane l has the pairs l, l+32, ...: the first of a pair is added before
// the second.
KERNEL(128) norm_rope_f32(void* dst, int dst_stride, const void* x, int x_stride, const float* w, const float* cosines, int cos_stride,
                          const float* sines, int sin_stride, const int* table_rows, int rows, int heads, int half, float eps, int types) {
  int item = block_x() * 4 + thread_x() / 32, lane = thread_x() % 32;
  if (item >= rows * heads) return;
  int row = item / heads, first = (item - row * heads) * 2 * half, at = table_rows ? table_rows[row] : row;
  u64 from = (u64)row * x_stride + first, to = (u64)row * dst_stride + first;
  cosines += (u64)at * cos_stride;
  sines += (u64)at * sin_stride;
  float squares = 0;
  for (int j = lane; j < half; j += 32) {
    float a = get(x, types & X_BF16, from + 2 * j), b = get(x, types & X_BF16, from + 2 * j + 1);
    squares = fma(a, a, squares);
    squares = fma(b, b, squares);
  }
  float divisor = root(divide(warp_sum(squares), (float)(2 * half)) + eps);
  for (int j = lane; j < half; j += 32) {
    float a = divide(get(x, types & X_BF16, from + 2 * j), divisor) * w[2 * j];
    float b = divide(get(x, types & X_BF16, from + 2 * j + 1), divisor) * w[2 * j + 1];
    float c = cosines[j], s = sines[j];
    put(dst, types & DST_BF16, to + 2 * j, fma(-b, s, a * c));
    put(dst, types & DST_BF16, to + 2 * j + 1, fma(a, s, b * c));
  }
}

// rope rotates pairs of columns of each head: 2j and 2j+1, or, with halves, j and j+half.
KERNEL(128) rope_f32(void* dst, int dst_stride, const void* x, int x_stride, const float* cosines, int cos_stride, const float* sines,
                     int sin_stride, const int* table_rows, int rows, int pairs, int half, int halves, int types) {
  int i = block_x() * 128 + thread_x();
  if (i >= rows * pairs) return;
  int row = i / pairs, pair = i - row * pairs;
  int head = pair / half, j = pair - head * half;
  int a = 2 * head * half + (halves ? j : 2 * j), b = a + (halves ? half : 1);
  int at = table_rows ? table_rows[row] : row;
  float c = cosines[(u64)at * cos_stride + j], s = sines[(u64)at * sin_stride + j];
  float xa = get(x, types & X_BF16, (u64)row * x_stride + a), xb = get(x, types & X_BF16, (u64)row * x_stride + b);
  put(dst, types & DST_BF16, (u64)row * dst_stride + a, fma(-xb, s, xa * c));
  put(dst, types & DST_BF16, (u64)row * dst_stride + b, fma(xa, s, xb * c));
}

KERNEL(128) silu_mul_f32(void* dst, int dst_stride, const void* x, int x_stride, const void* y, int y_stride, int rows, int cols,
                         int types) {
  int i = block_x() * 128 + thread_x();
  if (i >= rows * cols) return;
  int row = i / cols, j = i - row * cols;
  put(dst, types & DST_BF16, (u64)row * dst_stride + j,
      activate(1, get(x, types & X_BF16, (u64)row * x_stride + j)) * get(y, types & Y_BF16, (u64)row * y_stride + j));
}

// copy copies row ids[i] (0: row i) of x to row i of dst, from one type to the other.
KERNEL(128) copy_f32(void* dst, int dst_stride, const void* x, int x_stride, const int* ids, int rows, int cols, int types) {
  int i = block_x() * 128 + thread_x();
  if (i >= rows * cols) return;
  int row = i / cols, j = i - row * cols;
  put(dst, types & DST_BF16, (u64)row * dst_stride + j, get(x, types & X_BF16, (u64)(ids ? ids[row] : row) * x_stride + j));
}

// upsample2 takes each pixel of [n, h, w, c] four times.
KERNEL(128) upsample2_f32(void* dst, const void* x, int n, int h, int w, int c, int types) {
  int i = block_x() * 128 + thread_x();
  if (i >= n * h * w * c * 4) return;
  int pixel = i / c, ch = i - pixel * c;
  int y = pixel / (2 * w), column = pixel - y * (2 * w); // y counts through the pictures: 2h is even
  put(dst, types & DST_BF16, i, get(x, types & X_BF16, ((u64)(y / 2) * w + column / 2) * c + ch));
}

// The wide kernels are those of the same names for rows that begin at multiples of 8 elements and are as many long: a
// thread takes 8 columns at a time, with accesses of 16 bytes.

// A block takes a row of at most 4096 columns: thread t has columns 8t to 8t+7, 8t+1024 to ... A thread adds its own in
// ascending order, then the lanes are added as warp_sum does, then the four warps in their order.
DEVICE float block_sum(float* parts, float x) {
  x = warp_sum(x);
  if (thread_x() % 32 == 0) parts[thread_x() / 32] = x;
  sync_block();
  return parts[0] + parts[1] + parts[2] + parts[3];
}

KERNEL(128) layer_norm_wide(void* dst, int dst_stride, const void* x, int x_stride, const float* scale, int scale_stride,
                            const float* shift, int shift_stride, const int* group, int rows, int cols, float eps, int types) {
  enum { MOST = 4 };
  SHARED float parts[2][4];
  int row = block_x(), t = thread_x();
  u64 from = (u64)row * x_stride, to = (u64)row * dst_stride;
  float v[MOST][8], sum = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    int col = 8 * (t + 128 * i);
#pragma unroll
    for (int j = 0; j < 8; j++) v[i][j] = 0;
    if (col < cols) {
      get8(v[i], x, types & X_BF16, from + col);
#pragma unroll
      for (int j = 0; j < 8; j++) sum = sum + v[i][j];
    }
  }
  float mean = divide(block_sum(parts[0], sum), (float)cols);
#pragma unroll
  for (int i = 0; i < MOST; i++)
    if (8 * (t + 128 * i) < cols)
#pragma unroll
      for (int j = 0; j < 8; j++) {
        v[i][j] = v[i][j] - mean;
        squares = fma(v[i][j], v[i][j], squares);
      }
  float factor = divide(1.0f, root(divide(block_sum(parts[1], squares), (float)cols) + eps));
  int g = group ? group[row] : 0;
#pragma unroll
  for (int i = 0; i < MOST; i++) {
    int col = 8 * (t + 128 * i);
    if (col < cols) {
      float by[8], plus[8];
      get8(by, scale, 0, (u64)g * scale_stride + col);
      get8(plus, shift, 0, (u64)g * shift_stride + col);
#pragma unroll
      for (int j = 0; j < 8; j++) v[i][j] = fma(v[i][j] * factor, 1.0f + by[j], plus[j]);
      put8(dst, types & DST_BF16, to + col, v[i]);
    }
  }
}

// Heads have 64, 128 or 256 columns: 8, 16 or 32 lanes take one. A lane adds the squares of its own in ascending order,
// then the lanes are added as warp_sum does.
KERNEL(128) norm_rope_wide(void* dst, int dst_stride, const void* x, int x_stride, const float* w, const float* cosines, int cos_stride,
                           const float* sines, int sin_stride, const int* table_rows, int rows, int heads, int half, float eps, int types) {
  int lanes = half / 4, item = (block_x() * 128 + thread_x()) / lanes, col = thread_x() % lanes * 8;
  bool there = item < rows * heads; // all lanes exchange their sums
  int row = there ? item / heads : 0, first = there ? (item - row * heads) * 2 * half : 0, at = table_rows ? table_rows[row] : row;
  float v[8] = {0, 0, 0, 0, 0, 0, 0, 0}, by[8], squares = 0;
  if (there) get8(v, x, types & X_BF16, (u64)row * x_stride + first + col);
  get8(by, w, 0, col);
#pragma unroll
  for (int j = 0; j < 8; j++) squares = fma(v[j], v[j], squares);
  for (int m = lanes / 2; m > 0; m /= 2) squares = squares + from_partner(squares, m);
  float factor = divide(1.0f, root(divide(squares, (float)(2 * half)) + eps));
  if (!there) return;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float a = v[2 * j] * factor * by[2 * j], b = v[2 * j + 1] * factor * by[2 * j + 1];
    float c = cosines[(u64)at * cos_stride + col / 2 + j], s = sines[(u64)at * sin_stride + col / 2 + j];
    v[2 * j] = fma(-b, s, a * c);
    v[2 * j + 1] = fma(a, s, b * c);
  }
  put8(dst, types & DST_BF16, (u64)row * dst_stride + first + col, v);
}

KERNEL(128) copy_wide(void* dst, int dst_stride, const void* x, int x_stride, const int* ids, int rows, int cols, int types) {
  int i = block_x() * 128 + thread_x(), pieces = cols / 8;
  if (i >= rows * pieces) return;
  int row = i / pieces, col = 8 * (i - row * pieces);
  float v[8];
  get8(v, x, types & X_BF16, (u64)(ids ? ids[row] : row) * x_stride + col);
  put8(dst, types & DST_BF16, (u64)row * dst_stride + col, v);
}
