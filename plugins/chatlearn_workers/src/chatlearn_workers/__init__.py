"""What runtimes over several processes share: workers, groups, fleets and splitting, behind a small protocol."""
