"""What people see: tables in notebooks, the report to mail, the running results, the index of all runs."""
