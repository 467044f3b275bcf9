"""In which order the rows of a task set are visited, one way a file."""
