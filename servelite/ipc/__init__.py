"""The contract between the processes: message structs, sockets, the progress page, request states."""
