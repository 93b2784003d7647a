"""Reads reasoning and tool calls out of an answer's text as it comes; the formats are data."""
