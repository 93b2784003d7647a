"""How the engine core drives model runners: in its own process, or in worker processes."""
