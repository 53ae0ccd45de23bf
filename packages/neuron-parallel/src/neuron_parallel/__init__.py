"""Plan a Trainium training run on a laptop: degrees, memory, step time, launch files. Needs nothing but Python."""
