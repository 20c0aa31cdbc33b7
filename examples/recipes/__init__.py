"""PyTorch's AMP recipes, each a training loop that runs compiled or eagerly. `python -m examples.recipes` runs all."""
