"""The registry of rejection reasons: one condition, one word, one plain sentence; it decides nothing."""

REASONS: dict[str, str] = {
    # what was asked
    "unknown_operation": "The machine has no operation of this name, or the operation lacks an argument.",
    "invalid_length": "A length must be a whole number of tokens, at least one.",
    "unknown_request": "No live request has this id; it never started, or it has been released already.",
    "request_exists": "A live request already has this id.",
    "duplicate_request": "One transaction names the same request twice.",
    "truncate_beyond_context": "You cannot keep more tokens than the request has.",
    "interior_truncate": "Only a suffix can be dropped: without its earlier blocks the rest loses its positions.",
    "cache_partial_block": "Only a block that is full in every cache group can carry a cached identity.",
    "touch_without_identity": "The block carries no cached identity, so nobody may find it again.",
    "block_reserved": "An open transaction has reserved this block; wait for its end.",
    # who asked, and how fresh their view is
    "stale_allocator_epoch": "The state has moved on since the caller looked at it.",
    "stale_request_generation": "This id now belongs to a later request.",
    "stale_table_version": "The request's block table has changed since the caller looked at it.",
    "stale_block_generation": "The block number is the same, but it has been given to somebody else since.",
    # what a transaction may not do
    "out_of_memory": "A cache group has too few free blocks, so no group gets any.",
    "fault_after_partial_reservation": "The transaction broke off with only some groups reserved.",
    "in_place_shared_tail_write": "The tail block has more than one owner, so it must be copied first.",
    "copied_row_count_drift": "A copy must move exactly the valid rows that the writer can see.",
    "publish_before_copy_complete": "Publication was asked for while rows were still to be copied.",
    "publish_before_append_write": "Publication was asked for before the new rows were written.",
    "half_bundle_publication": "Every cache group must publish, or none.",
    "rollback_after_publication": "What is published cannot be undone, only followed by another transaction.",
    "transaction_closed": "This transaction has ended; its handles give no right to write any more.",
    # what a state may not be
    "malformed_snapshot": "The snapshot lacks a field, or a field has the wrong form.",
    "unpublished_block_reachable": "A request's table names a block that was never published.",
    "refcount_drift": "A stored reference count differs from what the block tables say.",
    "free_with_live_refs": "A block that somebody still uses stands in the free queue.",
    "double_free": "A block stands in the free queue twice.",
    "free_queue_missing_handle": "A block that nobody uses is missing from the free queue.",
    "table_length_drift": "A block table is longer or shorter than the request's length needs.",
    "valid_rows_exceed_block": "A block claims more valid rows than it has.",
    "valid_rows_below_view": "A request can see rows that its block does not hold.",
    "cross_group_bundle_mismatch": "The blocks of one bundle disagree between cache groups.",
}
