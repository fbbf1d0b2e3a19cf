"""Parts shared by runtimes over several processes: workers, groups, fleets and splitting, behind a small protocol."""
