"""Built-in metric sinks, one a file."""
