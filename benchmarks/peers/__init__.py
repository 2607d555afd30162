"""One worker script for each peer of the training benchmark; each runs in an environment of its own."""
