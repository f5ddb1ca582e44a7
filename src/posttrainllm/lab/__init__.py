"""The lab: checks and measurements of the whole program. Each returns plain data; ``cli/lab.py`` shows it."""
