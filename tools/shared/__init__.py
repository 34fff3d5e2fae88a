"""Code of several tools: command lines, output, plots, and runs that they read, start, interrupt or load."""
