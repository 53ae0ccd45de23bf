"""Start ranks and live one rank's life."""
