"""What turns machines into lessons: fixtures, benchmarks, replays."""
