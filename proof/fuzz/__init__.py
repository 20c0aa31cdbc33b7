"""Random programs, drawn by seeds: modules, and training of a module whose weights everybody writes."""
