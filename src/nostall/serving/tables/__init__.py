"""Task tables: a ragged batch cut into units of a few tile heights, in execution order.

A *tile* is a number of rows of one KV head: ``QUERY_COUNT`` query tokens times the group of
``heads // kv_heads`` query heads that share the KV head (row = token * group + head in the group).
A *unit* is one tile over one range of keys. Programs run contiguous ranges of units.

All tables are int32 arrays of a fixed capacity, so that they keep their addresses in a CUDA graph.
Rows behind the counts are undefined.

=================  =======================  ======================================================
table              shape                    content
=================  =======================  ======================================================
``tasks``          (capacity.units, 8)      SEQUENCE, QUERY_START (token within the sequence),
                                            QUERY_COUNT (<= max(1, height // group)), KV_START,
                                            KV_END (exclusive), KV_HEAD, TILE (index of the tile
                                            set), PARTIAL
``program_offsets``  (capacity.programs + 1,)  program p runs the units [p], ..., [p + 1] - 1; the
                                            entries behind the last program hold the unit count, so
                                            that a fixed grid of capacity.programs is correct
``reductions``     (capacity.reductions, 6)  SEQUENCE, QUERY_START, QUERY_COUNT, KV_HEAD, FIRST_ROW,
                                            SPLITS: a tile whose keys are split
``counts``         (6,)                     UNITS, REDUCTIONS, SCRATCH_ROWS, PROGRAMS, PREFIX_ROWS,
                                            SAVED_NS
``prefix_rows``    (capacity.prefix_rows, 4)  for each query token of a batch with shared prefixes,
                                            in the order of the prefix forest: its row in the
                                            packed queries, FIRST_ROW, SPLIT_ROWS, HEAD_ROWS
``tokens``         (rows, 7)                the Token-Table, for people and for costs; kernels do
                                            not read it
=================  =======================  ======================================================

PARTIAL and FIRST_ROW count rows of the scratch (a row: head_dim fp32 values and their log-sum-exp),
not slots of the largest tile: a decode of group 4 takes 4 rows, not 128, so that thousands of
splits fit into megabytes. PARTIAL is the unit's first row, or -1 if the unit writes its result
itself. Split i of a reduction begins at row ``FIRST_ROW + i * QUERY_COUNT * group``; splits are in
the order of their keys, so that a reduction that adds them in this order is deterministic.

A unit of a node of the prefix forest (:mod:`nostall.serving.tables.prefix.forest`) has SEQUENCE of
the node's leader, QUERY_START as its first row of ``prefix_rows``, and PARTIAL -2 - i for split i.
Splits of all nodes on a sequence's path are counted together, from the root on; they are the first
splits of the reductions of its own tiles. The partial result of a query token, KV head h and split
i is in the scratch rows from ``FIRST_ROW + i * SPLIT_ROWS + h * HEAD_ROWS`` on.

With a sliding window KV_START is the first visible key of the tile's first token, rounded down to
``TileSet.kv_align``; the kernel masks by position.
"""
