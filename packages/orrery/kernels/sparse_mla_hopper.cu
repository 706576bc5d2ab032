// Gradients of sparse MLA on Hopper: 64 heads, keys of 576 columns whose first 512 are the value.
//
// One block of 384 threads handles one query, with its chosen keys in tiles of 64. A warpgroup
// (`produce`) gathers the next tile's keys. Two warpgroups (`consume`) compute, for each tile:
//
//   z = keys · qᵀ, dp = values · doutᵀ      [64 keys, 64 heads], one product per warpgroup
//   p = exp(scale · z − lse), ds = scale · p · (dp − delta)      32 heads per warpgroup
//   dq += dsᵀ · keys      columns: 256 and half of the last 64 per warpgroup, in registers
//   dkv = ds · q + p · dout      one row per key, written to row `place` of `pair`
//
// Shared memory holds blocks of 64 rows × 64 columns of bfloat16 with a 128-byte swizzle: q, dout,
// keys, p and ds. `wgmma_N`, which multiplies 64 × 16 by 16 × N, comes from sparse_mla_hopper.py.

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int HEADS = 64, KEYS = 64;
constexpr int ROW = 2 * 576, VALUE_ROW = 2 * 512;  // bytes of a key and of its value
constexpr int BLOCK = 8192;                        // bytes of a block
constexpr int Q = 0, GRAD = 9 * BLOCK, KEY = 17 * BLOCK, P = 26 * BLOCK, DS = 27 * BLOCK;
constexpr int PER_HEAD = 28 * BLOCK;  // f32 [32, 4]: lse of two heads, then delta of both
constexpr float LOG2_E = 1.4426950408889634f;

// Ids of named barriers. The first three have one barrier per consumer: id and id + 1.
constexpr int KEYS_READ = 1, KEYS_HERE = 3, TILES_READ = 5, SENT = 7, TILES_HERE = 8, TURN = 9;

template <int ID>
__device__ __forceinline__ void wait_at() {
  asm volatile("bar.sync %0, 256;" ::"n"(ID) : "memory");
}
template <int ID>
__device__ __forceinline__ void arrive_at() {
  asm volatile("bar.arrive %0, 256;" ::"n"(ID) : "memory");
}

// Matrix descriptors of a block in shared memory. In `rows`, the inner dimension is contiguous.
constexpr u64 SWIZZLE_128 = 1ull << 62, EIGHT_ROWS = 64ull << 32;  // 1,024 bytes, in 16 bytes
struct Operand {
  u32 base;
  __device__ __forceinline__ u64 at(u32 low, u32 offset) const {
    return SWIZZLE_128 | EIGHT_ROWS | ((base >> 4) + (low + (offset >> 4)));
  }
  __device__ __forceinline__ u64 rows(u32 offset) const { return at(1u << 16, offset); }
  __device__ __forceinline__ u64 columns(u32 offset) const {
    return at((BLOCK / 16u) << 16, offset);
  }
};

__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void commit_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int PENDING>
__device__ __forceinline__ void wait_for_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Keep the compiler from reading a product's result before it is complete.
template <int N>
__device__ __forceinline__ void completed(float (&result)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(result[i])::"memory");
}
// Make this thread's writes to shared memory visible to products.
__device__ __forceinline__ void publish() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void copy_16(u32 to, const char* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
               : "memory");
}
__device__ __forceinline__ void wait_for_copies() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  return word;
}
__device__ __forceinline__ float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two rows in global memory. A thread stores parts of them.
struct Rows {
  char *a, *b;
  bool has_a, has_b;
};

__device__ __forceinline__ void store_16(char* to, u32 x, u32 y, u32 z, u32 w, bool exists) {
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, %5, 0; "
      "@p st.global.cs.v4.b32 [%0], {%1, %2, %3, %4}; }" ::"l"(to),
      "r"(x), "r"(y), "r"(z), "r"(w), "r"((int)exists)
      : "memory");
}
// Store 32 columns from 16 values per thread. The four threads of a row first exchange words, so
// that each stores 16 contiguous bytes.
__device__ __forceinline__ void store_32(const float* value, int lane, const Rows& rows,
                                         int offset) {
  const bool odd = lane & 1, high = lane & 2;
#pragma unroll
  for (int r = 0; r < 2; r++, value += 2) {
    u32 w0 = pack(value[0], value[1]), w1 = pack(value[4], value[5]);
    u32 w2 = pack(value[8], value[9]), w3 = pack(value[12], value[13]);
    u32 one = __shfl_xor_sync(~0u, odd ? w0 : w1, 1);
    u32 two = __shfl_xor_sync(~0u, odd ? w2 : w3, 1);
    if (odd) w0 = one, w2 = two;
    else w1 = one, w3 = two;
    one = __shfl_xor_sync(~0u, high ? w0 : w2, 2);
    two = __shfl_xor_sync(~0u, high ? w1 : w3, 2);
    if (high) w0 = one, w1 = two;
    else w2 = one, w3 = two;
    char* to = (r ? rows.b : rows.a) + offset + (lane & 3) * 16;
    store_16(to, w0, w1, w2, w3, r ? rows.has_b : rows.has_a);
  }
}
template <int N>
__device__ __forceinline__ void store(const float (&value)[N], int lane, const Rows& rows,
                                      int offset) {
#pragma unroll
  for (int i = 0; i < N / 16; i++) store_32(value + i * 16, lane, rows, offset + i * 64);
}

struct Query {
  const char* kv;
  const int *indices, *place;
  char *grad_q, *pair;
  float scale;
  int count;  // leading columns of `indices` to read: each holds a key or −1
  Operand shared;
};

// Return the offset in a block of chunk number `chunk` (16 bytes) of a row.
__device__ __forceinline__ u32 swizzled(int row, int chunk) {
  return row * 128 + ((chunk ^ (row & 7)) << 4);
}

__device__ __forceinline__ int key_at(const Query& query, int k) {
  return k < query.count ? max(query.indices[k], 0) : 0;
}

__device__ __forceinline__ void produce(const Query& query) {
  const int chunk = threadIdx.x & 7, first = (threadIdx.x & 127) >> 3;
  const char* from = query.kv + chunk * 16;
  const u32 to = query.shared.base + KEY + swizzled(first, chunk);
  int key[4];
#pragma unroll
  for (int i = 0; i < 4; i++) key[i] = key_at(query, first + i * 16);
  for (int start = 0; start < query.count; start += KEYS) {
    if (start) wait_at<KEYS_READ>();
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int b = 0; b < 4; b++)
        copy_16(to + i * 2048 + b * BLOCK, from + (long long)key[i] * ROW + b * 128);
    if (start) wait_at<KEYS_READ + 1>();
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int b = 4; b < 9; b++)
        copy_16(to + i * 2048 + b * BLOCK, from + (long long)key[i] * ROW + b * 128);
#pragma unroll
    for (int i = 0; i < 4; i++) key[i] = key_at(query, start + KEYS + first + i * 16);
    wait_for_copies();
    publish();
    arrive_at<KEYS_HERE>();
    arrive_at<KEYS_HERE + 1>();
  }
}

// Compute two blocks of dkv's columns, from `block` on.
__device__ __forceinline__ void multiply_pairs(float (&dkv)[64], const Operand& shared,
                                               int block) {
#pragma unroll
  for (int k = 0; k < 4; k++)
    wgmma_128<0, 1>(dkv, shared.rows(P + k * 32),
                    shared.columns(GRAD + block * BLOCK + k * 2048), k);
#pragma unroll
  for (int k = 0; k < 4; k++)
    wgmma_128<0, 1>(dkv, shared.rows(DS + k * 32),
                    shared.columns(Q + block * BLOCK + k * 2048), 1);
}

// Write p and ds of the consumer's 32 heads. Consumer 0 has z and consumer 1 has dp of all heads.
// Each sends the other's half in float32, to the words that the other overwrites with p and ds.
template <int SELF>
__device__ __forceinline__ void exchange(const Query& query, char* shared, const float (&own)[32],
                                         int row, int lane, const Rows& rows) {
  char* tile = shared + P + (lane & 3) * 4;
#pragma unroll
  for (int j = 0; j < 4; j++) {
    const int other = (SELF ^ 1) * 4 + j;
    char* at = tile + swizzled(row, other);
#pragma unroll
    for (int i = 0; i < 4; i++)
      *(float*)(at + (i & 1) * BLOCK + (i >> 1) * 1024) = own[other * 4 + i];
  }
  wait_at<SENT>();
  const float4* per_head = (const float4*)(shared + PER_HEAD) + SELF * 16 + (lane & 3);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    char* at = tile + swizzled(row, SELF * 4 + j);
    const float4 head = per_head[j * 4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float p[2], ds[2];
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float sent = *(const float*)(at + i * BLOCK + r * 1024);
        const float mine = own[(SELF * 4 + j) * 4 + r * 2 + i];
        const float z = SELF ? sent : mine, dp = SELF ? mine : sent;
        const float log2_p = z * (query.scale * LOG2_E) - (i ? head.y : head.x);
        p[i] = (r ? rows.has_b : rows.has_a) ? exp2_of(log2_p) : 0.f;
        ds[i] = p[i] * (dp - (i ? head.w : head.z)) * query.scale;
      }
      *(u32*)(at + r * 1024) = pack(p[0], p[1]);
      *(u32*)(at + BLOCK + r * 1024) = pack(ds[0], ds[1]);
    }
  }
  publish();
  wait_at<TILES_HERE>();
}

template <int SELF>
__device__ __forceinline__ void consume(const Query& query, char* shared) {
  constexpr int FIRST = SELF * 4;  // the consumer's first block of columns
  const Operand& operand = query.shared;
  const int lane = threadIdx.x & 31, row = ((threadIdx.x >> 5) & 3) * 16 + (lane >> 2);
  float dq[128] = {}, rest_of_dq[16] = {};
  bool has_dq = false;
  if (query.count) arrive_at<TILES_READ + (SELF ^ 1)>();
  for (int start = 0; start < query.count; start += KEYS) {
    const int k = start + row;  // this thread has rows k and k + 8
    Rows pairs;
    pairs.has_a = k < query.count && query.indices[k] >= 0;
    pairs.has_b = k + 8 < query.count && query.indices[k + 8] >= 0;
    pairs.a = query.pair + (long long)(pairs.has_a ? query.place[k] : 0) * ROW;
    pairs.b = query.pair + (long long)(pairs.has_b ? query.place[k + 8] : 0) * ROW;
    const bool is_last = start + KEYS >= query.count;
    wait_at<KEYS_HERE + SELF>();
    {
      float product[32];
      begin_products();
#pragma unroll
      for (int i = 0; i < (SELF ? 32 : 36); i++) {
        const u32 at = (i >> 2) * BLOCK + (i & 3) * 32;
        wgmma_64<0, 0>(product, operand.rows(KEY + at), operand.rows((SELF ? GRAD : Q) + at), i);
      }
      commit_products();
      wait_for_products<0>();
      completed(product);
      wait_at<TILES_READ + SELF>();
      exchange<SELF>(query, shared, product, row, lane, pairs);
    }
    begin_products();
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const u64 ds = operand.columns(DS + i * 2048);
      wgmma_256<1, 1>(dq, ds, operand.columns(KEY + FIRST * BLOCK + i * 2048), has_dq || i);
      wgmma_32<1, 1>(rest_of_dq, ds, operand.columns(KEY + 8 * BLOCK + SELF * 64 + i * 2048),
                     has_dq || i);
    }
    commit_products();
    has_dq = true;
    float dkv[64];
    if (SELF == 0) {  // multiplies first, so that one consumer multiplies while the other stores
      multiply_pairs(dkv, operand, FIRST);
      commit_products();
      wait_for_products<1>();
      if (!is_last) arrive_at<KEYS_READ + SELF>();
      wait_for_products<0>();
      arrive_at<TURN>();
    } else {
      float rest[32];
#pragma unroll
      for (int i = 0; i < 4; i++)
        wgmma_64<0, 1>(rest, operand.rows(DS + i * 32), operand.columns(Q + 8 * BLOCK + i * 2048),
                       i);
      commit_products();
      wait_for_products<1>();
      if (!is_last) arrive_at<KEYS_READ + SELF>();
      wait_for_products<0>();
      completed(rest);
      store(rest, lane, pairs, VALUE_ROW);
      wait_at<TURN>();
      begin_products();
      multiply_pairs(dkv, operand, FIRST);
      commit_products();
      wait_for_products<0>();
    }
    completed(dkv);
    store(dkv, lane, pairs, FIRST * 128);
    begin_products();
    multiply_pairs(dkv, operand, FIRST + 2);
    commit_products();
    wait_for_products<0>();
    completed(dkv);
    if (!is_last) arrive_at<TILES_READ + (SELF ^ 1)>();
    store(dkv, lane, pairs, FIRST * 128 + 256);
  }
  completed(dq);
  completed(rest_of_dq);
  char* to = query.grad_q + row * ROW;
  const Rows heads = {to, to + 8 * ROW, true, true};
  store(dq, lane, heads, FIRST * 128);
  store(rest_of_dq, lane, heads, VALUE_ROW + SELF * 64);
}

extern "C" __global__ void __launch_bounds__(384, 1)
    pair_gradients(const char* q, const char* grad, const char* kv, const int* indices,
                   const int* length, const float* lse, const float* delta, const int* place,
                   char* grad_q, char* pair, float scale, int num_chosen) {
  extern __shared__ __align__(1024) char shared[];
  const long long t = blockIdx.x;
  Query query;
  query.kv = kv;
  query.indices = indices + t * num_chosen;
  query.place = place + t * num_chosen;
  query.grad_q = grad_q + t * HEADS * ROW;
  query.pair = pair;
  query.scale = scale;
  query.count = length[t];
  query.shared.base = (u32)__cvta_generic_to_shared(shared);
  const int chunk = threadIdx.x & 7;
  for (int row = threadIdx.x >> 3; row < HEADS; row += 48) {
    const u32 to = query.shared.base + swizzled(row, chunk);
    const char* q_at = q + (t * HEADS + row) * ROW + chunk * 16;
    const char* grad_at = grad + (t * HEADS + row) * VALUE_ROW + chunk * 16;
#pragma unroll
    for (int b = 0; b < 9; b++) copy_16(to + Q + b * BLOCK, q_at + b * 128);
#pragma unroll
    for (int b = 0; b < 8; b++) copy_16(to + GRAD + b * BLOCK, grad_at + b * 128);
  }
  if (threadIdx.x < HEADS) {
    float* at = (float*)(shared + PER_HEAD) + (threadIdx.x >> 1) * 4 + (threadIdx.x & 1);
    at[0] = lse[t * HEADS + threadIdx.x] * LOG2_E;
    at[2] = delta[t * HEADS + threadIdx.x];
  }
  wait_for_copies();
  publish();
  __syncthreads();
  if (threadIdx.x >= 256) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    produce(query);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    if (threadIdx.x < 128) consume<0>(query, shared);
    else consume<1>(query, shared);
  }
}
