"""The steps of a scheduled job, each for spark-submit, for the command line and for Python."""
