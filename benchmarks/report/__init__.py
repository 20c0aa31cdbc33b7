"""Reports made of results: decisions, pictures, a page."""
