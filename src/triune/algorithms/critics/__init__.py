"""Critics: value models beside the policy; one brick a file."""
