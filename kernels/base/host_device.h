#pragma once

/// Marks a function that host and CUDA code both call. The only macro of the project.
#if defined(__CUDACC__)
#define VLM_HD __host__ __device__
#else
#define VLM_HD
#endif
