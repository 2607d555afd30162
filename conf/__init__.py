"""The job files of this folder, installed as deeprec_spark.conf so that the command line finds them everywhere."""
