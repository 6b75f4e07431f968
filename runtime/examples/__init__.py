"""Short programs to start from; each runs as `python -m runtime.examples.NAME`."""
