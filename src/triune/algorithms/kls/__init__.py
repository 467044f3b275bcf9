"""KL terms: how far the policy is from the reference; one brick a file."""
