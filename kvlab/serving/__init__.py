"""Where the contracts meet: requests, memory and model in one engine."""
