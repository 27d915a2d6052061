/* The docstrings of the extension's functions. The first line of each is its signature, which
 * Python shows as __text_signature__. */
#ifndef SMLA_DOCS_H
#define SMLA_DOCS_H

#define SMLA_ATTEND_SIGNATURE                                                                      \
    "(q, kv_cache, indices, *, softmax_scale, cache_format=None, head_dim_v=None, "                \
    "block_table=None, request_ids=None, seq_lens=None, query_positions=None, shard=None, "        \
    "max_seq_len=None, topk_lens=None, attn_sink=None, logit_cap=0.0, cache_scale=None, "          \
    "extra_kv_cache=None, extra_indices=None, extra_topk_lens=None, extra_cache_format=None, "     \
    "extra_cache_scale=None, extra_block_table=None, extra_seq_lens=None, out=None, lse=None, "    \
    "max_logits=None, validate='deferred', batch_invariant=False, stream=None)\n--\n\n"

#define SMLA_DOC_ATTEND                                                                            \
    "attend" SMLA_ATTEND_SIGNATURE                                                                 \
    "Sparse attention of absorbed queries over a paged latent cache, gathered and attended in "    \
    "one step.\n\n"                                                                                \
    "For query row t and head h, over the entries j of indices[t] that are valid::\n\n"            \
    "    s_j = softmax_scale * dot(q[t, h], k_j)         k_j: the cache row, d_qk numbers\n"       \
    "          (logit_cap c > 0: s_j = c * tanh(s_j / c))\n"                                       \
    "    lse = log(sum_j exp(s_j))                       natural logarithm\n"                      \
    "    out = sum_j exp(s_j - lse) * k_j[:d_v]\n"                                                 \
    "          (attn_sink: out *= 1 / (1 + exp(attn_sink[h] - lse)); lse stays)\n\n"               \
    "This is the core attention of DeepSeek Sparse Attention (DeepSeek-V3.2, equation 2) in the "  \
    "absorbed form of multi-head latent attention (DeepSeek-V2, section 2.1). Entries that are "   \
    "not valid contribute nothing and are never read; a row without valid entries gives out = 0 "  \
    "and lse = -inf. Scores and sums are float32.\n\n"                                             \
    "Parameters\n"                                                                                 \
    "----------\n"                                                                                 \
    "q : (tokens, heads, d_qk) or (batch, s_q, heads, d_qk), bfloat16, float16 or float32\n"       \
    "    Absorbed queries, or a pair (q_latent, q_rope) with strides and widths of their own "     \
    "that add up to d_qk. 1 to 256 heads.\n"                                                       \
    "kv_cache : (num_blocks, block_size[, 1], row) or (num_slots, row)\n"                          \
    "    Of q's dtype, or bytes (uint8, float8_e4m3fn) in a packed format. Any strides; the row "  \
    "itself is contiguous.\n"                                                                      \
    "indices : q's leading shape + (topk,), int32 or int64, or None\n"                             \
    "    Slots block * block_size + offset; with a block_table positions within the request. -1 "  \
    "is padding and may stand anywhere. None, with block_table and seq_lens: every position.\n"    \
    "softmax_scale : float\n"                                                                      \
    "    1 / sqrt(nope + rope) of the model's unabsorbed head (GLM-5: 1/16), times what the "      \
    "model adds; it cannot be derived from the absorbed shapes.\n"                                 \
    "cache_format : str\n"                                                                         \
    "    'dense' (the default where the cache has q's dtype) or a name of cache_formats().\n"      \
    "head_dim_v : int\n"                                                                           \
    "    d_v; 512 where d_qk is 576 or 512, else required.\n"                                      \
    "block_table : (requests, max_blocks), int32 or int64\n"                                       \
    "    Block of each logical block; -1: not held here.\n"                                        \
    "request_ids : one per row, int32 or int64\n"                                                  \
    "    Row of block_table; -1: a padding row. Default: the batch.\n"                             \
    "seq_lens : (requests,), int32 or int64\n"                                                     \
    "    Positions at or past it are masked.\n"                                                    \
    "query_positions : one per row, int32 or int64\n"                                              \
    "    The row's own position: later ones are masked.\n"                                         \
    "shard : (rank, size, interleave)\n"                                                           \
    "    Context parallelism: position p is this rank's when (p // interleave) % size == rank.\n"  \
    "max_seq_len : int\n"                                                                          \
    "    With indices=None: no seq_lens is longer.\n"                                              \
    "topk_lens : one per row or (batch,), int32 or int64\n"                                        \
    "    Entries of indices at or past it are ignored, whatever they hold.\n"                      \
    "attn_sink : (heads,), float32\n"                                                              \
    "    A logit a head that takes part in the sum only; may be infinite.\n"                       \
    "logit_cap : float\n"                                                                          \
    "    0: none.\n"                                                                               \
    "cache_scale : float\n"                                                                        \
    "    The one scale of cache_format 'fp8_tensor'.\n"                                            \
    "extra_kv_cache, extra_indices, extra_topk_lens, extra_cache_format, extra_cache_scale, "      \
    "extra_block_table, extra_seq_lens\n"                                                          \
    "    A second cache with paging of its own, joined into the same softmax. query_positions "    \
    "and shard do not bound it.\n"                                                                 \
    "out : q's leading shape + (heads, d_v), q's dtype or float32\n"                               \
    "    Written and returned; allocated by q's framework where not given.\n"                      \
    "lse, max_logits : q's leading shape + (heads,), float32\n"                                    \
    "    max_logits, the largest s_j (-inf for an empty row), is written only where given.\n"      \
    "validate : 'deferred', 'raise', 'record' or 'mask'\n"                                         \
    "    What a fault of the index arrays does (an index < -1 or past the cache, a block past "    \
    "it, a length out of range): raised by the next call, raised before anything runs, kept for "  \
    "faults(), or nothing. It is masked in every mode. On the CPU the first two raise at once.\n"  \
    "batch_invariant : bool\n"                                                                     \
    "    A row's bits do not depend on the other rows of the call.\n"                              \
    "stream : int or object with __cuda_stream__\n"                                                \
    "    Launch stream of CUDA tensors (a cudaStream_t; 0 and 1: legacy). None: the one on which " \
    "q's\n"                                                                                        \
    "    framework works now; where another argument's framework works on another stream, each\n"  \
    "    waits for the other. With a stream given, the caller orders it after the work that "      \
    "fills\n"                                                                                      \
    "    the arguments, and keeps arguments and results until the launch is done; new outputs "    \
    "and\n"                                                                                        \
    "    the workspace take care of themselves. A call with JAX arrays waits for the GPU.\n\n"     \
    "Returns\n"                                                                                    \
    "-------\n"                                                                                    \
    "(out, lse)\n\n"                                                                               \
    "Raises\n"                                                                                     \
    "------\n"                                                                                     \
    "TypeError, ValueError, BufferError\n"                                                         \
    "    An argument of the wrong kind or dtype; shape, stride or range; not exportable.\n"        \
    "IndexFault\n"                                                                                 \
    "    An index array or block table names what is not there.\n"                                 \
    "UnsupportedError, CudaError\n"                                                                \
    "    This build or GPU cannot; the driver reported an error."

#define SMLA_DOC_ATTEND_FOR_FLASH_MLA                                                              \
    "attend_for_flash_mla" SMLA_ATTEND_SIGNATURE                                                   \
    "attend, but for the lse of a row without valid entries: +inf, as FlashMLA has it."

#define SMLA_DOC_MERGE                                                                             \
    "merge(outs, lses, *, attn_sink=None, out=None, lse=None)\n--\n\n"                             \
    "Joins results over disjoint sets of entries: shards, or parts of a context.\n\n"              \
    "With w_i = exp(lses[i] - lse)::\n\n"                                                          \
    "    lse = log(sum_i exp(lses[i]))\n"                                                          \
    "    out = sum_i w_i * outs[i]      (attn_sink: times 1 / (1 + exp(attn_sink - lse)))\n\n"     \
    "A part whose lse is -inf contributes nothing. The parts are computed without the sink, "      \
    "which "                                                                                       \
    "counts once, here.\n\n"                                                                       \
    "Parameters\n"                                                                                 \
    "----------\n"                                                                                 \
    "outs : 1 to 32 tensors (tokens, heads, d_v) or (batch, s_q, heads, d_v), one dtype\n"         \
    "lses : as many tensors of the same shape less d_v, float32, natural logarithm\n"              \
    "attn_sink : (heads,), float32\n"                                                              \
    "out : as outs, bfloat16, float16 or float32; allocated in the dtype of outs where not "       \
    "given\n"                                                                                      \
    "lse : as lses; allocated where not given\n\n"                                                 \
    "Returns\n"                                                                                    \
    "-------\n"                                                                                    \
    "(out, lse)"

#define SMLA_DOC_PACK                                                                              \
    "pack(rows, *, cache_format, block_size, cache_scale=None)\n"                                  \
    "--\n\n"                                                                                       \
    "A new cache that holds rows[i] in slot i.\n\n"                                                \
    "A scale is amax / 448 of its group in float32; numbers are clamped to +-448 scales "          \
    "and rounded to nearest even.\n\n"                                                             \
    "Parameters\n"                                                                                 \
    "----------\n"                                                                                 \
    "rows : (n, d_qk), bfloat16, float16 or float32\n"                                             \
    "cache_format : str\n"                                                                         \
    "    A name of cache_formats().\n"                                                             \
    "block_size : int\n"                                                                           \
    "    Slots of a block, at least 1; what is left of the last block is zero.\n"                  \
    "cache_scale : float\n"                                                                        \
    "    The one scale of 'fp8_tensor'.\n\n"                                                       \
    "Returns\n"                                                                                    \
    "-------\n"                                                                                    \
    "(num_blocks, block_size, row) in rows' framework: of rows' dtype for 'dense', else "          \
    "uint8.\n\n"                                                                                   \
    "Raises\n"                                                                                     \
    "------\n"                                                                                     \
    "TypeError, ValueError, BufferError\n"                                                         \
    "    As attend does."

#define SMLA_DOC_UNPACK                                                                            \
    "unpack(kv_cache, *, cache_format=None, cache_scale=None)\n"                                   \
    "--\n\n"                                                                                       \
    "Every slot of a cache as float32, exactly as its bytes say.\n\n"                              \
    "Parameters\n"                                                                                 \
    "----------\n"                                                                                 \
    "kv_cache : (num_blocks, block_size[, 1], row) or (num_slots, row)\n"                          \
    "cache_format : str\n"                                                                         \
    "    A name of cache_formats(); 'dense' where kv_cache is of a float dtype.\n"                 \
    "cache_scale : float\n"                                                                        \
    "    The one scale of 'fp8_tensor'.\n\n"                                                       \
    "Returns\n"                                                                                    \
    "-------\n"                                                                                    \
    "(num_slots, d_qk) float32 in kv_cache's framework.\n\n"                                       \
    "Raises\n"                                                                                     \
    "------\n"                                                                                     \
    "TypeError, ValueError, BufferError\n"                                                         \
    "    As attend does."

#define SMLA_DOC_APPEND                                                                            \
    "append(kv_cache, slots, latent, rope=None, *, cache_format, cache_scale=None, "               \
    "stream=None)\n"                                                                               \
    "--\n\n"                                                                                       \
    "Writes tokens into a cache: token t to slot slots[t].\n\n"                                    \
    "A slot < 0 or past the cache is skipped; of equal slots the last token wins whole. "          \
    "Scales and rounding are those of pack.\n\n"                                                   \
    "Parameters\n"                                                                                 \
    "----------\n"                                                                                 \
    "kv_cache : (num_blocks, block_size[, 1], row) or (num_slots, row), written\n"                 \
    "slots : (tokens,), int32 or int64\n"                                                          \
    "latent, rope : (tokens, width), bfloat16, float16 or float32\n"                               \
    "    Together d_qk wide; without rope latent holds whole rows.\n"                              \
    "cache_format : str\n"                                                                         \
    "    A name of cache_formats().\n"                                                             \
    "cache_scale : float\n"                                                                        \
    "    The one scale of 'fp8_tensor'.\n"                                                         \
    "stream : int or object with __cuda_stream__\n"                                                \
    "    As in attend.\n\n"                                                                        \
    "Raises\n"                                                                                     \
    "------\n"                                                                                     \
    "TypeError, ValueError, BufferError\n"                                                         \
    "    As attend does."

#define SMLA_DOC_RESOLVE                                                                           \
    "resolve(kv_cache, indices, *, cache_format=None, block_table=None, request_ids=None, "        \
    "seq_lens=None, query_positions=None, shard=None, max_seq_len=None, topk_lens=None, "          \
    "extra_kv_cache=None, extra_indices=None, extra_topk_lens=None, extra_cache_format=None, "     \
    "extra_block_table=None, extra_seq_lens=None)\n--\n\n"                                         \
    "The slot of every entry, as attend would read it.\n\n"                                        \
    "Returns a tuple with an int64 NumPy array for each cache, of the shape of its indices: the "  \
    "slot, or minus the number of the cause for which the entry is masked."

#define SMLA_DOC_FAULTS                                                                            \
    "faults(device=None)\n--\n\n"                                                                  \
    "The IndexFault that calls with validate='record' met since the last look, or None; the "      \
    "record is cleared.\n\n"                                                                       \
    "device is 'cpu', 'cuda:1' or an object that prints so; None: the CPU, then every GPU."

#define SMLA_DOC_SYNCHRONIZE                                                                       \
    "synchronize(device=None)\n"                                                                   \
    "--\n\n"                                                                                       \
    "Waits for the work of a GPU and raises the IndexFault that a call with "                      \
    "validate='deferred' left. The CPU has nothing to wait for.\n\n"                               \
    "device is 'cpu', 'cuda:1' or an object that prints so; None: every GPU."

#define SMLA_DOC_CACHE_FORMATS                                                                     \
    "cache_formats()\n--\n\n"                                                                      \
    "The cache formats by name: row_bytes (0: d_qk numbers of q's dtype), d_qk, d_v (0: any), "    \
    "scale ('none', 'tensor' or 'float32') and layout."

#define SMLA_DOC_PLAN                                                                              \
    "plan(*, batch, heads, topk, s_q=1, d_qk=576, d_v=512, dtype='bfloat16', "                     \
    "cache_format='dense', extra_topk=0, extra_cache_format=None, batch_invariant=False, "         \
    "device='cpu')\n"                                                                              \
    "--\n\n"                                                                                       \
    "What attend would run for these shapes; nothing else decides it but "                         \
    "SPARSE_MLA_KERNEL.\n\n"                                                                       \
    "Parameters\n"                                                                                 \
    "----------\n"                                                                                 \
    "batch, s_q, heads, d_qk, d_v : int\n"                                                         \
    "    Of q and out; batch * s_q rows.\n"                                                        \
    "topk, extra_topk : int\n"                                                                     \
    "    Entries of a row in each cache.\n"                                                        \
    "dtype : 'bfloat16', 'float16' or 'float32'\n"                                                 \
    "    Of q.\n"                                                                                  \
    "cache_format, extra_cache_format : str\n"                                                     \
    "    Names of cache_formats().\n"                                                              \
    "batch_invariant : bool\n"                                                                     \
    "device : str or object that prints so\n"                                                      \
    "    'cpu', 'cuda' or 'cuda:1'.\n\n"                                                           \
    "Returns\n"                                                                                    \
    "-------\n"                                                                                    \
    "A dict: kernel, splits (parts of a row that are merged), split_entries (entries of "          \
    "a part), head_tile (heads that share one gather), launches (on the stream) and "              \
    "workspace_bytes."

#define SMLA_DOC_LOAD                                                                              \
    "load(device=None)\n--\n\n"                                                                    \
    "Does the work of a first call on a device ahead of time: loads the kernels of a GPU. None: "  \
    "every GPU there is."

#define SMLA_DOC_BUILD_INFO                                                                        \
    "build_info()\n--\n\n"                                                                         \
    "What this binary holds: version, compiler, stable_abi, cpu_kernels (name, isa, runs), "       \
    "gpu_kernels and gpu_targets (empty in a CPU-only build)."

#define SMLA_DOC_DEVICES                                                                           \
    "devices()\n--\n\n"                                                                            \
    "The devices that attend can use here: a list of dicts, the CPU first (device, name, kernel, " \
    "threads), then the GPUs that the driver reports."

#define SMLA_DOC_CPU_PEAK                                                                          \
    "cpu_peak(kernel)\n--\n\n"                                                                     \
    "Multiply-adds a second that one thread reaches with the instructions of a CPU kernel on "     \
    "registers alone: the ceiling that bench compares with."

#define SMLA_DOC_GATHER                                                                            \
    "gather(kv_cache, indices, out, *, stream=None)\n--\n\n"                                       \
    "Reads the rows of a GPU's kv_cache (its last dimension) that int32 indices name and does "    \
    "nothing else: the floor that bench compares with. Each block writes the exclusive or of the " \
    "words that it has read to its number of out, int32; there are at most so many blocks."

#define SMLA_DOC_INDEX_FAULT                                                                       \
    "An index array or block table names what is not there.\n\n"                                   \
    "Attributes: tensor (the argument's name), position (a tuple of ints into it), value, bound "  \
    "(the first value that is too large), count (faults in that tensor), exact (False: at least "  \
    "count), device."

#define SMLA_DOC_CUDA_ERROR "The CUDA driver reported an error; code is its number."

#define SMLA_DOC_UNSUPPORTED_ERROR "This GPU or this build cannot; the message says what would."

#endif
