"""Built-in alarms, one a file."""
