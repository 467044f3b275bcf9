"""Published algorithms: each file names its bricks and its paper."""
