// FlashInfer's plan functions behind plain C functions, compiled with one release's own headers.
//
// A plan is host code: it divides a batch into the work of thread blocks and writes integers. It asks
// CUDA for the number of multiprocessors only, and, for decode, how many blocks of a kernel one
// of them holds. The recording driver answers both. No kernel is launched, so that the kernels which
// the plan names have empty bodies here.
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <limits>
#include <sstream>
#include <string>
#include <vector>

#include "flashinfer/attention/scheduler.cuh"

namespace flashinfer {

// What FlashInfer's headers only declare. Decode's plan passes its address to the occupancy query.
template <PosEncodingMode, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, typename,
          typename Params>
__global__ void BatchDecodeWithPagedKVCacheKernel(const __grid_constant__ Params params) {}

}  // namespace flashinfer

// A call's buffers. The device's integers are host memory, into which the driver copies.
struct Buffers {
  void* integers;
  void* staged;
  size_t integer_bytes;
  void* floats;  // an address that is only calculated with
  size_t float_bytes;
};

namespace {

template <typename KV>
struct DecodeParams {
  using DTypeQ = nv_bfloat16;
  using DTypeKV = KV;
  using DTypeO = nv_bfloat16;
  using IdType = int32_t;
};
struct Variant {};

std::string error;

template <typename Info>
int keep(const Info& info, int64_t* out) {
  const std::vector<int64_t> found = info.ToVector();
  std::copy(found.begin(), found.end(), out);
  return static_cast<int>(found.size());
}

// Returns the length of the plan's vector; -1 where the release raises.
template <typename Call>
int guarded(Call call) {
  try {
    return call();
  } catch (const std::exception& raised) {
    error = raised.what();
    return -1;
  }
}

void check(cudaError_t status) {
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
}

template <uint32_t GROUP, uint32_t DIM, typename KV>
int decode(const Buffers& b, int32_t* pages, const int64_t* a, int64_t* out) {
  using Params = DecodeParams<KV>;
  constexpr auto kNone = flashinfer::PosEncodingMode::kNone;
  flashinfer::DecodePlanInfo info;
  auto estimate =
      flashinfer::BatchDecodeWithPagedKVCacheWorkEstimationDispatched<GROUP, DIM, kNone, Variant,
                                                                      Params>;
  check(flashinfer::DecodePlan<DIM, kNone, Variant, Params>(
      b.floats, b.float_bytes, b.integers, b.staged, b.integer_bytes, info, pages,
      static_cast<uint32_t>(a[0]), static_cast<uint32_t>(a[1]), static_cast<uint32_t>(a[3]),
      a[4] != 0, nullptr, estimate));
  return keep(info, out);
}

template <uint32_t GROUP, uint32_t DIM>
int decode_of(const Buffers& b, int32_t* pages, const int64_t* a, int64_t* out) {
  if (a[6] == 1) return decode<GROUP, DIM, __nv_fp8_e4m3>(b, pages, a, out);
  return decode<GROUP, DIM, nv_bfloat16>(b, pages, a, out);
}

template <uint32_t DIM>
int decode_of(const Buffers& b, int32_t* pages, const int64_t* a, int64_t* out) {
  switch (a[1] / a[2]) {
    case 1: return decode_of<1, DIM>(b, pages, a, out);
    case 4: return decode_of<4, DIM>(b, pages, a, out);
    case 8: return decode_of<8, DIM>(b, pages, a, out);
  }
  throw std::runtime_error("the planner has no decode of this group size");
}

}  // namespace

extern "C" {

const char* planner_error() { return error.c_str(); }

// arguments: requests, query heads, KV heads, page size, graph, head dim, bytes of a KV number.
int plan_decode(const Buffers* b, int32_t* pages, const int64_t* a, int64_t* out) {
  return guarded([&] {
    switch (a[5]) {
      case 64: return decode_of<64>(*b, pages, a, out);
      case 128: return decode_of<128>(*b, pages, a, out);
      case 256: return decode_of<256>(*b, pages, a, out);
    }
    throw std::runtime_error("the planner has no decode of this head dim");
  });
}

// arguments: requests, query heads, KV heads, page size, graph, head dim of queries, of values,
// bytes of a KV number, rows that a graph may have, left window, fixed split, whether splitting is
// disabled, rows that each request promises.
int plan_fa2(const Buffers* b, int32_t* rows, int32_t* pages, const int64_t* a, int64_t* out) {
  return guarded([&] {
    flashinfer::PrefillPlanInfo info;
    check(flashinfer::PrefillPlan<int32_t>(
        b->floats, b->float_bytes, b->integers, b->staged, b->integer_bytes, info, rows, pages,
        static_cast<uint32_t>(a[8]), static_cast<uint32_t>(a[0]), static_cast<uint32_t>(a[1]),
        static_cast<uint32_t>(a[2]), static_cast<uint32_t>(a[5]), static_cast<uint32_t>(a[6]),
        static_cast<uint32_t>(a[3]), a[4] != 0, 2, static_cast<int32_t>(a[9]),
        static_cast<int32_t>(a[10]), a[11] != 0, 0,
#ifdef HAS_UNIFORM_ROWS
        a[12], nullptr, static_cast<uint32_t>(a[7])));
#else
        nullptr));
#endif
    return keep(info, out);
  });
}

// arguments: as of plan_fa2, with the causal mask in the place of the window.
int plan_fa3(const Buffers* b, int32_t* rows, int32_t* pages, int32_t* keys, const int64_t* a,
             int64_t* out) {
  return guarded([&] {
    flashinfer::PrefillPlanSM90Info info;
    check(flashinfer::PrefillSM90Plan<int32_t>(
        b->floats, b->float_bytes, b->integers, b->staged, b->integer_bytes, info, rows, pages,
        keys, static_cast<uint32_t>(a[8]), static_cast<uint32_t>(a[0]),
        static_cast<uint32_t>(a[1]), static_cast<uint32_t>(a[2]), static_cast<uint32_t>(a[5]),
        static_cast<uint32_t>(a[6]), static_cast<uint32_t>(a[3]), a[9] != 0, a[4] != 0, 2,
        nullptr));
    return keep(info, out);
  });
}

// arguments: requests, query heads, the causal mask, head dim of values.
int plan_mla(const Buffers* b, int32_t* rows, int32_t* pages, int32_t* keys, const int64_t* a,
             int64_t* out) {
  return guarded([&] {
    flashinfer::MLAPlanInfo info;
#ifdef RETURNS_STAGED_BYTES
    // The caller copies what was staged, which these releases do in Python.
    size_t staged_bytes = 0;
    check(flashinfer::MLAPlan<int32_t>(b->floats, b->float_bytes, b->integers, b->staged,
                                       b->integer_bytes, info, staged_bytes, rows, pages, keys,
                                       static_cast<uint32_t>(a[0]), static_cast<uint32_t>(a[1]),
                                       static_cast<uint32_t>(a[3]), a[2] != 0, nullptr));
    std::memcpy(b->integers, b->staged, staged_bytes);
#else
    check(flashinfer::MLAPlan<int32_t>(b->floats, b->float_bytes, b->integers, b->staged,
                                       b->integer_bytes, info, rows, pages, keys,
                                       static_cast<uint32_t>(a[0]), static_cast<uint32_t>(a[1]),
                                       static_cast<uint32_t>(a[3]), a[2] != 0, nullptr));
#endif
    return keep(info, out);
  });
}

}  // extern "C"
