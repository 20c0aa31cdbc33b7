"""`ampcompile.explain`: which cast stands where, and why, as a table and as a page."""
