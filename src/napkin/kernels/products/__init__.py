"""Matrix products that are not torch's own: of one vector, in 8 bits, and of groups of rows."""
