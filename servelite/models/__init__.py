"""Model families, one file each; `registry.py` maps a checkpoint's architecture to its class."""
