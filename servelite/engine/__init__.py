"""The engine core: the loop, the scheduler and its policies, the KV cache manager."""
