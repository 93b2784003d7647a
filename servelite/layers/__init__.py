"""Building blocks the models share. Each holds its weights and declares the names it is loaded under."""
