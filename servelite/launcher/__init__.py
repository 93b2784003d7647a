"""Starts, watches and drains the processes of one replica."""
