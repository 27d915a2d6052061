/* Reading cache rows and nothing else: what bench compares a call with, since no kernel that
 * attends to the same rows can be faster than this one.
 *
 * A row is cut into pieces of 16 bytes. Thread t begins with piece t of all the rows in their order
 * and goes on by the number of threads, several loads at once; row and piece are carried along, as
 * a division for every load would cost more than the load. The exclusive or of what a block has
 * read is its result: without one the compiler would drop the loads, and a test can tell that every
 * row was read. */
#include "params.h"
#include "warp.cuh"

namespace
{

constexpr int THREADS = 128;
constexpr int BLOCKS_PER_SM = 12;
constexpr int AT_ONCE = 4;

__device__ uint32_t block_xor(uint32_t bits)
{
    __shared__ uint32_t parts[THREADS / WARP];
    bits = __reduce_xor_sync(ALL_LANES, bits);
    if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = bits;
    __syncthreads();
    bits = 0;
    for (int warp = 0; warp < THREADS / WARP; warp++) bits ^= parts[warp];
    return bits;
}

} // namespace

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM)
    any_gather(const __grid_constant__ smla_gpu_gather work)
{
    if (work.rows == 0) return; /* so that it tells what a launch costs */
    const uint32_t pieces = work.pieces, slots = work.slots;
    const uint32_t threads = gridDim.x * THREADS, first = blockIdx.x * THREADS + threadIdx.x;
    const uint32_t row_step = threads / pieces, piece_step = threads % pieces;
    const uint4 *const cache = reinterpret_cast<const uint4 *>(work.cache);
    uint32_t row = first / pieces, piece = first % pieces, bits = 0;

    while (row < work.rows) {
        const uint4 *place[AT_ONCE];
        uint4 loaded[AT_ONCE];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            /* a negative slot is a large number here */
            const uint32_t slot = row < work.rows ? work.indices[row] : slots;
            place[i] = slot < slots ? cache + (uint64_t)slot * pieces + piece : nullptr;
            row += row_step;
            piece += piece_step;
            if (piece >= pieces) {
                piece -= pieces;
                row++;
            }
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            loaded[i] = place[i] ? __ldg(place[i]) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            bits ^= loaded[i].x ^ loaded[i].y ^ loaded[i].z ^ loaded[i].w;
        }
    }
    bits = block_xor(bits);
    if (threadIdx.x == 0) work.sums[blockIdx.x] = bits;
}
