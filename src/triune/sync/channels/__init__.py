"""Weight channels, one a file: bricks that the launcher calls to get a `WeightChannel`."""
