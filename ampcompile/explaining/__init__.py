"""`ampcompile.explain`: report every cast, its place and its reason, as a table and as a page."""
