// Attention in float32. A warp makes 128 columns of a query and head: keys in chunks of
// 32 in their order, lane l has the l-th of a chunk. The maximum moves from chunk to chunk;
// sum and values are scaled by e^(old - new) and then take the chunk, the sum as warp_sum
// adds, each value as one chain of fma over its keys.

// queries are triples: row, the first of its keys in keys, and their number; keys are rows.
KERNEL(128) attention_f32(float* dst, int dst_stride, const float* q, int q_stride, const float* k, int k_stride,
                          const float* v, int v_stride, const int* queries, const int* keys, int n, int heads, int kv_heads,
                          int d, int dv, float scale) {
  int item = block_x() * 4 + thread_x() / 32, lane = thread_x() % 32;
  if (item >= n * heads) return;
  int query = item / heads, head = item - query * heads, kv = head * kv_heads / heads;
  int row = queries[3 * query], first = queries[3 * query + 1], count = queries[3 * query + 2];
  int column = block_y() * 128 + lane;
  q += (u64)row * q_stride + head * d;
  k += kv * d;
  v += kv * dv;
  dst += (u64)row * dst_stride + head * dv;

  float most = 0, sum = 0, acc[4] = {0, 0, 0, 0};
  for (int c = 0; c < count; c += 32) {
    int key = keys[first + (c + lane < count ? c + lane : c)];
    const float* kr = k + (u64)key * k_stride;
    float s = 0;
    for (int j = 0; j < d; j++) s = fma(q[j], kr[j], s);
    s = s * scale;
    float here = warp_max(s); // lanes beyond the end repeat the first
    float now = c == 0 ? here : larger(most, here);
    float shrink = c == 0 ? 0.0f : exponential(most - now);
    float p = c + lane < count ? exponential(s - now) : 0.0f;
    most = now;
    sum = fma(sum, shrink, warp_sum(p));
#pragma unroll
    for (int j = 0; j < 4; j++) acc[j] = acc[j] * shrink;
    int left = count - c < 32 ? count - c : 32;
    for (int i = 0; i < left; i++) {
      float pi = from_lane(p, i);
      const float* vr = v + (u64)from_lane(key, i) * v_stride;
#pragma unroll
      for (int j = 0; j < 4; j++)
        if (column + 32 * j < dv) acc[j] = fma(pi, vr[column + 32 * j], acc[j]);
    }
  }
  sync_warp(); // dst may be q
#pragma unroll
  for (int j = 0; j < 4; j++)
    if (column + 32 * j < dv) dst[column + 32 * j] = count > 0 ? divide(acc[j], sum) : 0.0f;
}
