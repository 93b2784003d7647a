"""OpenAI's Responses API, in terms of a chat: bodies in, objects and events out."""
