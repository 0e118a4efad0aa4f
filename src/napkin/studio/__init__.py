"""The studio: pages to plan, watch and compare runs, served to this machine's browser alone."""
