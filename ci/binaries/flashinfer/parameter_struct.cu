// The struct that the launcher of a FlashInfer release passes to its precompiled kernels: this
// variable has its size, which is read from the library's symbols. Nothing is executed.

#include <flashinfer/trtllm/fmha/kernelParams.h>

extern "C" {
extern char kernelproof_parameters[sizeof(KernelParams)];
char kernelproof_parameters[sizeof(KernelParams)] = {1};
}
