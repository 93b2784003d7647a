"""How the engine core drives model runners: in its own process now, in worker processes later."""
