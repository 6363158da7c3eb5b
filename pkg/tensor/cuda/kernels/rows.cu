// Operations on rows. A warp takes a row, or a group of columns of one: lane l has columns
// l, l+32, ... in ascending order, and the lanes are added as warp_sum does.

KERNEL(128) layer_norm_f32(float* dst, int dst_stride, const float* x, int x_stride, const float* scale, int scale_stride,
                            const float* shift, int shift_stride, const int* group, int rows, int cols, float eps) {
  int row = block_x() * 4 + thread_x() / 32, lane = thread_x() % 32;
  if (row >= rows) return;
  x += (u64)row * x_stride;
  dst += (u64)row * dst_stride;
  float sum = 0;
  for (int j = lane; j < cols; j += 32) sum = sum + x[j];
  float mean = divide(warp_sum(sum), (float)cols);
  float squares = 0;
  for (int j = lane; j < cols; j += 32) {
    float d = x[j] - mean;
    squares = fma(d, d, squares);
  }
  float deviation = root(divide(warp_sum(squares), (float)cols) + eps);
  int g = group ? group[row] : 0;
  scale += (u64)g * scale_stride;
  shift += (u64)g * shift_stride;
  for (int j = lane; j < cols; j += 32)
    dst[j] = fma(divide(x[j] - mean, deviation), 1.0f + scale[j], shift[j]);
}

// norm divides groups of n columns by the root of their mean square plus eps, or, with
// length, by the length, at least eps, over the root of n; and multiplies by w.
KERNEL(128) norm_f32(float* dst, int dst_stride, const float* x, int x_stride, const float* w, int rows, int groups, int n,
                      int length, float eps, int act) {
  int item = block_x() * 4 + thread_x() / 32, lane = thread_x() % 32;
  if (item >= rows * groups) return;
  int row = item / groups, first = (item - row * groups) * n;
  x += (u64)row * x_stride + first;
  dst += (u64)row * dst_stride + first;
  float squares = 0;
  for (int j = lane; j < n; j += 32) {
    float v = x[j];
    squares = fma(v, v, squares);
  }
  squares = warp_sum(squares);
  float divisor = length ? larger(root(squares), eps) : root(divide(squares, (float)n) + eps);
  float factor = length ? root((float)n) : 1.0f;
  for (int j = lane; j < n; j += 32) dst[j] = activate(act, divide(x[j] * factor, divisor) * w[j]);
}

// rope rotates pairs of columns of each head: 2j and 2j+1, or, with halves, j and j+half.
KERNEL(128) rope_f32(float* dst, int dst_stride, const float* x, int x_stride, const float* cosines, int cos_stride, const float* sines,
                      int sin_stride, const int* table_rows, int rows, int pairs, int half, int halves) {
  int i = block_x() * 128 + thread_x();
  if (i >= rows * pairs) return;
  int row = i / pairs, pair = i - row * pairs;
  int head = pair / half, j = pair - head * half;
  int a = 2 * head * half + (halves ? j : 2 * j), b = a + (halves ? half : 1);
  int at = table_rows ? table_rows[row] : row;
  float c = cosines[(u64)at * cos_stride + j], s = sines[(u64)at * sin_stride + j];
  float xa = x[(u64)row * x_stride + a], xb = x[(u64)row * x_stride + b];
  dst[(u64)row * dst_stride + a] = fma(-xb, s, xa * c);
  dst[(u64)row * dst_stride + b] = fma(xa, s, xb * c);
}

KERNEL(128) silu_mul_f32(float* dst, int dst_stride, const float* x, int x_stride, const float* y, int y_stride, int rows, int cols) {
  int i = block_x() * 128 + thread_x();
  if (i >= rows * cols) return;
  int row = i / cols, j = i - row * cols;
  dst[(u64)row * dst_stride + j] = activate(1, x[(u64)row * x_stride + j]) * y[(u64)row * y_stride + j];
}

// copy copies row ids[i] (0: row i) of src to row i of dst, and rounds where dst is bf16.
template <class T>
DEVICE void copy(T* dst, int dst_stride, const float* src, int src_stride, const int* ids, int rows, int cols) {
  int i = block_x() * 128 + thread_x();
  if (i >= rows * cols) return;
  int row = i / cols, j = i - row * cols;
  put(dst + (u64)row * dst_stride + j, src[(u64)(ids ? ids[row] : row) * src_stride + j]);
}

KERNEL(128) copy_f32(float* dst, int dst_stride, const float* src, int src_stride, const int* ids, int rows, int cols) {
  copy(dst, dst_stride, src, src_stride, ids, rows, cols);
}

KERNEL(128) copy_bf16(bf16* dst, int dst_stride, const float* src, int src_stride, const int* ids, int rows, int cols) {
  copy(dst, dst_stride, src, src_stride, ids, rows, cols);
}

// upsample2 takes each pixel of [n, h, w, c] four times.
KERNEL(128) upsample2_f32(float* dst, const float* x, int n, int h, int w, int c) {
  int i = block_x() * 128 + thread_x();
  if (i >= n * h * w * c * 4) return;
  int pixel = i / c, ch = i - pixel * c;
  int y = pixel / (2 * w), column = pixel - y * (2 * w); // y counts through the pictures: 2h is even
  dst[i] = x[((u64)(y / 2) * w + column / 2) * c + ch];
}
