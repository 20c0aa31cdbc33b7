"""The backend inside other people's training loops: each file is imported on request, and needs what it names."""
