"""Gates: pure statistics and pure checks that answer PASS, FAIL or INCONCLUSIVE. No clock, no randomness, no files."""
