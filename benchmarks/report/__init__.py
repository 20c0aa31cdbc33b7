"""What is made of results: comparisons, pictures, a page."""
