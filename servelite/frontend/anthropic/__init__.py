"""Anthropic's Messages API, in terms of a chat: bodies in, messages and events out."""
