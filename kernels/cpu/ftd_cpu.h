// C interface of the CPU kernels: pointers and sizes in, nothing allocated for the caller, no
// Python.
//
// Opened with ctypes, which drops the GIL for the length of each call. One call is one operation of
// kernels/ops.py. Calls on one pool take turns; the calling thread computes along with the workers.
// Functions that can be called wrongly return 0 for done and a negative FtdFault otherwise.
#pragma once

#include <stdint.h>

#define FTD_CPU_ABI 6

#if defined(__GNUC__)
#define FTD_API __attribute__((visibility("default")))
#else
#define FTD_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Numbers by themselves: activations, biases, results.
enum FtdType { FTD_BF16 = 0, FTD_F16 = 1, FTD_F32 = 2 };

// How weights are stored: a type, or numbers with scales. Codes and meanings of kernels/formats.py.
enum FtdFormat { FTD_FP8 = 3, FTD_FP8_ROW = 4, FTD_MXFP4 = 5, FTD_NVFP4 = 6, FTD_INT4 = 7 };

enum FtdFault { FTD_BAD_TYPE = -1, FTD_BAD_SHAPE = -2, FTD_BAD_INDEX = -3 };

typedef struct FtdPool FtdPool;
typedef struct FtdOps FtdOps;
typedef struct FtdService FtdService;

// Where the threads of a pool run. Thread 0 is whoever calls an operation and is never moved.
typedef struct {
  int32_t threads;         // including the caller
  int32_t nodes;           // memory nodes the threads are spread over
  const int32_t* node;     // [threads] node of each thread
  const int32_t* cpu_end;  // [threads] end of the thread's list in cpus; empty list: not pinned
  const int32_t* cpus;     // processor numbers
  int32_t park_after_us;   // idle spinning before a worker sleeps
} FtdPoolPlan;

// Where a matrix is, in bytes from the start of its record: MatrixLayout of kernels/formats.py.
typedef struct {
  int32_t format;
  int64_t numbers;
  int64_t scales;
  int64_t factor;
  int64_t bias;  // -1: none
} FtdMatrix;

// One expert's record: ExpertLayout of kernels/formats.py. gate and up have one format.
typedef struct {
  int32_t hidden;
  int32_t inner;
  FtdMatrix gate;
  FtdMatrix up;
  FtdMatrix down;
} FtdExpertLayout;

// h = (u + shift) · g · sigmoid(alpha · g), with g = min(gate, limit) and |u| <= limit.
typedef struct {
  float limit;
  float alpha;
  float shift;
} FtdActivation;

FTD_API int32_t ftd_abi(void);

// Instruction sets from worst to best, null past the end; whether this processor can run one.
FTD_API const char* ftd_isa_name(int32_t index);
FTD_API int32_t ftd_isa_supported(int32_t index);

FTD_API FtdPool* ftd_pool_create(const FtdPoolPlan* plan);
FTD_API void ftd_pool_destroy(FtdPool* pool);
FTD_API void ftd_pool_wake(FtdPool* pool);  // before a step: parked workers start spinning
FTD_API int64_t
ftd_pool_finished(FtdPool* pool);  // units of work done so far: grows while it is alive
FTD_API int32_t ftd_pool_parked(FtdPool* pool);  // workers asleep
// Memory [begin, begin + bytes) lies on a node: experts there are computed by that node's threads
// first.
FTD_API void ftd_pool_place(FtdPool* pool, int64_t begin, int64_t bytes, int32_t node);

FTD_API FtdOps* ftd_ops_create(FtdPool* pool, int32_t isa);
FTD_API void ftd_ops_destroy(FtdOps* ops);
// How far ahead weights are asked for, for one token (0) or several (1).
FTD_API void ftd_ops_prefetch(FtdOps* ops, int32_t format, int32_t several, int32_t bytes);

// y[T, O] = x[T, K] · W[O, K]ᵀ + bias. y is of type out: bf16 or f32; bias may be null, and the
// matrix' own is not looked at.
FTD_API int32_t ftd_linear(FtdOps* ops, const void* x, int32_t act, const void* record,
                           const FtdMatrix* matrix, const void* bias, int32_t bias_type, void* y,
                           int32_t out, int64_t tokens, int64_t outputs, int64_t inputs);

// y[T, H] f32 = Σ_k weights[t, k] · down(activation(gate x, up x)) of expert ids[t, k], in the
// order of k. Without weights (null) y is [T, K, H], each route's part by itself; those of unused
// routes are left as they were.
FTD_API int32_t ftd_moe(FtdOps* ops, const void* x, int32_t act, const int32_t* ids,
                        const float* weights, const int64_t* address, const FtdExpertLayout* layout,
                        const FtdActivation* activation, float* y, int64_t tokens, int64_t routes,
                        int64_t experts);

// Where another processor asks for experts and is answered: memory that both see.
//
// Whoever asks stores head, ids and x, then a new number at the bell; the service computes what
// ftd_moe without weights does and stores that number at the answer. One question at a time.
// Of one expert it may be asked for a part: what the first rows of gate and up, and the columns of
// down that go with them, add to the product, without down's bias.
typedef struct {
  uint32_t* bell;
  uint32_t* answer;
  const int32_t* head;     // layer, tokens T, expert asked for in part (-1: none), its rows
  const int32_t* ids;      // [T, K], -1: not asked for
  const void* x;           // [T, H]
  float* y;                // [T, K, H]
  const int64_t* address;  // [layers, experts]
  int32_t layers;
  int32_t most_tokens;
  int32_t routes;  // K
  int32_t experts;
  int32_t act;
  int32_t pad;
  FtdExpertLayout layout;
  FtdActivation activation;
} FtdMailbox;

// A thread that answers with the pool's help: it looks at the bell without a pause while somebody
// may ring and sleeps otherwise. Null where no thread can be started.
FTD_API FtdService* ftd_service_start(FtdOps* ops, const FtdMailbox* mailbox);
FTD_API void ftd_service_stop(FtdService* service);  // the last call; what is asked is not answered
// Somebody may ring from here on: once before each step; and a step like that is over.
FTD_API void ftd_service_expect(FtdService* service);
FTD_API void ftd_service_done(FtdService* service);
FTD_API int32_t ftd_service_fault(FtdService* service);  // FtdFault of a question, 0: none so far
// For tests: the thread is stuck from the next question on.
FTD_API void ftd_service_stick(FtdService* service);

// Causal attention of rows over paged keys and values; window 0: all positions up to the row's own.
// sinks: a logit for each head that takes part in its softmax and has no value; may be null.
FTD_API int32_t ftd_attention(FtdOps* ops, const void* q, const void* k_pages, const void* v_pages,
                              int32_t act, const int32_t* page_table, int64_t table_width,
                              const int32_t* sequence, const int32_t* position, void* out,
                              int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim,
                              int64_t page_tokens, float scale, int64_t window, const float* sinks);

FTD_API int32_t ftd_write_kv(FtdOps* ops, const void* k, const void* v, const int64_t* place,
                             void* k_pages, void* v_pages, int64_t rows, int64_t places,
                             int64_t row_bytes);
FTD_API int32_t ftd_rms_norm(FtdOps* ops, const void* x, int32_t type, const void* weight,
                             int32_t weight_type, void* y, int32_t out, int64_t rows, int64_t width,
                             float eps);
FTD_API int32_t ftd_rope(FtdOps* ops, void* x, int32_t act, const float* cos, const float* sin,
                         int64_t rows, int64_t heads, int64_t head_dim, int64_t half,
                         int32_t interleaved);
FTD_API int32_t ftd_silu_mul(FtdOps* ops, const void* gate, const void* up, void* y, int32_t act,
                             int64_t count);

// The gated delta rule of kernels/delta.py over the rows of one sequence. source: the state before
// them, null: zeros; target: the state after them, which may be the source.
FTD_API int32_t ftd_delta_scan(FtdOps* ops, const float* q, const float* k, const float* v,
                               const float* decay, const float* beta, const float* source,
                               float* target, float* out, int64_t rows, int64_t heads,
                               int64_t key_dim, int64_t value_dim);

// Reads bytes at each of so many addresses with all threads and returns a checksum: the machine's
// own bandwidth, to compare with.
FTD_API int64_t ftd_read(FtdOps* ops, const int64_t* address, int64_t count, int64_t bytes);

#ifdef __cplusplus
}
#endif
