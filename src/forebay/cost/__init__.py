"""What a job costs before it runs: operations, bytes, and how many devices each role should get. No torch."""
