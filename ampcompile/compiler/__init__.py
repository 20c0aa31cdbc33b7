"""The backend: what happens between `torch.compile` and the code that runs, and around each call of it."""
