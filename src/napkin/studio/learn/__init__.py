"""The course's ideas as pages to play with, each answered by the functions that plan, train and measure."""
