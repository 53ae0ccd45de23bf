"""Turn a recipe and the command line into the config of one run."""
