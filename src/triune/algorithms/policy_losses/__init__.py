"""Policy losses: terms that move the policy; one brick a file."""
