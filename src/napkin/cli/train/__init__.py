"""Commands that train runs, and compare what they left."""
