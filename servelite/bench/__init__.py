"""Measuring a server from outside (`serve`) and the engine's parts from inside (`engine`)."""
