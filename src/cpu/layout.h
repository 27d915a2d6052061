/* How the work of one call is cut into tasks, and how much memory they take. */
#ifndef SMLA_LAYOUT_H
#define SMLA_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>

#include "plan.h"
#include "tile.h"

enum {
    SMLA_ALIGNMENT = 64,
    SMLA_MOST_SPLITS = 64, /* of a row's entries */
    SMLA_MOST_LEVELS = 48, /* of results that are joined in pairs */
};

struct smla_cpu_layout {
    struct smla_tile shape; /* what every tile of the call has in common; no memory */
    int64_t rows;           /* of q */
    int32_t tiles;          /* of heads */
    int32_t head_tile;      /* heads of a tile, the last one may have fewer */
    int32_t splits;         /* of a row's entries */
    bool apart;             /* splits are tasks of their own, whose results wait in a workspace */
    int64_t split_entries;
    int64_t run_entries; /* of a split, that are added one after another, about */
    int32_t tile_entries;
    int32_t run_levels; /* on which the runs of a split are joined, and the splits of a row where */
    int32_t split_levels; /* they do not lie apart */
    size_t parts;         /* in the workspace: of rows, head tiles and splits; 0: none */
    size_t query_bytes;   /* buffers of a thread, multiples of SMLA_ALIGNMENT */
    size_t keys_bytes;
    size_t pairs_bytes;
    size_t scores_bytes;
    size_t own_bytes;
    size_t part_bytes; /* of one struct smla_part's arrays */
};

size_t smla_aligned(size_t bytes);

void smla_cpu_lay_out(const struct smla_attend *work, const struct smla_plan *plan,
                      struct smla_cpu_layout *layout);

/* The arrays of a part in `memory`, which begins at a multiple of SMLA_ALIGNMENT. */
struct smla_part smla_part_at(const struct smla_cpu_layout *layout, uint8_t *memory);

/* The tile kernel of a plan: kernel_id is its place in smla_cpu_kernels. */
const struct smla_tile_kernel *smla_tile_kernel(int32_t kernel_id, enum smla_dtype q_dtype,
                                                int32_t heads);

#endif
