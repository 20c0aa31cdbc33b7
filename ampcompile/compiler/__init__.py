"""The backend: the compiler between `torch.compile` and the code that runs, and the work around each call."""
