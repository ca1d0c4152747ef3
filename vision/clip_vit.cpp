// Filled by the next commits.
