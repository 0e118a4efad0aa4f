"""`napkin speedrun`: from raw pages to a model that one talks with, every stage planned beside metered."""
