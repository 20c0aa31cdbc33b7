"""`ampcompile.explain`: which cast stands where, and why, as a table, a page, and Graphviz's language."""
