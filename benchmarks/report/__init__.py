"""What is made of results: decisions, pictures, a page."""
