"""From a name to a model with its weights. This file and `resolve.py` import no torch."""
