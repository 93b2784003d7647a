"""What one rank runs: the model runner, its resident request table, the sampler, the KV pool's size."""
