"""The backend in other libraries' training loops: each file is imported on request, and needs the library it names."""
