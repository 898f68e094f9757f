"""Scripts for environments of their own are not imported here."""

collect_ignore_glob = ["packages/*"]
