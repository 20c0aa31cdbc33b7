"""How to see and steer casts, each question a file. `python -m examples.steering` answers all."""
