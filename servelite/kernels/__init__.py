"""The arithmetic the layers stand on: the KV layout, the batch as attention sees it, the dispatch table."""
