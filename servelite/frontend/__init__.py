"""HTTP: the app, routes, request fields, SSE, and the client of the engine."""
