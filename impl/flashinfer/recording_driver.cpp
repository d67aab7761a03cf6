// A CUDA driver and runtime that compute nothing.
//
// FlashInfer's launcher of trtllm-gen attention is linked with this library instead of libcuda and
// libcudart. It then selects a kernel as it would on a chip that need not be here, and launches it:
// each call is checked against the limits of that chip, written down, and answered with success, or
// with the error that the limit gives. No kernel runs, so a wrong value or a hang stays unseen.
//
// What is recorded, as JSON objects with commas between them (recording_log):
//   {"launch": NAME, "grid": [X, Y, Z], "block": THREADS, "cluster": CTAS, "shared": BYTES}
//                            a precompiled kernel that the launcher starts
//   {"reduction": NAME}      a kernel of the launcher's own, which merges the parts of split keys
//   {"refused": SENTENCE}    what the chip's limits refuse
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>

namespace {

// The chip that is recorded for. Shared memory is the most bytes that a block may ask for.
struct Chip {
  int capability = 100;
  int multiprocessors = 148;
  int shared_memory = 232448;
} chip;

// Blocks of any kernel that one multiprocessor holds: what registers it needs, only a chip knows.
int blocks_per_multiprocessor = 1;

constexpr int kDefaultSharedMemory = 48 * 1024;
constexpr unsigned kPortableCluster = 8, kLargestCluster = 16;
constexpr unsigned kLargestBlock = 1024, kLargestGridYZ = 65535;

// A kernel by its name, with the attributes that were set for it. They persist, as in a process.
struct Function {
  std::string name;
  int shared_memory = 0;
  bool large_clusters = false;
};

std::string record;
std::map<std::string, Function> functions;
std::map<const void*, std::string> own_kernels;
char module_, library_, context_;

std::string text(long long number) { return std::to_string(number); }

void write(const std::string& entry) {
  if (!record.empty()) record += ",\n";
  record += entry;
}

CUresult refuse(const std::string& why) {
  write("{\"refused\":\"" + why + "\"}");
  return CUDA_ERROR_INVALID_VALUE;
}

// A cluster's extent in each dimension, as the attributes of a launch state it.
dim3 cluster_of(const CUlaunchConfig* launch) {
  for (unsigned i = 0; i < launch->numAttrs; ++i)
    if (launch->attrs[i].id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      const auto& extent = launch->attrs[i].value.clusterDim;
      return dim3(extent.x, extent.y, extent.z);
    }
  return dim3(1, 1, 1);
}

int attribute(int of_capability_major, int asked, int of_capability_minor, int of_multiprocessors,
              int of_shared_memory) {
  if (asked == of_capability_major) return chip.capability / 10;
  if (asked == of_capability_minor) return chip.capability % 10;
  if (asked == of_multiprocessors) return chip.multiprocessors;
  if (asked == of_shared_memory) return chip.shared_memory;
  return 0;
}

}  // namespace

extern "C" {

// The interface of the process that asks.

void recording_chip(int capability, int multiprocessors, int shared_memory) {
  chip = {capability, multiprocessors, shared_memory};
}
void recording_occupancy(int blocks) { blocks_per_multiprocessor = blocks; }
void recording_clear() { record.clear(); }
const char* recording_log() { return record.c_str(); }

// The driver.

CUresult cuCtxGetDevice(CUdevice* device) {
  *device = 0;
  return CUDA_SUCCESS;
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  *context = reinterpret_cast<CUcontext>(&context_);
  return CUDA_SUCCESS;
}

CUresult cuCtxGetId(CUcontext, unsigned long long* id) {
  *id = 1;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute asked, CUdevice) {
  *value = attribute(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, asked,
                     CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
                     CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                     CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
  return CUDA_SUCCESS;
}

// The image of a module is never read: a kernel is known by the name that the launcher asks for.
CUresult cuModuleLoadData(CUmodule* module, const void*) {
  *module = reinterpret_cast<CUmodule>(&module_);
  return CUDA_SUCCESS;
}

CUresult cuModuleUnload(CUmodule) { return CUDA_SUCCESS; }

CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
  Function& found = functions[name];
  found.name = name;
  *function = reinterpret_cast<CUfunction>(&found);
  return CUDA_SUCCESS;
}

CUresult cuFuncSetAttribute(CUfunction handle, CUfunction_attribute asked, int value) {
  auto* function = reinterpret_cast<Function*>(handle);
  if (asked == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) {
    if (value > chip.shared_memory)
      return refuse("shared memory of " + text(value) + " bytes, of " + text(chip.shared_memory));
    function->shared_memory = value;
  } else if (asked == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) {
    function->large_clusters = value != 0;
  }
  return CUDA_SUCCESS;
}

// An assumption: each multiprocessor holds one block, so that as many clusters fit as divide them.
// A chip may hold fewer, where its multiprocessors are not spread evenly over its units.
CUresult cuOccupancyMaxActiveClusters(int* clusters, CUfunction, const CUlaunchConfig* launch) {
  const dim3 cluster = cluster_of(launch);
  *clusters = chip.multiprocessors / static_cast<int>(cluster.x * cluster.y * cluster.z);
  return CUDA_SUCCESS;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* launch, CUfunction handle, void**, void**) {
  const auto* function = reinterpret_cast<Function*>(handle);
  const dim3 cluster = cluster_of(launch);
  const unsigned ctas = cluster.x * cluster.y * cluster.z;
  const unsigned threads = launch->blockDimX * launch->blockDimY * launch->blockDimZ;
  const int allowed = function->shared_memory ? function->shared_memory : kDefaultSharedMemory;
  if (!launch->gridDimX || !launch->gridDimY || !launch->gridDimZ) return refuse("an empty grid");
  if (launch->gridDimY > kLargestGridYZ || launch->gridDimZ > kLargestGridYZ)
    return refuse("a grid of more than 65535 in y or z");
  if (threads > kLargestBlock) return refuse("a block of " + text(threads) + " threads");
  if (launch->gridDimX % cluster.x || launch->gridDimY % cluster.y || launch->gridDimZ % cluster.z)
    return refuse("a cluster that does not divide the grid");
  if (ctas > (function->large_clusters ? kLargestCluster : kPortableCluster))
    return refuse("a cluster of " + text(ctas) + " blocks");
  if (static_cast<int>(launch->sharedMemBytes) > allowed)
    return refuse("dynamic shared memory above what was set for the kernel");
  write("{\"launch\":\"" + function->name + "\",\"grid\":[" + text(launch->gridDimX) + "," +
        text(launch->gridDimY) + "," + text(launch->gridDimZ) + "],\"block\":" + text(threads) +
        ",\"cluster\":" + text(ctas) + ",\"shared\":" + text(launch->sharedMemBytes) + "}");
  return CUDA_SUCCESS;
}

// The limits of cuTensorMapEncodeTiled, from the CUDA driver API's documentation.
CUresult cuTensorMapEncodeTiled(CUtensorMap*, CUtensorMapDataType type, cuuint32_t rank,
                                void* address, const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* steps,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  // Bits of an element, in the order of CUtensorMapDataType; 4-bit elements may be spread to bytes.
  constexpr int kBits[] = {8, 16, 32, 32, 64, 64, 16, 32, 64, 16, 32, 32, 32, 4, 4, 6};
  constexpr int kTypes = sizeof(kBits) / sizeof(kBits[0]);
  const auto no_map = [](const std::string& why) { return refuse("a tensor map: " + why); };
  if (static_cast<int>(type) >= kTypes) return no_map("an unknown type");
  const bool spread = static_cast<int>(type) == 14;
  const unsigned aligned = spread ? 32 : 16;
  if (rank < 1 || rank > 5) return no_map("a rank outside 1 to 5");
  if (reinterpret_cast<uintptr_t>(address) % aligned) return no_map("an address not aligned");
  for (unsigned i = 0; i < rank; ++i) {
    if (sizes[i] < 1 || sizes[i] > (1ull << 32)) return no_map("a size outside 1 to 2^32");
    if (box[i] < 1 || box[i] > 256) return no_map("a box of " + text(box[i]) + ", outside 1 to 256");
    if (steps[i] < 1 || steps[i] > 8) return no_map("a step outside 1 to 8");
  }
  if (spread && (sizes[0] % 128 || box[0] != 128))
    return no_map("4-bit elements spread to bytes, not in rows and boxes of 128");
  for (unsigned i = 0; i + 1 < rank; ++i)
    if (strides[i] % aligned || strides[i] >= (1ull << 40))
      return no_map("a stride of " + text(strides[i]) + " bytes");
  if (interleave == CU_TENSOR_MAP_INTERLEAVE_NONE) {
    const long row = static_cast<long>(box[0]) * (spread ? 8 : kBits[type]) / 8;
    long span = 128;
    if (swizzle == CU_TENSOR_MAP_SWIZZLE_NONE) span = 1l << 30;
    if (swizzle == CU_TENSOR_MAP_SWIZZLE_32B) span = 32;
    if (swizzle == CU_TENSOR_MAP_SWIZZLE_64B) span = 64;
    if (row % 16 || row > span) return no_map("a row of " + text(row) + " bytes in the box");
  }
  return CUDA_SUCCESS;
}

CUresult cuGetErrorName(CUresult result, const char** name) {
  *name = result == CUDA_SUCCESS ? "CUDA_SUCCESS" : "CUDA_ERROR_INVALID_VALUE";
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult result, const char** sentence) {
  *sentence = result == CUDA_SUCCESS ? "no error" : "invalid argument";
  return CUDA_SUCCESS;
}

// The runtime.

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr asked, int) {
  *value = attribute(cudaDevAttrComputeCapabilityMajor, asked, cudaDevAttrComputeCapabilityMinor,
                     cudaDevAttrMultiProcessorCount, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return cudaSuccess;
}

// Some releases are linked with these, from CUB's headers, and call none of them in a selection.
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaPeekAtLastError() { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int,
                                                                   size_t, unsigned) {
  *blocks = blocks_per_multiprocessor;
  return cudaSuccess;
}
// A plan's integers on their way to the device, which is host memory here.
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

// The launcher of MoE calls these; what it would write to the device, nothing reads.
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void*, int, size_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaMallocHost(void** memory, size_t bytes) {
  *memory = std::calloc(1, bytes);
  return cudaSuccess;
}
cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* address) {
  *attributes = {};
  attributes->type = cudaMemoryTypeDevice;
  attributes->devicePointer = const_cast<void*>(address);
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus* status) {
  *status = cudaStreamCaptureStatusNone;
  return cudaSuccess;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaSuccess ? "no error" : "an error";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void* function, void**) {
  write("{\"reduction\":\"" + own_kernels[function] + "\"}");
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaLaunchKernelExC(nullptr, function, nullptr);
}

// What nvcc's own code calls: it registers the kernels of a file, and launches them by <<< >>>.

cudaError_t __cudaLaunchKernel(void* function, dim3, dim3, void**, size_t, cudaStream_t) {
  return cudaLaunchKernelExC(nullptr, function, nullptr);
}
cudaError_t __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return cudaSuccess;
}
unsigned __cudaPushCallConfiguration(dim3, dim3, size_t, struct CUstream_st*) { return 0; }
cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void*) {
  *grid = *block = dim3(1);
  *shared = 0;
  return cudaSuccess;
}
void** __cudaRegisterFatBinary(void*) {
  static void* handle = &library_;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}
void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, uint3*, uint3*,
                            dim3*, dim3*, int*) {
  own_kernels[host] = name;
}

}  // extern "C"
