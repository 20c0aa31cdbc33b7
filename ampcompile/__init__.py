"""Mixed precision as a compiler pass: `torch.compile(model, backend="amp")`."""
